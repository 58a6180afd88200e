"""Predictions at work: follows the computation through the layers and asks for the experts to come."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from experts.expert_memory import ExpertMemory
from experts.gate_preview import GatePreview
from experts.prediction import BEFORE, Ids, Predictor, Tap
from experts.prediction_sources import LearntAffinity
from experts.prefetch_planning import PrefetchPlanner
from experts.prefetch_switch import PrefetchSwitch
from experts.recorder import RoutingRecorder
from experts.step_routing import NOT_COMPUTED

# Steps without prefetches, to know what waiting costs then.
_REFERENCE_STEPS = 32


class Prefetcher:
    """Called by the computing thread, which pays for predictions: `ExpertMemory.predictor_seconds` counts that.

    A wrong prediction costs time and never changes what is computed. While the switch is off, a step costs next to
    nothing here.
    """

    def __init__(
        self,
        memory: ExpertMemory,
        predictor: Predictor,
        planner: PrefetchPlanner,
        learnt: LearntAffinity,
        preview: GatePreview | None,
        switch: PrefetchSwitch | None,
    ) -> None:
        """planner: asks this predictor and tells the control of this memory. learnt: what the predictor learns from.
        preview: if the predictor listens to gates. switch: None to predict in every step."""
        self._memory = memory
        self._predictor = predictor
        self._planner = planner
        self._learnt = learnt
        self._recorder = RoutingRecorder(learnt.statistics)
        self._preview = preview
        self._judge = None if switch is None else _Judge(memory, switch)
        self._token_ids: NDArray[np.int64] | None = None
        self._ids: NDArray[np.int16] = np.empty((0, 0, 0), np.int16)

    def begin_step(self, token_ids: NDArray[np.int64], requests: Ids) -> None:
        """A step of T tokens begins: token_ids, requests [T]."""
        self._token_ids = None
        if self._judge is not None and not self._judge.begin_step():
            return
        started = time.perf_counter()
        spec = self._learnt.statistics.spec
        self._token_ids = token_ids
        self._ids = np.full((spec.num_layers, len(token_ids), spec.top_k), NOT_COMPUTED, np.int16)
        self._predictor.begin(token_ids, requests)
        self._plan(BEFORE)
        self._memory.predictor_seconds += time.perf_counter() - started

    def observe(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        """The gate of a layer chose: x [T, H] is what it saw, expert_ids and weights [T, k]."""
        if self._token_ids is None:
            return
        started = time.perf_counter()
        chosen = expert_ids.numpy()
        if len(chosen) == len(self._token_ids):
            self._ids[layer] = chosen
        self._predictor.observe(layer, chosen, weights.numpy())
        if self._preview is not None:
            for distance, logits in enumerate(self._preview(layer, x), start=1):
                self._predictor.observe_gate(Tap.EARLY, layer, distance, logits.float().numpy())
        self._plan(layer)
        self._memory.predictor_seconds += time.perf_counter() - started

    def end_step(self, ended_requests: Iterable[int]) -> None:
        """The step is computed, and these requests are over."""
        started = time.perf_counter()
        if self._token_ids is not None:
            self._recorder.add(self._ids, self._token_ids.tolist())
            self._learnt.step_done()
            self._predictor.end(ended_requests)
            self._memory.predictor_seconds += time.perf_counter() - started
        if self._judge is not None:
            self._judge.end_step()

    def _plan(self, layer: int) -> None:
        expected = self._planner.expect(layer)
        if expected:
            self._memory.decide(lambda loads: self._planner.request(layer, expected, loads))


class _Judge:
    """Measures what steps with prefetches wait less than steps without, and has the switch decide.

    Waiting without prefetches is known per expert that a step needs, from the first steps and from the switch's rests.
    """

    def __init__(self, memory: ExpertMemory, switch: PrefetchSwitch) -> None:
        self._memory = memory
        self._switch = switch
        self._reference_left = _REFERENCE_STEPS
        self._stall_per_expert: float | None = None
        self._on = False
        self._before = (0.0, 0.0, 0)

    def begin_step(self) -> bool:
        """Whether to prefetch in this step."""
        self._on = self._reference_left == 0 and self._switch.on
        self._before = self._memory.costs()
        return self._on

    def end_step(self) -> None:
        stall, prediction, num_experts = (
            after - before for after, before in zip(self._memory.costs(), self._before, strict=True)
        )
        if not self._on:
            self._refer(stall / max(num_experts, 1))
        if self._reference_left > 0:
            self._reference_left -= 1
        else:
            assert self._stall_per_expert is not None
            self._switch.step_done(self._stall_per_expert * num_experts - stall, prediction)

    def _refer(self, stall_per_expert: float) -> None:
        mean = stall_per_expert if self._stall_per_expert is None else self._stall_per_expert
        self._stall_per_expert = mean + (stall_per_expert - mean) / _REFERENCE_STEPS
