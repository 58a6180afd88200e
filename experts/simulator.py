"""Replay routing traces through the runtime's residency, prediction and transfer decisions, by a clock. Torch-free.

The objects are those of the runtime (`ResidencyControl`, `AffinityPredictor`, `PrefetchPlanner`, `LookaheadPlanner`);
only the copier and the clock are simulated. An event, all that a step asks of one layer, is decided at once: replaying
its experts one by one would count misses that no runtime has.

Below: simulations by their parameters, figures of predictors and of placements, and synthetic traces.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf, nan
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from experts.placement import Placement, balancedness, contiguous, hops, remote_ranks, round_robin
from experts.placement_search import affinity_placement, coactivation_placement
from experts.predictors import (
    AFFINITY_SPAN,
    BEFORE,
    MAX_DISTANCE,
    AffinityPredictor,
    LearntAffinity,
    Predictor,
    num_recalled,
)
from experts.prefetch_planning import LookaheadPlanner, PrefetchPlanner, PrefetchRules
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
from experts.routing_files import RoutingTrace, Tap
from experts.signatures import decode_signature, encode_signature

Float = NDArray[np.float32]
Ids = NDArray[np.integer]
# Of a trace.
Rows = NDArray[np.int64] | slice

POLICY_NAMES = (*SERVED, "belady")
# A gate is heard from its tap, as far as the trace has its guesses.
PREDICTOR_TAPS = {"affinity": None, "gate-early": Tap.EARLY, "gate-late": Tap.LATE}
PREDICTOR_NAMES = tuple(PREDICTOR_TAPS)
# The baseline of recall: every token may choose what tokens choose most.
POPULARITY = "popularity"

# The longest interval, in steps, at which affinity is computed anew.
_REFRESH_STEPS = 128
_WARM_UP_TOKENS = 256
# Tokens of the learning requests that are learnt as single steps, so that affinity is as fresh as while serving.
_LEARNT_ONE_BY_ONE = 500
# Predicted together.
_MAX_TOKENS = 128

# Of synthetic traces.
_TOKENS_PER_CLASS = 16
_BIAS_TOKENS = 2048
_BIAS_ROUNDS = 15


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """residency: share of a layer's experts that its slots hold, at least a token's. predictor: one of
    PREDICTOR_NAMES, None for demand loads alone. rules: of `affinity`; gates go by the distance alone. num_streams:
    requests at a time.
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
        if self.predictor is not None and self.predictor not in PREDICTOR_NAMES:
            raise ValueError(f"there is no predictor {self.predictor!r}; there are {', '.join(PREDICTOR_NAMES)}")
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


def simulate(learning: RoutingTrace, held_out: RoutingTrace, setup: SimulationSetup) -> SimulationResult:
    """Replay the held-out requests. Slots and predictors are warm from the others, and go on learning.

    Each token is predicted before it is learnt. The policies `static` (from the load of `learning`) and `belady` (from
    the future) know more than others.
    """
    policies = _policies(learning, held_out, setup)
    control = _control_of(learning, setup, policies)
    simulation = Simulation(
        control, setup.expert_bytes, setup.link, setup.timing, _ahead(learning, setup, control, policies)
    )
    simulation.replay(learning, setup.num_streams)
    return simulation.replay(held_out, setup.num_streams)


def _control_of(trace: RoutingTrace, setup: SimulationSetup, policies: Sequence[EvictionPolicy]) -> ResidencyControl:
    num_layers, _, top_k = trace.ids.shape
    num_slots = [setup.num_slots(trace.num_experts, top_k)] * num_layers
    return ResidencyControl(num_slots, trace.num_experts, setup.expert_bytes, policies.__getitem__)


