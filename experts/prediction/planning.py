"""Decide which predicted experts to ask for. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np
from numpy.typing import NDArray

from experts.memory.eviction import Affinity
from experts.memory.residency import Priority, ResidencyControl
from experts.routing.predictors import AffinityPredictor

Float = NDArray[np.float32]


# An expert is sure to be chosen if its score is above that of the best expert that is not chosen, by more than this
# share of the distance from the mean score to the best.
SURE = 0.2


@dataclass(frozen=True, slots=True)
class PrefetchRules:
    """When an absent expert is worth a prefetch.

    min_probability: the least probability to begin a prefetch. keep_probability: the least probability to go on with
    one, lower so that a wavering prediction does not undo copies. margin: by how much an expert must be likelier than
    the expert it evicts. max_bytes: the bytes that one plan may ask for, None for all bytes that can arrive on time.
    """

    max_distance: int = 3
    min_probability: float = 0.4
    keep_probability: float = 0.1
    margin: float = 0.2
    max_bytes: int | None = None


@dataclass(slots=True)
class _Target:
    """A layer ahead. scores: of all experts; a list, since there are few and each is read several times.

    ready: resident experts. begun: experts on their way that are likely enough to go on. absent: experts worth a copy.
    wanted: the absent experts to ask for, the likeliest first.
    """

    layer: int
    scores: list[float]
    ready: list[int]
    begun: list[int]
    absent: list[int]
    wanted: list[int] = field(default_factory=list)


class PrefetchPlanner:
    """Tells a `ResidencyControl` which experts a `AffinityPredictor` expects. The caller runs both through the step.

    Experts are unit jobs on one link, and each layer ahead is a deadline. Taking the likeliest first as long as all
    taken can still be on time is optimal for such jobs (the greedy rule of a scheduling matroid).
    """

    def __init__(
        self,
        predictor: AffinityPredictor,
        control: ResidencyControl,
        expert_bytes: int,
        rules: PrefetchRules,
        rated: list[Affinity] | None = None,
    ) -> None:
        """rated: the eviction policy of each layer if that is `Affinity`, which needs scores; else None."""
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
        """Tell the control the result of `expect`; the caller holds the lock that guards the control.

        A layer whose scores are all 0 is not known yet: earlier requests stay.

        loads_per_layer: the number of experts that the link loads while one layer is computed, as measured.
        """
        ahead = [self._look(layer + distance, scores.tolist()) for distance, scores in enumerate(expected, start=1)]
        self._take(ahead, loads_per_layer)
        for distance, target in enumerate(ahead, start=1):
            if not any(target.scores):
                continue
            # Experts likelier than this are not evicted for `wanted`.
            least = min(map(target.scores.__getitem__, target.wanted), default=1.0) - self.rules.margin
            kept = [expert for expert in target.ready if target.scores[expert] > least]
            named = target.wanted + kept + target.begun
            named.sort(key=target.scores.__getitem__, reverse=True)
            if self._rated is not None:
                self._rated[target.layer].rate(target.scores)
            priority = Priority.NEXT_LAYER if distance == 1 else Priority.SPECULATIVE
            self._control.predict(target.layer, named, priority)

    def _look(self, layer: int, scores: list[float]) -> _Target:
        residency = self._control.layers[layer]
        ready = residency.resident()
        begun = [expert for expert in residency.loading() if scores[expert] >= self.rules.keep_probability]
        needed = self.rules.min_probability
        if len(ready) == residency.num_slots:
            needed = max(needed, min(map(scores.__getitem__, ready)) + self.rules.margin)
        absent = []
        if max(scores) >= needed:
            absent = [
                expert
                for expert, probability in enumerate(scores)
                if probability >= needed and residency.slot_of(expert) is None
            ]
        return _Target(layer, scores, ready, begun, absent)

    def _take(self, ahead: list[_Target], loads_per_layer: float) -> None:
        """Fill `wanted` of each target. ahead: nearest layer first."""
        room = [ceil(distance * loads_per_layer) for distance in range(1, len(ahead) + 1)]
        for place, target in enumerate(ahead):
            # Copies under way take time on the link as well.
            for later in range(place, len(ahead)):
                room[later] -= len(target.begun)
        candidates = [
            (-target.scores[expert], place, expert) for place, target in enumerate(ahead) for expert in target.absent
        ]
        budget = None if self.rules.max_bytes is None else self.rules.max_bytes // self._expert_bytes
        num_taken = 0
        for _, place, expert in sorted(candidates):
            if min(room[place:]) < 1:
                continue
            if budget is not None and num_taken >= budget:
                break
            for later in range(place, len(room)):
                room[later] -= 1
            ahead[place].wanted.append(expert)
            num_taken += 1


class LookaheadPlanner:
    """Asks for the experts that each token's preview ranks first, as far as they are sure to be among the k that it
    chooses, and for those that most tokens want first.

    Every second layer looks ahead, at two layers, so each layer is predicted once with half as many looks. The first
    layer looks at all near layers.
    """

    def __init__(
        self,
        control: ResidencyControl,
        top_k: int,
        max_distance: int,
        experts_here: Callable[[int], Collection[int]] | None = None,
    ) -> None:
        """experts_here: returns the experts of a layer that this rank holds now; None if it holds all."""
        self._experts_here = experts_here
        self._control = control
        self._top_k = top_k
        self._max_distance = max_distance

    def reach(self, loads_per_layer: float) -> int:
        """Return the largest distance of a step's looks: the layers computed during one load, plus two.

        One of the two is a reserve, the other makes up for the layer that does not look.
        """
        return min(ceil(1 / loads_per_layer) + 2, self._max_distance)

    def distances(self, layer: int, reach: int) -> range:
        """Return the consecutive distances of the layers that `layer` looks at; empty if it does not look."""
        between = min(reach, 2)
        if layer % between:
            return range(0)
        nearest = 1 if layer == 0 else reach - between + 1
        return range(nearest, min(reach, len(self._control.layers) - 1 - layer) + 1)

    def ask(self, layer: int, distances: Sequence[int], logits: Sequence[NDArray[np.floating]]) -> None:
        """Ask for the experts that gates choose. logits: [T, E] for each distance, of the gate at layer + distance.

        The caller holds the lock that guards the control.
        """
        for distance, of_layer in zip(distances, logits, strict=True):
            wanted = self._wanted(of_layer)
            if self._experts_here is not None:
                here = self._experts_here(layer + distance)
                wanted = [expert for expert in wanted if expert in here]
            self.ask_for(layer + distance, wanted)

    def ask_for(self, layer: int, wanted: Sequence[int]) -> None:
        """Ask for experts of a layer that is soon computed, most wanted first. The caller holds the lock."""
        self._control.predict(layer, wanted, Priority.NEXT_LAYER)

    def _wanted(self, logits: NDArray[np.floating]) -> list[int]:
        """Return the experts that tokens are sure to choose by `logits` [T, E], most wanted first.

        A wrong expert takes the link from the right one, and the slot from another expert.
        """
        top_k = self._top_k
        if len(logits) == 1:
            # Between two layers every microsecond counts: numpy's calls take longer for a few experts.
            row = logits[0].tolist()
            order = sorted(range(len(row)), key=row.__getitem__, reverse=True)
            if top_k == len(row):
                return order
            least = row[order[top_k]] + SURE * (row[order[0]] - sum(row) / len(row))
            return [expert for expert in order[:top_k] if row[expert] > least]
        best_left = np.partition(logits, -top_k - 1, axis=1)[:, -top_k - 1] if top_k < logits.shape[1] else -np.inf
        least = best_left + SURE * (logits.max(axis=1) - logits.mean(axis=1))
        counts = (logits > least[:, None]).sum(axis=0)
        ranked: list[int] = (-counts).argsort(kind="stable")[: np.count_nonzero(counts)].tolist()
        return ranked
