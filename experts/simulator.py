"""Replays routing traces through the residency, prediction and transfer decisions of the runtime, by a clock. Pure.

The objects are those of the runtime (`ResidencyControl`, `Predictor`, `PrefetchPlanner`); only the copier and the clock
are simulated. An event, all that a step asks of one layer, is decided at once: replaying its experts one by one would
count misses that no runtime has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from experts.placement import Placement, balancedness, contiguous, hops, remote_ranks, round_robin
from experts.placement_search import affinity_placement, coactivation_placement
from experts.predictor import BEFORE, Ids, ObservedStep, Predictor, Tap, num_recalled
from experts.predictors import (
    CombinedSource,
    LearntAffinity,
    Pair,
    SignatureSource,
    follows_requests,
    make_predictor,
    make_source,
    only_gates,
    taps_of,
)
from experts.prefetch_planning import PrefetchPlanner, PrefetchRules
from experts.prefix_warmth import PrefixWarmth
from experts.residency import (
    POLICIES,
    Affinity,
    EvictionPolicy,
    ResidencyControl,
    ResidencyCounters,
    SlotState,
    Static,
    Transfer,
    Worth,
)
from experts.residency import POLICY_NAMES as SERVED
from experts.routing import RoutingStatistics, StatisticsSpec
from experts.routing_files import RoutingTrace
from experts.signatures import RequestProfiles, decode_signature, encode_signature

# A link over which experts arrive one chunk at a time, in simulated time. Pure.


@dataclass(frozen=True, slots=True)
class LinkModel:
    """bytes_per_second: bandwidth. latency: seconds before the first byte whenever a transfer begins or goes on.

    chunk_bytes: what is copied before the copier looks whether something more urgent has come.
    """

    bytes_per_second: float
    latency: float = 0.0
    chunk_bytes: int = 2**20

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or self.latency < 0 or self.chunk_bytes < 1:
            raise ValueError("a link needs a positive bandwidth and chunk size and no negative latency")

    def load_seconds(self, num_bytes: int) -> float:
        """An undisturbed load."""
        return self.latency + num_bytes / self.bytes_per_second


class SimulatedCopier:
    """Does what the copying thread of the runtime does, by a clock of its own, which only moves forward."""

    __slots__ = ("_chunk_end", "_control", "_expert_bytes", "_link", "_transfer", "_whole_chunk", "now")

    def __init__(self, control: ResidencyControl, link: LinkModel, expert_bytes: int) -> None:
        self._control = control
        self._link = link
        self._whole_chunk = link.chunk_bytes / link.bytes_per_second
        self._expert_bytes = expert_bytes
        self._transfer: Transfer | None = None
        self._chunk_end = 0.0
        self.now = 0.0

    def run_until(self, time: float) -> None:
        """Copies until `time`; a chunk that is not over by then goes on afterwards."""
        while self._start() and self._chunk_end <= time:
            self._end_chunks(time)
        self.now = max(self.now, time)

    def run_until_true(self, condition: Callable[[], bool]) -> None:
        """Copies until something has arrived. RuntimeError if nothing is left to copy before that."""
        while not condition():
            if not self._start():
                raise RuntimeError("the computation waits for an expert that nobody loads")
            self._end_chunks(inf)

    def _start(self) -> bool:
        """Whether something is being copied from now on."""
        if self._transfer is None:
            self._transfer = self._control.next_transfer()
            if self._transfer is not None:
                self._chunk_end = (
                    self.now + self._link.latency + self._chunk_seconds(self._expert_bytes - self._transfer.num_moved)
                )
        return self._transfer is not None

    def _end_chunks(self, time: float) -> None:
        """The chunk that ends by `time`, and those after it that do, as long as they are of the same transfer.

        Whether it has to stop is asked once: until it ends nobody tells the control anything else.
        """
        transfer = self._transfer
        assert transfer is not None
        must_stop = self._control.must_stop(transfer)
        num_left = self._expert_bytes - transfer.num_moved
        num_before = num_left
        now, chunk_end = self.now, self._chunk_end
        while chunk_end <= time:
            now = max(now, chunk_end)
            num_left = max(num_left - self._link.chunk_bytes, 0)
            if must_stop or not num_left:
                break
            chunk_end = now + self._chunk_seconds(num_left)
        self.now, self._chunk_end = now, chunk_end
        self._control.moved(transfer, num_before - num_left)
        if not num_left:
            self._control.finish(transfer)
            self._transfer = None
        elif must_stop:
            self._control.stop(transfer)
            self._transfer = None

    def _chunk_seconds(self, num_left: int) -> float:
        return self._whole_chunk if num_left >= self._link.chunk_bytes else num_left / self._link.bytes_per_second


Float = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """Seconds of computation per layer: before its experts are known, for the experts, and for a prediction."""

    attention: float
    experts: float
    prediction: float = 0.0

    @property
    def total(self) -> float:
        return self.attention + self.experts


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """counters: of the measured part, see `ResidencyCounters`. seconds: of all steps; exposed_stall: of these, waited
    for experts. prediction_seconds: spent on predictions. num_steps: measured."""

    counters: ResidencyCounters
    num_steps: int
    seconds: float
    exposed_stall: float
    prediction_seconds: float

    @property
    def miss_rate(self) -> float:
        """Misses and late prefetches among all accesses."""
        counters = self.counters
        return (counters.num_misses + counters.num_late) / max(
            counters.num_hits + counters.num_late + counters.num_misses, 1
        )

    @property
    def wasted_share(self) -> float:
        """Bytes moved for nothing, wasted or cancelled, among all bytes moved."""
        counters = self.counters
        moved = counters.demand_bytes + counters.prefetch_bytes
        return (counters.wasted_bytes + counters.cancelled_bytes) / max(moved, 1)


def steps_of(trace: RoutingTrace, num_streams: int) -> Iterator[NDArray[np.int64]]:
    """Rows [T] of the trace that are computed together: one token of each running request.

    `num_streams` requests run at a time, in the order of the trace; one that ends makes room for the next.
    """
    rows_of = [np.flatnonzero(trace.requests == request) for request in _in_order(trace.requests)]
    waiting = iter(rows_of)
    running: list[Iterator[int]] = []
    while True:
        rows = []
        still: list[Iterator[int]] = []
        for stream in running:
            row = next(stream, None)
            if row is not None:
                rows.append(row)
                still.append(stream)
        running = still
        while len(running) < num_streams and (fresh := next(waiting, None)) is not None:
            stream = iter(fresh.tolist())
            rows.append(next(stream))
            running.append(stream)
        if not rows:
            return
        yield np.array(rows)


def _in_order(requests: NDArray[np.int32]) -> list[int]:
    found, first = np.unique(requests, return_index=True)
    order: list[int] = found[np.argsort(first)].tolist()
    return order


class Simulation:
    """One rank at work. State stays between `replay`s: replay the learnt part first, then measure the held-out one."""

    def __init__(
        self,
        control: ResidencyControl,
        expert_bytes: int,
        link: LinkModel,
        timing: LayerTiming,
        predictor: Predictor | None = None,
        planner: PrefetchPlanner | None = None,
        learnt: LearntAffinity | None = None,
        taps: Collection[Tap] = (),
        warmth: PrefixWarmth | None = None,
    ) -> None:
        """predictor, planner: both or none; the planner asks this predictor and tells this control. learnt: what
        predictors learn from, if it should go on learning from each step after it. warmth: of this control."""
        self._control = control
        self._copier = SimulatedCopier(control, link, expert_bytes)
        self._timing = timing
        self._predictor = predictor
        self._planner = planner
        self._learnt = learnt
        self._taps = frozenset(taps)
        self._warmth = warmth
        self._loads_per_layer = timing.total / link.load_seconds(expert_bytes)
        self._now = 0.0
        self._stall = 0.0
        self._prediction = 0.0

    def replay(self, trace: RoutingTrace, num_streams: int = 1) -> SimulationResult:
        """Computes the trace and returns what that took. A request ends with its last token."""
        before = replace(self._control.counters)
        started, stall, prediction = self._now, self._stall, self._prediction
        num_steps = 0
        is_last = np.zeros(len(trace.requests), np.bool_)
        is_last[len(is_last) - 1 - np.unique(trace.requests[::-1], return_index=True)[1]] = True
        for rows in steps_of(trace, num_streams):
            self.step(trace, rows)
            num_steps += 1
            if is_last[rows].any():
                self.end(trace.requests[rows[is_last[rows]]].tolist())
        return SimulationResult(
            counters=self._control.counters.since(before),
            num_steps=num_steps,
            seconds=self._now - started,
            exposed_stall=self._stall - stall,
            prediction_seconds=self._prediction - prediction,
        )

    @property
    def exposed_stall(self) -> float:
        """Seconds waited for experts since the beginning."""
        return self._stall

    def step(self, trace: RoutingTrace, rows: NDArray[np.int64]) -> None:
        """Computes these rows [T] of the trace together."""
        # A slice is several times faster than an index.
        part = slice(int(rows[0]), int(rows[0]) + 1) if len(rows) == 1 else rows
        ids = trace.ids[:, part]
        weights = np.full(ids.shape[1:], 1 / ids.shape[2], np.float32)
        if self._predictor is not None:
            self._predictor.begin(trace.token_ids[part], trace.requests[part])
            self._plan(BEFORE)
        if self._warmth is not None:
            self._warmth.begin_step(trace.requests[part].tolist(), may_ask=True)
        for layer, event in enumerate(sorted(set(of_layer)) for of_layer in ids.reshape(len(ids), -1).tolist()):
            self._compute(self._timing.attention)
            self._control.access(layer, event)
            if self._predictor is not None:
                self._predictor.observe(layer, ids[layer], weights)
                self._hear_gates(trace, part, layer, Tap.EARLY)
                self._plan(layer)
            if self._warmth is not None:
                self._warmth.observed(layer, event)
            self._compute_experts(layer, event)
            if self._predictor is not None and self._hear_gates(trace, part, layer, Tap.LATE):
                self._plan(layer)
        if self._warmth is not None:
            self._warmth.end_step(())
        if self._learnt is not None:
            self._learnt.statistics.update(ids, trace.token_ids[part])
            self._learnt.step_done()

    def end(self, requests: Iterable[int]) -> None:
        """These are over."""
        if self._predictor is not None:
            self._predictor.end(requests)

    def _compute_experts(self, layer: int, event: list[int]) -> None:
        """Those that are there first, and the others as they come."""
        residency = self._control.layers[layer]
        remaining = event

        def ready() -> list[int]:
            return [expert for expert in remaining if residency.state_of(expert) is SlotState.READY]

        while remaining:
            computed = ready()
            if not computed:
                self._copier.run_until_true(lambda: bool(ready()))
                self._stall += self._copier.now - self._now
                self._now = self._copier.now
                computed = ready()
            self._compute(self._timing.experts * len(computed) / len(event))
            self._control.release(layer, computed)
            remaining = [expert for expert in remaining if expert not in computed]

    def _compute(self, seconds: float) -> None:
        self._now += seconds
        self._copier.run_until(self._now)

    def _plan(self, layer: int) -> None:
        if self._planner is not None:
            expected = self._planner.expect(layer)
            self._prediction += self._timing.prediction
            self._compute(self._timing.prediction)
            self._planner.request(layer, expected, self._loads_per_layer)

    def _hear_gates(self, trace: RoutingTrace, rows: NDArray[np.int64] | slice, layer: int, tap: Tap) -> bool:
        """Whether there are guesses of this tap, and it is wanted."""
        assert self._predictor is not None
        if tap not in self._taps:
            return False
        heard = False
        for guesses in trace.guesses:
            if guesses.tap is tap and layer + guesses.distance < len(trace.ids):
                self._predictor.observe_gate(tap, layer, guesses.distance, guesses.logits[layer, rows])
                heard = True
        return heard


# The bound of all eviction: who is needed last in a known future leaves first (Belady 1966). For simulations. Pure.


class Belady:
    """A policy for one layer whose events are all known."""

    def __init__(self, events: Sequence[Sequence[int]]) -> None:
        """events: the experts of each event to come, in order."""
        self._now = -1
        self._uses: dict[int, list[int]] = {}
        for number, experts in enumerate(events):
            for expert in experts:
                self._uses.setdefault(expert, []).append(number)

    def touch(self, experts: Sequence[int]) -> None:
        self._now += 1

    def worth(self, expert: int) -> Worth:
        uses = self._uses.get(expert, [])
        following = bisect_right(uses, self._now)
        return (-uses[following] if following < len(uses) else -float("inf")), 0.0


# What predictors say of a trace whose tokens come one at a time, many tokens at once: for measurements. Pure.
# Sources that tell of each token by itself are asked for all tokens until what they go by is computed anew, instead
# of for each token, layer and distance: the same objects and the same numbers in a fraction of the time.


_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class TokenPredictions:
    """rows: the tokens, of the trace. moments: by layer and distance [T, E], as `Source.probabilities`; pairs of which
    nothing is known are left out."""

    rows: slice
    moments: list[dict[Pair, Float]]


def predict_tokens(
    trace: RoutingTrace,
    choice: str,
    source: CombinedSource,
    learnt: LearntAffinity,
    max_distance: int,
    moments: Sequence[Collection[Tap]],
) -> Iterator[TokenPredictions]:
    """Each token is predicted before it is learnt, by the source and by `learnt`, which it goes by.

    choice: the names of the sources. moments: predictions are wanted, after each layer, whenever the gates of one more
    of these were heard. Not before the first layer: first-layer experts are learnt with every token.
    """
    at_once = 1 if follows_requests(choice) else _MAX_TOKENS
    previous = None
    start = 0
    while start < len(trace.requests):
        rows = slice(start, min(start + min(at_once, learnt.steps_until_refresh), len(trace.requests)))
        request = int(trace.requests[start])
        if previous not in (None, request):
            source.end([previous])
        previous = request
        step, features = _through_layers(trace, rows, source, max_distance, moments)
        yield TokenPredictions(rows, source.one_by_one(features, step))
        for row in range(rows.start, rows.stop):
            one = slice(row, row + 1)
            learnt.statistics.update(trace.ids[:, one], trace.token_ids[one])
            learnt.step_done()
        start = rows.stop
    if previous is not None:
        source.end([previous])


def _through_layers(
    trace: RoutingTrace,
    rows: slice,
    source: CombinedSource,
    max_distance: int,
    moments: Sequence[Collection[Tap]],
) -> tuple[ObservedStep, list[dict[Pair, NDArray[np.float32]]]]:
    """The complete step, and what its sources said meanwhile."""
    step = ObservedStep(trace.token_ids[rows], trace.requests[rows])
    features: list[dict[Pair, Float]] = [{} for _ in moments]
    num_layers = len(trace.ids)
    for layer in range(num_layers):
        chosen = trace.ids[layer, rows]
        step.ids[layer] = chosen.astype(np.int64)
        step.weights[layer] = np.full(chosen.shape, 1 / chosen.shape[1], np.float32)
        distances = range(1, min(max_distance, num_layers - 1 - layer) + 1)
        for taps, of_moment in zip(moments, features, strict=True):
            for guesses in trace.guesses:
                if guesses.tap in taps and guesses.distance in distances:
                    step.gates[guesses.tap, layer, guesses.distance] = guesses.logits[layer, rows].astype(np.float32)
            for distance in distances:
                found = source.features(step, layer, distance)
                if found is not None:
                    of_moment[layer, distance] = found
    return step, features


# What gates say of a trace, computed once for any number of simulations. Pure. It depends neither on the link nor on
# what is resident, so simulations that differ in these alone can share it.


# In the order in which they are heard.
_TAPS = tuple(Tap)


class Foretold:
    """The predictions of a choice of gates for each token of some traces, one after the other."""

    def __init__(self, traces: Sequence[RoutingTrace], choice: str, max_distance: int) -> None:
        """ValueError if not only gates are chosen, or if requests of a trace do not follow each other."""
        if not only_gates(choice):
            raise ValueError(f"{choice!r} says something else when it is asked before the first layer")
        if not all(_follow_each_other(trace.requests) for trace in traces):
            raise ValueError("requests of a trace are computed at the same time")
        self.choice = choice
        self.max_distance = max_distance
        self.num_experts = traces[0].num_experts
        spec = StatisticsSpec(len(traces[0].ids), self.num_experts, traces[0].ids.shape[2], max_distance=max_distance)
        learnt = LearntAffinity(RoutingStatistics(spec))
        source = make_source(choice, learnt)
        taps = taps_of(choice)
        heard = [[tap] if tap in taps else [] for tap in _TAPS]
        parts = [
            predicted.moments
            for trace in traces
            for predicted in predict_tokens(trace, choice, source, learnt, max_distance, heard)
        ]
        # By what was heard last, then layer and distance: [T, E].
        self._rows: dict[Tap, dict[Pair, Float]] = {
            tap: {pair: np.concatenate([part[place][pair] for part in parts]) for pair in parts[0][place]}
            for place, tap in enumerate(_TAPS)
        }

    def rows(self, heard: Tap) -> dict[Pair, Float]:
        """[T, E] by layer and distance, after this tap; what nothing is known of is left out."""
        return self._rows[heard]


class ForetoldPredictor:
    """A `Predictor` that repeats what was foretold. Steps are the tokens, in order."""

    __slots__ = ("_foretold", "_heard", "_nothing", "_rows", "_token")

    def __init__(self, foretold: Foretold) -> None:
        self._foretold = foretold
        self._nothing: Float = np.zeros(foretold.num_experts, np.float32)
        self._token = -1
        self._rows = foretold.rows(Tap.EARLY)

    def begin(self, token_ids: Ids, requests: Ids) -> None:
        if len(token_ids) != 1:
            raise ValueError(f"a step of {len(token_ids)} tokens; each was foretold by itself")
        self._token += 1

    def observe(self, layer: int, expert_ids: Ids, weights: Float) -> None:
        self._rows = self._foretold.rows(Tap.EARLY)

    def observe_gate(self, tap: Tap, layer: int, distance: int, logits: Float) -> None:
        self._rows = self._foretold.rows(tap)

    def predict(self, layer: int, distance: int) -> Float:
        if layer == BEFORE:
            return self._nothing
        rows = self._rows.get((layer, distance))
        return self._nothing if rows is None else rows[self._token]

    def end(self, requests: Iterable[int]) -> None:
        """Nothing is kept of a request."""


def _follow_each_other(requests: NDArray[np.int32]) -> bool:
    return int(np.count_nonzero(np.diff(requests))) + 1 == len(np.unique(requests))


# Simulations by their parameters: learn and warm up on some requests, measure on others. Pure.


POLICY_NAMES = (*SERVED, "belady")
_REFRESH_STEPS = 128
# Layers that affinity looks back.
_HISTORY = 6


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """residency: share of a layer's experts that its slots hold, at least a token's. predictor: as
    `experts.predictors.make_predictor` takes it, None for demand loads alone. num_streams: requests at a time.
    """

    residency: float
    policy: str
    link: LinkModel
    timing: LayerTiming
    expert_bytes: int
    predictor: str | None = None
    rules: PrefetchRules = field(default_factory=PrefetchRules)
    num_streams: int = 1

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            raise ValueError(f"there is no policy {self.policy!r}; there are {', '.join(POLICY_NAMES)}")
        if not 0 < self.residency <= 1:
            raise ValueError(f"a residency of {self.residency} is no share between 0 and 1")

    @property
    def beta(self) -> float:
        """Time to load an expert over time to compute a layer: the figure that compares machines."""
        return self.link.load_seconds(self.expert_bytes) / self.timing.total

    def num_slots(self, num_experts: int, top_k: int) -> int:
        return max(round(self.residency * num_experts), top_k)


def link_for(beta: float, expert_bytes: int, timing: LayerTiming, num_chunks: int = 8) -> LinkModel:
    """A link without latency on which an expert takes `beta` times as long as a layer."""
    return LinkModel(expert_bytes / (beta * timing.total), chunk_bytes=max(expert_bytes // num_chunks, 1))


def simulate(
    learning: RoutingTrace, held_out: RoutingTrace, setup: SimulationSetup, foretold: Foretold | None = None
) -> SimulationResult:
    """What the held-out requests took. Slots and predictors are warm from the others, and go on learning.

    Each token is predicted before it is learnt. The policies `static` (from the load of `learning`) and `belady` (from
    the future) are told what no others know.

    foretold: what the setup's predictor says of `learning` and `held_out`, if it was computed before.
    """
    num_layers, _, top_k = learning.ids.shape
    policies = _policies(learning, held_out, setup)
    control = ResidencyControl(
        [setup.num_slots(learning.num_experts, top_k)] * num_layers,
        learning.num_experts,
        setup.expert_bytes,
        policies.__getitem__,
    )
    if setup.predictor is None:
        simulation = Simulation(control, setup.expert_bytes, setup.link, setup.timing)
    else:
        predictor, learnt = _predictor(learning, setup.predictor, setup.rules.max_distance, foretold)
        rated = [policy for policy in policies if isinstance(policy, Affinity)]
        planner = PrefetchPlanner(predictor, control, setup.expert_bytes, setup.rules, rated or None)
        simulation = Simulation(
            control, setup.expert_bytes, setup.link, setup.timing, predictor, planner, learnt, taps_of(setup.predictor)
        )
    simulation.replay(learning, setup.num_streams)
    return simulation.replay(held_out, setup.num_streams)


def _predictor(
    trace: RoutingTrace, choice: str, max_distance: int, foretold: Foretold | None
) -> tuple[Predictor, LearntAffinity | None]:
    """And what it learns from, if it still has to."""
    if foretold is not None:
        if (foretold.choice, foretold.max_distance) != (choice, max_distance):
            raise ValueError(f"{foretold.choice} was foretold, and {choice} is to be simulated")
        return ForetoldPredictor(foretold), None
    spec = StatisticsSpec(len(trace.ids), trace.num_experts, trace.ids.shape[2], max_distance=_HISTORY)
    learnt = LearntAffinity(RoutingStatistics(spec), _REFRESH_STEPS)
    return make_predictor(choice, learnt)[0], learnt


def _policies(learning: RoutingTrace, held_out: RoutingTrace, setup: SimulationSetup) -> list[EvictionPolicy]:
    """One for each layer."""
    make: Callable[[int], EvictionPolicy]
    if setup.policy == "static":
        load = learning.load().tolist()

        def make(layer: int) -> EvictionPolicy:
            return Static(load[layer])
    elif setup.policy == "belady":
        rows = [(part, rows) for part in (learning, held_out) for rows in steps_of(part, setup.num_streams)]

        def make(layer: int) -> EvictionPolicy:
            return Belady([np.unique(part.ids[layer, chosen]).tolist() for part, chosen in rows])
    else:

        def make(layer: int) -> EvictionPolicy:
            return POLICIES[setup.policy](learning.num_experts)

    return [make(layer) for layer in range(len(learning.ids))]


# Requests whose prefix is cached, replayed with and without what is known of its experts. Pure.


_WARM_UP_TOKENS = 256


class Signature(Enum):
    """Which one a request is admitted with."""

    NONE = "none"
    OWN = "own"
    OTHER = "that of another request's prefix"


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Each request finds `num_prefix` tokens cached, computes `num_behind` in its first step and decodes `num_decodes`.

    Requests that are shorter are left out.
    """

    num_prefix: int
    num_behind: int
    num_decodes: int = 8

    @property
    def num_tokens(self) -> int:
        return self.num_prefix + self.num_behind + self.num_decodes


