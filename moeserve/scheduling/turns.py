"""Requests in turns: where several steps are in flight, each one has an equal part of the running requests."""

from __future__ import annotations

from moeserve.plan import Chunk, Request
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.parts import Part


class Turns(Part):
    """Leaves running requests to the next step once a step names its part of them.

    A request in flight has no known token to compute, so without turns the first step would name all requests, and no
    other step would be in flight beside it.
    """

    def __init__(self, num_steps: int) -> None:
        """num_steps: the number of steps in flight at once."""
        self._num_steps = num_steps
        self._running: set[str] = set()
        self._named: set[str] = set()
        self._part = 0

    def enter(self, request: Request) -> bool:
        return True

    def begin_step(self) -> None:
        self._named.clear()
        self._part = -(-len(self._running) // self._num_steps)

    def holds(self, request: Request) -> bool:
        """Return whether a running request is left to the next step. New requests never are."""
        name = request.request_id
        return len(self._named) >= self._part and name in self._running and name not in self._named

    def planned(self, request: Request, chunk: Chunk) -> None:
        self._named.add(request.request_id)

    def started(self, request: Request) -> None:
        self._running.add(request.request_id)

    def preempted(self, request: Request, num_running: int) -> None:
        self._running.discard(request.request_id)

    def left(self, output: RequestOutput) -> None:
        self._running.discard(output.request.request_id)
