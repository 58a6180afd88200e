"""A copy stream that is as late as it may be: nothing is copied before somebody waits for it or follows it."""

from __future__ import annotations

import threading
from collections import deque

from torch import Tensor


class LateCopy:
    def __init__(self, stream: LateCopies, source: Tensor, target: Tensor, after: int) -> None:
        self.source, self.target, self.after = source, target, after
        self._stream = stream

    def wait(self) -> float:
        self._stream.run_until(self)
        return 0.001


class LateCopies:
    """See `experts.memory.slots.CopyStream`. Marks are numbered; num_followed: copies done for followers."""

    def __init__(self) -> None:
        self._queued: deque[LateCopy] = deque()
        self._lock = threading.Lock()
        self._num_marks = 0
        self.num_followed = 0

    def copy(self, source: Tensor, target: Tensor, after: int) -> LateCopy:
        copy = LateCopy(self, source, target, after)
        with self._lock:
            self._queued.append(copy)
        return copy

    def mark(self) -> int:
        self._num_marks += 1
        return self._num_marks

    def follow(self, copy: LateCopy) -> None:
        self.num_followed += self.run_until(copy)

    def run_until(self, copy: LateCopy) -> int:
        """Everything up to `copy`, in order; how much that was."""
        with self._lock:
            count = list(self._queued).index(copy) + 1 if copy in self._queued else 0
            for _ in range(count):
                late = self._queued.popleft()
                late.target.copy_(late.source)
            return count