@dataclass(frozen=True, slots=True)
class HitStall:
    """Seconds waited for experts, by step from the first on, summed over requests."""

    num_requests: int
    by_step: NDArray[np.float64]


def replay_hits(
    learning: RoutingTrace, held_out: RoutingTrace, setup: SimulationSetup, hits: PrefixHits, signature: Signature
) -> HitStall:
    """The held-out requests one after the other, on slots and predictors that `learning` has warmed.

    A step of several tokens is taken to last as long as one of a single token: the least time to load ahead in.
    """
    simulation, warmth, profiles = _simulation(learning, setup)
    for row in range(min(_WARM_UP_TOKENS, len(learning.requests))):
        simulation.step(learning, np.array([row]))
    rows_of = [np.flatnonzero(held_out.requests == request) for request in np.unique(held_out.requests)]
    rows_of = [rows for rows in rows_of if len(rows) >= hits.num_tokens]
    signatures = [_signature(held_out, rows[: hits.num_prefix]) for rows in rows_of]
    if signature is Signature.OTHER:
        signatures = signatures[1:] + signatures[:1]
    by_step = np.zeros(1 + hits.num_decodes)
    for rows, rates in zip(rows_of, signatures, strict=True):
        request = int(held_out.requests[rows[0]])
        if signature is not Signature.NONE:
            warmth.remember(request, rates)
            if profiles is not None:
                profiles.seed(request, rates, hits.num_prefix)
        first, last = hits.num_prefix + hits.num_behind, hits.num_tokens
        for step, computed in enumerate([rows[hits.num_prefix : first], *rows[first:last, None]]):
            before = simulation.exposed_stall
            simulation.step(held_out, computed)
            by_step[step] += simulation.exposed_stall - before
        simulation.end([request])
    return HitStall(len(rows_of), by_step)


