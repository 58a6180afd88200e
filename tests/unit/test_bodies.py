"""Bodies of requests: bounds on size and time."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import pytest

from moeserve.frontend import limits
from moeserve.frontend.errors import ApiError
from moeserve.frontend.held import HeldBytes, Hold
from moeserve.frontend.http import ClientDisconnected, content_coding, inflate, receive_body


class Connection:
    """The parts of a body, which come when they are sent."""

    def __init__(self, **headers: str) -> None:
        listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.scope = {"headers": listed, "state": {"hold": Hold(HeldBytes(), b"")}}
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


def test_a_body_is_received_in_parts() -> None:
    async def scenario() -> None:
        connection = Connection()
        for part, more in ((b"ab", True), (b"", True), (b"c", False)):
            connection.send(part, more=more)
        assert await receive_body(connection.scope, connection.receive, 1000) == b"abc"

    asyncio.run(scenario())


@pytest.mark.parametrize("declared", [{}, {"content_length": "5"}])
def test_a_body_that_is_too_large_is_refused_as_soon_as_that_is_known(declared: dict[str, str]) -> None:
    async def scenario() -> None:
        connection = Connection(**declared)
        connection.send(b"abc", more=True)
        connection.send(b"de", more=True)
        with pytest.raises(ApiError) as refused:
            await receive_body(connection.scope, connection.receive, 4)
        assert (refused.value.status, refused.value.close) == (413, True)
        assert connection.num_received == (0 if declared else 2)

    asyncio.run(scenario())


def test_a_client_that_leaves_ends_its_body() -> None:
    async def scenario() -> None:
        connection = Connection()
        connection.send(b"abc", more=True)
        connection.leave()
        with pytest.raises(ClientDisconnected):
            await receive_body(connection.scope, connection.receive, 1000)

    asyncio.run(scenario())


def test_a_body_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RECEIVE_TIMEOUT_S", 0.01)

    async def scenario() -> None:
        connection = Connection()
        connection.send(b"abc", more=True)
        with pytest.raises(ApiError) as refused:
            await receive_body(connection.scope, connection.receive, 1000)
        assert refused.value.status == 408

    asyncio.run(scenario())


def zipped(content: bytes) -> bytes:
    """The same bytes at any time: they name tests, in several processes."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("coding", "sent"),
    [
        ("gzip", zipped(b'{"a": 1}')),
        ("X-GZIP", zipped(b'{"a": 1}')),
        ("deflate", zlib.compress(b'{"a": 1}')),
        ("identity", b'{"a": 1}'),
    ],
)
def test_a_compressed_body_is_inflated(coding: str, sent: bytes) -> None:
    named = content_coding([(b"content-encoding", coding.encode())])
    assert (sent if named is None else inflate(sent, named, 1000)) == b'{"a": 1}'


@pytest.mark.parametrize(
    ("coding", "sent", "status", "code"),
    [
        ("gzip", zipped(b"x" * 1001), 413, "request_too_large"),
        ("gzip", zipped(b"x" * 10**6)[:1000], 413, "request_too_large"),
        ("gzip", zipped(b"x" * 1000)[:-9], 400, "invalid_content_encoding"),
        ("gzip", zipped(b"x") * 2, 400, "invalid_content_encoding"),
        ("gzip", b"{}", 400, "invalid_content_encoding"),
        ("deflate", b"", 400, "invalid_content_encoding"),
        ("zstd", b"(\xb5/\xfd", 415, "unsupported_content_encoding"),
        ("gzip, gzip", zipped(zipped(b"{}")), 415, "unsupported_content_encoding"),
    ],
)
def test_a_compressed_body_is_held_to_the_bounds_of_a_plain_one(
    coding: str, sent: bytes, status: int, code: str
) -> None:
    def read() -> None:
        named = content_coding([(b"content-encoding", coding.encode())])
        assert named is not None
        inflate(sent, named, 1000)

    with pytest.raises(ApiError) as caught:
        read()
    assert (caught.value.status, caught.value.code) == (status, code)
