"""The order in which waiting requests are tried."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from moeserve.request import Request

_LPM_WINDOW = 64
_LPM_MAX_OVERTAKERS = 32


def _queue_key(request: Request) -> tuple[int, int]:
    return request.queue_key


class WaitingQueue:
    """Requests by (priority, arrival); a preempted one returns to the place its arrival gives it.

    Policy `fcfs` tries them in that order. `lpm` tries those of the most urgent priority with the longest cached prefix
    first, so that requests which share a prompt run while it is in memory; whoever was overtaken `_LPM_MAX_OVERTAKERS`
    times goes first, so nobody starves.
    """

    def __init__(self, policy: str, matched_tokens: Callable[[Request], int]) -> None:
        if policy not in ("fcfs", "lpm"):
            raise ValueError(f"unknown scheduling policy {policy!r}")
        self._policy = policy
        self._matched_tokens = matched_tokens
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def top_priority(self) -> int | None:
        """The priority of the most urgent request, None if nobody waits."""
        return self._requests[0].priority if self._requests else None

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_queue_key)

    def remove(self, request: Request) -> None:
        """Raises ValueError for one that is not here."""
        index = bisect_left(self._requests, request.queue_key, key=_queue_key)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"request {request.request_id} does not wait")
        del self._requests[index]

    def candidates(self) -> list[Request]:
        """Who is to be tried, in order."""
        if self._policy == "fcfs" or len(self._requests) < 2:
            return list(self._requests)
        window = [r for r in self._requests[:_LPM_WINDOW] if r.priority == self._requests[0].priority]
        starving = [r for r in window if r.num_overtakers >= _LPM_MAX_OVERTAKERS]
        others = [r for r in window if r.num_overtakers < _LPM_MAX_OVERTAKERS]
        others.sort(key=self._matched_tokens, reverse=True)
        return starving + others + self._requests[len(window) :]

    def take(self, request: Request) -> None:
        """Removes the request, counting it as an overtaker of those who stood before it."""
        self.remove(request)
        for other in self._requests:
            if other.queue_key >= request.queue_key:
                break
            other.num_overtakers += 1