def _ahead(
    trace: RoutingTrace, setup: SimulationSetup, control: ResidencyControl, policies: Sequence[EvictionPolicy]
) -> LoadsAhead | None:
    if setup.predictor is None:
        return None
    num_layers, _, top_k = trace.ids.shape
    tap = PREDICTOR_TAPS[setup.predictor]
    if tap is not None:
        return GatesAhead(LookaheadPlanner(control, top_k, setup.rules.max_distance), tap)
    spec = StatisticsSpec(num_layers, trace.num_experts, top_k, max_distance=AFFINITY_SPAN)
    learnt = LearntAffinity(RoutingStatistics(spec), _REFRESH_STEPS)
    predictor = AffinityPredictor(learnt)
    rated = [policy for policy in policies if isinstance(policy, Affinity)]
    planner = PrefetchPlanner(predictor, control, setup.expert_bytes, setup.rules, rated or None)
    return AffinityAhead(predictor, planner, learnt)


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


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """Seconds of computation per layer: before its experts are known, for its experts, and for a prediction."""

    attention: float
    experts: float
    prediction: float = 0.0

    @property
    def total(self) -> float:
        return self.attention + self.experts


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """counters: of the measured part, see `ResidencyCounters`. seconds: of all steps. exposed_stall: the part of them
    spent waiting for experts. prediction_seconds: the part spent on predictions. num_steps: measured."""

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
    """One simulated rank. State stays between `replay`s: replay the learnt part first, then the held-out one."""

    def __init__(
        self,
        control: ResidencyControl,
        expert_bytes: int,
        link: LinkModel,
        timing: LayerTiming,
        ahead: LoadsAhead | None = None,
        warmth: PrefixWarmth | None = None,
    ) -> None:
        """ahead: tells this control; None for demand loads alone. warmth: of this control."""
        self._control = control
        self._copier = SimulatedCopier(control, link, expert_bytes)
        self._timing = timing
        self._ahead = ahead
        self._warmth = warmth
        self._loads_per_layer = timing.total / link.load_seconds(expert_bytes)
        self._now = 0.0
        self._stall = 0.0
        self._prediction = 0.0

    def replay(self, trace: RoutingTrace, num_streams: int = 1) -> SimulationResult:
        """Compute the trace and return what that took."""
        before = replace(self._control.counters)
        started, stall, prediction = self._now, self._stall, self._prediction
        num_steps = 0
        for rows in steps_of(trace, num_streams):
            self.step(trace, rows)
            num_steps += 1
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
        """Compute these rows [T] of the trace together."""
        # A slice is several times faster than an index.
        part: Rows = slice(int(rows[0]), int(rows[0]) + 1) if len(rows) == 1 else rows
        ids = trace.ids[:, part]
        if self._ahead is not None:
            self._ahead.begin(trace, part)
            self._look(Tap.EARLY, BEFORE)
        if self._warmth is not None:
            self._warmth.begin_step(trace.requests[part].tolist(), may_ask=True)
        for layer, event in enumerate(sorted(set(of_layer)) for of_layer in ids.reshape(len(ids), -1).tolist()):
            self._compute(self._timing.attention)
            self._control.access(layer, event)
            if self._ahead is not None:
                self._ahead.chose(layer, ids[layer])
                self._look(Tap.EARLY, layer)
            if self._warmth is not None:
                self._warmth.observed(layer, event)
            self._compute_experts(layer, event)
            self._look(Tap.LATE, layer)
        if self._warmth is not None:
            self._warmth.end_step(())
        if self._ahead is not None:
            self._ahead.end()

    def _look(self, tap: Tap, layer: int) -> None:
        tell = None if self._ahead is None else self._ahead.look(tap, layer, self._loads_per_layer)
        if tell is not None:
            self._prediction += self._timing.prediction
            self._compute(self._timing.prediction)
            tell()

    def _compute_experts(self, layer: int, event: list[int]) -> None:
        """Compute the resident experts first, and the others as they arrive."""
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


class LoadsAhead(Protocol):
    """What asks for experts ahead of need while steps are replayed."""

    def begin(self, trace: RoutingTrace, rows: Rows) -> None:
        """A step computes these rows of the trace."""

    def chose(self, layer: int, expert_ids: Ids) -> None:
        """The gate of a layer chose. expert_ids: [T, k]."""

    def look(self, tap: Tap, layer: int, loads_per_layer: float) -> Callable[[], None] | None:
        """Predict from the state at `tap` of a layer, and return what tells the control; None if nothing is predicted
        there. `BEFORE` the first layer the tap is EARLY."""

    def end(self) -> None:
        """The step is computed."""


