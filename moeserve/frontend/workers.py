"""Threads for work between text and tokens that is too long for the event loop, and what a request may do on the loop.

They are not asyncio's own threads: whoever ends the loop waits for those, so that a long text would hold up the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from moeserve.frontend import limits
from moeserve.frontend.allocator import give_back
from moeserve.frontend.http import ApiError, forget_locals, unavailable

_T = TypeVar("_T")

_MANY_CHARS = 50_000


class Workers:
    """A pool of threads whose work, waiting and under way, is bounded in characters. Used by one event loop."""

    def __init__(self, name: str, threads: int, max_chars: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._max_chars = max_chars
        self._chars = 0

    async def run(self, chars: int, work: Callable[[], _T]) -> _T:
        """Return the result of `work`, which goes through about so many characters. Raises ApiError (503) if too many
        are waiting. Work is always taken if there is no other, or if it goes through none."""
        if chars and self._chars and self._chars + chars > self._max_chars:
            raise unavailable("The server is converting too much text already", "too_much_text")
        self._chars += chars
        loop = asyncio.get_running_loop()
        future = self._pool.submit(_without_frames if chars < _MANY_CHARS else _giving_back, work)

        def release(_: object) -> None:
            # A client that leaves does not end work that has begun, which counts until it ends.
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._release, chars)

        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Drop what waits. Work under way is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _release(self, chars: int) -> None:
        self._chars -= chars


def _without_frames(work: Callable[[], _T]) -> _T:
    """Return the result of `work`. A refusal keeps nothing of what was read, which would be freed on the event loop."""
    try:
        return work()
    except ApiError as error:
        forget_locals(error)
        raise


def _giving_back(work: Callable[[], _T]) -> _T:
    """As `_without_frames`; the memory that a long text took is not kept."""
    try:
        return _without_frames(work)
    finally:
        give_back()


class InlineBudget:
    """The work that one request may still do on the event loop itself, in characters."""

    def __init__(self, chars: int) -> None:
        """is_small: whether there was anything at first."""
        self.is_small = chars > 0
        self._left = chars

    @classmethod
    def of(cls, body: bytes) -> InlineBudget:
        """Return the budget of a request; of what a big body holds, nothing is done on the loop."""
        return cls(limits.INLINE_CHARS if len(body) < limits.INLINE_BODY_BYTES else 0)

    def take(self, chars: int) -> bool:
        """Return whether work on so many characters may be done at once, and count it."""
        if chars > self._left:
            return False
        self._left -= chars
        return True
