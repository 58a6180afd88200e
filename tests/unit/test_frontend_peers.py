"""Frontends that ask each other for kept responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from moeserve.config import ServeConfig
from moeserve.frontend.dialects.responses import earlier_names
from moeserve.frontend.peers import Peers
from moeserve.frontend.response_store import ResponseStore, Shelf
from moeserve.wire import RunContext

CALLER = b"caller"


def run_context(folder: Path, num_frontends: int) -> RunContext:
    return RunContext(
        config=ServeConfig(num_frontends=num_frontends),
        model_dir="none",
        model_hash="none",
        run_dir=str(folder),
        incarnation=1,
        secret="00",
        served_model_names=("m",),
    )


def put(shelf: Shelf, name: str, previous: str | None = None) -> None:
    output = [{"type": "message", "id": f"msg_{name}", "text": name}]
    response, asked = {"id": name, "output": output}, [{"text": f"{name}?"}]
    assert shelf.put(name, json.dumps(response).encode(), json.dumps(asked).encode(), previous)


def texts(shelf: Shelf, name: str) -> list[str] | None:
    items = shelf.conversation(name)
    return None if items is None else [item["text"] for item in items]


def between_two(folder: Path, scenario: Callable[[Peers, Shelf, Shelf], Awaitable[None]]) -> None:
    """Runs a scenario with the peers of frontend 1, its shelf, and that of frontend 0, which answers."""

    async def run() -> None:
        stores = [ResponseStore(), ResponseStore()]
        peers = [Peers(run_context(folder, 2), number, store) for number, store in enumerate(stores)]
        for peer in peers:
            await peer.start()
        try:
            await scenario(peers[1], stores[1].shelf(CALLER), stores[0].shelf(CALLER))
        finally:
            for peer in peers:
                await peer.stop()

    asyncio.run(run())


def test_a_conversation_that_another_frontend_keeps_goes_on_here(tmp_path: Path) -> None:
    async def scenario(peers: Peers, mine: Shelf, others: Shelf) -> None:
        put(others, "a")
        put(others, "b", "a")
        await peers.borrow(CALLER, ["b", "unknown"])
        assert texts(mine, "b") == ["a?", "a", "b?", "b"]
        put(mine, "c", "b")
        assert texts(mine, "c") == ["a?", "a", "b?", "b", "c?", "c"]
        assert mine.find("unknown") is None

    between_two(tmp_path, scenario)


def test_an_item_is_found_by_its_own_id(tmp_path: Path) -> None:
    async def scenario(peers: Peers, mine: Shelf, others: Shelf) -> None:
        put(others, "a")
        await peers.borrow(CALLER, ["msg_a"])
        assert mine.item("msg_a") == {"type": "message", "id": "msg_a", "text": "a"}

    between_two(tmp_path, scenario)


def test_what_was_deleted_stays_the_past_of_others_and_is_found_nowhere(tmp_path: Path) -> None:
    async def scenario(peers: Peers, mine: Shelf, others: Shelf) -> None:
        put(others, "a")
        put(others, "b", "a")
        others.delete("a")
        await peers.borrow(CALLER, ["b"])
        assert texts(mine, "b") == ["a?", "a", "b?", "b"]
        assert mine.find("a") is None
        await peers.drop(CALLER, "b")
        await peers.borrow(CALLER, ["b"])
        assert mine.find("b") is None
        assert others.find("b") is None

    between_two(tmp_path, scenario)


def test_nobody_gets_what_another_key_keeps(tmp_path: Path) -> None:
    async def scenario(peers: Peers, mine: Shelf, others: Shelf) -> None:
        put(others, "a")
        await peers.borrow(b"another", ["a"])
        assert mine.find("a") is None

    between_two(tmp_path, scenario)


def test_one_that_is_silent_is_gone_without(tmp_path: Path) -> None:
    async def run() -> None:
        store = ResponseStore()
        peers = Peers(run_context(tmp_path, 2), 1, store)
        await peers.start()
        await peers.borrow(CALLER, ["a"])
        assert store.shelf(CALLER).find("a") is None
        await peers.stop()

    asyncio.run(run())


def test_a_single_frontend_asks_nobody_and_binds_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        peers = Peers(run_context(tmp_path, 1), 0, ResponseStore())
        await peers.start()
        await peers.borrow(CALLER, ["a"])
        await peers.stop()

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_the_ids_that_a_request_refers_to_are_those_of_responses_and_items() -> None:
    items = [{"type": "item_reference", "id": "x"}, {"id": "y"}, {"role": "user", "id": "z", "content": "hi"}]
    assert earlier_names(json.dumps({"previous_response_id": "r", "input": items}).encode()) == ["r", "x", "y"]
    assert earlier_names(b'{"input": "hi"}') == []
    assert earlier_names(b"no json") == []
