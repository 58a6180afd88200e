"""Requests that their client leads, as the beams of a search: behind each token one waits until it is to go on.

A led request may fork another one, whose text differs in its last token. It waits until the other one goes on, so that
one step computes both. The prefix cache shares the full blocks of their common text; a copy of the block behind these
spares computing its tokens again. When it begins once more, after a preemption or in another life of the engine, both
texts may have grown, and no block behind the shared ones is equal any more.
"""

from __future__ import annotations

from moeserve.plan import Request
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.parts import Part
from moeserve.scheduling.plan_draft import PlanDraft
from moeserve.scheduling.request_memory import RequestMemory


class LedRequests(Part):
    """Lets each led request compute one token, and another one whenever it is to go on.

    While a request that has begun lacks a place or memory, no other one waits for its client: each goes on with the
    token that it has sampled, and ends some day. Otherwise requests that wait might hold for ever what it lacks.
    """

    def __init__(self) -> None:
        self._led: dict[str, Request] = {}
        self._num_allowed: dict[str, int] = {}  # by request id, the output tokens at which it waits
        self._outside: dict[str, Request] = {}  # the requests with output that do not run
        self._lacking: set[str] = set()  # of these, by id, the ones that might have run in the last step
        self._is_crowded = False

    def enter(self, request: Request) -> bool:
        if request.asked.led:
            self._led[request.request_id] = request
            self._num_allowed[request.request_id] = request.num_output_tokens + 1
            if request.num_output_tokens:
                self._outside[request.request_id] = request
        return request.asked.led

    def begin_step(self) -> None:
        lacking = {name for name, request in self._outside.items() if not self._waits(request)}
        self._is_crowded = not lacking.isdisjoint(self._lacking)
        self._lacking = lacking

    def holds(self, request: Request) -> bool:
        return not self._is_crowded and self._waits(request)

    def needs_token(self, request: Request) -> bool:
        """Return True: the client may want another token in the place of the one that is being sampled."""
        return True

    def most_drafts(self, request: Request, most: int) -> int:
        return 0

    def continued(self, request_id: str) -> None:
        if request_id in self._led:
            self._num_allowed[request_id] += 1

    def begins(self, request: Request, memory: RequestMemory, draft: PlanDraft) -> None:
        self._outside.pop(request.request_id, None)
        forked = self._led.get(request.asked.forks)
        # The step names the forked request, so the block does not change hands before the copy. If that request begins
        # in this step too, its block may be a copy that is still to be made.
        if forked is not None and forked.rank == request.rank and draft.continues(forked):
            for source, target in memory.take_over(request, forked):
                draft.copy(request.rank, source, target)

    def preempted(self, request: Request, num_running: int) -> None:
        if request.asked.led:
            self._outside[request.request_id] = request

    def left(self, output: RequestOutput) -> None:
        request_id = output.request.request_id
        if self._led.pop(request_id, None) is not None:
            del self._num_allowed[request_id]
            self._outside.pop(request_id, None)

    def _waits(self, request: Request) -> bool:
        """Return whether a request waits for its client, or with the request that it forks."""
        if request.num_output_tokens >= self._num_allowed[request.request_id]:
            return True
        forked = self._led.get(request.asked.forks)
        if forked is None or forked.num_output_tokens != request.num_output_tokens:
            return False
        return request.request_id in self._outside and self._waits(forked)