def _simulation(
    learning: RoutingTrace, setup: SimulationSetup
) -> tuple[Simulation, PrefixWarmth, RequestProfiles | None]:
    """And the profiles that its predictor goes by, if it does."""
    num_layers, _, top_k = learning.ids.shape
    num_experts = learning.num_experts
    control = ResidencyControl(
        [setup.num_slots(num_experts, top_k)] * num_layers,
        num_experts,
        setup.expert_bytes,
        lambda _: POLICIES[setup.policy](num_experts),
    )
    warmth = PrefixWarmth(control, num_experts)
    if setup.predictor is None:
        return Simulation(control, setup.expert_bytes, setup.link, setup.timing, warmth=warmth), warmth, None
    learnt = LearntAffinity(RoutingStatistics(StatisticsSpec(num_layers, num_experts, top_k)))
    predictor, sources = make_predictor(setup.predictor, learnt)
    planner = PrefetchPlanner(predictor, control, setup.expert_bytes, setup.rules)
    taps = taps_of(setup.predictor)
    simulation = Simulation(
        control, setup.expert_bytes, setup.link, setup.timing, predictor, planner, learnt, taps, warmth
    )
    source = sources.get("signature")
    return simulation, warmth, source.profiles if isinstance(source, SignatureSource) else None


def _signature(trace: RoutingTrace, rows: NDArray[np.intp]) -> NDArray[np.float32]:
    """As it comes out of the cache: [L, E]."""
    counts = [np.bincount(ids[rows].reshape(-1), minlength=trace.num_experts) for ids in trace.ids]
    rates = np.stack(counts).astype(np.float32) / np.float32(len(rows))
    return decode_signature(encode_signature(rates), *rates.shape)


