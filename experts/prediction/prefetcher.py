"""Observers that ask for experts ahead of their use, and an observer that counts how well they predict.

`Prefetcher` follows a predictor by the rank's own rows; `RankPrefetcher` does so on one rank of several.
`GateRecall` counts how well gates predict on one rank of several.
"""

from __future__ import annotations

import time
from array import array

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experts.memory.memory import ExpertMemory
from experts.observer import PlannedStep, StepObserver
from experts.prediction.planning import PrefetchPlanner
from experts.routing.choices import NOT_COMPUTED, RoutingRecorder
from experts.routing.gates import GatesAhead
from experts.routing.predictors import BEFORE, AffinityPredictor, Ids, LearntAffinity, RecallSample

# The most rows of a step that `GateRecall` counts.
_MAX_ROWS = 8


class PrefetchObserver(StepObserver[PlannedStep, object]):
    """Asks for experts ahead of their use.

    It runs in the thread that computes, and its time counts as `ExpertMemory.predictor_seconds`. A wrong prediction
    costs time and never changes a token.
    """

    @property
    def is_on(self) -> bool:
        """True if the running step prefetches."""
        return True

    @property
    def gains(self) -> list[tuple[int, bool, float]]:
        """The share of a step's time that prefetching saves, see `PrefetchJudge.gains`; empty without a judge."""
        return []


class Prefetcher(PrefetchObserver):
    """Asks for the experts that a predictor expects the rank's own rows to choose."""

    def __init__(
        self, memory: ExpertMemory, predictor: AffinityPredictor, planner: PrefetchPlanner, learnt: LearntAffinity
    ) -> None:
        """planner: asks `predictor` and instructs the control of `memory`. learnt: what the predictor learns from."""
        self._memory = memory
        self._predictor = predictor
        self._planner = planner
        self._learnt = learnt
        self._recorder = RoutingRecorder(learnt.statistics)
        self._token_ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._ids: NDArray[np.int16] = np.empty((0, 0, 0), np.int16)
        # The choices for the rank's own rows by the gate of the layer that is computed.
        self._own_ids = torch.empty((0, 0), dtype=torch.int64)

    def begin(self, plan: PlannedStep) -> None:
        started = time.perf_counter()
        token_ids: array[int] = array("i")
        for chunk in plan.chunks:
            token_ids += chunk.token_ids
        spec = self._learnt.statistics.spec
        self._token_ids = np.array(token_ids, np.int64)
        self._ids = np.full((spec.num_layers, len(token_ids), spec.top_k), NOT_COMPUTED, np.int16)
        self._predictor.begin(self._token_ids)
        self._plan(BEFORE)
        self._memory.predictor_seconds += time.perf_counter() - started

    def arrived(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        # On a single rank all arrived rows are its own.
        self.follow(layer, expert_ids)

    def follow(self, layer: int, expert_ids: Tensor) -> None:
        """Observe that a gate chose expert_ids [T, k] for the rank's own rows, and ask for experts of later layers.

        Layers come in order.
        """
        started = time.perf_counter()
        chosen = expert_ids.cpu().numpy()
        if len(chosen) == len(self._token_ids):
            self._ids[layer] = chosen
        self._predictor.observe(layer, chosen)
        self._plan(layer)
        self._memory.predictor_seconds += time.perf_counter() - started

    def launched(self) -> None:
        started = time.perf_counter()
        self._recorder.add(self._ids, self._token_ids.tolist())
        self._learnt.step_done()
        self._predictor.end_step()
        self._memory.predictor_seconds += time.perf_counter() - started

    def _plan(self, layer: int) -> None:
        expected = self._planner.expect(layer)
        if expected:
            self._memory.decide(lambda loads: self._planner.request(layer, expected, loads))


class RankPrefetcher(Prefetcher):
    """A prefetcher on one rank of several. It follows a layer once the loads that the layer needs have begun."""

    def chose(self, layer: int, expert_ids: Tensor) -> None:
        self._own_ids = expert_ids

    def arrived(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        self.follow(layer, self._own_ids)


class GateRecall(StepObserver[PlannedStep, object]):
    """Counts how well a prefetcher's gates predict the choices of the rank's own rows, at all distances.

    The prefetcher cannot count that itself: it receives rows of all ranks, and other rows in each layer.
    """

    def __init__(self, prefetcher: PrefetchObserver, gates: GatesAhead, recall: RecallSample) -> None:
        """prefetcher: observes before this observer. gates: the gates that the prefetcher uses."""
        self._prefetcher = prefetcher
        self._gates = gates
        self._recall = recall
        self._num_rows = 0
        self._is_counting = False
        self._chosen: dict[int, Ids] = {}

    def begin(self, plan: PlannedStep) -> None:
        self._num_rows = sum(len(chunk.token_ids) for chunk in plan.chunks)
        self._is_counting = self._prefetcher.is_on and self._num_rows > 0 and self._recall.is_counting

    def gated(self, layer: int, x: Tensor, expert_ids: Tensor) -> None:
        if not self._is_counting or len(x) != self._num_rows:
            return
        every = -(-self._num_rows // _MAX_ROWS)
        self._chosen[layer] = expert_ids[::every].cpu().numpy()
        for distance, logits in self._gates(layer, x[::every]):
            self._recall.rank(self._gates.name, layer, distance, logits)

    def launched(self) -> None:
        if self._prefetcher.is_on and self._num_rows:
            self._recall.end_step(self._chosen)
            self._chosen.clear()
        self._is_counting = False

    def abandon(self, plan: PlannedStep) -> None:
        self._chosen.clear()
        self._is_counting = False
