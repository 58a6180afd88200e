"""Reasons to expect experts: how popular they are, what was chosen before, what a later gate says early. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from experts.prediction.predictor import BEFORE, Ids, ObservedStep, Tap
from experts.routing.affinity import Affinity
from experts.routing.statistics import RoutingStatistics

Float = NDArray[np.float32]

_FIRST_REFRESH = 16
# Tokens that the popularity of the first layer's experts is worth against what a token id was seen to choose.
_TOKEN_PSEUDO_COUNTS = np.float32(1.0)


class LearntAffinity:
    """The affinity behind routing statistics that somebody else gathers, computed anew at growing intervals.

    refresh_steps: the longest interval. A single one serves all sources of a predictor; whoever runs the steps calls
    `step_done`.
    """

    __slots__ = ("_affinity", "_due_in", "_interval", "_refresh_steps", "statistics")

    def __init__(self, statistics: RoutingStatistics, refresh_steps: int = 512) -> None:
        self.statistics = statistics
        self._refresh_steps = refresh_steps
        self._interval = min(_FIRST_REFRESH, refresh_steps)
        self._due_in = self._interval
        self._affinity = Affinity.of(statistics)

    @property
    def current(self) -> Affinity:
        return self._affinity

    @property
    def steps_until_refresh(self) -> int:
        """`current` stays what it is until so many more steps are done."""
        return self._due_in

    def step_done(self) -> None:
        self._due_in -= 1
        if self._due_in <= 0:
            self._affinity = Affinity.of(self.statistics)
            self._interval = min(2 * self._interval, self._refresh_steps)
            self._due_in = self._interval


class PopularitySource:
    """Every token may choose what tokens choose most."""

    __slots__ = ("_learnt",)

    def __init__(self, learnt: LearntAffinity) -> None:
        self._learnt = learnt

    def probabilities(self, step: ObservedStep, layer: int, distance: int) -> Float | None:
        popularity = self._learnt.current.popularity()[layer + distance]
        return np.broadcast_to(popularity, (len(step.token_ids), len(popularity)))

    def learn(self, step: ObservedStep) -> None:
        """The statistics learn."""

    def end(self, requests: Iterable[int]) -> None:
        """Nothing is kept of a request."""


class AffinitySource:
    """What follows the experts that a token has chosen; before the first layer, what its token id says.

    Each chosen expert, of this layer and of those before it that lie within the statistics' greatest distance,
    multiplies an expert's popularity by how much likelier it makes it (`Affinity.log_lifts`, so that layers that say
    nothing do not add their noise). The k factors of a layer overlap, so each counts with exponent k^-½: less than if
    they were independent, more than their mean. Layers count as if they were.

    With `BEFORE` and a distance beyond the first layer, the experts expected there stand in for chosen ones.
    """

    __slots__ = ("_learnt", "_lifts", "_lifts_of")

    def __init__(self, learnt: LearntAffinity) -> None:
        self._learnt = learnt
        self._lifts: dict[tuple[int, int], tuple[Float, Float]] = {}
        self._lifts_of = learnt.current

    def probabilities(self, step: ObservedStep, layer: int, distance: int) -> Float | None:
        affinity = self._learnt.current
        if layer == BEFORE:
            first = self._first_experts(step.token_ids)
            if distance == 1:
                return first
            if distance - 1 not in affinity.distances():
                return None
            following = affinity.conditional(distance - 1)[0]
            return np.minimum(first @ following / first.sum(axis=1, keepdims=True), 1)
        if layer not in step.ids or distance not in affinity.distances():
            return None
        popularity = self._logarithms(layer, distance)[0]
        top_k = step.ids[layer].shape[1]
        lifts = np.zeros((len(step.token_ids), len(popularity)), np.float32)
        for earlier in range(layer, -1, -1):
            span = layer - earlier + distance
            if span not in affinity.distances():
                break
            if earlier in step.ids:
                lifts += self._logarithms(earlier, span)[1][step.ids[earlier]].sum(axis=1)
        odds = np.exp(popularity + lifts * np.float32(top_k**-0.5))
        odds *= np.float32(top_k) / odds.sum(axis=1, keepdims=True)
        return np.minimum(odds, 1, out=odds)

    def learn(self, step: ObservedStep) -> None:
        """The statistics learn."""

    def end(self, requests: Iterable[int]) -> None:
        """Nothing is kept of a request."""

    def _logarithms(self, layer: int, distance: int) -> tuple[Float, Float]:
        """[E] of popularity at layer + distance and [E, E] of what an expert of `layer` multiplies it by.

        They are taken when first asked for, so that no step pays for all of a new affinity.
        """
        affinity = self._learnt.current
        if affinity is not self._lifts_of:
            self._lifts_of = affinity
            self._lifts.clear()
        found = self._lifts.get((layer, distance))
        if found is None:
            popularity = np.log(affinity.popularity()[layer + distance])
            found = popularity, affinity.log_lifts(layer, distance)
            self._lifts[layer, distance] = found
        return found

    def _first_experts(self, token_ids: Ids) -> Float:
        """[T, E]."""
        popularity = self._learnt.current.popularity()[0]
        top_k = np.float32(self._learnt.statistics.spec.top_k)
        found = np.empty((len(token_ids), len(popularity)), np.float32)
        for row, token_id in enumerate(token_ids.tolist()):
            counts = self._learnt.statistics.first_experts(token_id)
            if counts is None:
                found[row] = popularity
                continue
            seen = counts.sum() / top_k
            found[row] = (counts + _TOKEN_PSEUDO_COUNTS * popularity) / (seen + _TOKEN_PSEUDO_COUNTS)
        return found


class GateSource:
    """What the gate of a later layer says of an earlier state (Eliseev and Mazur 2023; Fate, arXiv 2502.12224).

    An expert's margin is how far its logit lies above the middle between the k-th and the next one, in standard
    deviations of the token's logits. slope: the log odds per standard deviation, before anything is learnt.
    """

    __slots__ = ("_slope", "_tap", "_top_k")

    def __init__(self, tap: Tap, top_k: int, slope: float = 4.0) -> None:
        self._tap = tap
        self._top_k = top_k
        self._slope = np.float32(slope)

    def probabilities(self, step: ObservedStep, layer: int, distance: int) -> Float | None:
        logits = step.gates.get((self._tap, layer, distance))
        return None if logits is None else self.of_logits(logits)

    def of_logits(self, logits: Float) -> Float:
        """[T, E] of a gate's logits [T, E]."""
        logits = logits.astype(np.float32, copy=False)
        found: Float = 1 / (1 + np.exp(-self._slope * gate_margin(logits, self._top_k)))
        return found

    def learn(self, step: ObservedStep) -> None:
        """There is nothing to learn: the gate was trained."""

    def end(self, requests: Iterable[int]) -> None:
        """Nothing is kept of a request."""


def gate_margin(logits: Float, top_k: int) -> Float:
    """[T, E]: how far above the edge of being chosen, in standard deviations of the row. logits: [T, E]."""
    num_experts = logits.shape[1]
    if top_k == num_experts:
        return np.ones_like(logits)
    split = num_experts - top_k
    ordered = np.sort(logits, axis=1)
    edge = (ordered[:, split - 1] + ordered[:, split]) / 2
    centred = logits - logits.sum(axis=1, keepdims=True) / num_experts
    spread = np.sqrt(np.einsum("te,te->t", centred, centred) / num_experts) + np.float32(1e-6)
    found: Float = (logits - edge[:, None]) / spread[:, None]
    return found
