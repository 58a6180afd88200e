"""What is asked for when the gates of later layers are believed as they are. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from math import ceil

import numpy as np
from numpy.typing import NDArray

from experts.memory.residency_control import ResidencyControl
from experts.memory.transfers import Priority
from experts.prediction.predictor import Float, StepPredictor, Tap


class LookaheadPlanner:
    """Asks for the k experts that each token's preview ranks first, those that most tokens want before the others.

    Every second layer looks, at two layers each, so that each layer is predicted once for half as many looks; the first
    one looks at all that are near. `ask` is the decision. `expect` and `request` are the calls of
    `experts.prefetch.planning.PrefetchPlanner`, for a simulation, which hears gates through a predictor.
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
