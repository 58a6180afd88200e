"""Requests before their places in a step: in the queue, or outside of it while something that they need is on its way.

A request waits outside of the queue for the first mask of its grammar, and while its prefix is read back or
fetched from another service. It then takes its place in the queue by its arrival. No text, tensors, clock or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

from moeserve.plan import Request
from moeserve.scheduling.arrivals import Arrivals
from moeserve.scheduling.fair_queue import FAR_SHORTER, Tenants, WaitingQueue
from moeserve.scheduling.kv_transfer import FetchJob, FetchResult, KvTransfer
from moeserve.scheduling.lower_tier import CopyJob, CopyResult, LowerTier
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


class WaitingRoom:
    """Owns the queue and the requests outside of it, and decides which blocks to look for elsewhere.

    `running`: the requests that run, which the scheduler mutates. `lower`: None where blocks are in memory alone.
    `transfer`: None where no KV goes to or comes from other services.
    """

    def __init__(
        self,
        memories: Sequence[RequestMemory],
        running: list[Request],
        tenants: Tenants,
        pace: Pace,
        lower: LowerTier | None,
        transfer: KvTransfer | None,
        parts: Parts,
    ) -> None:
        self.queue = WaitingQueue(tenants, pace.is_late, pace.is_bounded, pace.tells_overload)
        self._memories = memories
        self._running = running
        self._pace = pace
        self._lower = lower
        self._fetches = None if transfer is None else transfer.fetches
        self._arrivals: list[Arrivals[Any]] = [
            source.arrivals for source in (lower, self._fetches) if source is not None
        ]
        self._unmasked: dict[str, Request] = {}
        self._parts = parts

    def __len__(self) -> int:
        return len(self.queue) + len(self._unmasked) + sum(len(arrivals.waiting) for arrivals in self._arrivals)

    def enter(self, request: Request) -> None:
        """Receive a new request, before `place`."""
        if self._lower is not None:
            request.num_lower_tokens = 0

    def place(self, request: Request) -> None:
        """Let a request wait for its turn, or first for its mask."""
        if request.lacks_mask:
            self._unmasked[request.request_id] = request
        else:
            self.queue.add(request)

    def record_mask(self, request: Request) -> None:
        """Give a request its place in the queue if it waits for nothing but its mask, which has come."""
        if self._unmasked.pop(request.request_id, None) is not None:
            self.queue.add(request)

    def leave(self, request: Request) -> None:
        """Forget a request that has ended, wherever it waits."""
        if self._fetches is not None:
            self._fetches.give_back(request)
        if not any(arrivals.leave(request) for arrivals in self._arrivals):
            self._take_out(request)

    def take_copies(self, now: float) -> list[CopyJob]:
        """Return the copies up and down that are to begin. To be called before each `Scheduler.schedule`.

        Requests that are next in the queue wait from now on if their prefixes are read. now: in seconds since the
        epoch.
        """
        if self._lower is None:
            return []
        for request in self._lower.take_overdue(self._pace.now):
            self.place(request)
        self._take_out_next(self._waits_for_copies)
        return self._lower.take_jobs(now, len(self._running))

    def _waits_for_copies(self, request: Request, loads: RankLoads) -> bool:
        assert self._lower is not None
        if self._lower.seek(request, self._pace.now):
            return True
        if not self._parts.is_worth_reading(request, self):
            return False
        request.rank = loads.preferred_ranks(request)[0]
        return self._lower.look_up(request, self._pace.now, loads.num_spoken_for(request), len(self._running))

    def end_copy(self, result: CopyResult, now: float) -> None:
        """Receive the end of a copy between memory and the lower tier; requests that waited for it take their places.

        now: in seconds since the epoch.
        """
        assert self._lower is not None
        for request in self._lower.end(result, now):
            self.place(request)

    def take_fetches(self) -> list[FetchJob]:
        """Return the blocks that are to be fetched from other services. To be called before `take_copies`.

        Requests that are next in the queue wait from now on if blocks are fetched for them.
        """
        if (fetches := self._fetches) is None:
            return []
        for request in fetches.take_overdue(self._pace.now):
            self.place(request)
        self._take_out_next(
            lambda request, loads: fetches.look_up(request, self._pace.now, loads.num_spoken_for(request)),
            have_tickets=True,
        )
        return fetches.take_jobs()

    def end_fetch(self, result: FetchResult) -> None:
        """Receive the end of a fetch; requests that waited for it take their places."""
        assert self._fetches is not None
        for request in self._fetches.end(result):
            self.place(request)

    @property
    def has_fetches(self) -> bool:
        """True while a request waits until its blocks have been fetched from another service."""
        return self._fetches is not None and len(self._fetches.arrivals.waiting) > 0

    def is_looked_for(self, request: Request) -> bool:
        """Return whether files of the request's prefix are sought, or blocks are being fetched for it."""
        is_fetching = self._fetches is not None and request in self._fetches.arrivals.waiting
        return is_fetching or (self._lower is not None and self._lower.seeks(request))

    def count_found(self, request: Request) -> None:
        """Let a request that is not computed report what was found of its prompt."""
        request.num_cached_tokens = self.num_found(request)
        if self._lower is not None:
            request.num_lower_tokens = request.num_cached_tokens - self._num_cached(request)

    def num_found(self, request: Request) -> int:
        """Count the request's tokens that are in memory, stored as far as is known, or held by another service."""
        found = self._num_cached(request) if self._lower is None else self._lower.num_stored(request)
        return found if self._fetches is None else max(found, self._fetches.num_held(request))

    def late_outside(self) -> list[Request]:
        """Return the requests outside of the queue that have waited too long."""
        outside = chain(self._unmasked.values(), *(arrivals.waiting for arrivals in self._arrivals))
        return [r for r in outside if self._pace.now - r.arrived_at > self._pace.limit(r)]

    def late_in_queue(self, load: Load, num_tried: int, step_tokens: int) -> list[Request]:
        """Return the queued requests that have waited too long, or will before the requests ahead of them have begun.

        load: of now. num_tried: only requests that arrived before this number of arrivals are late. step_tokens: the
        most that a step computes.
        """
        late, ahead, num_tokens = list[Request](), list[int](), 0
        sums, limits = TokenSums(), dict[tuple[bool, float | None, int], float]()
        for request in self.queue.candidates():
            own, num_places = request.num_uncached_tokens, len(ahead) + 1 - load.num_free_places
            kind = (self._pace.is_bounded(request), request.terms.ttft_s, -(-own // step_tokens))
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
        """Return the requests whose blocks are looked for elsewhere: those that parts hurry, and the next ones."""
        if not (len(self.queue) or self._unmasked):
            return []
        most = min(max(0, self._pace.num_places() - len(self._running)) + 1, FORESEEN)
        hurried = [r for r in self._parts.sought_first() if not any(a.find(r) for a in self._arrivals)]
        unmasked, first = islice(self._unmasked.values(), most), islice(self.queue.candidates(), most)
        return list(dict.fromkeys((*hurried, *unmasked, *first)))

    def _take_out_next(self, waits: Callable[[Request, RankLoads], bool], *, have_tickets: bool = False) -> None:
        """Take out the next requests that wait from now on. Those behind them are next then, and are asked as well.

        have_tickets: only requests that have one are asked.
        """
        asked, num_tokens = set[str](), 0
        loads: RankLoads | None = None
        while new := [
            request
            for request in self._next()
            if request.request_id not in asked and (request.ticket is not None or not have_tickets)
        ]:
            loads = loads or RankLoads(self._memories, self._running)
            taken = [request for request in new if waits(request, loads)]
            for request in taken:
                self._take_out(request)
            asked.update(request.request_id for request in new)
            num_tokens += sum(max(request.num_prompt_tokens, _LEAST_ASKED_TOKENS) for request in new)
            if not taken or num_tokens >= _MOST_ASKED_TOKENS:
                return

    def _take_out(self, request: Request) -> None:
        """Take a request out of the queue, or from among the requests without a mask."""
        if self._unmasked.pop(request.request_id, None) is None:
            self.queue.remove(request)

    def _num_cached(self, request: Request) -> int:
        return max(memory.peek(request) for memory in self._memories)
