"""HTTP for all handlers: bodies in, responses and event streams out, clients that leave or do not read."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeserve.frontend import limits
from moeserve.frontend.errors import ApiError, invalid
from moeserve.frontend.held import hold_of
from moeserve.frontend.wills import NO_WILL, Will

KEEP_ALIVE = b": keep-alive\n\n"
RESUMED = b": resumed\n\n"
DONE = b"data: [DONE]\n\n"
_SLICE_BYTES = 64 * 1024

_T = TypeVar("_T")

Headers = list[tuple[bytes, bytes]]
# Of an answer: its headers, the next piece of its body, in a stream whole events, and whether it is the last piece.
Piece = tuple[Headers, bytes, bool]

_AS_IT_COMES: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
# Of a stream of events, and of one of lines of JSON. The type comes first.
STREAM_HEADERS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), *_AS_IT_COMES]
LINE_HEADERS: Headers = [(b"content-type", b"application/x-ndjson"), *_AS_IT_COMES]

# By the name of a content coding (RFC 9110, 8.4.1): the windowBits by which zlib expects its header.
_WINDOW_BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}


class ClientDisconnected(Exception):
    """The client left before its answer was complete."""


async def receive_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Return the whole body of a request, which counts as held until the request ends. Raise as `body_chunks`, and
    ApiError: 503 where the key holds too much."""
    chunks, hold = [], hold_of(scope)
    async for chunk in body_chunks(scope, receive, max_bytes):
        hold.grow(len(chunk))
        chunks.append(chunk)
    return b"".join(chunks)


async def body_chunks(scope: Scope, receive: Receive, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the body of a request as it arrives. Raise ClientDisconnected, and ApiError: 413 as soon as it is too
    large, 408 when it takes too long."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if declared.isdigit():
        _check_body(int(declared), max_bytes)
    size, has_more = 0, True
    due = asyncio.get_running_loop().time() + limits.RECEIVE_TIMEOUT_S
    while has_more:
        try:
            async with asyncio.timeout_at(due):
                message = await receive()
        except TimeoutError:
            text = f"The body did not arrive within {limits.RECEIVE_TIMEOUT_S:g} s"
            raise ApiError(408, text, code="request_timeout", close=True) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk, has_more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        _check_body(size, max_bytes)
        yield chunk


def _check_body(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise ApiError(413, f"The body is larger than {max_bytes} bytes", code="request_too_large", close=True)


def content_coding(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the name of the coding of a request's body, None for a plain one. Raise ApiError (415)."""
    named = [value.strip().lower() for name, value in headers if name == b"content-encoding"]
    codings = [coding for value in named for coding in value.split(b",") if coding.strip() not in (b"", b"identity")]
    if not codings:
        return None
    coding = codings[0].strip()
    if len(codings) > 1 or coding not in _WINDOW_BITS:
        shown = b",".join(codings).decode("ascii", "replace")[:40]
        message = f"A body with `content-encoding: {shown}` is not read here: send it as gzip, deflate or plain"
        raise ApiError(415, message, code="unsupported_content_encoding")
    return coding


def inflate(body: bytes, coding: bytes, max_bytes: int) -> bytes:
    """Return a decoded body. Raise ApiError: 413 above `max_bytes`, 400 if it is damaged or has several members:
    thousands of members would take seconds."""
    stream = zlib.decompressobj(_WINDOW_BITS[coding])
    try:
        inflated = stream.decompress(body, max_bytes + 1)
    except zlib.error:
        inflated = b""
    if len(inflated) > max_bytes:
        text = f"The body is larger than {max_bytes} bytes when it is inflated"
        raise ApiError(413, text, code="request_too_large", close=True)
    if not stream.eof or stream.unused_data:
        raise invalid(f"The body is not one whole {coding.decode()} stream", code="invalid_content_encoding")
    return inflated


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`. Cancel it and raise ClientDisconnected if the client leaves.

    The body must have been read: the next message of `receive` is the disconnect.
    """
    job = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({job, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientDisconnected
        return job.result()
    finally:
        for task in (job, watch):
            task.cancel()
        await asyncio.gather(job, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class SlowReader(Exception):
    """The client does not read: its connection's buffer stayed full."""


async def send_body(
    send: Send,
    status: int,
    body: bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
    *,
    is_last: bool = True,
) -> None:
    """Send a complete response of JSON. is_last: False if an empty message follows, which may close the connection."""
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*head, *(headers or ())]})
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


def with_headers(send: Send, headers: list[tuple[bytes, bytes]]) -> Send:

    async def adding(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    return adding


async def send_error(send: Send, error: ApiError, body: bytes, *, is_last: bool = True) -> None:
    """Send an error as a response with that body. is_last: see `send_body`."""
    await send_body(send, error.status, body, error.headers(), is_last=is_last)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def json_bytes(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def held_json(scope: Scope, body: bytes) -> Response:
    """Return a long answer, which counts as held until its client has read it. Raise ApiError (503)."""
    hold_of(scope).grow(len(body))
    return json_bytes(body)


def in_pieces(media_type: bytes, num_bytes: int, pieces: AsyncGenerator[bytes]) -> ASGIApp:
    """Return an answer of `num_bytes` whose pieces are read as its client takes them: it is never held whole."""

    async def send_all(send: Send) -> None:
        headers = [(b"content-type", media_type), (b"content-length", str(num_bytes).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(pieces):
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def answer(_: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, send_all(send))

    return answer


class PatientSend:
    """A `send` that hands bodies over in slices, each only when the connection's buffer has room.

    Raises SlowReader if there is no room for `timeout_s`. One timer outlasts many messages: a timer for each would cost
    a tenth of the CPU of a streamed token.
    """

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._due = math.inf  # when the waiting message will be too late, on the loop's clock
        self._is_late = False
        self._sender: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, message: Message) -> None:
        body = message.get("body", b"")
        if len(body) <= _SLICE_BYTES:
            await self._give(message)
            return
        for start in range(0, len(body), _SLICE_BYTES):
            end = start + _SLICE_BYTES
            more = end < len(body) or message.get("more_body", False)
            await self._give({"type": message["type"], "body": body[start:end], "more_body": more})

    async def _give(self, message: Message) -> None:
        loop, sender = asyncio.get_running_loop(), asyncio.current_task()
        assert sender is not None
        self._sender, self._due = sender, loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_at(self._due, self._check, loop)
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self._is_late and sender.uncancel() == 0:
                raise SlowReader from None
            raise
        finally:
            self._due = math.inf

    def end(self) -> None:
        """Release the request: its timer would hold all of it for as long as a client may take to read."""
        self._sender = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the waiting message if it is too late, else look again when it will be."""
        self._timer = None
        if loop.time() >= self._due and self._sender is not None:
            self._is_late = True
            self._sender.cancel()
        elif self._due < math.inf:
            self._timer = loop.call_at(self._due, self._check, loop)


class EventStream:
    """Server-sent events, or lines. Every call of `write` carries whole ones and is one write to the connection."""

    def __init__(self, send: Send, will: Will = NO_WILL, last_words: bytes = b"") -> None:
        """last_words: the events that end the stream, left in the `will` until it ends."""
        self._send = send
        self._will = will
        self._last_words = last_words

    async def start(self, headers: Headers = STREAM_HEADERS) -> None:
        """Send status 200 and the headers."""
        self._will.end_stream(self._last_words)
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, events: bytes, *, last: bool = False) -> None:
        if last:
            self._will.revoke()
        else:
            self._will.record_write()
        await self._send({"type": "http.response.body", "body": events, "more_body": not last})
