"""A flood of requests, whatever they ask for: each turn of the event loop works for a few of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from moeserve.frontend.held import HeldBytes, Hold
from moeserve.frontend.http import receive_body, send_body
from moeserve.frontend.metrics import Metrics
from moeserve.frontend.middleware import RequestBoundary
from moeserve.frontend.route import Route, RouteTable

FLOOD = 350
# The requests that were waiting, and as many that had not come yet.
MOST_IN_A_TURN = 16
ROUTES: list[Route[Any]] = [
    Route(method="POST", path="/work", role="user", summary="", endpoint=lambda _: None),
    Route(method="GET", path="/health", role="public", summary="", endpoint=lambda _: None, is_watch=True),
]


class Flood:
    """Requests that come at once, with or before their bodies, and the numbers of the turns in which they are worked
    for."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.worked: Counter[int] = Counter()
        self.statuses: list[int] = []
        self.bodies = asyncio.Event()
        self.turn = 0
        self._boundary = RequestBoundary(self._app, Metrics(), RouteTable(ROUTES))

    def count_turns(self) -> None:
        self.turn += 1
        self._next = asyncio.get_running_loop().call_soon(self.count_turns)

    def end(self) -> None:
        self._next.cancel()

    async def ask(self, path: str = "/work", key: bytes = b"") -> None:
        scope = {"type": "http", "path": path, "headers": [(b"x-api-key", key)], "method": "POST"}
        scope["state"] = {"hold": Hold(HeldBytes(), b"")}
        await self._boundary(scope, self._receive, self._send)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.began.append(self.turn)
        await receive_body(scope, receive, 100)
        self.worked[self.turn] += 1
        await send_body(send, 200, b"{}")

    async def _receive(self) -> Any:
        await self.bodies.wait()
        return {"type": "http.request", "body": b"{}"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])


async def flooded(flood: Flood, *, are_late: bool) -> None:
    flood.count_turns()
    if not are_late:
        flood.bodies.set()
    tasks = [asyncio.create_task(flood.ask()) for _ in range(FLOOD)]
    while are_late and len(flood.began) < FLOOD:
        await asyncio.sleep(0)
    flood.bodies.set()
    await asyncio.gather(*tasks)
    flood.end()


@pytest.mark.parametrize("are_late", [False, True], ids=["bodies come with the requests", "bodies come later, at once"])
def test_a_turn_works_for_a_few_requests_of_a_flood(are_late: bool) -> None:
    flood = Flood()
    asyncio.run(flooded(flood, are_late=are_late))
    assert flood.statuses == [200] * FLOOD
    assert max(Counter(flood.began).values()) <= MOST_IN_A_TURN
    assert max(flood.worked.values()) <= MOST_IN_A_TURN


def test_a_request_that_comes_alone_waits_for_no_turn_and_a_watch_for_no_flood() -> None:
    async def scenario() -> None:
        alone, amid = Flood(), Flood()
        alone.bodies.set()
        await alone.ask()
        assert alone.worked == {0: 1}
        tasks = [asyncio.create_task(amid.ask()) for _ in range(FLOOD)]
        await asyncio.sleep(0)
        assert 0 < len(amid.began) <= MOST_IN_A_TURN
        amid.bodies.set()
        await amid.ask("/health")
        assert len(amid.statuses) == 1
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_a_request_of_another_key_passes_a_flood_at_the_next_turn() -> None:
    async def scenario() -> None:
        flood = Flood()
        flood.bodies.set()
        tasks = [asyncio.create_task(flood.ask(key=b"flood")) for _ in range(FLOOD)]
        await asyncio.sleep(0)
        await flood.ask(key=b"other")
        assert len(flood.statuses) <= 2 * MOST_IN_A_TURN
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_who_leaves_a_queue_keeps_nobody_from_its_turn() -> None:
    async def scenario() -> None:
        flood = Flood()
        flood.bodies.set()
        tasks = [asyncio.create_task(flood.ask()) for _ in range(FLOOD)]
        await asyncio.sleep(0)
        for task in tasks[20:300]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(flood.statuses) == FLOOD - 280

    asyncio.run(scenario())