# Routing traces made from a seed, with the structure that published traces show. Pure. A token's gate logits are a
# taste of the request's topic, a taste of the token's class, noise that persists from token to token, and what the
# experts of the layer before ask for; then a bias per expert, found by iteration, gives each layer the load that
# training gives it: Zipf's law with an exponent. Each part has one knob; the presets are tuned to published figures
# (docs/benchmarks-experts.md says to which, and what is reached).


_TOKENS_PER_CLASS = 16
_BIAS_TOKENS = 2048
_BIAS_ROUNDS = 15


@dataclass(frozen=True, slots=True)
class SyntheticSpec:
    """Sizes and knobs. Strengths are standard deviations of a logit, beside noise of 1.

    popularity: exponent of Zipf's law of a layer's load. topic_drift: probability per token that the
    topic changes. persistence: correlation of the noise between neighbouring tokens. edge: the share of coupling,
    topic and persistence that the first layer has; they rise to the full strength at a quarter of the depth.
    kinship: the share of an expert's tastes that its kin, kin_size experts of the layer, have too; it makes them be
    chosen together, on which the published figures say nothing.
    """

    num_layers: int
    num_experts: int
    top_k: int
    num_topics: int = 8
    num_classes: int = 64
    popularity: float = 0.2
    topic: float = 0.6
    token_class: float = 0.3
    coupling: float = 1.0
    persistence: float = 0.55
    topic_drift: float = 0.003
    edge: float = 0.1
    kinship: float = 0.0
    kin_size: int = 2


