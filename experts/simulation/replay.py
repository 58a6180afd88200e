"""Replays routing traces through the residency, prediction and transfer decisions of the runtime, by a clock. Pure.

The objects are those of the runtime (`ResidencyControl`, `Predictor`, `PrefetchPlanner`); only the copier and the clock
are simulated. An event, all that a step asks of one layer, is decided at once: replaying its experts one by one would
count misses that no runtime has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experts.memory.residency import SlotState
from experts.memory.residency_control import ResidencyControl, ResidencyCounters
from experts.prediction.predictor import BEFORE, Predictor, Tap
from experts.prediction.sources import LearntAffinity
from experts.prefetch.planning import PrefetchPlanner
from experts.prefetch.prefix_warmth import PrefixWarmth
from experts.routing.traces import RoutingTrace
from experts.simulation.link_model import LinkModel, SimulatedCopier

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
