"""What one rank of several needs: experts for its own rows, and for those that come from other ranks. Pure.

Of the rows at home on a rank everything is known, as if there were no other. Of the others it sees in each layer which
of its experts they come for, but neither their tokens nor where they go besides; they are expected to choose what such
rows have chosen so far.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from experts.prediction.predictor import Float, Ids, Predictor, Tap
from experts.prediction.sources import LearntAffinity
from experts.routing.statistics import StatisticsSpec

# What rows are expected to choose is known as if so many had been seen to choose what rows at home do.
_PRIOR_ROWS = 8.0


class VisitorShares:
    """By layer, which share of the rows of other ranks comes for each expert here. Older rows count less.

    Of an expert only those rows count that were computed while it was here.
    """

    __slots__ = ("_chosen", "_half_life", "_rows")

    def __init__(self, num_layers: int, num_experts: int, half_life: float = 100_000) -> None:
        """half_life: in rows of other ranks."""
        self._half_life = half_life
        self._chosen: Float = np.zeros((num_layers, num_experts), np.float32)
        self._rows: Float = np.zeros((num_layers, num_experts), np.float32)

    def add(self, layer: int, num_rows: int, chosen: NDArray[np.integer], here: NDArray[np.bool_]) -> None:
        """Other ranks had `num_rows` rows, of which chosen[e] came for expert e; here: [E], those that are here."""
        fade = np.float32(2 ** (-num_rows / self._half_life))
        self._chosen[layer] *= fade
        self._rows[layer] *= fade
        self._chosen[layer] += np.where(here, chosen, 0)
        self._rows[layer] += np.where(here, np.float32(num_rows), 0)

    def of(self, layer: int, popularity: Float) -> Float:
        """[E]: the share that comes for each expert. popularity: [E], what is thought before any has been seen."""
        prior = np.float32(_PRIOR_ROWS)
        found: Float = (self._chosen[layer] + prior * popularity) / (self._rows[layer] + prior)
        return found


class RankPredictor:
    """A `Predictor` that follows the rows at home and expects no expert that is not here.

    `visited` is to be called once for each layer, after its `observe`.
    """

    __slots__ = (
        "_experts_here",
        "_has_rows",
        "_here",
        "_home",
        "_learnt",
        "_num_experts",
        "_num_visitors",
        "_own",
        "_shares",
    )

    def __init__(
        self,
        own: Predictor,
        learnt: LearntAffinity,
        experts_here: Callable[[int], Collection[int]],
        num_visitors: Callable[[int], int],
    ) -> None:
        """own: of rows at home, which learns from `learnt`. experts_here: those of a layer that this rank holds now.
        num_visitors: how many rows other ranks have in a layer of the step that runs."""
        spec: StatisticsSpec = learnt.statistics.spec
        self._own = own
        self._learnt = learnt
        self._experts_here = experts_here
        self._num_visitors = num_visitors
        self._num_experts = spec.num_experts
        self._shares = VisitorShares(spec.num_layers, spec.num_experts)
        # By layer what `experts_here` said last, and the same as [E].
        self._here: dict[int, tuple[Collection[int], NDArray[np.bool_]]] = {}
        self._has_rows = False
        self._home: NDArray[np.integer] = np.empty((0, spec.top_k), np.int64)

    def begin(self, token_ids: Ids, requests: Ids) -> None:
        self._has_rows = bool(len(token_ids))
        if self._has_rows:
            self._own.begin(token_ids, requests)

    def observe(self, layer: int, expert_ids: Ids, weights: Float) -> None:
        self._home = expert_ids
        if self._has_rows:
            self._own.observe(layer, expert_ids, weights)

    def observe_gate(self, tap: Tap, layer: int, distance: int, logits: Float) -> None:
        if self._has_rows:
            self._own.observe_gate(tap, layer, distance, logits)

    def visited(self, layer: int, expert_ids: Ids) -> None:
        """What the rows chose that are computed here, those at home among them: [M, k], -1 for experts elsewhere."""
        here = self._is_here(layer)
        # Rows at home are served here wherever they can be.
        chosen = self._count(expert_ids) - self._count(self._home)
        self._shares.add(layer, self._num_visitors(layer), chosen, here)

    def predict(self, layer: int, distance: int) -> Float:
        target = layer + distance
        spared: Float = np.ones(self._num_experts, np.float32)
        if num_visitors := self._num_visitors(target):
            shares = self._shares.of(target, self._learnt.current.popularity()[target])
            spared = (1 - np.minimum(shares, 1)) ** np.float32(num_visitors)
        if self._has_rows:
            spared = spared * (1 - self._own.predict(layer, distance))
        return np.where(self._is_here(target), 1 - spared, np.float32(0))

    def end(self, requests: Iterable[int]) -> None:
        self._own.end(requests)

    def _count(self, expert_ids: Ids) -> NDArray[np.int64]:
        """[E]: how many rows chose each expert."""
        return np.bincount(expert_ids.ravel() + 1, minlength=self._num_experts + 1)[1:]

    def _is_here(self, layer: int) -> NDArray[np.bool_]:
        """[E]. Layers are placed anew between steps."""
        experts = self._experts_here(layer)
        known = self._here.get(layer)
        if known is None or known[0] is not experts:
            is_here = np.zeros(self._num_experts, np.bool_)
            is_here[list(experts)] = True
            known = self._here[layer] = experts, is_here
        return known[1]
