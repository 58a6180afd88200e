"""How a running request gets its chunk of a step: memory for the tokens, at the cost of later requests if need be."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from moeserve.plan import Chunk, Request
from moeserve.scheduling.fair_queue import Tenants
from moeserve.scheduling.parts import Parts
from moeserve.scheduling.plan_draft import NO_DRAFTS, PlanDraft
from moeserve.scheduling.request_memory import RequestMemory
from moeserve.scheduling.running import Running


class Chunks:
    """Plans the chunks of single requests. The scheduler decides which request is next."""

    def __init__(
        self,
        memories: Sequence[RequestMemory],
        running: Running,
        tenants: Tenants,
        parts: Parts,
    ) -> None:
        """memories: by rank."""
        self._memories = memories
        self._running = running
        self._tenants = tenants
        self._parts = parts
        # By rank, the slots of a block, where chunks need nothing but slots; else 0.
        self._block_sizes = [memory.block_size if memory.needs_slots_alone else 0 for memory in memories]

    def plan_known(self, request: Request, drafts: array[int], draft: PlanDraft) -> None:
        """Plan the few tokens that a request lacks, with drafts after them if there is memory for them."""
        memory, count, num_drafts = self._memories[request.rank], request.num_pending_tokens, len(drafts)
        has_room = num_drafts and count + num_drafts <= draft.budgets[request.rank]
        new = memory.grow(request, count + num_drafts, sparing=True) if has_room else None
        if new is None:
            self.plan(request, count, draft)
            return
        if new:
            draft.zero(request.rank, new, memory.windows_of(new))
        state = memory.use_state(request, count, num_drafts)
        chunk = draft.add(request, count, state, memory.window_table(request), drafts)
        self._record_planned(request, count + num_drafts, chunk)

    def plan_run(
        self, requests: Sequence[Request], first: int, draft: PlanDraft, drafts: Mapping[str, array[int]]
    ) -> int:
        """Plan the token that each request lacks and its drafts, from place `first` on, up to one that lacks memory.

        This is the case of most requests of a large step, whose cost grows with their number. drafts: by request id,
        where there are any. Return the place of the request that is not planned, the number of requests without one.
        """
        budgets, block_sizes, place = draft.budgets[:], self._block_sizes, first
        watched = self._parts.watched
        counts = list[int]()
        for place in range(first, len(requests)):
            request = requests[place]
            rank, lease, start = request.rank, request.lease, request.num_computed_tokens
            block_size = block_sizes[rank]
            if (
                request.num_scheduled_tokens
                or len(request.token_ids) - start != 1
                or request.yields
                or (watched and request.request_id in watched)
                or not request.is_always_plain
                or lease is None
                or not block_size
            ):
                break
            count = 1 + len(drafts.get(request.request_id, NO_DRAFTS)) if drafts else 1
            if budgets[rank] < count:
                break
            if start + count > len(lease.block_ids) * block_size:
                new = self._memories[rank].grow(request, count, sparing=True)
                if new is None:
                    break
                draft.zero(rank, new, ())
            budgets[rank] -= count
            counts.append(count)
        else:
            place = len(requests)
        if place > first:
            planned = requests[first:place]
            draft.add_next(planned, counts, drafts)
            self._tenants.charge_each(planned, counts)
        return place

    def plan(self, request: Request, num_pending: int, draft: PlanDraft) -> None:
        """Plan as many of the request's pending tokens as fit into the step and into memory, preempting if none does.

        The victim is the last request of the same rank. Without a victim the request waits for memory of others.
        Prefixes that other tenants have cached within their shares are evicted only for a tenant's single request on
        the rank.
        """
        rank = request.rank
        memory = self._memories[rank]
        limit = min(num_pending, draft.budgets[rank]) if num_pending == 1 else draft.claim(request, num_pending)
        if limit <= 0:
            return
        count = wanted = memory.cut_chunk(request, limit)
        sparing = True
        while (new := memory.grow(request, count, sparing=sparing)) is None:
            count = memory.num_tokens_that_fit(request, sparing=sparing)
            if count:
                continue
            is_spared = memory.num_tokens_that_fit(request, sparing=False) > 0
            if is_spared and not self._running.has_others(request):
                sparing = False
            elif (victim := self._running.last_after(request, of_tenant=is_spared)) is not None:
                self._running.preempt(victim)
            else:
                return
            count = wanted
        if new:
            draft.zero(rank, new, memory.windows_of(new))
        chunk = draft.add(request, count, memory.use_state(request, count), memory.window_table(request))
        self._record_planned(request, count, chunk)

    def plan_unsampled(self, request: Request, previous: PlanDraft, draft: PlanDraft) -> None:
        """Plan the token that the `previous` plan will sample for a request, if it is sure to continue with it.

        Where parts need that token the request waits for the commit. The device counts the token for penalties. No
        request is preempted: after the commit this one has its turn like any other.
        """
        if request.num_output_tokens + 1 >= request.sampling.max_tokens:
            return
        if self._parts.watched and self._parts.need_token(request):
            return
        drawn_by = previous.sampled_place(request)
        if drawn_by is None or draft.budgets[request.rank] <= 0:
            return
        memory = self._memories[request.rank]
        new = memory.grow(request, 1, sparing=True)
        if new is not None:
            if new:
                draft.zero(request.rank, new, memory.windows_of(new))
            state, window = memory.use_state(request, 1), memory.window_table(request)
            self._record_planned(request, 1, draft.add_unsampled(request, drawn_by, state, window))

    def _record_planned(self, request: Request, num_tokens: int, chunk: Chunk) -> None:
        self._tenants.charge(request, num_tokens)
        if self._parts.watched:
            self._parts.record_planned(request, chunk)
