"""The counts that make a long queue cheap give the decisions of the plain computation over all requests."""

from __future__ import annotations

from array import array
from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st

from moeserve.plan import ChunkResult, Request, SamplingParams, StepResult, Terms
from moeserve.scheduling.fair_queue import FAR_SHORTER
from moeserve.scheduling.open_prompts import ScheduledPrompts
from moeserve.scheduling.outcomes import QueueFullError, TooLateError
from moeserve.scheduling.pacing import Backlog, Load, Pace, Slo
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.token_sums import TokenSums
from radix_cache import PrefixCache
from tests.support.cache_invariants import evict_all

NUM_SEQS, NUM_QUEUED = 4, 8
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
        self.cache = PrefixCache(60, 4)
        self.pace = Pace(Slo(1.0, burst_s=2.0), 12, NUM_SEQS)
        self.scheduler = Scheduler(
            [self.cache],
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=12,
            max_num_queued_reqs=NUM_QUEUED,
            max_model_len=200,
            pace=self.pace,
        )
        self.now = 0.0
        self.num_asked = self.num_taken = self.num_tried = 0

    def waiting(self) -> list[Request]:
        return list(self.scheduler.waiting.queue)

    def running(self) -> list[Request]:
        waiting = {request.request_id for request in self.waiting()}
        return [request for name, request in self.scheduler.requests.items() if name not in waiting]

    def add(self, tenant: int, prompt: list[int], priority: int) -> Request:
        scheduler, terms = self.scheduler, TENANTS[tenant]
        # Prompts of four kinds, that share beginnings of any length.
        request = Request(f"{self.num_asked}", array("i", prompt), SamplingParams(3), priority=priority)
        request.terms, request.arrived_at = terms, self.now
        self.num_asked += 1
        soon = [self._shared(request, other) for other in scheduler.requests.values()]
        expected = max([self.cache.peek(request.token_ids), *soon])
        may_wait = self._may_wait(terms, NUM_QUEUED + max(0, NUM_SEQS - scheduler.num_running))
        try:
            scheduler.add(request)
            self.num_taken += 1
        except QueueFullError:
            assert not may_wait
            return request
        except TooLateError:
            pass
        assert may_wait
        if self.pace.is_bounded(request):
            assert request.num_uncached_tokens <= len(prompt) - min(expected, len(prompt) - 1)
        return request

    def _shared(self, request: Request, other: Request) -> int:
        """The whole blocks that the request shares with the prompt of another one."""
        mine, theirs = request.token_ids, other.token_ids[: other.num_prompt_tokens]
        longest = min(len(mine) - 1, len(theirs))
        equal = next((place for place in range(longest) if mine[place] != theirs[place]), longest)
        return equal // 4 * 4

    def _may_wait(self, terms: Terms, num_places: int) -> bool:
        tenants = [r.terms.tenant for r in self.waiting() if r.terms.background == terms.background]
        is_full = len(tenants) >= num_places
        allowed = min(terms.queue, self._share(terms) if is_full else 1.0)
        return not (is_full or allowed < 1) or tenants.count(terms.tenant) < allowed * num_places

    def _share(self, terms: Terms) -> float:
        """The tenant's part of the weights of all tenants with requests in the foreground, its own included."""
        weights = {r.terms.tenant: r.terms.weight for r in self.scheduler.requests.values() if not r.terms.background}
        weights[terms.tenant] = terms.weight
        return terms.weight / sum(weights.values())

    def check(self, own: int | None) -> None:
        self._check_load(self.scheduler.load(own), own)
        queue, waiting = self.scheduler.waiting.queue, self.waiting()
        arrivals = [r.arrived_at for r in waiting if self.pace.is_bounded(r)]
        assert queue.is_awaited == bool(arrivals)
        telling = queue.telling or ()
        assert set(telling) <= set(arrivals)
        assert sorted(telling) == list(telling)
        candidates = list(queue.candidates())
        assert sorted(r.request_id for r in candidates) == sorted(r.request_id for r in waiting)
        firsts: dict[tuple[str, bool], Request] = {}
        for request in candidates:
            if request.priority == candidates[0].priority:
                firsts.setdefault((request.terms.tenant, request.terms.background), request)
        assert queue.firsts() == list(firsts.values())

    def _check_load(self, load: Load, own: int | None) -> None:
        waiting, running = self.waiting(), self.running()
        num_running = Counter(r.terms.tenant for r in running if not r.terms.background)
        weights = {r.terms.tenant: r.terms.weight for r in [*waiting, *running] if not r.terms.background}
        assert load.tenants.keys() == weights.keys()
        for name, backlog in load.tenants.items():
            mine = [r.num_uncached_tokens for r in waiting if r.terms.tenant == name and not r.terms.background]
            size = own or backlog.request_tokens
            tokens = sum(min(other, FAR_SHORTER * size) for other in mine) if size else sum(mine)
            assert backlog == Backlog(weights[name], num_running[name], len(mine), tokens, backlog.request_tokens)
        is_awaited = any(backlog.waiting for backlog in load.tenants.values())
        background_runs = any(r.terms.background for r in running)
        lacks_memory = bool(self.scheduler.lacking) and is_awaited and not background_runs
        assert load.places == (max(1, num_running.total()) if lacks_memory else self.pace.num_places())

    def late(self) -> list[str]:
        """The requests that are too late, each judged by all that are ahead of it."""
        load = self.scheduler.load()
        found, ahead = [], list[int]()
        for request in self.scheduler.waiting.queue.candidates():
            own, limit_s = request.num_uncached_tokens, self.pace.limit(request)
            waited_s = self.now - request.arrived_at
            before = sum(min(other, FAR_SHORTER * own) for other in ahead)
            behind_s = load.wait_behind_s(len(ahead) + 1 - load.num_free_places, before)
            is_late = waited_s > limit_s or behind_s > 1.2 * limit_s - waited_s
            if is_late and request.arrival < self.num_tried:
                found.append(request.request_id)
            else:
                ahead.append(own)
        return found

    def step(self, seconds: float) -> None:
        scheduler = self.scheduler
        expected = self.late()
        assert [output.request.request_id for output in scheduler.drop_late()] == expected
        plans = scheduler.schedule()
        self.num_tried = self.num_taken
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

# The clients of tenant 0 leave, so its requests may wait for less long than the one of tenant 1 ahead of them.
_OF_ONE, _OF_OTHER = ("add", 0, [(1,) * 4], 0), ("add", 1, [(1,) * 4], 1)
_LEAVING = [*[_OF_ONE] * 5, _OF_OTHER, ("step", 0.5), _OF_ONE, ("abort", 0)]


@settings(deadline=None, max_examples=60)
@example(script=_LEAVING, own=1)
@given(st.lists(_ADDS | _ADDS | _STEPS | _ABORTS, max_size=60), st.integers(1, 30))
def test_decisions_are_those_of_the_plain_computation(script: list[tuple], own: int) -> None:
    queue, prompts = Queue(), list[list[int]]()
    for what, *rest in script:
        if what == "add":
            tenant, parts, priority = rest
            prompts.append([token for part in parts for token in part])
            queue.add(tenant, prompts[-1], priority)
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
    queue.scheduler.check_idle()
    evict_all(queue.cache)
    for prompt in prompts:
        # Nothing is expected of the prompts of requests that have ended.
        request = queue.add(0, prompt, 0)
        assert request.num_uncached_tokens == len(prompt)
        queue.scheduler.abort(request.request_id)