# Tuned to figures of Mixtral-8x7B.
MIXTRAL_LIKE = SyntheticSpec(32, 8, 2, coupling=2.2)
# Tuned to figures of Qwen3-30B-A3B.
QWEN3_LIKE = SyntheticSpec(
    48, 128, 8, popularity=0.75, topic=1.5, token_class=0.4, coupling=0.8, persistence=0.5, edge=0.5
)
# The same knobs for a model with few choices among many experts.
SPARSE = replace(QWEN3_LIKE, num_layers=24, num_experts=64, top_k=4)


def synthetic_trace(spec: SyntheticSpec, num_requests: int, tokens_per_request: int, seed: int) -> RoutingTrace:
    """Requests one after the other. Another seed is another model and other requests; only the knobs are the same."""
    random = np.random.default_rng(seed)
    topics = _topics(spec, num_requests, tokens_per_request, random)
    # Zipf's law over classes; a token id belongs to one class.
    weights = 1 / np.arange(1, spec.num_classes + 1)
    shape = (num_requests, tokens_per_request)
    classes = random.choice(spec.num_classes, shape, p=weights / weights.sum())
    token_ids = classes * _TOKENS_PER_CLASS + random.integers(_TOKENS_PER_CLASS, size=shape)
    ids = np.empty((spec.num_layers, num_requests * tokens_per_request, spec.top_k), np.uint16)
    previous: NDArray[np.int64] | None = None
    for layer in range(spec.num_layers):
        logits = _layer_logits(spec, layer, topics, classes, previous, random)
        load = random.permutation(1 / np.arange(1, spec.num_experts + 1) ** spec.popularity)
        logits += _bias_for(load / load.sum(), logits, spec.top_k)
        chosen = np.argsort(-logits, axis=-1)[..., : spec.top_k]
        ids[layer] = chosen.reshape(-1, spec.top_k)
        previous = chosen
    requests = np.repeat(np.arange(num_requests, dtype=np.int32), tokens_per_request)
    families = np.repeat(topics[:, 0].astype(np.int32), tokens_per_request)
    return RoutingTrace(spec.num_experts, ids, requests, token_ids.reshape(-1).astype(np.int32), families)


