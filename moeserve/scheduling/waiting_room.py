"""Requests before their places in a step: in the queue, or outside of it while something that they need is on its way.

A request waits outside of the queue while a part keeps it out, as for the first mask of its grammar, and while its
prefix is read back or fetched from another service. It then takes its place in the queue by its arrival. No text,
tensors, clock or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, TypeVar

from moeserve.plan import Request
from moeserve.scheduling.arrivals import Job, Result, Source
from moeserve.scheduling.fair_queue import FAR_SHORTER, Tenants, WaitingQueue
from moeserve.scheduling.pacing import Load, Pace
from moeserve.scheduling.parts import Parts
from moeserve.scheduling.request_memory import RankLoads, RequestMemory
from moeserve.scheduling.token_sums import TokenSums

# The number of next requests for which blocks are looked for elsewhere, and by whose prompts an admitted request
# decides where to keep its state and windows.
FORESEEN = 16
# Tokens of the prompts for which one call looks elsewhere, after which it asks no further requests: tens of
# milliseconds. A short prompt costs as much as one of the least tokens.
_MOST_ASKED_TOKENS = 2**17
_LEAST_ASKED_TOKENS = 1024
# A request that waits is dropped once its wait is sure to exceed its limit by this factor.
_CLEARLY_LATE = 1.2

J = TypeVar("J", bound=Job)


class WaitingRoom:
    """Owns the queue and the requests outside of it, and decides which blocks to look for elsewhere.

    `running`: the requests that run, which the scheduler mutates. `sources`: of KV beside memory.
    """

    def __init__(
        self,
        memories: Sequence[RequestMemory],
        running: list[Request],
        tenants: Tenants,
        pace: Pace,
        sources: Sequence[Source[Any]],
        parts: Parts,
    ) -> None:
        self.queue = WaitingQueue(tenants, pace.is_late, pace.is_bounded, pace.tells_overload)
        self._memories = memories
        self._running = running
        self._pace = pace
        self._sources = sources
        self._kept_out: dict[str, Request] = {}
        self._parts = parts

    def __len__(self) -> int:
        return len(self.queue) + len(self._kept_out) + sum(len(source.arrivals.waiting) for source in self._sources)

    def place(self, request: Request) -> None:
        """Let a request wait for its turn, or first until parts no longer keep it out."""
        if self._parts.keep_out(request):
            self._kept_out[request.request_id] = request
        else:
            self.queue.add(request)

    def let_in(self, request: Request) -> None:
        """Give a request its place in the queue if a part has kept it out until now."""
        if self._kept_out.pop(request.request_id, None) is not None:
            self.queue.add(request)

    def leave(self, request: Request) -> None:
        """Forget a request that has ended, wherever it waits."""
        if not any(source.arrivals.leave(request) for source in self._sources):
            self._take_out(request)

    def take_jobs(self, source: Source[J], now: float) -> list[J]:
        """Return the jobs of a source that are to begin. To be called before each `Scheduler.schedule`.

        Requests that are next in the queue wait from now on if their KV comes from there. now: in seconds since the
        epoch.
        """
        for request in source.take_overdue(self._pace.now):
            self.place(request)
        self._take_out_next(source)
        return source.take_jobs(now, len(self._running))

    def end_job(self, source: Source[J], result: Result[J], now: float) -> None:
        """Receive the end of a job; requests that waited for it take their places. now: in seconds since the epoch."""
        for request in source.end(result, now):
            self.place(request)

    def is_looked_for(self, request: Request) -> bool:
        """Return whether more of the request's tokens may be found in a source."""
        return any(source.is_looked_for(request) for source in self._sources)

    def count_found(self, request: Request) -> None:
        """Let a request that is declined report what was found of its prompt."""
        request.num_cached_tokens = self.num_found(request)
        for source in self._sources:
            source.count_found(request, request.num_cached_tokens - self._num_cached(request))

    def num_found(self, request: Request) -> int:
        """Count the request's tokens that are in memory, or in a source as far as is known."""
        found = self._num_cached(request)
        return max([found, *(source.num_found(request) for source in self._sources)]) if self._sources else found

    def late_outside(self) -> list[Request]:
        """Return the requests outside of the queue that have waited too long."""
        outside = chain(self._kept_out.values(), *(source.arrivals.waiting for source in self._sources))
        return [r for r in outside if self._pace.now - r.arrived_at > self._pace.limit(r)]

    def late_in_queue(self, load: Load, num_tried: int, step_tokens: int) -> list[Request]:
        """Return the queued requests that have waited too long, or will before the requests ahead of them have begun.

        load: of now. num_tried: only requests that arrived before this number of arrivals are late. step_tokens: the
        most that a step computes.
        """
        late, ahead, num_tokens = list[Request](), list[int](), 0
        sums, limits = TokenSums(), dict[tuple[bool, str, float | None, int], float]()
        for request in self.queue.candidates():
            own, num_places = request.num_uncached_tokens, len(ahead) + 1 - load.num_free_places
            terms, num_steps = request.terms, -(-own // step_tokens)
            kind = (self._pace.is_bounded(request), terms.tenant, terms.ttft_s, num_steps)
            if (limit_s := limits.get(kind)) is None:
                limit_s = limits[kind] = self._pace.limit(request)
            waited_s = self._pace.now - request.arrived_at
            spare_s = _CLEARLY_LATE * limit_s - waited_s
            is_late = waited_s > limit_s
            if not is_late and load.wait_behind_s(num_places, num_tokens) > spare_s:
                for tokens in ahead[sums.count :]:
                    sums.add(tokens)
                is_late = load.wait_behind_s(num_places, sums.bounded(FAR_SHORTER * own)) > spare_s
            if is_late and request.arrival < num_tried:
                late.append(request)
            else:
                ahead.append(own)
                num_tokens += own
        return late

    def _next(self) -> list[Request]:
        """Return the requests whose blocks are looked for elsewhere: the ones that parts hurry, and the next ones."""
        if not (len(self.queue) or self._kept_out):
            return []
        most = min(max(0, self._pace.num_places() - len(self._running)) + 1, FORESEEN)
        hurried = [
            r for r in self._parts.sought_first() if not any(source.arrivals.find(r) for source in self._sources)
        ]
        kept_out, first = islice(self._kept_out.values(), most), islice(self.queue.candidates(), most)
        return list(dict.fromkeys((*hurried, *kept_out, *first)))

    def _take_out_next(self, source: Source[Any]) -> None:
        """Take out the next requests that wait for a source. The requests behind them are next then and asked, too."""
        asked, num_tokens = set[str](), 0
        loads: RankLoads | None = None
        while new := [r for r in self._next() if r.request_id not in asked and source.concerns(r)]:
            loads = loads or RankLoads(self._memories, self._running)
            taken = [request for request in new if self._waits(request, source, loads)]
            for request in taken:
                self._take_out(request)
            asked.update(request.request_id for request in new)
            num_tokens += sum(max(request.num_prompt_tokens, _LEAST_ASKED_TOKENS) for request in new)
            if not taken or num_tokens >= _MOST_ASKED_TOKENS:
                return

    def _waits(self, request: Request, source: Source[Any], loads: RankLoads) -> bool:
        """Return whether a request waits for a source from now on."""
        if source.seek(request, self._pace.now):
            return True
        is_worth_it = self._parts.is_worth_reading(request, self)
        return is_worth_it and source.look_up(request, self._pace.now, loads, len(self._running))

    def _take_out(self, request: Request) -> None:
        """Take a request out of the queue, or from among the requests that are kept out."""
        if self._kept_out.pop(request.request_id, None) is None:
            self.queue.remove(request)

    def _num_cached(self, request: Request) -> int:
        return max(memory.peek(request) for memory in self._memories)
