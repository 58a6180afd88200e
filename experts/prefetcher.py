"""Predictions at work: follows the computation through the layers and asks for the experts to come."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from experts.expert_memory import ExpertMemory
from experts.prediction import BEFORE, Ids, Predictor, Tap
from experts.prefetch_planning import PrefetchPlanner


class Gate(Protocol):
    """The gate of a layer, for states that are not its own."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, E], the larger the likelier."""


class Prefetcher:
    """Called by the computing thread, which pays for predictions: `ExpertMemory.predictor_seconds` counts that.

    A wrong prediction costs time and never changes what is computed.
    """

    def __init__(
        self, memory: ExpertMemory, predictor: Predictor, planner: PrefetchPlanner, gates: Sequence[Gate]
    ) -> None:
        """planner: asks this predictor and tells the control of this memory. gates: of each layer with experts, if
        the predictor listens to them; else none."""
        self._memory = memory
        self._predictor = predictor
        self._planner = planner
        self._gates = gates

    def begin_step(self, token_ids: Ids, requests: Ids) -> None:
        """A step of T tokens begins: token_ids, requests [T]."""
        started = time.perf_counter()
        self._predictor.begin(token_ids, requests)
        self._plan(BEFORE)
        self._memory.predictor_seconds += time.perf_counter() - started

    def observe(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        """The gate of a layer chose: x [T, H] is what it saw, expert_ids and weights [T, k]."""
        started = time.perf_counter()
        self._predictor.observe(layer, expert_ids.numpy(), weights.numpy())
        for distance in range(1, self._planner.rules.max_distance + 1):
            if layer + distance < len(self._gates):
                logits = self._gates[layer + distance](x)
                self._predictor.observe_gate(Tap.EARLY, layer, distance, logits.float().numpy())
        self._plan(layer)
        self._memory.predictor_seconds += time.perf_counter() - started

    def end(self, requests: Iterable[int]) -> None:
        """These requests are over."""
        self._predictor.end(requests)

    def _plan(self, layer: int) -> None:
        expected = self._planner.expect(layer)
        if expected:
            self._memory.decide(lambda loads: self._planner.request(layer, expected, loads))