def _topics(spec: SyntheticSpec, num_requests: int, num_tokens: int, random: np.random.Generator) -> NDArray[np.int64]:
    """[N, T]: a topic that drifts."""
    found = np.empty((num_requests, num_tokens), np.int64)
    topic = random.integers(spec.num_topics, size=num_requests)
    for token in range(num_tokens):
        drifts = random.random(num_requests) < spec.topic_drift
        topic = np.where(drifts, random.integers(spec.num_topics, size=num_requests), topic)
        found[:, token] = topic
    return found


def _layer_logits(
    spec: SyntheticSpec,
    layer: int,
    topics: NDArray[np.int64],
    classes: NDArray[np.int64],
    previous: NDArray[np.int64] | None,
    random: np.random.Generator,
) -> Float:
    """[N, T, E]."""
    experts = spec.num_experts
    depth = min(1.0, layer / max(spec.num_layers / 4, 1))
    strength = spec.edge + (1 - spec.edge) * depth
    logits = _noise(spec.persistence * strength, topics.shape, experts, random)
    kin = random.permutation(experts) // spec.kin_size
    logits += _taste(spec, strength * spec.topic, spec.num_topics, kin, random)[topics]
    logits += _taste(spec, spec.token_class, spec.num_classes, kin, random)[classes]
    if previous is not None:
        asks = _taste(spec, strength * spec.coupling / spec.top_k**0.5, experts, kin, random)
        # By choice, so that [N, T, k, E] never exists.
        for choice in range(spec.top_k):
            logits += asks[previous[..., choice]]
    return logits


