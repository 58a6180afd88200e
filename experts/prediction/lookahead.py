"""The cheapest prefetching: apply the gate of a later layer to the present state, and load the experts it chooses."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from experts.memory.memory import ExpertMemory
from experts.memory.residency import ResidencyControl
from experts.observer import PlannedStep
from experts.prediction.cores import FreeCores
from experts.prediction.judge import PrefetchJudge
from experts.prediction.planning import SURE, LookaheadPlanner
from experts.prediction.prefetcher import PrefetchObserver
from experts.routing.files import Tap
from experts.routing.gates import GatePreview, shared_state
from experts.routing.predictors import Ids

# The rows up to which the interpreter lock is held for a look: copying threads must not wait for a prompt's.
_FEW_ROWS = 64


class GateLookahead(PrefetchObserver):
    """Predicts each layer once per step, as many layers ahead as a load takes and a little more.

    A `LookaheadPlanner` decides what to ask for. There are no probabilities and no learning: on a CPU every microsecond
    between two layers counts.
    """

    def __init__(
        self,
        memory: ExpertMemory,
        control: ResidencyControl,
        preview: GatePreview,
        top_k: int,
        judge: PrefetchJudge | None,
        experts_here: Callable[[int], Collection[int]] | None,
    ) -> None:
        """control: the control of `memory`. preview: reads one of the taps, `SHARED` on a single rank only. judge: None
        to predict in every step. experts_here: returns the experts of a layer that this rank holds now; None if it
        holds all."""
        self._memory = memory
        self._preview = preview
        self._planner = LookaheadPlanner(control, top_k, preview.max_distance, experts_here)
        self._judge = judge
        # Among several ranks other rows arrive in each layer, so `GateRecall` counts instead.
        self._recall = None if experts_here is not None else memory.recall
        # By layer, what names the sure experts of the next layer in a single call, where there is such a call.
        self._foresights = preview.foresights(top_k, SURE)
        self._chosen: dict[int, Ids] = {}
        self._is_on = True
        self._reach = 1
        self._cores = FreeCores(torch.get_num_threads())
        # The time, and `_load_seconds`, when the running step began.
        self._began = self._loaded = 0.0

    @property
    def is_on(self) -> bool:
        return self._is_on

    @property
    def gains(self) -> list[tuple[int, bool, float]]:
        return [] if self._judge is None else self._judge.gains()

    def begin(self, plan: PlannedStep) -> None:
        if self._judge is not None:
            num_rows = sum(len(chunk.token_ids) for chunk in plan.chunks)
            self._is_on = self._judge.begin_step(num_rows, has_free_core=self._cores.has_one())
            self._began, self._loaded = time.perf_counter(), self._load_seconds()
        self._reach = self._planner.reach(self._memory.loads_per_layer())

    def arrived(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        if not self._is_on or not len(x):
            return
        if self._recall is not None and self._recall.is_counting:
            self._chosen[layer] = expert_ids.cpu().numpy()
        if self._preview.tap is Tap.EARLY:
            self._look(layer, lambda: x)

    def attended(self, layer: int, residual: Tensor, shared: Tensor | None) -> None:
        if not self._is_on or self._preview.tap is not Tap.SHARED or layer == len(self._foresights):
            return
        foresight = self._foresights[layer]
        is_counting = self._recall is not None and self._recall.is_counting
        if foresight is None or is_counting or len(residual) > _FEW_ROWS or not foresight.takes(residual, shared):
            self._look(layer, lambda: shared_state(residual, shared))
            return
        started = time.perf_counter()
        wanted = foresight(residual, shared)
        self._memory.decide(lambda _: self._planner.ask_for(layer + 1, wanted))
        self._memory.predictor_seconds += time.perf_counter() - started

    def launched(self) -> None:
        if self._is_on and self._recall is not None:
            self._recall.end_step(self._chosen)
            self._chosen.clear()
        if self._judge is not None:
            self._judge.end_step(time.perf_counter() - self._began, self._load_seconds() - self._loaded)

    def abandon(self, plan: PlannedStep) -> None:
        self._chosen.clear()

    def _load_seconds(self) -> float:
        """Return seconds that grow at least as fast as those in which the host or the device waits for experts."""
        return self._memory.stall_seconds + self._memory.copy_seconds

    def _look(self, layer: int, state: Callable[[], Tensor]) -> None:
        distances = self._planner.distances(layer, self._reach)
        if not distances:
            return
        started = time.perf_counter()
        logits = self._preview(layer, distances, state())
        self._memory.decide(lambda _: self._planner.ask(layer, distances, logits))
        if self._recall is not None and self._recall.is_counting:
            for distance, predicted in zip(distances, logits, strict=True):
                self._recall.rank(f"gate-{self._preview.tap.value}", layer, distance, predicted)
        self._memory.predictor_seconds += time.perf_counter() - started
