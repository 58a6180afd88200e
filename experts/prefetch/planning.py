"""From predictions to prefetches: which absent experts are worth a copy, and how many arrive in time. Pure.

Experts are unit jobs on one link, and each layer ahead is a deadline. Taking the likeliest first as long as all taken
can still be on time is optimal for such jobs (the greedy rule of a scheduling matroid). With a predictor that follows
routes (`experts.prediction.route_source`) what is taken is the best part of a spanning tree of routes within a byte
budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from experts.memory.eviction import Affinity
from experts.memory.residency import LayerResidency
from experts.memory.residency_control import ResidencyControl
from experts.memory.transfers import Priority
from experts.prediction.predictor import Predictor

Float = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PrefetchRules:
    """What is worth a prefetch.

    min_probability: of an absent expert. keep_probability: of one that is on its way, so that a prediction that
    wavers does not undo what was begun. margin: by how much an expert must be likelier than the one it evicts.
    max_bytes: what one plan may ask for, None for as much as can be on time.
    """

    max_distance: int = 3
    min_probability: float = 0.4
    keep_probability: float = 0.1
    margin: float = 0.2
    max_bytes: int | None = None


@dataclass(slots=True)
class _Candidate:
    probability: float
    distance: int
    expert: int
    begun: bool


class PrefetchPlanner:
    """Tells a `ResidencyControl` what a `Predictor` expects. The caller runs both through the step."""

    __slots__ = ("_control", "_expert_bytes", "_predictor", "_rated", "rules")

    def __init__(
        self,
        predictor: Predictor,
        control: ResidencyControl,
        expert_bytes: int,
        rules: PrefetchRules,
        rated: list[Affinity] | None = None,
    ) -> None:
        """rated: the eviction policy of each layer, if it is the one that wants scores."""
        self._predictor = predictor
        self._control = control
        self._expert_bytes = expert_bytes
        self._rated = rated
        self.rules = rules

    def expect(self, layer: int) -> list[Float]:
        """[E] for each layer after `layer`, nearest first: the predictor's probabilities. Does not touch the control.

        `layer` was observed, or is `BEFORE`.
        """
        num_layers = len(self._control.layers)
        last = min(self.rules.max_distance, num_layers - 1 - layer)
        return [self._predictor.predict(layer, distance) for distance in range(1, last + 1)]

    def request(self, layer: int, expected: list[Float], loads_per_layer: float) -> None:
        """Tells the control what `expect` found; the caller holds whatever lock guards the control.

        Where nothing at all is expected of a layer, nothing is known of it yet: what was asked for stays.

        loads_per_layer: how many experts the link can bring while one layer is computed, as measured.
        """
        # There are few experts and many looks at one of them: lists are faster than arrays.
        by_distance: list[list[float]] = [scores.tolist() for scores in expected]
        taken = self._take(layer, by_distance, loads_per_layer)
        for distance, scores in enumerate(by_distance, start=1):
            if not any(scores):
                continue
            target = layer + distance
            wanted = [candidate.expert for candidate in taken if candidate.distance == distance]
            named = wanted + self._kept(self._control.layers[target], scores, wanted)
            named.sort(key=scores.__getitem__, reverse=True)
            if self._rated is not None:
                self._rated[target].rate(scores)
            self._control.predict(target, named, Priority.NEXT_LAYER if distance == 1 else Priority.SPECULATIVE)

    def _kept(self, residency: LayerResidency, scores: list[float], wanted: list[int]) -> list[int]:
        """Who may not make room for `wanted`, and whose copy goes on."""
        least = min((scores[expert] for expert in wanted), default=1.0) - self.rules.margin
        ready = [expert for expert in residency.resident() if scores[expert] > least]
        return ready + [expert for expert in residency.loading() if scores[expert] >= self.rules.keep_probability]

    def _take(self, layer: int, scores: list[list[float]], loads_per_layer: float) -> list[_Candidate]:
        """The absent experts to ask for."""
        candidates = []
        for distance, of_layer in enumerate(scores, start=1):
            candidates += self._candidates(self._control.layers[layer + distance], of_layer, distance)
        candidates.sort(key=lambda candidate: (not candidate.begun, -candidate.probability))
        room = [ceil(distance * loads_per_layer) for distance in range(1, len(scores) + 1)]
        budget = None if self.rules.max_bytes is None else self.rules.max_bytes // self._expert_bytes
        taken: list[_Candidate] = []
        for candidate in candidates:
            if min(room[candidate.distance - 1 :]) < 1 and not candidate.begun:
                continue
            if not candidate.begun and budget is not None and len(taken) >= budget:
                break
            for place in range(candidate.distance - 1, len(room)):
                room[place] -= 1
            if not candidate.begun:
                taken.append(candidate)
        return taken

    def _candidates(self, residency: LayerResidency, scores: list[float], distance: int) -> list[_Candidate]:
        """Absent experts worth a copy, and those that are being copied, which take time on the link as well."""
        begun = [expert for expert in residency.loading() if scores[expert] >= self.rules.keep_probability]
        found = [_Candidate(scores[expert], distance, expert, begun=True) for expert in begun]
        likeliest = max(scores)
        needed = self.rules.min_probability
        if likeliest < needed:
            return found
        ready = residency.resident()
        if len(ready) == residency.num_slots:
            needed = max(needed, min(scores[expert] for expert in ready) + self.rules.margin)
        if likeliest < needed:
            return found
        return found + [
            _Candidate(probability, distance, expert, begun=False)
            for expert, probability in enumerate(scores)
            if probability >= needed and residency.slot_of(expert) is None
        ]