def _bias_for(shares: NDArray[np.float64], logits: Float, top_k: int) -> Float:
    """[E]: added to the logits it makes the load of the experts about these shares of all choices."""
    flat = logits.reshape(-1, len(shares))
    sample = flat[:: max(len(flat) // _BIAS_TOKENS, 1)]
    wanted = np.log(shares)
    bias = np.zeros(len(shares), np.float32)
    for _ in range(_BIAS_ROUNDS):
        chosen = np.argpartition(sample + bias, -top_k, axis=1)[:, -top_k:]
        load = np.bincount(chosen.reshape(-1), minlength=len(shares)) + 1.0
        bias += (0.5 * (wanted - np.log(load / load.sum()))).astype(np.float32)
    return bias


def _noise(persistence: float, shape: tuple[int, ...], num_experts: int, random: np.random.Generator) -> Float:
    """[N, T, E]: unit variance, first-order autoregressive over tokens."""
    noise = random.standard_normal((*shape, num_experts), np.float32)
    fresh = np.float32((1 - persistence**2) ** 0.5)
    for token in range(1, shape[1]):
        noise[:, token] = np.float32(persistence) * noise[:, token - 1] + fresh * noise[:, token]
    return noise


def _taste(spec: SyntheticSpec, scale: float, size: int, kin: NDArray[np.int64], random: np.random.Generator) -> Float:
    """[size, E]: normal, of variance scale²; experts of a kin share part of it."""
    own = random.standard_normal((size, spec.num_experts), np.float32)
    shared = random.standard_normal((size, int(kin.max()) + 1), np.float32)[:, kin]
    return np.float32(scale) * (np.float32((1 - spec.kinship) ** 0.5) * own + np.float32(spec.kinship**0.5) * shared)


# How good predictors are on requests they have not seen, and what prefetching by them saves. Pure.


# Tokens of the learning requests that are predicted before they are learnt, to calibrate probabilities.
_CALIBRATING = 500


@dataclass(frozen=True, slots=True)
class RecallFigure:
    """recall: of a token's k experts `distance` layers ahead, the share among the k likeliest; mean over tokens and
    layers. precision: of the experts that are given even odds or better, the share that is chosen. NaN where the
    predictor said nothing of the kind."""

    predictor: str
    distance: int
    recall: float
    precision: float


@dataclass(frozen=True, slots=True)
class StallFigure:
    """The same requests with demand loads alone and with prefetches."""

    on_demand: SimulationResult
    prefetching: SimulationResult

    @property
    def stall_saved(self) -> float:
        """The share of the exposed stall that prefetching, with all it costs, takes away; 0 without stall."""
        stalled = self.on_demand.exposed_stall
        remaining = self.prefetching.exposed_stall + self.prefetching.prediction_seconds
        return 1 - remaining / stalled if stalled else 0.0


def recall_figures(
    learning: RoutingTrace, held_out: RoutingTrace, choices: Sequence[str], max_distance: int = 3
) -> list[RecallFigure]:
    """Recall of each choice of predictors at each distance, from layers that were observed.

    Tokens come one at a time and are learnt after they were predicted, but for the first of many that are learnt from:
    these only enter the statistics. Held-out ones count.
    """
    traces = learning, held_out
    found = []
    for choice in choices:
        taps = taps_of(choice)
        learning, held_out = (
            replace(trace, guesses=tuple(guesses for guesses in trace.guesses if guesses.tap in taps))
            for trace in traces
        )
        spec = StatisticsSpec(
            len(learning.ids), learning.num_experts, learning.ids.shape[2], max_distance=max(max_distance, _HISTORY)
        )
        statistics = RoutingStatistics(spec)
        is_first = np.arange(len(learning.requests)) < len(learning.requests) - _CALIBRATING
        for start in range(0, int(is_first.sum()), spec.max_rows_per_step):
            rows = slice(start, min(start + spec.max_rows_per_step, int(is_first.sum())))
            statistics.update(learning.ids[:, rows], learning.token_ids[rows])
        learnt = LearntAffinity(statistics, _REFRESH_STEPS)
        source = make_source(choice, learnt)
        scores = [_Score() for _ in range(max_distance)]
        for trace, counts in ((learning.select(~is_first), False), (held_out, True)):
            for predicted in predict_tokens(trace, choice, source, learnt, max_distance, (taps,)):
                if counts:
                    _count(scores, predicted, trace)
        for distance, score in enumerate(scores, start=1):
            recall = score.recalled / score.num_chosen if score.num_chosen else nan
            precision = score.confirmed / score.num_expected if score.num_expected else nan
            found.append(RecallFigure(choice, distance, recall, precision))
    return found


@dataclass(slots=True)
class _Score:
    """Experts counted over tokens and layers, of one distance."""

    num_chosen: int = 0
    recalled: int = 0
    num_expected: int = 0
    confirmed: int = 0

    def add(self, probabilities: NDArray[np.float32], chosen: NDArray[np.uint16]) -> None:
        """probabilities: [T, E]. chosen: [T, k]."""
        self.num_chosen += chosen.size
        self.recalled += num_recalled(probabilities, chosen)
        is_expected = probabilities >= 0.5
        self.num_expected += int(is_expected.sum())
        self.confirmed += int(np.take_along_axis(is_expected, chosen.astype(np.int64), 1).sum())


def _count(scores: Sequence[_Score], predicted: TokenPredictions, trace: RoutingTrace) -> None:
    """scores: by distance."""
    for (layer, distance), rows in predicted.moments[-1].items():
        scores[distance - 1].add(rows, trace.ids[layer + distance, predicted.rows])


# What learnt placements save on requests they have not seen. Pure.


@dataclass(frozen=True, slots=True)
class RemoteRanksFigure:
    """Ranks other than its home to which a token is sent, mean over tokens and layers, and how even that makes ranks.

    plain: of contiguous and round-robin the one with fewer remote ranks. The balances are mean over greatest load of
    the ranks, mean over layers.
    """

    num_ranks: int
    plain: float
    learnt: float
    plain_balance: float
    learnt_balance: float

    @property
    def saved(self) -> float:
        """Share saved against the plain placement."""
        return 1 - self.learnt / self.plain


@dataclass(frozen=True, slots=True)
class HopsFigure:
    """Share of layer transitions at which a token's first choice changes its rank (ExFlow's metric), by placement.

    by_load: placed by the same algorithm as if what follows an expert did not depend on it, so that it knows no more
    than which experts are busy. It says nothing of data-parallel attention, where a token returns home after every
    layer.
    """

    num_ranks: int
    round_robin: float
    by_load: float
    affinity: float

    @property
    def saved(self) -> float:
        return 1 - self.affinity / self.round_robin

    @property
    def saved_beyond_load(self) -> float:
        """Share saved by knowing what follows what."""
        return 1 - self.affinity / self.by_load


def remote_ranks_figure(
    learning: RoutingTrace,
    held_out: RoutingTrace,
    num_ranks: int,
    *,
    by_family: bool = False,
    max_load: float | None = 1.1,
) -> RemoteRanksFigure:
    """Of co-activation placement. by_family: requests that begin alike live on the same rank, and that is known when
    experts are placed; otherwise requests are dealt in turn. max_load: see `coactivation_placement`. PlacementError if
    the ranks cannot share the experts equally."""
    homes = learning.family_homes(num_ranks) if by_family else None
    learnt = coactivation_placement(learning.ids, learning.num_experts, num_ranks, homes, max_load=max_load)
    return remote_ranks_of(learnt, held_out, by_family=by_family)


def remote_ranks_of(learnt: Placement, held_out: RoutingTrace, *, by_family: bool = False) -> RemoteRanksFigure:
    """Of any placement."""
    num_ranks = learnt.num_ranks
    homes = held_out.family_homes(num_ranks) if by_family else held_out.homes(num_ranks)
    load = held_out.load()
    sizes = learnt.num_layers, learnt.num_experts, num_ranks
    found = [
        (float(remote_ranks(held_out.ids, homes, placement).mean()), float(balancedness(load, placement).mean()))
        for placement in (contiguous(*sizes), round_robin(*sizes), learnt)
    ]
    plain = min(found[:2])
    return RemoteRanksFigure(num_ranks, plain[0], found[2][0], plain[1], found[2][1])


def hops_figure(learning: RoutingTrace, held_out: RoutingTrace, num_ranks: int) -> HopsFigure:
    """PlacementError if the ranks cannot share the experts equally."""
    transitions = learning.transitions()
    leaving, arriving = transitions.sum(axis=2), transitions.sum(axis=1)
    independent = leaving[:, :, None] * arriving[:, None, :] / leaving.sum(axis=1)[:, None, None]
    placements = (
        round_robin(len(learning.ids), learning.num_experts, num_ranks),
        affinity_placement(independent, num_ranks),
        affinity_placement(transitions, num_ranks),
    )
    first = held_out.ids[:, :, 0]
    return HopsFigure(num_ranks, *(hops(first, placement) for placement in placements))
