"""Which experts follow which: smoothed conditional probabilities. Pure.

A token chooses k experts per layer, so P(j at l + d | i at l) is a probability for each j by itself and sums to k
over j. The estimate is the mean of a Dirichlet posterior whose prior is the popularity of j: a pair seen rarely says
no more than how popular its experts are.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import numpy as np
from numpy.typing import NDArray

from experts.routing.statistics import RoutingStatistics

Float = NDArray[np.float32]


class Affinity:
    """P(expert j at layer l + d | expert i at layer l) for d = 1 … max_distance. Immutable."""

    __slots__ = ("_conditional", "_popularity", "_prior", "_tokens")

    def __init__(
        self,
        load: Float,
        transitions: Mapping[int, Float],
        top_k: int,
        pseudo_counts: float | None = None,
    ) -> None:
        """load: [L, E]; transitions[d]: [L - d, E, E], both in tokens, as `RoutingStatistics` has them.

        A token counts for a pair of layers only if both computed it: with k choices in the second one, a row of
        transitions sums to k times the tokens behind it. pseudo_counts: tokens that the prior is worth, by default
        E / 4.
        """
        num_experts = load.shape[1]
        prior = np.float32(num_experts / 4 if pseudo_counts is None else pseudo_counts)
        if not prior > 0:
            raise ValueError(f"pseudo_counts is {pseudo_counts}, but must be positive")
        tokens = load.sum(axis=1, keepdims=True) / top_k
        uniform = np.float32(top_k / num_experts)
        self._popularity: Float = (load + prior * uniform) / (tokens + prior)
        self._prior = prior
        self._tokens: dict[int, Float] = {
            distance: counts.sum(axis=2) / np.float32(top_k) for distance, counts in transitions.items()
        }
        self._conditional = {
            distance: (counts + prior * self._popularity[distance:, None, :])
            / (self._tokens[distance][..., None] + prior)
            for distance, counts in transitions.items()
        }

    @classmethod
    def of(cls, statistics: RoutingStatistics, pseudo_counts: float | None = None) -> Affinity:
        transitions = {distance: statistics.transitions(distance) for distance in statistics.spec.distances()}
        return cls(statistics.load(), transitions, statistics.spec.top_k, pseudo_counts)

    def popularity(self) -> Float:
        """[L, E]: P(a token chooses the expert)."""
        return self._popularity

    def distances(self) -> Set[int]:
        """The distances that `conditional` knows."""
        return self._conditional.keys()

    def conditional(self, distance: int) -> Float:
        """[L - distance, E, E]: P(j at l + distance | i at l)."""
        return self._conditional[distance]

    def log_lifts(self, layer: int, distance: int) -> Float:
        """[E, E]: log of how much likelier i at `layer` makes j at layer + distance, as far as the counts bear it out.

        n tokens that chose i scatter the logarithm of j, of popularity p, with variance (1 - p) / (n p) even if i says
        nothing of it. All logarithms of the two layers are multiplied by the share of their mean square that this does
        not explain: between layers that do not depend on each other it is 0, and many counts leave them as they are
        (shrinkage after James and Stein 1961, with the mean of a pair of layers weighted by how often i and j are met).
        """
        popularity = self._popularity[layer + distance]
        tokens = self._tokens[distance][layer][:, None]
        lifts: Float = np.log(self._conditional[distance][layer]) - np.log(popularity)
        found = float((tokens * popularity * lifts**2).sum())
        by_chance = float((np.square(tokens / (tokens + self._prior)) * (1 - popularity)).sum())
        return lifts * np.float32(1 - by_chance / found if found > by_chance else 0.0)
