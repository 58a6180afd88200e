"""What is asked for when the gate of a later layer is believed as it is, at one distance. Pure."""

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

    `ask` is the decision. `expect` and `request` are the calls of `experts.prefetch.planning.PrefetchPlanner`, for a
    simulation, which hears gates through a predictor.
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

    def distance(self, loads_per_layer: float) -> int:
        """How far a step looks: as many layers as a load takes, and one."""
        return min(ceil(1 / loads_per_layer) + 1, self._max_distance)

    def looks(self, layer: int, distance: int) -> bool:
        """Whether there is a layer to look at."""
        return layer + distance < len(self._control.layers)

    def ask(self, layer: int, distance: int, logits: NDArray[np.floating]) -> None:
        """logits: [T, E], of the gate at layer + distance. The caller holds whatever lock guards the control."""
        chosen = np.argpartition(-logits, self._top_k - 1, axis=1)[:, : self._top_k]
        wanted = [expert for expert, _ in Counter(chosen.ravel().tolist()).most_common()]
        if self._experts_here is not None:
            here = self._experts_here(layer + distance)
            wanted = [expert for expert in wanted if expert in here]
        self._control.predict(layer + distance, wanted, Priority.NEXT_LAYER)

    def expect(self, layer: int) -> list[Float]:
        """Nothing: the gates are looked at when it is known how far."""
        return []

    def request(self, layer: int, expected: list[Float], loads_per_layer: float) -> None:
        assert self._predictor is not None
        distance = self.distance(loads_per_layer)
        logits = self._predictor.gate(self._tap, layer, distance)
        if logits is not None and self.looks(layer, distance):
            self.ask(layer, distance, logits)
