"""How many choices this server takes at once, decided before any work is done for them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moeserve.frontend.errors import invalid, unavailable

_REMEMBERED_ENDS = 32
_LONGEST_WAIT_S = 60.0


class Admission:
    """Counts choices in flight against what the engine runs and queues. `clock` gives seconds, monotonic.

    `rejections` is where refusals are counted.
    """

    def __init__(self, clock: Callable[[], float], rejections: Counter[str]) -> None:
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._rejections = rejections
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_REMEMBERED_ENDS)

    @contextmanager
    def hold(self, num_choices: int, capacity: int) -> Iterator[None]:
        """Places for the length of the block. Raises ApiError: 400 if so many never fit, 503 if they do not now."""
        if num_choices > capacity:
            raise invalid(f"The request asks for {num_choices} choices; this server takes {capacity} at once", "n")
        if self.in_flight + num_choices > capacity:
            self._rejections["queue_full"] += 1
            raise unavailable("The server's queue is full", "queue_full", self.retry_after())
        self.in_flight += num_choices
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= num_choices
            if self.in_flight == 0:
                self.idle.set()
            self._ends.append(self._clock())

    def retry_after(self) -> float:
        """Seconds until a place gets free at the pace of the latest requests, 1 to 60."""
        if len(self._ends) < 2:
            return 1.0
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(max(pace, 1.0), _LONGEST_WAIT_S)
