"""The cheapest way to load ahead: what the gate of a later layer would choose now is taken for what it will choose."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from math import ceil

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from experts.expert_memory import ExpertMemory
from experts.gates import GatePreview
from experts.predictor import Float, Ids, StepPredictor, Tap
from experts.prefetch_planning import PrefetchSwitch
from experts.prefetcher import LayerListener
from experts.residency import Priority, ResidencyControl

# Whether prefetches pay, by what steps with and without them waited.


# Steps without prefetches, to know what waiting costs then.
_REFERENCE_STEPS = 32


class PrefetchJudge:
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
            # In seconds: what the step waited less than it would have without, against the time of predicting.
            self._switch.step_done(gain=self._stall_per_expert * num_experts - stall, cost=prediction)

    def _refer(self, stall_per_expert: float) -> None:
        mean = stall_per_expert if self._stall_per_expert is None else self._stall_per_expert
        self._stall_per_expert = mean + (stall_per_expert - mean) / _REFERENCE_STEPS


# What is asked for when the gates of later layers are believed as they are. Pure.


class LookaheadPlanner:
    """Asks for the k experts that each token's preview ranks first, those that most tokens want before the others.

    Every second layer looks, at two layers each, so that each layer is predicted once for half as many looks; the first
    one looks at all that are near. `ask` is the decision. `expect` and `request` are the calls of
    `experts.prefetch_planning.PrefetchPlanner`, for a simulation, which hears gates through a predictor.
    """

    __slots__ = ("_control", "_experts_here", "_max_distance", "_predictor", "_tap", "_top_k")

    def __init__(
        self,
        control: ResidencyControl,
        tap: Tap,
        top_k: int,
        max_distance: int,
        predictor: StepPredictor | None = None,
        experts_here: Callable[[int], Collection[int]] | None = None,
    ) -> None:
        """predictor: whose gates `request` looks at. experts_here: those of a layer that this rank holds now, None if
        all."""
        self._experts_here = experts_here
        self._control = control
        self._tap = tap
        self._top_k = top_k
        self._max_distance = max_distance
        self._predictor = predictor

    def reach(self, loads_per_layer: float) -> int:
        """How far a step looks: as many layers as a load takes, one, and the one that does not look itself."""
        return min(ceil(1 / loads_per_layer) + 2, self._max_distance)

    def distances(self, layer: int, reach: int) -> range:
        """How far ahead the layers are that `layer` looks at, without a gap; empty if it does not look."""
        between = min(reach, 2)
        if layer % between:
            return range(0)
        nearest = 1 if layer == 0 else reach - between + 1
        return range(nearest, min(reach, len(self._control.layers) - 1 - layer) + 1)

    def ask(self, layer: int, distances: range, logits: NDArray[np.floating]) -> None:
        """logits: [D, T, E], of the gates at layer + each of the D distances. The caller holds whatever lock guards the
        control."""
        for distance, wanted in zip(distances, self._wanted(logits), strict=True):
            if self._experts_here is not None:
                here = self._experts_here(layer + distance)
                wanted = [expert for expert in wanted if expert in here]
            self._control.predict(layer + distance, wanted, Priority.NEXT_LAYER)

    def _wanted(self, logits: NDArray[np.floating]) -> list[list[int]]:
        """For each distance."""
        top_k = self._top_k
        if logits.shape[1] == 1:
            ranked: list[list[int]] = logits[:, 0].argsort(axis=1)[:, : -top_k - 1 : -1].tolist()
            return ranked
        chosen = logits.argpartition(-top_k, axis=2)[:, :, -top_k:].reshape(len(logits), -1)
        return [[expert for expert, _ in Counter(of_all).most_common()] for of_all in chosen.tolist()]

    def expect(self, layer: int) -> list[Float]:
        """Nothing: the gates are looked at when it is known how far."""
        return []

    def request(self, layer: int, expected: list[Float], loads_per_layer: float) -> None:
        assert self._predictor is not None
        for distance in self.distances(layer, self.reach(loads_per_layer)):
            logits = self._predictor.gate(self._tap, layer, distance)
            if logits is not None:
                self.ask(layer, range(distance, distance + 1), logits[None])


class GateLookahead(LayerListener):
    """Predicts each layer once per step, some layers before: as many as a load takes, and a little more.

    No probabilities, no learning: on a CPU every microsecond between two layers counts. What is asked for is decided by
    a `LookaheadPlanner`.
    """

    def __init__(
        self,
        memory: ExpertMemory,
        control: ResidencyControl,
        preview: GatePreview,
        top_k: int,
        judge: PrefetchJudge | None,
        experts_here: Callable[[int], Collection[int]] | None = None,
    ) -> None:
        """control: that of the memory. judge: None to predict in every step. experts_here: those of a layer that this
        rank holds now, None if all."""
        self._memory = memory
        self._preview = preview
        self._planner = LookaheadPlanner(control, preview.tap, top_k, preview.max_distance, experts_here=experts_here)
        self._judge = judge
        # What is told of are rows of other ranks too, and not the same ones in each layer.
        self._recall = None if experts_here is not None else memory.recall
        self._chosen: dict[int, Ids] = {}
        self._is_on = True
        self._reach = 1

    @property
    def is_on(self) -> bool:
        return self._is_on

    def begin_step(self, token_ids: Ids, requests: Ids) -> None:
        self._is_on = self._judge is None or self._judge.begin_step()
        self._reach = self._planner.reach(self._memory.loads_per_layer())

    def arrived(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        if not len(x):
            return
        if self._is_on and self._recall is not None and self._recall.is_counting:
            self._chosen[layer] = expert_ids.cpu().numpy()
        if self._preview.tap is Tap.EARLY:
            self._look(layer, x)

    def after(self, layer: int, residual: Tensor) -> None:
        if self._preview.tap is Tap.LATE:
            self._look(layer, residual)

    def end_step(self, ended_requests: Iterable[int]) -> None:
        if self._is_on and self._recall is not None:
            self._recall.end_step(self._chosen)
            self._chosen.clear()
        if self._judge is not None:
            self._judge.end_step()

    def _look(self, layer: int, state: Tensor) -> None:
        distances = self._planner.distances(layer, self._reach) if self._is_on else ()
        if not distances:
            return
        started = time.perf_counter()
        logits = self._preview(layer, distances, state)
        self._memory.decide(lambda _: self._planner.ask(layer, distances, logits))
        if self._recall is not None and self._recall.is_counting:
            for distance, of_distance in zip(distances, logits, strict=True):
                self._recall.rank(f"gate-{self._preview.tap.value}", layer, distance, of_distance)
        self._memory.predictor_seconds += time.perf_counter() - started
