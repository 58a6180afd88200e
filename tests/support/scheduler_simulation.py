"""A scheduler, and per rank a prefix cache and a KV oracle, driven step by step and checked after each."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from itertools import product

from moeserve.engine.planner import build_parts, build_text_parts
from moeserve.grammars.made_masks import MadeMask, no_drafts
from moeserve.kv_transfer import TicketOffice
from moeserve.plan import DEFAULT_TERMS, Asked, FinishReason, Request, SamplingParams, StepPlan, Terms
from moeserve.scheduling.grammars import Drafts
from moeserve.scheduling.kv_transfer import KvOffers
from moeserve.scheduling.lower_tier import LowerTier
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.overflow import Overflow
from moeserve.scheduling.pacing import UNBOUNDED, Pace, Slo
from moeserve.scheduling.request_states import StatePolicy
from moeserve.scheduling.scheduler import Scheduler
from moeserve.thoughts import ThoughtBudget
from radix_cache import PrefixCache, StoredBlocks
from tests.support.cache_invariants import check_invariants, evict_all
from tests.support.kv_oracle import KvOracle, Record, mask_of, undisturbed

VOCAB_SIZE = 50


class PlayedMasks:
    """Makes masks at once, but for requests whose ids are in `late`, and fails those in `broken`."""

    def __init__(self) -> None:
        self.late: set[str] = set()
        self.broken: set[str] = set()
        # The requests without a mask, with their drafts.
        self.unmasked: dict[Request, array[int]] = {}
        self.num_updates = 0

    @property
    def is_awaited(self) -> bool:
        return bool(self.unmasked)

    def update(self, changes: Iterable[Request], drafts_of: Callable[[Request], array[int]] = no_drafts) -> None:
        self.num_updates += 1
        for request in changes:
            if request.finished:
                self.unmasked.pop(request, None)
            else:
                self.unmasked[request] = drafts_of(request)

    def take(self, seconds: float = 0.0) -> list[MadeMask]:
        asked = [(request, drafts) for request, drafts in self.unmasked.items() if request.request_id not in self.late]
        for request, _ in asked:
            del self.unmasked[request]
        return [self._made(request, drafts) for request, drafts in asked]

    def wait(self, seconds: float) -> None:
        """Late masks come when they are told to."""

    def _made(self, request: Request, drafts: array[int]) -> MadeMask:
        if request.request_id in self.broken:
            return MadeMask(request, error="broken")
        output = request.token_ids[request.num_prompt_tokens :]
        after = tuple(mask_of(output + drafts[: number + 1]) for number in range(len(drafts)))
        # Some of them as if the grammar had forced them, or as the answer's layout.
        forced, laid = divmod(len(output) % 9, 3)
        forced = min(forced, len(drafts))
        return MadeMask(request, mask_of(output), None, drafts, after, forced, min(laid, len(drafts) - forced))


class Simulation:
    """`depth` is the number of steps that stay in flight while the next one is made; 0 is the plain loop. With
    `run_ahead` a request may be in several of them. With `in_turns` each step has its part of the running requests.

    `num_blocks` and `budget` hold for each rank; `cache` and `oracle` are rank 0's.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        budget: int = 16,
        max_num_seqs: int = 8,
        max_num_queued_reqs: int = 1000,
        max_model_len: int | None = None,
        caching: bool = True,
        depth: int = 0,
        num_ranks: int = 1,
        run_ahead: bool = False,
        states: StatePolicy | None = None,
        num_snapshots: int = 0,
        slo: Slo = UNBOUNDED,
        num_window_blocks: int = 0,
        window: int = 0,
        stored: StoredBlocks | None = None,
        drafting: Drafts | None = None,
        most_drafts: int = 0,
        overflow: Overflow = Overflow.AUTO,
        office: TicketOffice | None = None,
        kv_read_s: dict[bool, float] | None = None,
        in_turns: bool = False,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        num_slots = 0 if states is None else states.num_slots
        rows = None if states is None else range(num_slots, num_slots + num_snapshots)
        self.caches = [
            PrefixCache(
                num_blocks,
                block_size,
                caching=caching,
                snapshot_rows=rows,
                num_window_blocks=num_window_blocks,
                window=window,
                stored=stored,
            )
            for _ in range(num_ranks)
        ]
        self.oracles = [
            KvOracle(cache, vocab_size, run_ahead=run_ahead, num_slots=num_slots, most_drafts=most_drafts)
            for cache in self.caches
        ]
        self.cache, self.oracle = self.caches[0], self.oracles[0]
        pace = Pace(slo, budget, max_num_seqs, num_ranks)
        self.tier = None if stored is None else LowerTier(self.caches, pace, overflow, kv_read_s)
        self.offers = None if office is None else KvOffers(self.cache, office)
        kv_parts = [part for part in (self.tier, self.offers) if part is not None]
        # By id of a suspect: the number of computed tokens that clears it.
        self._suspects: dict[str, int] = {}
        self.masks = PlayedMasks()
        text_parts = build_text_parts(self.masks, drafting or Drafts())
        num_stages = depth + 1 if in_turns else 1
        parts = build_parts(
            self.caches, lambda name: self._suspects.get(name, 0), pace, kv_parts, text_parts, num_stages
        )
        self.scheduler = Scheduler(
            self.caches,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_num_queued_reqs=max_num_queued_reqs,
            max_model_len=max_model_len or num_blocks * block_size,
            run_ahead=run_ahead,
            states=states,
            pace=pace,
            parts=parts,
        )
        self._parts = parts
        self.vocab_size = vocab_size
        self._budget = budget
        self._max_num_seqs = max_num_seqs
        self._depth, self._in_turns = depth, in_turns
        self.in_flight: deque[list[StepPlan]] = deque()
        self.records: dict[str, Record] = {}
        self.plans: list[StepPlan] = []

    def add(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        namespace: str = "",
        priority: int = 0,
        terms: Terms = DEFAULT_TERMS,
        resumed_from: float | None = None,
        suspect_until: int = 0,
        budget: ThoughtBudget | None = None,
        earlier_output: list[int] | None = None,
        predicted: list[int] | None = None,
        offers_kv: bool = False,
        led: bool = False,
        forks: str = "",
    ) -> Record:
        """resumed_from: when the request arrived in an earlier life of the engine; None for a new one."""
        earlier = array("i", earlier_output or [])
        request = Request(
            request_id,
            array("i", prompt),
            sampling,
            namespace,
            priority,
            terms=terms,
            earlier_output=earlier,
            asked=Asked(
                offers_kv=offers_kv, thought=budget, predicted=array("i", predicted or []), led=led, forks=forks
            ),
        )
        if resumed_from is not None:
            request.resumes, request.arrived_at = True, resumed_from
        self._suspects[request_id] = suspect_until
        self.scheduler.add(request)
        record = Record(request, prompt, sampling, array("i", prompt) + earlier, earlier.tolist(), budget=budget)
        record.earlier = earlier.tolist()
        self.records[request_id] = record
        return record

    def let_go_on(self, *request_ids: str) -> None:
        """Let led requests go on."""
        for part, request_id in product(self._parts, request_ids):
            part.continued(request_id)

    def abort(self, request_id: str) -> None:
        self._take([output] if (output := self.scheduler.abort(request_id)) else [])

    def finish(self, request_id: str, keep_tokens: int) -> None:
        self._take([output] if (output := self.scheduler.finish(request_id, keep_tokens)) else [])

    def step(self) -> list[RequestOutput]:
        """Makes a plan and commits the one that has been in flight for `depth` steps."""
        plans = self._schedule()
        outputs: list[RequestOutput] = []
        while len(self.in_flight) > (self._depth if plans else 0):
            outputs += self._commit()
            if plans is None:
                break
        return outputs

    def run(self) -> None:
        """Steps until nothing is left, which must not take more steps than all tokens computed twice, one by one."""
        work = sum(len(r.prompt) + r.sampling.max_tokens for r in self.records.values() if r.finish_reason is None)
        limit = 2 * work * (self._depth + 1) + 10
        while not self.scheduler.is_idle:
            assert limit, "no end in sight"
            limit -= 1
            self.step()

    def run_and_check(self) -> None:
        """Run until nothing is left, and check that all is done."""
        self.run()
        self.check_all_done()

    def check_all_done(self) -> None:
        """Every request had one end and the tokens of an undisturbed run; every block is back."""
        assert self.scheduler.is_idle
        assert not self.in_flight
        self.scheduler.check_idle()
        self._check_memory()
        for record in self.records.values():
            tokens, reason = undisturbed(record.prompt, record.sampling, self.vocab_size, record.budget, record.earlier)
            assert record.finish_reason is not None
            assert record.request.num_cached_tokens < len(record.prompt)
            assert record.output == tokens[: len(record.output)]
            if record.finish_reason is FinishReason.LENGTH or (
                record.finish_reason is FinishReason.STOP and reason is FinishReason.STOP
            ):
                assert (record.output, record.finish_reason) == (tokens, reason)
            if record.sampling.prompt_logprobs is not None and len(record.output) > 0:
                seen = [(-1 - int(entry.logprob), entry.top[0][0]) for entry in record.prompt_logprobs]
                assert seen == list(enumerate(record.prompt))[1:]
        for cache in self.caches:
            evict_all(cache)
            assert cache.counts.num_free == cache.num_blocks

    def _schedule(self) -> list[StepPlan] | None:
        self._take(self.scheduler.end_declined())
        ready = [
            (record.request, record.request.lease)
            for record in self.records.values()
            if record.request.lease is not None
            and not record.request.finished
            and not record.request.num_scheduled_tokens
            and self._suspects.get(record.request.request_id, 0) <= record.request.num_computed_tokens
            and len(record.history) - record.request.num_computed_tokens == 1
            and record.request not in self.masks.unmasked
            and not record.request.asked.led
        ]
        num_preemptions = self.scheduler.counters.preemptions
        plans = self.scheduler.schedule()
        if plans is None:
            is_reading = self.tier is not None and self.tier.arrivals.waiting
            # Blocks that are copied, or held for another service until a turn's end, may be all that is left.
            is_held = self.offers is not None and self.offers.num_held > 0
            is_led = any(request.asked.led for request in self.scheduler.requests.values())
            lenders = [lender for cache in self.caches for lender in (cache.windows, cache.states)]
            is_copied = any(cache.copies.num_copied for cache in self.caches) or any(one.num_lent for one in lenders)
            is_stopped = self.masks.unmasked or is_reading or is_held or is_led or is_copied
            assert self.in_flight or self.scheduler.is_idle or is_stopped, "something is runnable"
            return None
        chunks = [chunk for plan in plans for chunk in plan.chunks]
        assert len(plans) == len(self.caches)
        assert len({plan.step for plan in plans}) == 1
        assert all(plan.num_tokens <= self._budget for plan in plans)
        assert 0 < len(chunks) <= self._max_num_seqs
        planned = {chunk.request_id for chunk in chunks}
        assert len(planned) == len(chunks)
        for request, lease in ready:
            if request.request_id not in planned and request.lease is lease:
                cache = self.caches[request.rank]
                num_available = min(cache.counts.num_available_to(request.namespace), cache.windows.num_available)
                # A preemption for a later request frees memory when this one has had its turn.
                is_sure = self.scheduler.counters.preemptions == num_preemptions
                assert num_available == 0 or not is_sure or self._in_turns, "a decode was left out"
        self.plans += plans
        for rank, plan in enumerate(plans):
            records = [self.records[chunk.request_id] for chunk in plan.chunks]
            assert all(record.request.rank == rank for record in records)
            self.oracles[rank].submit(plan, records)
        self.in_flight.append(plans)
        return plans

    def _commit(self) -> list[RequestOutput]:
        plans = self.in_flight.popleft()
        results = []
        for rank, oracle in enumerate(self.oracles):
            results.append(oracle.execute([r for r in self.records.values() if r.request.rank == rank]))
        outputs = self.scheduler.commit(plans, results)
        self._take(outputs)
        self._check_memory()
        return outputs

    def _check_memory(self) -> None:
        for cache, oracle in zip(self.caches, self.oracles, strict=True):
            check_invariants(cache)
            oracle.check_published()

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            record = self.records[output.request.request_id]
            assert record.request is output.request
            assert record.finish_reason is None, "an output after the end"
            record.prompt_logprobs += output.prompt_logprobs or []
            if output.token_id is not None:
                record.output.append(output.token_id)
                record.history.append(output.token_id)
                assert (output.logprobs is not None) == (record.sampling.logprobs is not None)
            record.finish_reason, record.error = output.finish_reason, output.error
