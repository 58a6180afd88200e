"""Replay routing traces through the runtime's residency, prediction and transfer decisions. Torch-free.

The runtime's own objects decide (`ResidencyControl`, `AffinityPredictor`, `PrefetchPlanner`, `LookaheadPlanner`); only
the copier and the clock are simulated. An event, all experts that a step needs in one layer, is decided at once:
replaying its experts one by one would count misses that no runtime has. `recall_figures` measures predictors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.experts.lab_traces import LabTrace
from experts.memory.eviction import POLICIES, Affinity, EvictionPolicy, Static, Worth
from experts.memory.eviction import POLICY_NAMES as SERVED
from experts.memory.host_share import HostCosts, HostShare
from experts.memory.residency import ResidencyControl, ResidencyCounters, SlotState, Transfer
from experts.prediction.planning import LookaheadPlanner, PrefetchPlanner, PrefetchRules
from experts.routing.choices import RoutingStatistics, StatisticsSpec
from experts.routing.files import Tap
from experts.routing.predictors import (
    AFFINITY_SPAN,
    BEFORE,
    MAX_DISTANCE,
    AffinityPredictor,
    LearntAffinity,
    num_recalled,
)

Float = NDArray[np.float32]
Ids = NDArray[np.integer]
# Rows of a trace.
Rows = NDArray[np.int64] | slice

POLICY_NAMES = (*SERVED, "belady")
# By predictor, the tap of the trace's gate guesses that it uses.
PREDICTOR_TAPS = {"affinity": None, "gate-early": Tap.EARLY, "gate-shared": Tap.SHARED}
PREDICTOR_NAMES = tuple(PREDICTOR_TAPS)
# The baseline of recall: every token is expected to choose the experts that tokens choose most.
POPULARITY = "popularity"

# The longest interval, in steps, at which affinity is computed anew.
_REFRESH_STEPS = 128
_WARM_UP_TOKENS = 256
# The last tokens of the learning requests are learnt as single steps, so that affinity is as fresh as while serving.
_LEARNT_ONE_BY_ONE = 500
# The most tokens that are predicted together.
_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """residency: the share of a layer's experts that its slots hold; a layer has at least top-k slots. predictor: one
    of PREDICTOR_NAMES, None for demand loads alone. rules: for `affinity`; gates use only `max_distance`. num_streams:
    requests that run at a time.
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
        """The time to load an expert over the time to compute a layer: the figure that compares machines."""
        return self.link.load_seconds(self.expert_bytes) / self.timing.total

    def num_slots(self, num_experts: int, top_k: int) -> int:
        return max(round(self.residency * num_experts), top_k)


