"""Lets requests begin a few in each turn of the event loop: between them the tokens of streams go out."""

from __future__ import annotations

import asyncio
from collections import deque

# Requests that begin in one turn; each takes up to a millisecond until it first waits.
_AT_ONCE = 8


class Turnstile:
    """Bounds the work of a flood in each turn of the event loop. Requests pass in the order of their arrival.

    `turn` counts the turns in which the turnstile has work; it is larger in a later turn than it was when a request
    passed.
    """

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self.turn = 0
        self._at_once = at_once
        self._num_passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return at once, or in a later turn if others have passed in this one or wait."""
        loop = asyncio.get_running_loop()
        if not self._num_passed:
            loop.call_soon(self._begin_turn, loop)
        if self._num_passed < self._at_once:
            self._num_passed += 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _begin_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self.turn += 1
        self._num_passed = 0
        while self._waiting and self._num_passed < self._at_once:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its client may have left
                waiter.set_result(None)
                self._num_passed += 1
        if self._num_passed:
            loop.call_soon(self._begin_turn, loop)