class AffinityAhead:
    """Loads ahead by a predictor that learns from the steps it follows."""

    def __init__(self, predictor: Predictor, planner: PrefetchPlanner, learnt: LearntAffinity | None = None) -> None:
        """planner: asks this predictor. learnt: what the predictor learns from, None if it does not learn."""
        self._predictor = predictor
        self._planner = planner
        self._learnt = learnt
        self._trace: RoutingTrace | None = None
        self._rows: Rows = slice(0)

    def begin(self, trace: RoutingTrace, rows: Rows) -> None:
        self._trace, self._rows = trace, rows
        self._predictor.begin(trace.token_ids[rows])

    def chose(self, layer: int, expert_ids: Ids) -> None:
        self._predictor.observe(layer, expert_ids)

    def look(self, tap: Tap, layer: int, loads_per_layer: float) -> Callable[[], None] | None:
        if tap is Tap.LATE:
            return None
        expected = self._planner.expect(layer)
        return lambda: self._planner.request(layer, expected, loads_per_layer)

    def end(self) -> None:
        self._predictor.end_step()
        if self._learnt is not None:
            assert self._trace is not None
            self._learnt.statistics.update(self._trace.ids[:, self._rows], self._trace.token_ids[self._rows])
            self._learnt.step_done()


class GatesAhead:
    """Believes what the gates of later layers said when the trace was recorded, as services do."""

    def __init__(self, planner: LookaheadPlanner, tap: Tap) -> None:
        self._planner = planner
        self._tap = tap
        self._rows: Rows = slice(0)
        self._logits: dict[int, NDArray[np.floating]] = {}

    def begin(self, trace: RoutingTrace, rows: Rows) -> None:
        self._rows = rows
        self._logits = {guesses.distance: guesses.logits for guesses in trace.guesses if guesses.tap is self._tap}

    def chose(self, layer: int, expert_ids: Ids) -> None:
        """Gates do not go by it."""

    def look(self, tap: Tap, layer: int, loads_per_layer: float) -> Callable[[], None] | None:
        if tap is not self._tap or layer == BEFORE:
            return None
        distances = [
            distance
            for distance in self._planner.distances(layer, self._planner.reach(loads_per_layer))
            if distance in self._logits
        ]
        return (lambda: self._ask(layer, distances)) if distances else None

    def end(self) -> None:
        """There is nothing to learn: the gates were trained."""

    def _ask(self, layer: int, distances: Sequence[int]) -> None:
        for distance in distances:
            logits = self._logits[distance][layer, self._rows]
            self._planner.ask(layer, range(distance, distance + 1), logits[None])


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
    """The copying thread of the runtime, by a clock of its own, which only moves forward."""

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
        """Copy until `time`; a chunk that is not over by then goes on afterwards."""
        while self._start() and self._chunk_end <= time:
            self._end_chunks(time)
        self.now = max(self.now, time)

    def run_until_true(self, condition: Callable[[], bool]) -> None:
        """Copy until the condition holds. RuntimeError if nothing is left to copy before that."""
        while not condition():
            if not self._start():
                raise RuntimeError("the computation waits for an expert that nobody loads")
            self._end_chunks(inf)

    def _start(self) -> bool:
        """Start the next transfer if none is running; return whether one runs."""
        if self._transfer is None:
            self._transfer = self._control.next_transfer()
            if self._transfer is not None:
                self._chunk_end = (
                    self.now + self._link.latency + self._chunk_seconds(self._expert_bytes - self._transfer.num_moved)
                )
        return self._transfer is not None

    def _end_chunks(self, time: float) -> None:
        """End the chunks of the running transfer that are over by `time`.

        Whether it has to stop is asked once: until it ends the control hears nothing else.
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


class Belady:
    """The bound of all eviction: in a layer whose events are all known, the expert needed last leaves first (Belady
    1966)."""

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


class Signature(Enum):
    """The signature that a request is admitted with."""

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
    """Replay held-out requests with cached prefixes one after the other, on slots and predictors warm from `learning`.

    A step of several tokens is taken to last as long as one of a single token: the least time to load ahead in.
    """
    policies = [POLICIES[setup.policy](learning.num_experts) for _ in learning.ids]
    control = _control_of(learning, setup, policies)
    warmth = PrefixWarmth(control, learning.num_experts)
    ahead = _ahead(learning, setup, control, policies)
    simulation = Simulation(control, setup.expert_bytes, setup.link, setup.timing, ahead, warmth)
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
        first, last = hits.num_prefix + hits.num_behind, hits.num_tokens
        for step, computed in enumerate([rows[hits.num_prefix : first], *rows[first:last, None]]):
            before = simulation.exposed_stall
            simulation.step(held_out, computed)
            by_step[step] += simulation.exposed_stall - before
    return HitStall(len(rows_of), by_step)


def _signature(trace: RoutingTrace, rows: NDArray[np.intp]) -> NDArray[np.float32]:
    """[L, E]: the rates as they come out of the cache."""
    counts = [np.bincount(ids[rows].reshape(-1), minlength=trace.num_experts) for ids in trace.ids]
    rates = np.stack(counts).astype(np.float32) / np.float32(len(rows))
    return decode_signature(encode_signature(rates), *rates.shape)


@dataclass(frozen=True, slots=True)
class RecallFigure:
    """recall: of a token's k experts `distance` layers ahead, the share among the k likeliest; mean over tokens and
    layers. precision: of the experts that are given even odds or better, the share that is chosen. NaN where the
    predictor said nothing of the kind, as gates do: they rank."""

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
    learning: RoutingTrace, held_out: RoutingTrace, choices: Sequence[str], max_distance: int = MAX_DISTANCE
) -> list[RecallFigure]:
    """Recall of each choice of PREDICTOR_NAMES and `popularity` at each distance, from layers that were observed.

    Tokens come one at a time and are learnt after they were predicted, but for the first of many that are learnt from:
    these only enter the statistics. Held-out ones count.
    """
    found = []
    for choice in choices:
        scores = [_Score() for _ in range(max_distance)]
        tap = PREDICTOR_TAPS.get(choice)
        if tap is None:
            _score_learnt(scores, learning, held_out, by_popularity=choice == POPULARITY)
        else:
            for guesses in held_out.guesses:
                if guesses.tap is tap and guesses.distance <= max_distance:
                    for layer, logits in enumerate(guesses.logits):
                        scores[guesses.distance - 1].add(logits, held_out.ids[layer + guesses.distance])
        found += [score.figure(choice, distance) for distance, score in enumerate(scores, start=1)]
    return found


def _score_learnt(
    scores: Sequence[_Score], learning: RoutingTrace, held_out: RoutingTrace, *, by_popularity: bool
) -> None:
    """Tokens are predicted together until what they are predicted by is computed anew: the numbers of one at a time."""
    num_layers, num_tokens, top_k = learning.ids.shape
    spec = StatisticsSpec(num_layers, learning.num_experts, top_k, max_distance=AFFINITY_SPAN)
    statistics = RoutingStatistics(spec)
    num_first = max(num_tokens - _LEARNT_ONE_BY_ONE, 0)
    for start in range(0, num_first, spec.max_rows_per_step):
        rows = slice(start, min(start + spec.max_rows_per_step, num_first))
        statistics.update(learning.ids[:, rows], learning.token_ids[rows])
    learnt = LearntAffinity(statistics, _REFRESH_STEPS)
    for row in range(num_first, num_tokens):
        _learn(learnt, learning, row)
    start, num_held_out = 0, held_out.ids.shape[1]
    while start < num_held_out:
        rows = slice(start, min(start + min(learnt.steps_until_refresh, _MAX_TOKENS), num_held_out))
        chosen = {layer: ids[rows].astype(np.int64) for layer, ids in enumerate(held_out.ids)}
        for distance, score in enumerate(scores, start=1):
            for layer in range(num_layers - distance):
                if by_popularity:
                    popularity = learnt.current.popularity()[layer + distance]
                    expected: Float | None = np.broadcast_to(popularity, (len(chosen[layer]), len(popularity)))
                else:
                    seen = {earlier: ids for earlier, ids in chosen.items() if earlier <= layer}
                    expected = learnt.of_choices(seen, layer, distance)
                assert expected is not None
                score.add(expected, held_out.ids[layer + distance, rows])
                score.add_expected(expected, held_out.ids[layer + distance, rows])
        for row in range(rows.start, rows.stop):
            _learn(learnt, held_out, row)
        start = rows.stop


def _learn(learnt: LearntAffinity, trace: RoutingTrace, row: int) -> None:
    learnt.statistics.update(trace.ids[:, row : row + 1], trace.token_ids[row : row + 1])
    learnt.step_done()


@dataclass(slots=True)
class _Score:
    """Experts counted over tokens and layers, of one distance."""

    num_chosen: int = 0
    recalled: int = 0
    num_expected: int = 0
    confirmed: int = 0

    def add(self, scores: NDArray[np.floating], chosen: NDArray[np.uint16]) -> None:
        """scores: [T, E], the higher the likelier. chosen: [T, k]."""
        self.num_chosen += chosen.size
        self.recalled += num_recalled(scores, chosen)

    def add_expected(self, probabilities: Float, chosen: NDArray[np.uint16]) -> None:
        """probabilities: [T, E]. chosen: [T, k]."""
        is_expected = probabilities >= 0.5
        self.num_expected += int(is_expected.sum())
        self.confirmed += int(np.take_along_axis(is_expected, chosen.astype(np.int64), 1).sum())

    def figure(self, predictor: str, distance: int) -> RecallFigure:
        recall = self.recalled / self.num_chosen if self.num_chosen else nan
        precision = self.confirmed / self.num_expected if self.num_expected else nan
        return RecallFigure(predictor, distance, recall, precision)


@dataclass(frozen=True, slots=True)
class RemoteRanksFigure:
    """Remote ranks to which a token is sent, mean over tokens and layers, and the balance of the ranks.

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

    by_load: placed by the same algorithm as if the next expert did not depend on the last one, so that it knows only
    which experts are busy. The metric does not apply to data-parallel attention, where a token returns home after every
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
        """Share saved by knowing which expert follows which."""
        return 1 - self.affinity / self.by_load


