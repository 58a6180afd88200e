"""The counts that make a long queue cheap give the decisions of the plain computation over all requests."""

from __future__ import annotations

from array import array
from collections import Counter
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.plan import ChunkResult, Request, SamplingParams, StepResult, Terms
from moeserve.scheduling.fair_queue import FAR_SHORTER
from moeserve.scheduling.open_prompts import ScheduledPrompts
from moeserve.scheduling.outcomes import QueueFullError, TooLateError
from moeserve.scheduling.pacing import Backlog, Load, Pace, Slo
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.token_sums import TokenSums
from radix_cache import PrefixCache

TENANTS = [
    Terms("a"),
    Terms("b", weight=2.0, queue=0.5),
    Terms("c", patient=True),
    Terms("a", background=True),
    Terms("d", ttft_s=0.5),
]


@given(st.lists(st.tuples(st.integers(0, 3000), st.booleans())), st.lists(st.integers(0, 5000)))
def test_sums_below_a_bound_are_those_of_the_values(changes: list[tuple[int, bool]], bounds: list[int]) -> None:
    sums, values = TokenSums(), list[int]()
    for value, stays in changes:
        sums.add(value)
        values.append(value)
        if not stays:
            sums.add(values.pop(0), -1)
    assert (sums.count, sums.total) == (len(values), sum(values))
    for bound in bounds:
        assert sums.bounded(bound) == sum(min(value, bound) for value in values)


_TOKENS = st.lists(st.integers(0, 2), max_size=6)


@given(st.lists(st.tuples(_TOKENS, st.sampled_from("ab"))), _TOKENS, st.sampled_from("ab"))
def test_scheduled_prompts_that_begin_alike_are_found_in_their_order(
    prompts: list[tuple[list[int], str]], wanted: list[int], namespace: str
) -> None:
    scheduled, expected = ScheduledPrompts(), list[Request]()
    for number, (tokens, of) in enumerate(prompts):
        request = Request(f"{number}", array("i", tokens), SamplingParams(1), of)
        scheduled.add(request)
        if of == namespace and tokens[: len(wanted)] == wanted:
            expected.append(request)
    assert scheduled.that_begin_with(array("i", wanted), namespace) == expected
    assert len(scheduled) == len(prompts)


