"""Requests in turns: where several steps are in flight, each one has an equal part of the running requests."""

from __future__ import annotations

from collections import Counter

from moeserve.plan import Chunk, Request
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.parts import Part


class Turns(Part):
    """Leaves running requests to the next step once a step names its part of them, on each rank with KV of its own.

    A request in flight has no known token to compute, so without turns the first step would name all requests, and no
    other step would be in flight beside it.
    """

    def __init__(self, num_steps: int) -> None:
        """num_steps: the number of steps in flight at once."""
        self._num_steps = num_steps
        # The ranks of running requests, by their ids.
        self._running: dict[str, int] = {}
        self._named: set[str] = set()
        # By rank: how many more requests a step names.
        self._left: Counter[int] = Counter()

    def enter(self, request: Request) -> bool:
        return True

    def begin_step(self) -> None:
        self._named.clear()
        self._left = Counter(self._running.values())
        for rank, num_running in self._left.items():
            self._left[rank] = -(-num_running // self._num_steps)

    def holds(self, request: Request) -> bool:
        """Return whether a running request is left to the next step. New requests never are."""
        name = request.request_id
        return self._left[request.rank] <= 0 and name in self._running and name not in self._named

    def planned(self, request: Request, chunk: Chunk) -> None:
        if request.request_id not in self._named:
            self._named.add(request.request_id)
            self._left[request.rank] -= 1

    def started(self, request: Request) -> None:
        self._running[request.request_id] = request.rank

    def preempted(self, request: Request, num_running: int) -> None:
        self._running.pop(request.request_id, None)

    def left(self, output: RequestOutput) -> None:
        self._running.pop(output.request.request_id, None)
