"""Bodies of requests: bounds on size and time, and who waits while a big one is read."""

from __future__ import annotations

import asyncio
import gzip
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from moeserve.frontend import limits
from moeserve.frontend.bodies import Bodies
from moeserve.frontend.http import ApiError, ClientDisconnected

BIG = b"x" * limits.INLINE_BODY_BYTES


class Connection:
    """The parts of a body, which come when they are sent."""

    def __init__(self, **headers: str) -> None:
        self.scope = {"headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]}
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.num_received = 0

    def send(self, part: bytes, *, more: bool = False) -> None:
        self._messages.put_nowait({"type": "http.request", "body": part, "more_body": more})

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> dict[str, Any]:
        message = await self._messages.get()
        self.num_received += 1
        return message


@contextmanager
def bodies(max_bytes: int = 1000) -> Iterator[Bodies]:
    made = Bodies(max_bytes)
    try:
        yield made
    finally:
        made.stop()


def test_a_body_is_received_in_parts() -> None:
    async def scenario() -> None:
        connection = Connection()
        for part, more in ((b"ab", True), (b"", True), (b"c", False)):
            connection.send(part, more=more)
        with bodies() as some:
            assert await some.receive(connection.scope, connection.receive) == b"abc"

    asyncio.run(scenario())


@pytest.mark.parametrize("declared", [{}, {"content_length": "5"}])
def test_a_body_that_is_too_large_is_refused_as_soon_as_that_is_known(declared: dict[str, str]) -> None:
    async def scenario() -> None:
        connection = Connection(**declared)
        connection.send(b"abc", more=True)
        connection.send(b"de", more=True)
        with bodies(max_bytes=4) as some, pytest.raises(ApiError) as refused:
            await some.receive(connection.scope, connection.receive)
        assert (refused.value.status, refused.value.close) == (413, True)
        assert connection.num_received == (0 if declared else 2)

    asyncio.run(scenario())


def test_a_client_that_leaves_ends_its_body() -> None:
    async def scenario() -> None:
        connection = Connection()
        connection.send(b"abc", more=True)
        connection.leave()
        with bodies() as some, pytest.raises(ClientDisconnected):
            await some.receive(connection.scope, connection.receive)

    asyncio.run(scenario())


def test_a_body_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RECEIVE_TIMEOUT_S", 0.01)

    async def scenario() -> None:
        connection = Connection()
        connection.send(b"abc", more=True)
        with bodies() as some, pytest.raises(ApiError) as refused:
            await some.receive(connection.scope, connection.receive)
        assert refused.value.status == 408

    asyncio.run(scenario())


def test_while_a_big_body_is_read_others_wait_and_that_time_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RECEIVE_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        gate = threading.Event()
        connection, late = Connection(), Connection()
        with bodies() as some:
            first = asyncio.ensure_future(some.read(BIG, lambda _: gate.wait()))
            second = asyncio.ensure_future(some.read(BIG, len))
            receiving = asyncio.ensure_future(some.receive(connection.scope, connection.receive))
            # A body of one part is not held up.
            late.send(b"small")
            assert await some.receive(late.scope, late.receive) == b"small"
            connection.send(b"abc", more=True)
            connection.send(b"de")
            await asyncio.sleep(1.5 * limits.RECEIVE_TIMEOUT_S)
            assert (connection.num_received, receiving.done()) == (1, False)
            gate.set()
            assert await first
            assert await second == len(BIG)
            assert await receiving == b"abcde"

    asyncio.run(scenario())


def test_a_small_body_is_read_at_once_and_a_big_one_by_a_thread() -> None:
    async def scenario() -> None:
        with bodies() as some:
            loop = threading.get_ident()
            assert await some.read(b"small", lambda _: threading.get_ident()) == loop
            assert await some.read(BIG, lambda _: threading.get_ident()) != loop

    asyncio.run(scenario())


def test_a_big_body_that_is_refused_lets_the_others_go_on() -> None:
    def refuse(_: bytes) -> None:
        raise ApiError(400, "no")

    async def scenario() -> None:
        connection = Connection()
        connection.send(b"abc", more=True)
        connection.send(b"de")
        with bodies() as some:
            with pytest.raises(ApiError, match="no"):
                await some.read(BIG, refuse)
            assert await some.receive(connection.scope, connection.receive) == b"abcde"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("coding", "sent"),
    [
        ("gzip", gzip.compress(b'{"a": 1}')),
        ("X-GZIP", gzip.compress(b'{"a": 1}')),
        ("deflate", zlib.compress(b'{"a": 1}')),
        ("identity", b'{"a": 1}'),
    ],
)
def test_a_compressed_body_is_inflated(coding: str, sent: bytes) -> None:
    async def scenario() -> None:
        connection = Connection(content_encoding=coding)
        connection.send(sent)
        with bodies() as some:
            assert await some.receive(connection.scope, connection.receive) == b'{"a": 1}'

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("coding", "sent", "status", "code"),
    [
        ("gzip", gzip.compress(b"x" * 1001), 413, "request_too_large"),
        ("gzip", gzip.compress(b"x" * 10**6)[:1000], 413, "request_too_large"),
        ("gzip", gzip.compress(b"x" * 1000)[:-9], 400, "invalid_content_encoding"),
        ("gzip", gzip.compress(b"x") * 2, 400, "invalid_content_encoding"),
        ("gzip", b"{}", 400, "invalid_content_encoding"),
        ("deflate", b"", 400, "invalid_content_encoding"),
        ("zstd", b"(\xb5/\xfd", 415, "unsupported_content_encoding"),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), 415, "unsupported_content_encoding"),
    ],
)
def test_a_compressed_body_is_held_to_the_bounds_of_a_plain_one(
    coding: str, sent: bytes, status: int, code: str
) -> None:
    async def scenario() -> None:
        connection = Connection(content_encoding=coding)
        connection.send(sent)
        with bodies() as some, pytest.raises(ApiError) as caught:
            await some.receive(connection.scope, connection.receive)
        assert (caught.value.status, caught.value.code) == (status, code)

    asyncio.run(scenario())
