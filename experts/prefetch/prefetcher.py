"""Predictions at work: follows the computation through the layers and asks for the experts to come."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from experts.memory.expert_memory import ExpertMemory
from experts.prediction.predictor import BEFORE, Ids, Predictor, Tap
from experts.prediction.sources import LearntAffinity
from experts.prefetch.gates_ahead import GatesAhead
from experts.prefetch.planning import PrefetchPlanner
from experts.routing.recorder import RoutingRecorder
from experts.routing.step_routing import NOT_COMPUTED


class LayerListener(Protocol):
    """Hears the computation of steps, and may ask for experts. See `Prefetcher`.

    is_on: whether it asks for any in the step that runs.
    """

    @property
    def is_on(self) -> bool: ...

    def begin_step(self, token_ids: NDArray[np.int64], requests: Ids) -> None: ...

    def observe(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None: ...

    def after_layer(self, layer: int, residual: Tensor) -> None: ...

    def end_step(self, ended_requests: Iterable[int]) -> None: ...


class Prefetcher:
    """Called by the computing thread, which pays for predictions: `ExpertMemory.predictor_seconds` counts that.

    A wrong prediction costs time and never changes what is computed. Layers must be told in order within a step.
    """

    def __init__(
        self,
        memory: ExpertMemory,
        predictor: Predictor,
        planner: PrefetchPlanner,
        learnt: LearntAffinity,
        gates: Mapping[Tap, GatesAhead],
    ) -> None:
        """planner: asks this predictor and tells the control of this memory. learnt: what the predictor learns from.
        gates: of each tap that the predictor listens to."""
        self._memory = memory
        self._predictor = predictor
        self._planner = planner
        self._learnt = learnt
        self._recorder = RoutingRecorder(learnt.statistics)
        self._gates = gates
        self._token_ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._ids: NDArray[np.int16] = np.empty((0, 0, 0), np.int16)

    @property
    def is_on(self) -> bool:
        return True

    def begin_step(self, token_ids: NDArray[np.int64], requests: Ids) -> None:
        """A step of T tokens begins: token_ids, requests [T]."""
        started = time.perf_counter()
        spec = self._learnt.statistics.spec
        self._token_ids = token_ids
        self._ids = np.full((spec.num_layers, len(token_ids), spec.top_k), NOT_COMPUTED, np.int16)
        self._predictor.begin(token_ids, requests)
        self._plan(BEFORE)
        self._memory.predictor_seconds += time.perf_counter() - started

    def observe(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        """The gate of a layer chose: x [T, H] is what it saw, expert_ids and weights [T, k]."""
        started = time.perf_counter()
        chosen = expert_ids.cpu().numpy()
        if len(chosen) == len(self._token_ids):
            self._ids[layer] = chosen
        self._predictor.observe(layer, chosen, weights.cpu().numpy())
        self._hear_gates(Tap.EARLY, layer, x)
        self._plan(layer)
        self._memory.predictor_seconds += time.perf_counter() - started

    def after_layer(self, layer: int, residual: Tensor) -> None:
        """A layer is computed, residual [T, H]: the last look before the next one. Not called for the last layer."""
        if Tap.LATE not in self._gates:
            return
        started = time.perf_counter()
        self._hear_gates(Tap.LATE, layer, residual)
        self._plan(layer)
        self._memory.predictor_seconds += time.perf_counter() - started

    def end_step(self, ended_requests: Iterable[int]) -> None:
        """The step is computed, and these requests are over."""
        started = time.perf_counter()
        self._recorder.add(self._ids, self._token_ids.tolist())
        self._learnt.step_done()
        self._predictor.end(ended_requests)
        self._memory.predictor_seconds += time.perf_counter() - started

    def _hear_gates(self, tap: Tap, layer: int, state: Tensor) -> None:
        if tap in self._gates and len(state):
            for distance, logits in self._gates[tap](layer, state):
                self._predictor.observe_gate(tap, layer, distance, logits)

    def _plan(self, layer: int) -> None:
        expected = self._planner.expect(layer)
        if expected:
            self._memory.decide(lambda loads: self._planner.request(layer, expected, loads))
