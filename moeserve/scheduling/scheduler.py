"""The scheduler: which requests advance by how many tokens in the next step. No text, tensors, clock or sockets.

There is no prefill phase and no decode phase. A request has `num_computed_tokens`; a step advances some requests by
some tokens under a token budget: first requests that lack one token, then requests whose thought was ended, then
prompts in chunks with the rest of the budget, where a long prompt lets far shorter ones of its tenant pass. Prefix
hits, chunked prefill, preemption and resuming are all this one idea.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile

from moeserve.plan import CANCELLED, Chunk, ChunkResult, FinishReason, Request, StepPlan, StepResult
from moeserve.scheduling.arrivals import Source
from moeserve.scheduling.chunks import Chunks
from moeserve.scheduling.draft_room import DraftRoom
from moeserve.scheduling.fair_queue import FAR_SHORTER, Tenant, Tenants
from moeserve.scheduling.open_prompts import OpenPrompts, ScheduledPrompts
from moeserve.scheduling.outcomes import (
    NeverFitsError,
    QueueFullError,
    RequestOutput,
    SchedulerCounters,
    TooLateError,
)
from moeserve.scheduling.pacing import UNBOUNDED, Load, Pace
from moeserve.scheduling.parts import Part, Parts
from moeserve.scheduling.plan_draft import NO_DRAFTS, PlanDraft
from moeserve.scheduling.request_memory import AdmissionOutcome, RankLoads, RequestMemory
from moeserve.scheduling.request_states import NoStates, RequestStates, StatePolicy
from moeserve.scheduling.running import Running
from moeserve.scheduling.sampled_tokens import append_sampled
from moeserve.scheduling.sharing import Sharing
from moeserve.scheduling.waiting_room import FORESEEN, WaitingRoom
from radix_cache import Miss, PrefixCache

# A round of admissions ends once this number of prompts was found to wait for other prompts, each for another one.
_MAX_FOLLOWERS_TRIED = 64


class Scheduler:
    """Owns the state of requests and, through one `RequestMemory` per rank, of memory.

    A request lives on one rank at a time, chosen at its admission (`RankLoads`). `caches[r]` are the blocks of rank r.
    A step takes as long as its busiest rank, so `max_num_batched_tokens` holds for each rank; `max_num_seqs` and the
    queue hold for the service as a whole.

    `schedule` may be called again before `commit` of the previous plan, and commits come in the order of the plans. A
    request with tokens in flight then goes on with the rest of its prompt, and is left out without one; its blocks stay
    until its commit, even if it is aborted. With `run_ahead` it also goes on with the token that the previous plan will
    sample; tokens planned beyond the request's end are dropped.
    """

    def __init__(
        self,
        caches: Sequence[PrefixCache],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_queued_reqs: int,
        max_model_len: int,
        run_ahead: bool = False,
        states: StatePolicy | None = None,
        pace: Pace | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        """states: None for models without recurrent states. pace: None bounds no wait by time. parts: in their order
        (`moeserve.scheduling.parts`)."""
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"max_num_batched_tokens {max_num_batched_tokens} is below max_num_seqs {max_num_seqs}")
        for cache in caches:
            if max_model_len > cache.num_blocks * cache.block_size:
                raise ValueError(f"max_model_len {max_model_len} exceeds the {cache.num_blocks} blocks of KV memory")
        self._caches = caches
        self._max_num_seqs = self._num_places = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_queued_reqs = max_num_queued_reqs
        self._max_model_len = max_model_len
        self._run_ahead = run_ahead
        self._pace = pace or Pace(UNBOUNDED, max_num_batched_tokens, max_num_seqs, len(caches))
        self._memories = [
            RequestMemory(cache, NoStates() if states is None else RequestStates(cache, states)) for cache in caches
        ]
        self._parts = Parts(parts)
        self._requests: dict[str, Request] = {}
        self._tenants = Tenants()
        self._sharing = Sharing(self._tenants, caches, max_num_seqs)
        self._open_prompts = OpenPrompts()
        self._committed: PlanDraft | None = None
        self._lacking: dict[Tenant, Request] = {}
        self.counters = SchedulerCounters()
        running: list[Request] = []
        sources = [part for part in parts if isinstance(part, Source)]
        self.waiting = WaitingRoom(self._memories, running, self._tenants, self._pace, sources, self._parts)
        self._running = Running(
            running, self.waiting, self._tenants, self._sharing, self._memories, self._parts, self.counters
        )
        self._chunks = Chunks(self._memories, self._running, self._tenants, self._parts)
        self._in_flight: deque[PlanDraft] = deque()
        self._started: list[Request] = []
        self._misses: dict[str, Miss] = {}  # by request id, until an output tells why the match of its prompt ended
        self._num_arrivals = 0
        self._num_tried = 0
        self._step = 0

    @property
    def num_running(self) -> int:
        return len(self._running.requests)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def now(self) -> float:
        """The time of `set_time`."""
        return self._pace.now

    @property
    def lacking(self) -> Collection[Request]:
        """The first request of each tenant that found no memory in the latest step."""
        return self._lacking.values()

    @property
    def is_idle(self) -> bool:
        return not self._requests and not self._in_flight

    @property
    def num_blocks(self) -> tuple[int, int, int]:
        """The numbers of free, cached and leased blocks of all ranks."""
        of_ranks = [cache.counts for cache in self._caches]
        counts = [(of_rank.num_free, of_rank.num_cached, of_rank.num_leased) for of_rank in of_ranks]
        free, cached, leased = map(sum, zip(*counts, strict=True))
        return free, cached, leased

    @property
    def num_empty_slots(self) -> int:
        """The number of slots that requests hold and no plan fills yet."""
        return sum(self._memories[request.rank].num_empty_slots(request) for request in self._running.requests)

    def add(self, request: Request) -> None:
        """Queue a request. Raise NeverFitsError, QueueFullError, TooLateError; ValueError if invalid."""
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        if not request.num_prompt_tokens or request.sampling.max_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one token to generate")
        if request.num_output_tokens >= request.sampling.max_tokens:
            raise ValueError("the request has all its tokens already")
        wanted = request.num_prompt_tokens + request.sampling.max_tokens
        if wanted > self._max_model_len:
            raise NeverFitsError(
                f"maximum context length is {self._max_model_len} tokens, but {wanted} were asked for: "
                f"{request.num_prompt_tokens} in the prompt and {request.sampling.max_tokens} for the completion"
            )
        self._check_queue(request)
        for check in self._parts.check:
            check(request)
        self._check_wait(request)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._tenants.enter(request)
        for memory in self._memories:
            memory.share(request)
        self._parts.enter(request)
        self._open_prompts.add(request)
        self._tenants.wait(request)
        self.waiting.place(request)

    def drop_late(self) -> list[RequestOutput]:
        """End the requests that never began and have waited too long, or will before those ahead of them have begun.

        Each has had its chance in at least one step, however long the previous step took.
        """
        late = self.waiting.late_outside()
        if len(self.waiting.queue):
            late += self.waiting.late_in_queue(self.load(), self._num_tried, self._max_num_batched_tokens)
        return [self._end(RequestOutput(request, finish_reason=FinishReason.LATE)) for request in late]

    def end_declined(self) -> list[RequestOutput]:
        """End the requests that parts decline, and queue those that parts no longer keep out.

        To be called before each `schedule`.
        """
        declined = self._parts.declined(self.waiting)
        for request in self._parts.ready():
            self.waiting.let_in(request)
        return [self._end(output) for output in declined]

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request whose client left, in any state. Return None for a request that is not known."""
        request = self._requests.get(request_id)
        return None if request is None else self._end(RequestOutput(request, finish_reason=FinishReason.ABORT))

    @property
    def requests(self) -> Mapping[str, Request]:
        """The requests that have not ended, by id, in the order of their arrival."""
        return self._requests

    def cancel(self, request_id: str) -> RequestOutput | None:
        """End a request that an operator does not want. Return None for a request that is not known."""
        ended = self.abort(request_id)
        return None if ended is None else replace(ended, error=CANCELLED)

    def finish(self, request_id: str, keep_tokens: int) -> RequestOutput | None:
        """End a request with its first `keep_tokens` output tokens: the frontend found a stop string in them."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        del request.token_ids[request.num_prompt_tokens + max(0, keep_tokens) :]
        return self._end(RequestOutput(request, finish_reason=FinishReason.STOP))

    def take_started(self) -> list[Request]:
        """Return the requests that left the queue for the first time since the last call."""
        started, self._started = self._started, []
        return started

    def schedule(self) -> list[StepPlan] | None:
        """Return the next step, one plan per rank, or None when nothing can be computed before a commit.

        A rank with nothing to do gets an empty plan. Mutates the requests that it schedules.
        """
        draft = PlanDraft(
            self._step + 1,
            self._max_num_batched_tokens,
            len(self._memories),
            tells_following=self._parts.tells_following,
        )
        for begin_step in self._parts.begin_step:
            begin_step()
        self._num_places = self._pace.num_places()
        self._running.make_room(self._num_places, lacks_memory=bool(self._lacking))
        # A request that is not tried in this step may find memory by now.
        self._lacking = {}
        prompts = self._plan_running(draft)
        draft.end_decodes(self._pace.step_bound(draft.requests))
        self._plan_prompts(prompts, draft)
        self._admit(draft)
        self._pace.record_waiting(self.waiting.queue.telling, is_awaited=self.waiting.queue.is_awaited)
        self._num_tried = self._num_arrivals
        if not draft.requests:
            return None
        self._step += 1
        self._in_flight.append(draft)
        return draft.plans

    def _plan_running(self, draft: PlanDraft) -> list[Request]:
        """Plan the running requests that are behind their prompts; return the others. Preempts some for memory."""
        prompts, closings = list[Request](), list[Request]()
        drafts = self._drafts(draft)
        # Preemption removes requests from the list during this loop, but only behind the current one.
        running, place = self._running.requests, 0
        while (place := self._chunks.plan_run(running, place, draft, drafts)) < len(running):
            request, place = running[place], place + 1
            if not self._may_go_on(request):
                continue
            num_pending = request.num_pending_tokens
            if num_pending > 1:
                num_lost = self._memories[request.rank].num_lost_tokens(request)
                is_prompt = num_pending - num_lost > 1 + request.num_forced_tokens
                (prompts if is_prompt else closings).append(request)
            elif num_pending == 1:
                self._chunks.plan_known(request, drafts.get(request.request_id, NO_DRAFTS), draft)
            elif num_pending == 0 and request.request_id not in drafts:
                self._chunks.plan_unsampled(request, self._in_flight[-1], draft)
        for request in closings:
            if request.lease is not None:
                self._chunks.plan_known(request, drafts.get(request.request_id, NO_DRAFTS), draft)
        return prompts

    def _plan_prompts(self, prompts: list[Request], draft: PlanDraft) -> None:
        """Plan running prompts in the turns of their tenants, and before some of them waiting requests."""
        awaited = next(self.waiting.queue.candidates(), None) if prompts else None
        prompts.sort(key=self._tenants.turn)
        urgent, patient = list[Request](), list[Request]()
        for request in prompts:
            is_later = awaited is not None and self._tenants.goes_before(awaited, request)
            (patient if is_later else urgent).append(request)
        self._schedule_prompts(urgent, draft)
        if patient:
            candidates = self.waiting.queue.candidates()
            self._admit(draft, takewhile(lambda request: self._tenants.goes_before(request, patient[0]), candidates))
            self._schedule_prompts(patient, draft)

    def commit(self, plans: Sequence[StepPlan], results: Sequence[StepResult]) -> list[RequestOutput]:
        """Apply the ranks' results of a step: publish full blocks, append tokens, end requests.

        Raise ValueError, with nothing changed, unless `plans` are the oldest in flight and `results` fit them.
        """
        if not self._in_flight or self._in_flight[0].plans is not plans:
            raise ValueError(f"step {plans[0].step} is not the oldest one in flight")
        rows = self._in_flight[0].rows(results)
        draft = self._committed = self._in_flight.popleft()
        for rank, blocks in draft.duplicates:
            self._memories[rank].free(blocks)
        for begin_commit in self._parts.begin_commit:
            begin_commit(draft)
        outputs: list[RequestOutput] = []
        for request in draft.requests:
            outputs += self._commit_chunk(request, *next(rows[request.rank]))
        for committed in self._parts.committed:
            committed()
        return outputs

    def _commit_chunk(self, request: Request, chunk: Chunk, computed: ChunkResult) -> list[RequestOutput]:
        """Apply the result of a chunk, and return what there is to report of its request."""
        num_certain = len(chunk.token_ids) - chunk.num_drafts
        request.num_scheduled_tokens -= num_certain
        error = computed.error
        if error is None and computed.token_id is None and chunk.sampling is not None:
            error = "no token was sampled"
        outputs: list[RequestOutput] = []
        goes_on = keeps_state = error is None and not request.finished
        if goes_on:
            num_known = len(request.token_ids)
            watching = self._parts.watching(request) if self._parts.watched else ()
            outputs = append_sampled(request, chunk, computed, watching)
            num_new = len(request.token_ids) - num_known
            num_accepted = max(0, num_new - request.num_forced_tokens - 1)
            keeps_state = num_accepted == chunk.num_drafts
            if keeps_state or chunk.state is None:
                request.num_computed_tokens += num_certain + num_accepted
            if self._parts.watched:
                self._parts.record_computed(request, request.num_computed_tokens)
            self._publish(request)
            for followed in self._parts.followed:
                followed(request, self._memories[request.rank], chunk, computed, outputs)
        if chunk.state is not None:
            self._memories[request.rank].commit_state(request, chunk, keep=keeps_state)
        if request.finished:
            request.failed |= error is not None
            self._release(request)
        elif error is not None:
            outputs.append(self._end(RequestOutput(request, finish_reason=FinishReason.ERROR, error=error)))
        elif outputs:
            self._report(request, outputs)
        return outputs

    def _report(self, request: Request, outputs: list[RequestOutput]) -> None:
        """Complete the outputs of a chunk, and end its request if the last one says so."""
        last = outputs[-1]
        self.counters.generation_tokens += sum([output.num_tokens for output in outputs])
        if self._misses:
            outputs[0].miss = self._misses.pop(request.request_id, None)
        if last.finish_reason is not None:
            self._end(last)

    def set_time(self, now: float) -> None:
        """Set the time by which retained prefixes expire and waits are measured, in seconds; it must not go back.

        Plans depend on it only if requests ask for retention, or are late.
        """
        self._pace.set_time(now)
        for set_time in self._parts.set_time:
            set_time(now)
        for memory in self._memories:
            memory.set_time(now)

    def count_step(self, seconds: float) -> None:
        """Learn from the seconds that the last committed step took."""
        if self._committed is not None:
            size, has_prompts = self._committed.size, bool(self._committed.prompts)
            self._pace.count_step(size, seconds, has_prompts=has_prompts)
            for counted in self._parts.counted:
                counted(size, seconds, has_prompts=has_prompts)
            self._committed = None

    def load(self, num_tokens: int | None = None) -> Load:
        """Return the load that a request would find now.

        num_tokens: its uncached prompt's; None for a typical one, of one step at most: it may be a short one among long
        ones.
        """
        backlogs = self._tenants.backlogs(num_tokens, self._max_num_batched_tokens)
        is_awaited = any(backlog.waiting for backlog in backlogs.values())
        return self._pace.load(backlogs, bool(self._lacking) and is_awaited and not self._tenants.background_runs)

    def check_idle(self) -> None:
        """Raise AssertionError unless every block is free or cached, as it must be when nothing runs."""
        num_held = self._parts.num_held_blocks()
        for memory in self._memories:
            memory.check_idle(num_held)

    def _num_cached_soon(self, request: Request) -> int:
        """Count the request's tokens that are cached, or will be cached by the prompts of the requests before it."""
        others, memory = self._open_prompts.neighbours(request), self._memories[0]
        return max([self.waiting.num_found(request), *(memory.num_shared(request, other) for other in others)])

    def _check_queue(self, request: Request) -> None:
        """Raise QueueFullError if no place is left. A request that an earlier engine had is always taken."""
        num_places = self._max_num_queued_reqs + max(0, self._max_num_seqs - self.num_running)
        if not request.resumes and not self._sharing.may_wait(request.terms, num_places):
            raise QueueFullError(f"{self.num_waiting} requests wait already")

    def _check_wait(self, request: Request) -> None:
        """Raise TooLateError if the request would wait much longer than it may."""
        if not self._pace.is_bounded(request):
            return
        request.num_uncached_tokens = len(request.token_ids) - self._num_cached_soon(request)
        if not len(self.waiting.queue):
            return
        wait_s = self.load(request.num_uncached_tokens).wait_s(request.terms.tenant, request.terms.weight)
        if not self._pace.admits(request, wait_s):
            raise TooLateError(f"the request would wait {wait_s:.1f} s for its first step")

    def _schedule_prompts(self, prompts: list[Request], draft: PlanDraft) -> None:
        """Plan chunks of running requests that lack more than one token, in order."""
        for request in prompts:
            rank = request.rank
            if request.request_id in draft.prompts:
                continue
            pending = request.num_pending_tokens
            if pending > draft.room(request, pending) > 0:
                self._let_shorter_pass(request, prompts, draft)
            if request.lease is None or draft.budgets[rank] <= 0 or self._parts.hold(request):
                continue
            if not request.num_scheduled_tokens:
                self._count_hits(request, self._memories[rank].catch_up(request))
            if not self._memories[rank].awaits_any(request, self._scheduled_prompts(draft)):
                self._chunks.plan(request, request.num_pending_tokens, draft)

    def _let_shorter_pass(self, request: Request, prompts: list[Request], draft: PlanDraft) -> None:
        """Plan requests of the same tenant that lack far fewer tokens than this one, which would fill the step.

        They get half of the rest of a step. So none waits for all of a long prompt, which takes at most twice as long.
        """
        most = request.num_pending_tokens // FAR_SHORTER
        shorter = [other for other in prompts if self._are_alike(other, request) and other.num_pending_tokens <= most]
        set_aside = draft.set_half_aside()
        self._schedule_prompts(shorter, draft)
        waiting = self.waiting.queue.candidates()
        self._admit(draft, (r for r in waiting if self._are_alike(r, request) and r.num_uncached_tokens <= most))
        draft.take_back(set_aside)

    def _are_alike(self, one: Request, other: Request) -> bool:
        return self._tenants.of(one) is self._tenants.of(other) and one.priority == other.priority

    def _admit(self, draft: PlanDraft, candidates: Iterable[Request] | None = None) -> None:
        """Admit waiting requests while budget, places and memory for their whole prompts last.

        No request passes one of its own tenant that finds no memory. A request of another tenant passes it until that
        tenant has had as much as this one will have. While parts hold a request, its place is kept, and of its tenant
        only requests that an earlier engine had are admitted. candidates: in the order in which they are tried; None
        for all.
        """
        if not len(self.waiting.queue) or draft.is_full or self.num_running >= self._num_places:
            return
        loads = RankLoads(self._memories, self._running.requests)
        awaiting: list[Tenant] = []
        places = Counter(map(self._tenants.of, self._running.requests))
        first = list(islice(self.waiting.queue.candidates(), FORESEEN))
        for request in self.waiting.queue.candidates() if candidates is None else candidates:
            if draft.is_full or self.num_running + len(awaiting) >= self._num_places:
                break
            tenant = self._tenants.of(request)
            if tenant in self._lacking or not self._sharing.may_run(tenant.terms, places[tenant]):
                continue
            if self._parts.hold(request):
                awaiting.append(tenant)
                places[tenant] += 1
                continue
            if tenant in awaiting and not request.resumes:
                continue
            if not all(self._tenants.may_pass(request, other) for other in self._lacking.values()):
                break
            outcome = loads.place(request, self._scheduled_prompts(draft))
            if outcome is AdmissionOutcome.FOLLOWS:
                if loads.num_followers_tried == _MAX_FOLLOWERS_TRIED:
                    break
                continue
            if outcome is AdmissionOutcome.NO_ROOM:
                self._lacking[tenant] = request
                continue
            places[tenant] += 1
            self._running.start(request)
            memory = self._memories[request.rank]
            for started in self._parts.started:
                started(request)
            self._parts.begin(request, memory, draft)
            memory.foresee(request, first)
            self._count_start(request)
            self._chunks.plan(request, request.num_pending_tokens, draft)
            loads.add(request)
        self._running.sort()

    def _scheduled_prompts(self, draft: PlanDraft) -> list[ScheduledPrompts]:
        """Return the prompts that are computed in this step and in those in flight."""
        return [step.prompts for step in (draft, *self._in_flight)]

    def _may_go_on(self, request: Request) -> bool:
        """Return whether the next step may name a running request."""
        if request.yields or (self._parts.watched and self._parts.hold(request)):
            return False
        if not request.is_in_flight:
            return True
        return self._run_ahead or request.num_pending_tokens > 0

    def _drafts(self, draft: PlanDraft) -> Mapping[str, array[int]]:
        """Return by request id the drafts that the step should verify, where there are any."""
        running, parts = self._running.requests, self._parts
        num_coming = min(len(self.waiting.queue), max(0, self._num_places - self.num_running))
        room = DraftRoom(self._memories, running, num_coming, self._may_go_on, parts.watched, parts.most_drafts)
        return parts.drafts(draft, room)

    def _count_start(self, request: Request) -> None:
        self.counters.prefix_query_tokens += len(request.token_ids)
        self._count_hits(request, request.num_computed_tokens)
        if not request.num_preemptions:
            self.counters.prompt_tokens += request.num_prompt_tokens
            self._pace.count_start(request)
            self._tenants.of(request).count_start(request)
            self._started.append(request)

    def _count_hits(self, request: Request, num_tokens: int) -> None:
        """Count cached tokens. After a preemption they are hits, but its client did not find them cached."""
        self.counters.prefix_hit_tokens += num_tokens
        if num_tokens:
            for hit in self._parts.hit:
                hit(request, num_tokens)
        if request.num_preemptions:
            return
        request.num_cached_tokens += num_tokens
        memory = self._memories[request.rank]
        if num_tokens:
            memory.record_hit(request, num_tokens)
        if not request.asked.cache.report:
            return
        # A match after tokens that the request computed itself says nothing about its prompt.
        is_new = num_tokens > 0 or request.request_id not in self._misses
        if is_new and request.num_cached_tokens == request.num_computed_tokens:
            self._misses[request.request_id] = memory.explain(request)

    def _publish(self, request: Request) -> None:
        """Publish the request's full blocks, and free the duplicates once no plan names them."""
        memory = self._memories[request.rank]
        blocks = memory.publish(request)
        if blocks and request.num_scheduled_tokens:
            self._in_flight[-1].duplicates.append((request.rank, blocks))
        elif blocks:
            memory.free(blocks)

    def _end(self, output: RequestOutput) -> RequestOutput:
        """Remove the request of a last output. Its blocks are released now, or with the commit of the plan that names
        it. Return the output."""
        request, reason = output.request, output.finish_reason
        assert reason is not None
        del self._requests[request.request_id]
        self._misses.pop(request.request_id, None)
        self._tenants.leave(request)
        request.finished, request.failed = True, output.error is not None
        self._pace.count_end(request, reason)
        self._open_prompts.remove(request)
        if request.lease is None:
            self._tenants.end_wait(request)
            self.waiting.leave(request)
            self._parts.leave(output)
        else:
            self._running.leave(request)
            self._parts.leave(output)
            self._release(request)
        return output

    def _release(self, request: Request) -> None:
        """Release the request's memory once no plan names it. Its tokens stay cached, but not after an error."""
        if request.num_scheduled_tokens:
            return
        memory = self._memories[request.rank]
        if not request.failed:
            memory.retain(request)
        memory.detach(request, 0 if request.failed else len(request.token_ids))