def link_for(beta: float, expert_bytes: int, timing: LayerTiming, num_chunks: int = 8) -> LinkModel:
    """Return a link without latency that loads an expert in `beta` times the time of a layer."""
    return LinkModel(expert_bytes / (beta * timing.total), chunk_bytes=max(expert_bytes // num_chunks, 1))


def simulate(learning: LabTrace, held_out: LabTrace, setup: SimulationSetup) -> SimulationResult:
    """Replay the held-out requests. `learning` has warmed slots and predictors, and predictors go on learning.

    Each token is predicted before it is learnt. The policies `static` (from the load of `learning`) and `belady` (from
    the future) know more than the others.
    """
    policies = _policies(learning, held_out, setup)
    control = control_of(learning, setup, policies)
    simulation = Simulation(
        control, setup.expert_bytes, setup.link, setup.timing, loads_ahead(learning, setup, control, policies)
    )
    simulation.replay(learning, setup.num_streams)
    return simulation.replay(held_out, setup.num_streams)


def control_of(trace: LabTrace, setup: SimulationSetup, policies: Sequence[EvictionPolicy]) -> ResidencyControl:
    """Return the control of the trace's layers, each with the number of slots that the setup gives."""
    num_layers, _, top_k = trace.ids.shape
    num_slots = [setup.num_slots(trace.num_experts, top_k)] * num_layers
    return ResidencyControl(num_slots, trace.num_experts, setup.expert_bytes, policies.__getitem__)


def loads_ahead(
    trace: LabTrace, setup: SimulationSetup, control: ResidencyControl, policies: Sequence[EvictionPolicy]
) -> LoadsAhead | None:
    """Return the setup's predictor with its planner, which asks `control` for experts; None without a predictor."""
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


def _policies(learning: LabTrace, held_out: LabTrace, setup: SimulationSetup) -> list[EvictionPolicy]:
    """Return one policy for each layer."""
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
        """The share of misses and late prefetches among all accesses."""
        counters = self.counters
        return (counters.num_misses + counters.num_late) / max(
            counters.num_hits + counters.num_late + counters.num_misses, 1
        )

    @property
    def wasted_share(self) -> float:
        """The share of wasted and cancelled bytes among all bytes moved."""
        counters = self.counters
        moved = counters.demand_bytes + counters.prefetch_bytes
        return (counters.wasted_bytes + counters.cancelled_bytes) / max(moved, 1)


def steps_of(trace: LabTrace, num_streams: int) -> Iterator[NDArray[np.int64]]:
    """Yield the rows [T] of the trace that each step computes: one token of each running request.

    `num_streams` requests run at a time, in the order of the trace; when one ends, the next begins.
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
        host: SimulatedHost | None = None,
    ) -> None:
        """ahead: tells this control which experts to load; None for demand loads alone. host: computes experts of this
        control that are not in slots; None if all are loaded."""
        self._control = control
        self._host = host
        self._copier = SimulatedCopier(control, link, expert_bytes)
        self._timing = timing
        self._ahead = ahead
        self._load_seconds = link.load_seconds(expert_bytes)
        self._loads_per_layer = timing.total / self._load_seconds
        self._now = 0.0
        self._stall = 0.0
        self._prediction = 0.0

    def replay(self, trace: LabTrace, num_streams: int = 1) -> SimulationResult:
        """Compute the trace and return the counts and times of that part."""
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
        """The seconds waited for experts since the beginning."""
        return self._stall

    def step(self, trace: LabTrace, rows: NDArray[np.int64]) -> None:
        """Compute these rows [T] of the trace together."""
        # A slice is several times faster than an index.
        part: Rows = slice(int(rows[0]), int(rows[0]) + 1) if len(rows) == 1 else rows
        ids = trace.ids[:, part]
        if self._ahead is not None:
            self._ahead.begin(trace, part)
            self._look(Tap.EARLY, BEFORE)
        for layer, event in enumerate(sorted(set(of_layer)) for of_layer in ids.reshape(len(ids), -1).tolist()):
            self._compute(self._timing.attention)
            elsewhere = self._access(layer, event, ids[layer])
            if self._ahead is not None:
                self._ahead.chose(layer, ids[layer])
                self._look(Tap.EARLY, layer)
                self._look(Tap.SHARED, layer)
            self._compute_experts(layer, event, elsewhere)
        if self._ahead is not None:
            self._ahead.end()

    def _look(self, tap: Tap, layer: int) -> None:
        tell = None if self._ahead is None else self._ahead.look(tap, layer, self._loads_per_layer)
        if tell is not None:
            self._prediction += self._timing.prediction
            self._compute(self._timing.prediction)
            tell()

    def _access(self, layer: int, event: list[int], expert_ids: Ids) -> dict[int, int]:
        """Begin an event; return the rows of each expert that the host computes. expert_ids: [T, k]."""
        if self._host is None:
            self._control.access(layer, event)
            return {}
        num_rows = Counter(expert_ids.ravel().tolist())
        access = self._host.share.access(layer, num_rows, self._load_seconds)
        return {expert: num_rows[expert] for expert in access.elsewhere}

    def _compute_experts(self, layer: int, event: list[int], elsewhere: dict[int, int]) -> None:
        """Compute the resident experts first, and the others as they arrive, while the host computes its own."""
        residency = self._control.layers[layer]
        remaining = [expert for expert in event if expert not in elsewhere]

        def ready() -> list[int]:
            return [expert for expert in remaining if residency.state_of(expert) is SlotState.READY]

        host_ends = self._now
        if self._host is not None and elsewhere:
            host_ends += self._host.compute(elsewhere)
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
        self._compute(max(host_ends - self._now, 0.0))

    def _compute(self, seconds: float) -> None:
        self._now += seconds
        self._copier.run_until(self._now)


@dataclass(frozen=True, slots=True)
class HostModel:
    """Seconds of a host that computes experts: of a call, to read an expert, and of a row where rows take longer."""

    call: float
    expert: float
    row: float

    def of_expert(self, num_rows: int) -> float:
        return max(self.expert, self.row * num_rows)

    def costs(self) -> HostCosts:
        """Return what measuring at start finds."""
        return HostCosts(self.call, [(rows, self.of_expert(rows)) for rows in (1, 4, 16, 64, 256)])


@dataclass(frozen=True, slots=True)
class SimulatedHost:
    """A host that computes experts. share: begins the events of the simulated control."""

    share: HostShare
    model: HostModel

    def compute(self, num_rows: Mapping[int, int]) -> float:
        """Return the seconds of a call. num_rows: by expert."""
        seconds = self.model.call + sum(map(self.model.of_expert, num_rows.values()))
        self.share.costs.learn(num_rows.values(), seconds)
        return seconds


class LoadsAhead(Protocol):
    """Asks for experts ahead of need while steps are replayed."""

    def begin(self, trace: LabTrace, rows: Rows) -> None:
        """Begin a step that computes these rows of the trace."""

    def chose(self, layer: int, expert_ids: Ids) -> None:
        """Observe the choice of a layer's gate. expert_ids: [T, k]."""

    def look(self, tap: Tap, layer: int, loads_per_layer: float) -> Callable[[], None] | None:
        """Predict from the state at `tap` of a layer; return a function that tells the control, None without a
        prediction. For layer `BEFORE` the tap is EARLY."""

    def end(self) -> None:
        """End the step, after its last layer."""


class AffinityAhead:
    """Loads ahead by a predictor that learns from the steps it follows."""

    def __init__(
        self, predictor: AffinityPredictor, planner: PrefetchPlanner, learnt: LearntAffinity | None = None
    ) -> None:
        """planner: asks this predictor. learnt: what the predictor learns from, None if it does not learn."""
        self._predictor = predictor
        self._planner = planner
        self._learnt = learnt
        self._trace: LabTrace | None = None
        self._rows: Rows = slice(0)

    def begin(self, trace: LabTrace, rows: Rows) -> None:
        self._trace, self._rows = trace, rows
        self._predictor.begin(trace.token_ids[rows])

    def chose(self, layer: int, expert_ids: Ids) -> None:
        self._predictor.observe(layer, expert_ids)

    def look(self, tap: Tap, layer: int, loads_per_layer: float) -> Callable[[], None] | None:
        if tap is Tap.SHARED:
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
    """Loads ahead by the guesses of later layers' gates, which the trace has recorded."""

    def __init__(self, planner: LookaheadPlanner, tap: Tap) -> None:
        self._planner = planner
        self._tap = tap
        self._rows: Rows = slice(0)
        self._logits: dict[int, NDArray[np.floating]] = {}

    def begin(self, trace: LabTrace, rows: Rows) -> None:
        self._rows = rows
        self._logits = {guesses.distance: guesses.logits for guesses in trace.guesses if guesses.tap is self._tap}

    def chose(self, layer: int, expert_ids: Ids) -> None:
        """Do nothing: gates do not use the choices of earlier layers."""

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
        """Do nothing: gates do not learn."""

    def _ask(self, layer: int, distances: Sequence[int]) -> None:
        for distance in distances:
            logits = self._logits[distance][layer, self._rows]
            self._planner.ask(layer, [distance], [logits])


@dataclass(frozen=True, slots=True)
class LinkModel:
    """bytes_per_second: bandwidth. latency: seconds before the first byte whenever a transfer begins or goes on.

    chunk_bytes: bytes that are copied before the copier checks for a more urgent transfer.
    """

    bytes_per_second: float
    latency: float = 0.0
    chunk_bytes: int = 2**20

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or self.latency < 0 or self.chunk_bytes < 1:
            raise ValueError("a link needs a positive bandwidth and chunk size and no negative latency")

    def load_seconds(self, num_bytes: int) -> float:
        """Return the seconds of a load without interruptions."""
        return self.latency + num_bytes / self.bytes_per_second


class SimulatedCopier:
    """The copying thread of the runtime, with a clock of its own that only moves forward."""

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
        """Copy until `time`; a chunk that is not copied by then is continued later."""
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

        `must_stop` is asked once: the control does not change in between.
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
    """The bound of all eviction policies: with all events of a layer known, the expert needed last is evicted first
    (Belady 1966)."""

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


@dataclass(frozen=True, slots=True)
class RecallFigure:
    """recall: the share of a token's k experts that are among the k likeliest, predicted `distance` layers ahead; mean
    over tokens and layers. precision: the share of experts with a predicted probability of 0.5 or more that are chosen.
    NaN without such predictions; gates have no precision, since they only rank."""

    predictor: str
    distance: int
    recall: float
    precision: float


def recall_figures(
    learning: LabTrace, held_out: LabTrace, choices: Sequence[str], max_distance: int = MAX_DISTANCE
) -> list[RecallFigure]:
    """Return the recall of each of `choices` (PREDICTOR_NAMES and `popularity`) at each distance, from observed layers.

    Only held-out tokens are predicted. They come one at a time, and each is learnt after it was predicted. The learning
    tokens only enter the statistics.
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


def _score_learnt(scores: Sequence[_Score], learning: LabTrace, held_out: LabTrace, *, by_popularity: bool) -> None:
    """Score held-out tokens as if one at a time, but predict them together between two computations of affinity."""
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


def _learn(learnt: LearntAffinity, trace: LabTrace, row: int) -> None:
    learnt.statistics.update(trace.ids[:, row : row + 1], trace.token_ids[row : row + 1])
    learnt.step_done()


@dataclass(slots=True)
class _Score:
    """Counts of experts over tokens and layers, for one distance."""

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