class Queue:
    """A scheduler on a scripted clock, beside the plain computations over all its requests."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(
            [PrefixCache(60, 4)],
            max_num_seqs=4,
            max_num_batched_tokens=12,
            max_num_queued_reqs=12,
            max_model_len=200,
            pace=Pace(Slo(1.0, burst_s=2.0), 12, 4),
        )
        self.now = 0.0
        self.num_added = 0

    def requests(self) -> list[Request]:
        return list(self.scheduler.waiting.queue)

    def add(self, tenant: int, prompt: list[int], priority: int) -> None:
        scheduler, terms = self.scheduler, TENANTS[tenant]
        # Prompts of four kinds, that share beginnings of any length.
        request = Request(f"{self.num_added}", array("i", prompt), SamplingParams(3), priority=priority)
        request.terms, request.arrived_at = terms, self.now
        self.num_added += 1
        cached = scheduler._memories[0].peek(request)
        others = [*self.requests(), *scheduler._running.requests]
        soon = [self._shared(request, other) for other in others]
        expected = max([cached, *soon])
        assert min(expected, len(prompt) - 1) <= scheduler._num_cached_soon(request)
        assert scheduler._sharing.may_wait(terms, 9) == self._may_wait(terms, 9)
        with suppress(QueueFullError, TooLateError):
            scheduler.add(request)

    def _shared(self, request: Request, other: Request) -> int:
        """The whole blocks that the request shares with the prompt of another one."""
        mine, theirs = request.token_ids, other.token_ids[: other.num_prompt_tokens]
        if request.namespace != other.namespace:
            return 0
        longest = min(len(mine) - 1, len(theirs))
        equal = next((place for place in range(longest) if mine[place] != theirs[place]), longest)
        return equal // 4 * 4

    def _may_wait(self, terms: Terms, num_places: int) -> bool:
        tenants = [r.terms.tenant for r in self.requests() if r.terms.background == terms.background]
        is_full = len(tenants) >= num_places
        allowed = min(terms.queue, self.scheduler._tenants.share(terms) if is_full else 1.0)
        return not (is_full or allowed < 1) or tenants.count(terms.tenant) < allowed * num_places

    def check(self, own: int | None) -> None:
        scheduler = self.scheduler
        running = Counter(r.terms.tenant for r in scheduler._running.requests if not r.terms.background)
        backlogs = {}
        for tenant in scheduler._tenants.active:
            if tenant.terms.background:
                continue
            mine = [r for r in self.requests() if scheduler._tenants.of(r) is tenant]
            typical = min(round(tenant.request_tokens), scheduler._max_num_batched_tokens)
            tokens = sum(
                min(r.num_uncached_tokens, FAR_SHORTER * (own or typical or r.num_uncached_tokens)) for r in mine
            )
            name = tenant.terms.tenant
            backlogs[name] = Backlog(tenant.terms.weight, running[name], len(mine), tokens, typical)
        assert scheduler._tenants.backlogs(own, scheduler._max_num_batched_tokens) == backlogs
        assert scheduler._tenants.background_runs == any(r.terms.background for r in scheduler._running.requests)
        bounded = {r.request_id: r.arrived_at for r in scheduler.waiting.queue if scheduler._pace.is_bounded(r)}
        telling = scheduler.waiting.queue._telling
        assert scheduler.waiting.queue.is_awaited == bool(bounded)
        assert telling.items() <= bounded.items()
        times = telling.values()
        assert scheduler.waiting.queue.telling == ((min(times), max(times)) if times else None)
        candidates = list(scheduler.waiting.queue.candidates())
        assert sorted(r.request_id for r in candidates) == sorted(r.request_id for r in scheduler.waiting.queue)
        firsts: dict[int, Request] = {}
        for request in candidates:
            if request.priority == candidates[0].priority:
                firsts.setdefault(id(scheduler._tenants.of(request)), request)
        assert scheduler.waiting.queue.firsts() == list(firsts.values())

    def late(self) -> list[str]:
        """The requests that are too late, each judged by all that are ahead of it."""
        scheduler, load = self.scheduler, self.scheduler.load()
        found, ahead = [], list[int]()
        for request in scheduler.waiting.queue.candidates():
            own, limit_s = request.num_uncached_tokens, scheduler._pace.limit(request)
            waited_s = self.now - request.arrived_at
            before = sum(min(other, FAR_SHORTER * own) for other in ahead)
            behind_s = self._behind(load, len(ahead) + 1 - load.num_free_places, before)
            is_late = waited_s > limit_s or behind_s > 1.2 * limit_s - waited_s
            if is_late and request.arrival < scheduler._num_tried:
                found.append(request.request_id)
            else:
                ahead.append(own)
        return found

    def _behind(self, load: Load, num_places: float, num_tokens: float) -> float:
        return load.wait_behind_s(num_places, num_tokens)

    def step(self, seconds: float) -> None:
        scheduler = self.scheduler
        expected = self.late()
        assert [output.request.request_id for output in scheduler.drop_late()] == expected
        plans = scheduler.schedule()
        self.now += seconds
        scheduler.set_time(self.now)
        if plans is not None:
            results = [ChunkResult(5 if chunk.sampling else None) for chunk in plans[0].chunks]
            scheduler.commit(plans, [StepResult(plans[0].step, results)])
            scheduler.count_step(seconds)


_PROMPTS = st.lists(st.sampled_from([(1,) * 4, (2,) * 4, (1, 2, 3, 4), (7,)]), min_size=1, max_size=10)
_ADDS = st.tuples(st.just("add"), st.integers(0, len(TENANTS) - 1), _PROMPTS, st.integers(0, 1))
_STEPS = st.tuples(st.just("step"), st.floats(0.001, 0.7))
_ABORTS = st.tuples(st.just("abort"), st.integers(0, 40))


@settings(deadline=None, max_examples=60)
@given(st.lists(_ADDS | _ADDS | _STEPS | _ABORTS, max_size=60), st.integers(1, 30))
def test_decisions_are_those_of_the_plain_computation(script: list[tuple], own: int) -> None:
    queue = Queue()
    for what, *rest in script:
        if what == "add":
            tenant, parts, priority = rest
            queue.add(tenant, [token for part in parts for token in part], priority)
        elif what == "abort":
            queue.scheduler.abort(f"{rest[0]}")
        else:
            queue.step(*rest)
        queue.check(None)
        queue.check(own)
    for _ in range(200):
        queue.step(0.01)
    queue.check(None)
    assert queue.scheduler.is_idle
    assert not queue.scheduler._open_prompts._prompts
    queue.scheduler.check_idle()
