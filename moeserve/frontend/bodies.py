"""Bodies of requests: received within bounds, and read by a thread where they are big."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.types import Receive, Scope

from moeserve.frontend import limits
from moeserve.frontend.encodings import content_coding, inflate
from moeserve.frontend.http import ApiError, ClientDisconnected
from moeserve.frontend.workers import Workers

_T = TypeVar("_T")


class Bodies:
    """Receives and reads the bodies of one frontend.

    One thread reads big ones and prepares their conversations, one at a time: what a body becomes takes many times its
    size. Meanwhile no other is received any further: the thread holds the interpreter for milliseconds, and the event
    loop waits for it anew before the data of each connection.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._thread = Workers("bodies", 1, limits.MAX_WAITING_CHARS)
        self._num_big = 0  # that the thread works on, or that wait for it
        self._may_receive = asyncio.Event()
        self._may_receive.set()

    async def receive(self, scope: Scope, receive: Receive) -> bytes:
        """Return the whole body of a request, inflated. Raises ClientDisconnected, and ApiError: 413 as soon as it is
        too large, 408 when it takes too long, not counting the time for which it was held up here, 415 for an unknown
        coding."""
        coding = content_coding(scope["headers"])
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if declared.isdigit():
            self._check_size(int(declared))
        chunks: list[bytes] = []
        size, seconds = 0, limits.RECEIVE_TIMEOUT_S
        try:
            async with asyncio.timeout(seconds) as limit:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    self._check_size(size)
                    if not message.get("more_body", False):
                        break
                    await self._wait_for_reader(limit)
        except TimeoutError:
            text = f"The body did not arrive within {seconds:g} s"
            raise ApiError(408, text, code="request_timeout", close=True) from None
        join = partial(b"".join, chunks)
        if coding is not None:
            # However small it is, it may become large.
            return await self.run(size, lambda: inflate(join(), coding, self._max_bytes))
        # Many may be whole at once.
        return join() if size < limits.INLINE_BODY_BYTES else await self.run(0, join)

    async def read(self, body: bytes, parse: Callable[[bytes], _T]) -> _T:
        """Return what `parse` makes of a body. Raises ApiError as it does, and 503."""
        if len(body) < limits.INLINE_BODY_BYTES:
            return parse(body)
        return await self.run(len(body), partial(parse, body))

    async def run(self, num_bytes: int, work: Callable[[], _T]) -> _T:
        """Return the result of `work` on about so many bytes that came in a big body. Raises ApiError as it does, and
        503."""
        self._num_big += 1
        self._may_receive.clear()
        try:
            return await self._thread.run(num_bytes // limits.BODY_BYTES_PER_CHAR, work)
        finally:
            self._num_big -= 1
            if not self._num_big:
                self._may_receive.set()

    def stop(self) -> None:
        """Drop what waits."""
        self._thread.stop()

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            text = f"The body is larger than {self._max_bytes} bytes"
            raise ApiError(413, text, code="request_too_large", close=True)

    async def _wait_for_reader(self, limit: asyncio.Timeout) -> None:
        if self._may_receive.is_set():
            return
        loop, due = asyncio.get_running_loop(), limit.when()
        assert due is not None
        paused = loop.time()
        limit.reschedule(None)
        await self._may_receive.wait()
        limit.reschedule(due + loop.time() - paused)
