"""Sending: whole JSON bodies, and event streams whose reader may be slow."""

from __future__ import annotations

import asyncio

from starlette.types import Send

from moeserve.frontend.errors import ApiError

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class SlowReader(Exception):
    """The client does not read; its connection's buffer stayed full."""


async def send_body(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None, media: bytes | None = None
) -> None:
    """A complete response, JSON unless `media` says otherwise."""
    head = [(b"content-type", media or b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*head, *(headers or ())]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    """An error as a response."""
    await send_body(send, error.status, error.body(), error.headers())


class EventStream:
    """Server-sent events. Every call of `write` carries whole events and is one write to the connection."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s

    async def start(self) -> None:
        """Sends status 200 and the headers."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, events: bytes, *, last: bool = False) -> None:
        """Sends events. Raises SlowReader when the connection takes nothing for too long."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send({"type": "http.response.body", "body": events, "more_body": not last})
        except TimeoutError:
            raise SlowReader from None

    async def fail(self, error: ApiError) -> None:
        """Ends the stream with an error event."""
        await self.write(b"data: " + error.body() + b"\n\n", last=True)
