"""What one rank of several needs: experts for its own rows, and for those that come from other ranks. Pure.

Of the rows at home on a rank everything is known, as if there were no other. Of the others it sees in each layer which
of its experts they come for, but neither their tokens nor where they go besides. Those that come are expected to choose
what a later gate says of them, if gates are asked; those that stay away, what such rows have chosen so far.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from experts.predictor import BEFORE, Float, Ids, Predictor, Tap
from experts.predictors import CombinedSource, GateSource, LearntAffinity
from experts.routing import StatisticsSpec

# In a layer that computes more rows than these, those of others count by what such rows chose so far alone.
_MAX_ROWS_JUDGED = 64
# What rows are expected to choose is known as if so many had been seen to choose what rows at home do.
_PRIOR_ROWS = 8.0


class RankShare(Protocol):
    """A rank's part in each layer with experts (`experts.dispatch.ExpertParallel`).

    experts_here: those that this rank holds now. num_rows_elsewhere: how many rows other ranks have, in this step.
    """

    def experts_here(self, layer: int) -> Collection[int]: ...

    def num_rows_elsewhere(self, layer: int) -> int: ...


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

    In each layer `visited` is to be called once, and any `observe_gate_of_computed`, before `observe`.
    """

    __slots__ = (
        "_combined",
        "_gate",
        "_gates_of_computed",
        "_gates_of_home",
        "_has_rows",
        "_here",
        "_layer",
        "_learnt",
        "_num_come",
        "_num_experts",
        "_own",
        "_share",
        "_shares",
        "_stays",
    )

    def __init__(
        self,
        own: Predictor,
        combined: CombinedSource,
        learnt: LearntAffinity,
        share: RankShare,
    ) -> None:
        """own: of rows at home, which learns from `learnt`. combined: what it says; as gates are believed there, they
        are believed of other rows. share: of this rank in the step that runs."""
        spec: StatisticsSpec = learnt.statistics.spec
        self._own = own
        self._combined = combined
        self._learnt = learnt
        self._share = share
        self._num_experts = spec.num_experts
        self._shares = VisitorShares(spec.num_layers, spec.num_experts)
        # By layer what `share.experts_here` said last, and the same as [E].
        self._here: dict[int, tuple[Collection[int], NDArray[np.bool_]]] = {}
        self._gate = GateSource(Tap.EARLY, spec.top_k)
        self._has_rows = False
        # The layer whose `visited` came last; which rows at home are computed there, [T], how many of others, and what
        # gates say of them by distance.
        self._layer = BEFORE
        self._stays: NDArray[np.bool_] = np.empty(0, np.bool_)
        self._num_come = 0
        self._gates_of_home: dict[int, Float] = {}
        self._gates_of_computed: dict[int, Float] = {}

    def begin(self, token_ids: Ids, requests: Ids) -> None:
        self._forget_layer(BEFORE)
        self._has_rows = bool(len(token_ids))
        if self._has_rows:
            self._own.begin(token_ids, requests)

    def visited(self, layer: int, home: Ids, computed: Ids) -> None:
        """The gate of a layer chose. home: [T, k], for the rows at home. computed: [M, k], for the rows that come for
        experts here, those at home among them; -1 for experts elsewhere."""
        self._forget_layer(layer)
        here = self._is_here(layer)
        self._stays = np.logical_or.reduce(here[home], axis=1)
        self._num_come = max(0, len(computed) - int(self._stays.sum()))
        # Rows at home are served here wherever they can be.
        chosen = self._count(computed) - self._count(home)
        self._shares.add(layer, self._share.num_rows_elsewhere(layer), chosen, here)

    def wants_gates_of_computed(self) -> bool:
        """Whether rows of others have come, and not so many that all are alike."""
        return self._num_come > 0 and self._num_come + int(self._stays.sum()) <= _MAX_ROWS_JUDGED

    def observe_gate_of_computed(self, layer: int, distance: int, logits: Float) -> None:
        """As `observe_gate` of the tap `EARLY`, of the rows that are computed here: [M, E]."""
        self._gates_of_computed[distance] = logits

    def observe(self, layer: int, expert_ids: Ids, weights: Float) -> None:
        if self._has_rows:
            self._own.observe(layer, expert_ids, weights)

    def observe_gate(self, tap: Tap, layer: int, distance: int, logits: Float) -> None:
        if tap is Tap.EARLY:
            self._gates_of_home[distance] = logits
        if self._has_rows:
            self._own.observe_gate(tap, layer, distance, logits)

    def predict(self, layer: int, distance: int) -> Float:
        target = layer + distance
        spared = self._spared_by_visitors(layer, distance)
        if self._has_rows:
            spared = spared * (1 - self._own.predict(layer, distance))
        return np.where(self._is_here(target), 1 - spared, np.float32(0))

    def end(self, requests: Iterable[int]) -> None:
        self._own.end(requests)

    def _forget_layer(self, layer: int) -> None:
        """`layer` is the one that is seen from now on."""
        self._layer = layer
        self._gates_of_home.clear()
        self._gates_of_computed.clear()

    def _spared_by_visitors(self, layer: int, distance: int) -> Float:
        """[E]: the probability that no row of other ranks comes for the expert at layer + distance."""
        target = layer + distance
        num_unseen = self._share.num_rows_elsewhere(target)
        spared: Float = np.ones(self._num_experts, np.float32)
        if num_unseen and layer == self._layer and distance in self._gates_of_computed:
            spared = self._spared_by_those_come(layer, distance)
            num_unseen = max(0, num_unseen - self._num_come)
        if num_unseen:
            shares = self._shares.of(target, self._learnt.current.popularity()[target])
            spared *= (1 - np.minimum(shares, 1)) ** num_unseen
        return spared

    def _spared_by_those_come(self, layer: int, distance: int) -> Float:
        """By those of other ranks whose rows are computed here: by all that are, less those at home among them."""
        logits = self._gates_of_computed[distance]
        num_computed = len(logits)
        if (of_home := self._gates_of_home.get(distance)) is not None:
            logits = np.concatenate([logits, of_home[self._stays]])
        chosen = self._combined.if_all_said(layer, distance, self._gate.of_logits(logits))
        spared = np.log1p(-np.minimum(chosen, np.float32(1 - 1e-6)))
        by_all: Float = spared[:num_computed].sum(axis=0) - spared[num_computed:].sum(axis=0)
        return np.exp(np.minimum(by_all, 0))

    def _count(self, expert_ids: Ids) -> NDArray[np.int64]:
        """[E]: how many rows chose each expert."""
        return np.bincount(expert_ids.ravel() + 1, minlength=self._num_experts + 1)[1:]

    def _is_here(self, layer: int) -> NDArray[np.bool_]:
        """[E]. Layers are placed anew between steps."""
        experts = self._share.experts_here(layer)
        known = self._here.get(layer)
        if known is None or known[0] is not experts:
            is_here = np.zeros(self._num_experts, np.bool_)
            is_here[list(experts)] = True
            known = self._here[layer] = experts, is_here
        return known[1]