def remote_ranks_figure(
    learning: RoutingTrace,
    held_out: RoutingTrace,
    num_ranks: int,
    *,
    by_family: bool = False,
    max_load: float | None = 1.1,
) -> RemoteRanksFigure:
    """The figure of co-activation placement.

    by_family: requests that begin alike live on the same rank, which is known when experts are placed; otherwise
    requests are dealt in turn. max_load: see `coactivation_placement`. PlacementError if the ranks cannot share the
    experts equally.
    """
    homes = learning.family_homes(num_ranks) if by_family else None
    learnt = coactivation_placement(learning.ids, learning.num_experts, num_ranks, homes, max_load=max_load)
    return remote_ranks_of(learnt, held_out, by_family=by_family)


def remote_ranks_of(learnt: Placement, held_out: RoutingTrace, *, by_family: bool = False) -> RemoteRanksFigure:
    """The figure of any placement."""
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


@dataclass(frozen=True, slots=True)
class SyntheticSpec:
    """Sizes and knobs of routing traces made from a seed, with the structure that published traces show.

    A token's gate logits are a taste of the request's topic, a taste of the token's class, noise that persists from
    token to token, and what the experts of the layer before ask for; then a bias per expert, found by iteration, gives
    each layer the load that training gives it: Zipf's law with an exponent. Strengths are standard deviations of a
    logit, beside noise of 1.

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
    """[E]: the bias that gives the experts about these shares of all choices."""
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
