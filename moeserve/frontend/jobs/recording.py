"""Record the parts of a running answer in memory, for any number of clients that come at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import Message

from moeserve.frontend import limits
from moeserve.frontend.errors import ApiError
from moeserve.frontend.held import Hold
from moeserve.frontend.http import Headers, Piece
from moeserve.frontend.store.idempotency import in_use

PIECE_BYTES = 64 * 1024  # of an answer that one client gets at once
_PART_BYTES = 64  # of memory around a part


class Recording:
    """An answer while it is computed: an ASGI `send` on one side, readers on the other.

    One that outgrows its room is not kept: it goes on for its present readers, at the pace of the slowest.
    """

    def __init__(self, content: bytes, hold: Hold) -> None:
        """content: digest of the request."""
        self.content = content
        self.headers: Headers = []
        self.is_kept = True
        self._hold = hold
        self._size = 0
        self._parts: list[bytes] = []
        self._num_dropped = 0  # parts that all readers have, and that are gone
        self._last = b""
        self._is_over = False
        self._error: ApiError | None = None
        self._places: dict[object, int] = {}  # the number of the next part, by reader
        self._changed = asyncio.Event()

    @property
    def body(self) -> bytes:
        """The body of a kept answer, once all of it has been sent."""
        return b"".join([*self._parts, self._last])

    async def send(self, message: Message) -> None:
        """Take a message of the answer. The last one is given to nobody before `end`. Raise ApiError where nobody reads
        an answer that is not kept."""
        if message["type"] == "http.response.start":
            self.headers = message["headers"]
            return
        body = message.get("body", b"")
        self._size += len(body) + _PART_BYTES
        self.is_kept = self._fits() and self.is_kept
        if not message.get("more_body", False):
            self._last = body
            return
        self._parts.append(body)
        self._tell()
        while not self._fits() and self._parts:
            if not self._places:
                raise in_use()
            if taken := min(self._places.values()) - self._num_dropped:
                self._drop(taken)
            else:
                await self._changed.wait()

    def end(self, error: ApiError | None) -> None:
        """Give the last part, or the error in its place."""
        if error is None:
            self._parts.append(self._last)
        self._error, self._is_over = error, True
        self._tell()
        self._leave()

    async def read(self) -> AsyncGenerator[Piece]:
        """Yield the answer from its beginning, as it comes. Raise its ApiError, and 409 where the beginning is gone."""
        if self._num_dropped:
            raise in_use()
        reader = object()
        self._places[reader] = 0
        try:
            while True:
                place = self._places[reader] - self._num_dropped
                if parts := self._next_parts(place):
                    self._places[reader] += len(parts)
                    if not self.is_kept:
                        self._tell()
                    has_all = place + len(parts) == len(self._parts)
                    yield self.headers, b"".join(parts), has_all and self._is_over and self._error is None
                elif self._error is not None:
                    raise self._error
                elif self._is_over:
                    return
                else:
                    await self._changed.wait()
        finally:
            del self._places[reader]
            self._tell()
            self._leave()

    def _next_parts(self, place: int) -> list[bytes]:
        size, end = 0, place
        while end < len(self._parts) and size < PIECE_BYTES:
            size += len(self._parts[end])
            end += 1
        return self._parts[place:end]

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _fits(self) -> bool:
        """Hold the bytes of all parts; return whether the caller may hold them."""
        try:
            self._hold.set(self._size)
        except ApiError:
            return False
        return self._size <= limits.MAX_KEPT_ANSWER_BYTES

    def _drop(self, num_parts: int) -> None:
        self._size -= sum(len(part) + _PART_BYTES for part in self._parts[:num_parts])
        del self._parts[:num_parts]
        self._num_dropped += num_parts

    def _leave(self) -> None:
        if self._is_over and not self._places:
            self._hold.set(0)
