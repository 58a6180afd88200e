"""Beams in plans: each reads its own text and nothing is lost, whatever runs beside and however short memory is."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import log
from random import Random

import pytest

from moeserve.plan import (
    BeamParams,
    Chunk,
    ChunkResult,
    FinishReason,
    FoundText,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
    owner_of,
)
from moeserve.scheduling.beam_search import BeamSearch
from moeserve.scheduling.parts import Part
from moeserve.scheduling.request_states import StatePolicy
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.trials import Trial
from radix_cache import PrefixCache
from tests.support.cache_invariants import check_invariants
from tests.support.kv_oracle import Cell, KvOracle
from tests.support.parameters import pairs

VOCAB = 40
STOP = 3


def likeliest(prefix: array[int]) -> list[tuple[int, float]]:
    """Return a made-up distribution of the token after a prefix, best first."""
    return _likeliest(prefix.tobytes())


@lru_cache(maxsize=1 << 12)
def _likeliest(prefix: bytes) -> list[tuple[int, float]]:
    weights = Random(prefix).choices(range(1, 1000), k=VOCAB)
    total = sum(weights)
    found = [(token, log(weight / total)) for token, weight in enumerate(weights)]
    return sorted(found, key=lambda pair: -pair[1])


def plain(prompt: array[int], params: BeamParams, sampling: SamplingParams) -> list[FoundText]:
    """Return what a search finds without any scheduler."""
    search = BeamSearch(
        params,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
    )
    while not search.is_done:
        search.advance([likeliest(prompt + beam.token_ids)[: search.num_alternatives] for beam in search.beams])
    return search.best()


def greedy(prompt: array[int], max_tokens: int) -> list[int]:
    """Return the output of a greedy request."""
    text = prompt[:]
    for _ in range(max_tokens):
        text.append(likeliest(text)[0][0])
    return text[len(prompt) :].tolist()


class BeamOracle(KvOracle):
    """Computes plans on cells that hold (token, position, namespace), as late as they are committed."""

    def __init__(self, cache: PrefixCache) -> None:
        super().__init__(cache, VOCAB)
        self._plans: deque[tuple[StepPlan, list[str]]] = deque()
        self.num_copies = 0

    def take(self, plan: StepPlan, namespaces: list[str]) -> None:
        copy = self._receiver.decode(self._sender.encode(plan))
        assert copy == plan
        assert len({chunk.request_id for chunk in copy.chunks}) == len(copy.chunks)
        for chunk in copy.chunks:
            chunk.block_table = chunk.block_table[:]
        self._plans.append((copy, namespaces))

    def compute(self) -> StepResult:
        plan, namespaces = self._plans.popleft()
        for kv, zeroed, copied in (
            (self._kv, plan.zeroed_blocks, plan.copied_blocks),
            (self._window_kv, plan.zeroed_windows, plan.copied_windows),
        ):
            for block in zeroed:
                kv[block] = [None] * self._size
            assert not set(copied[1::2]) & {*copied[::2], *zeroed}, "a target is read or cleared"
            for source, target in zip(copied[::2], copied[1::2], strict=True):
                kv[target] = kv[source][:]
                self.num_copies += 1
        for chunk, namespace in zip(plan.chunks, namespaces, strict=True):
            if chunk.drawn_by is not None:
                chunk.token_ids[0] = self._last_drawn[chunk.drawn_by]
            for place, token in enumerate(chunk.token_ids, chunk.start):
                self._cells(chunk, place)[place % self._size] = (token, place, namespace)
                if chunk.window is not None:
                    block = chunk.window.blocks[place // self._size - chunk.window.first]
                    self._window_kv[block][place % self._size] = (token, place, namespace)
        results = []
        for chunk, namespace in zip(plan.chunks, namespaces, strict=True):
            if self.fails(chunk):
                results.append(ChunkResult(error="the oracle fails this chunk"))
                continue
            prefix = self._read(chunk, namespace)
            if chunk.sampling is None:
                results.append(ChunkResult())
                continue
            top = likeliest(prefix)
            count = chunk.sampling.logprobs or 0
            results.append(ChunkResult(top[0][0], TokenLogprobs(top[0][1], tuple(top[:count]))))
        sampled = zip(plan.chunks, results, strict=True)
        self._last_drawn = [result.token_id or 0 for chunk, result in sampled if chunk.sampling is not None]
        return StepResult(plan.step, results)

    def _cells(self, chunk: Chunk, place: int) -> list[Cell | None]:
        return self._kv[chunk.block_table[place // self._size]]

    def _read(self, chunk: Chunk, namespace: str) -> array[int]:
        prefix = array("i")
        for place in range(chunk.start + len(chunk.token_ids)):
            cell = self._cells(chunk, place)[place % self._size]
            assert cell is not None
            assert cell[1:] == (place, namespace), "a chunk reads a foreign block"
            prefix.append(cell[0])
            if chunk.window is not None and place // self._size >= chunk.window.first:
                block = chunk.window.blocks[place // self._size - chunk.window.first]
                assert self._window_kv[block][place % self._size] == cell
        return prefix


class Bench:
    """A scheduler over oracles, and the ends of its requests."""

    def __init__(
        self,
        caches: list[PrefixCache],
        depth: int,
        budget: int,
        places: int,
        *,
        run_ahead: bool,
        rope_switch: int | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        self.caches, self._depth = caches, depth
        self.oracles = [BeamOracle(cache) for cache in caches]
        self.scheduler = Scheduler(
            caches,
            max_num_seqs=places,
            max_num_batched_tokens=budget,
            max_num_queued_reqs=100,
            max_model_len=caches[0].num_blocks * caches[0].block_size,
            run_ahead=run_ahead and depth > 0,
            rope_switch=rope_switch,
            parts=parts,
        )
        self._places = places
        self._in_flight: deque[list[StepPlan]] = deque()
        self.requests: dict[str, Request] = {}
        self.found: dict[str, list[FoundText] | None] = {}
        self.output: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.output[request.request_id] = []

    def step(self) -> None:
        plans = self.scheduler.schedule()
        if plans is not None:
            assert sum(len(plan.chunks) for plan in plans) <= self._places
            for plan, oracle in zip(plans, self.oracles, strict=True):
                leaders = [self.requests[owner_of(chunk.request_id)] for chunk in plan.chunks]
                oracle.take(plan, [leader.namespace for leader in leaders])
            self._in_flight.append(plans)
        while len(self._in_flight) > (self._depth if plans else 0):
            self._commit()
            if plans is None:
                break
        for cache, oracle in zip(self.caches, self.oracles, strict=True):
            check_invariants(cache)
            oracle.check_published()

    def _commit(self) -> None:
        for output in self.scheduler.commit(self._in_flight.popleft(), [oracle.compute() for oracle in self.oracles]):
            name = output.request.request_id
            assert name not in self.reasons, "an output after the end"
            assert output.request is self.requests[name]
            if output.token_id is not None:
                self.output[name].append(output.token_id)
            if output.finish_reason is not None:
                self.reasons[name], self.found[name] = output.finish_reason, output.found

    def end(self, name: str, *, by: Callable[[str], object]) -> None:
        if name not in self.reasons and by(name) is not None:
            self.reasons[name] = FinishReason.ABORT

    def run(self, most: int = 6000) -> None:
        while not self.scheduler.is_idle:
            assert most, "no end in sight"
            most -= 1
            self.step()
        self.scheduler.check_idle()


def search_request(random: Random, name: str, prompts: list[array[int]]) -> Request:
    width = random.randrange(2, 6)
    params = BeamParams(width, random.randrange(1, width + 1), random.choice([0.0, 1.0]), random.choice([True, False]))
    sampling = SamplingParams(
        random.randrange(1, 14), min_tokens=random.choice([0, 3]), stop_token_ids=random.choice([(), (STOP, 5, 6)])
    )
    return Request(name, random.choice(prompts)[:], sampling, random.choice(["", "b"]), beam_params=params)


def check(bench: Bench, wanted: dict[str, tuple[array[int], BeamParams | None, SamplingParams]]) -> None:
    for name, (prompt, params, sampling) in wanted.items():
        if bench.reasons[name] in (FinishReason.ABORT, FinishReason.ERROR):
            assert bench.found.get(name) is None
        elif params is not None:
            assert bench.found[name] == plain(prompt, params, sampling)
            assert bench.output[name] == []
        else:
            assert bench.output[name] == greedy(prompt, sampling.max_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block_size", "depth", "kind"),
    pairs([1, 3, 4, 16], [0, 1], ["plain", "windows", "ranks", "apart", "ahead"]),
)
@pytest.mark.parametrize("num_seeds", [4, pytest.param(12, marks=pytest.mark.long)])
def test_searches_beside_other_requests_find_what_they_find_alone(
    block_size: int, depth: int, kind: str, num_seeds: int
) -> None:
    num_preemptions = num_copies = 0
    for seed in range(num_seeds):
        random = Random(f"{block_size} {depth} {kind} {seed}")
        # The widest search has 5 beams of 25 + 13 tokens, which share the full blocks of the prompt.
        num_shared = 0 if kind == "apart" else 25 // block_size
        tight = -(-25 // block_size) + 5 * (-(-38 // block_size) - num_shared)
        num_blocks = random.choice([tight, tight + 3, 10 * tight])
        windows = {"num_window_blocks": 6 * (-(-8 // block_size) + 3), "window": 7} if kind == "windows" else {}
        caches = [
            PrefixCache(num_blocks, block_size, caching=kind != "apart", **windows)
            for _ in range(2 if kind == "ranks" else 1)
        ]
        bench = Bench(caches, depth, random.choice([20, 64]), 20, run_ahead=kind == "ahead")
        base = array("i", random.choices(range(VOCAB), k=24))
        prompts = [base[: random.randrange(1, 25)] + array("i", [random.randrange(VOCAB)]) for _ in range(3)]
        wanted, names = {}, [f"r{number}" for number in range(random.randrange(4, 15) * len(caches))]
        for name in names:
            if random.random() < 0.6:
                request = search_request(random, name, prompts)
            else:
                request = Request(name, random.choice(prompts)[:], SamplingParams(random.randrange(1, 50), 0.0))
            wanted[name] = request.token_ids[:], request.beam_params, request.sampling
            bench.add(request)
            for _ in range(random.randrange(3)):
                bench.step()
            if random.random() < 0.15:
                bench.end(random.choice(list(wanted)), by=bench.scheduler.abort)
        bench.run()
        check(bench, wanted)
        num_preemptions += bench.scheduler.counters.preemptions
        num_copies += sum(oracle.num_copies for oracle in bench.oracles)
        for cache in caches:
            cache.reset()
            assert cache.num_free == cache.num_blocks
    # In few searches there may be none.
    assert num_preemptions > 0 or num_seeds < 12
    assert (num_copies > 0) <= (block_size > 1 or kind == "apart")
    assert num_copies > 0 or block_size == 1 or num_seeds < 12


def test_a_beam_that_fails_ends_its_search_alone() -> None:
    bench = Bench([PrefixCache(64, 4)], 0, 64, 8, run_ahead=False)
    prompt = array("i", range(10))
    for name in ("bad", "good"):
        bench.add(Request(name, prompt[:], SamplingParams(8), beam_params=BeamParams(3, 3)))
    for _ in range(3):
        bench.step()
    bench.oracles[0].fails = lambda chunk: chunk.request_id.startswith("bad/")
    bench.run()
    assert bench.reasons["bad"] is FinishReason.ERROR
    assert bench.found["good"] == plain(prompt, BeamParams(3, 3), SamplingParams(8))


def test_beams_share_the_blocks_of_their_common_text() -> None:
    cache = PrefixCache(200, 4)
    bench = Bench([cache], 0, 64, 8, run_ahead=False)
    bench.add(Request("r", array("i", range(40)), SamplingParams(8), beam_params=BeamParams(4, 1)))
    most = 0
    while not bench.scheduler.is_idle:
        bench.step()
        most = max(most, cache.num_leased)
    # Ten blocks of the prompt once, and of each of four beams at most two of its own.
    assert 10 + 4 <= most <= 10 + 4 * 2


def test_searches_that_cannot_run_are_refused_in_words() -> None:
    prompt, wide = array("i", range(30)), BeamParams(6, 2)
    for scheduler, words in (
        (Bench([PrefixCache(20, 4)], 0, 64, 8, run_ahead=False).scheduler, "KV blocks of 20"),
        (Bench([PrefixCache(200, 4)], 0, 64, 5, run_ahead=False).scheduler, "5 places"),
        (
            Scheduler(
                [PrefixCache(200, 4, snapshot_rows=range(8, 12))],
                max_num_seqs=8,
                max_num_batched_tokens=64,
                max_num_queued_reqs=9,
                max_model_len=400,
                states=StatePolicy(8),
            ),
            "recurrent states",
        ),
        (
            Scheduler(
                [PrefixCache(200, 4)],
                max_num_seqs=8,
                max_num_batched_tokens=64,
                max_num_queued_reqs=9,
                max_model_len=400,
                rope_switch=30,
            ),
            "go on at 30 tokens",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            scheduler.add(Request("r", prompt[:], SamplingParams(20), beam_params=wide))
        assert scheduler.is_idle


def test_a_search_ends_before_the_angles_of_its_beams_would_change() -> None:
    prompt, params = array("i", range(10)), BeamParams(3, 3, early_stopping="never")
    bench = Bench([PrefixCache(64, 4)], 0, 64, 8, run_ahead=False, rope_switch=18)
    bench.add(Request("r", prompt[:], SamplingParams(60), beam_params=params))
    bench.run()
    assert bench.found["r"] == plain(prompt, params, SamplingParams(8))
    assert {text.finish_reason for text in bench.found["r"]} == {FinishReason.LENGTH}


def test_a_search_goes_by_log_probabilities_whatever_a_checkpoint_has_for_sampling() -> None:
    bench = Bench([PrefixCache(64, 4)], 0, 64, 8, run_ahead=False)
    sampling = SamplingParams(8, 0.7, top_k=2, top_p=0.5, repetition_penalty=1.3, stop_token_ids=(STOP,), seed=4)
    request = Request("r", array("i", range(10)), sampling, beam_params=BeamParams(3, 3))
    bench.add(request)
    assert request.sampling == SamplingParams(8, 0.0, logprobs=4, stop_token_ids=(STOP,))
    bench.run()
    assert bench.found["r"] == plain(array("i", range(10)), BeamParams(3, 3), sampling)


def test_a_suspect_is_on_trial_until_a_beam_has_passed_its_place() -> None:
    bench = Bench([PrefixCache(64, 4)], 0, 64, 8, run_ahead=False, parts=[Trial(lambda request_id: 16)])
    for name in ("one", "other"):
        params = BeamParams(2, 2, early_stopping="never")
        suspect = Request(name, array("i", [*range(9), len(name)]), SamplingParams(12), beam_params=params)
        bench.add(suspect)
    seen = []
    for _ in range(30):
        plans = bench.scheduler.schedule()
        if plans is None:
            break
        leaders = {owner_of(chunk.request_id) for chunk in plans[0].chunks}
        ends = [chunk.start + len(chunk.token_ids) for chunk in plans[0].chunks]
        seen.append((leaders, max(ends)))
        bench.oracles[0].take(plans[0], [""] * len(plans[0].chunks))
        bench.scheduler.commit(plans, [bench.oracles[0].compute()])
    first = [end for leaders, end in seen if leaders == {"one"}]
    assert max(first) >= 16
    assert all(len(leaders) == 1 for leaders, _ in seen[: len(first)])
