"""What gates say of a trace, computed once for any number of simulations. Pure.

It depends neither on the link nor on what is resident, so simulations that differ in these alone can share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from experts.prediction.choice import make_source, only_gates, taps_of
from experts.prediction.combined import Pair
from experts.prediction.predictor import BEFORE, Float, Ids, Tap
from experts.prediction.sources import LearntAffinity
from experts.prediction.token_predictions import predict_tokens
from experts.routing.statistics import RoutingStatistics, StatisticsSpec
from experts.routing.traces import RoutingTrace

# In the order in which they are heard.
_TAPS = tuple(Tap)


class Foretold:
    """The predictions of a choice of gates for each token of some traces, one after the other."""

    def __init__(self, traces: Sequence[RoutingTrace], choice: str, max_distance: int) -> None:
        """ValueError if not only gates are chosen, or if requests of a trace do not follow each other."""
        if not only_gates(choice):
            raise ValueError(f"{choice!r} says something else when it is asked before the first layer")
        if not all(_follow_each_other(trace.requests) for trace in traces):
            raise ValueError("requests of a trace are computed at the same time")
        self.choice = choice
        self.max_distance = max_distance
        self.num_experts = traces[0].num_experts
        spec = StatisticsSpec(len(traces[0].ids), self.num_experts, traces[0].ids.shape[2], max_distance=max_distance)
        learnt = LearntAffinity(RoutingStatistics(spec))
        source = make_source(choice, learnt)
        taps = taps_of(choice)
        heard = [[tap] if tap in taps else [] for tap in _TAPS]
        parts = [
            predicted.moments
            for trace in traces
            for predicted in predict_tokens(trace, choice, source, learnt, max_distance, heard)
        ]
        # By what was heard last, then layer and distance: [T, E].
        self._rows: dict[Tap, dict[Pair, Float]] = {
            tap: {pair: np.concatenate([part[place][pair] for part in parts]) for pair in parts[0][place]}
            for place, tap in enumerate(_TAPS)
        }

    def rows(self, heard: Tap) -> dict[Pair, Float]:
        """[T, E] by layer and distance, after this tap; what nothing is known of is left out."""
        return self._rows[heard]


class ForetoldPredictor:
    """A `Predictor` that repeats what was foretold. Steps are the tokens, in order."""

    __slots__ = ("_foretold", "_heard", "_nothing", "_rows", "_token")

    def __init__(self, foretold: Foretold) -> None:
        self._foretold = foretold
        self._nothing: Float = np.zeros(foretold.num_experts, np.float32)
        self._token = -1
        self._rows = foretold.rows(Tap.EARLY)

    def begin(self, token_ids: Ids, requests: Ids) -> None:
        if len(token_ids) != 1:
            raise ValueError(f"a step of {len(token_ids)} tokens; each was foretold by itself")
        self._token += 1

    def observe(self, layer: int, expert_ids: Ids, weights: Float) -> None:
        self._rows = self._foretold.rows(Tap.EARLY)

    def observe_gate(self, tap: Tap, layer: int, distance: int, logits: Float) -> None:
        self._rows = self._foretold.rows(tap)

    def predict(self, layer: int, distance: int) -> Float:
        if layer == BEFORE:
            return self._nothing
        rows = self._rows.get((layer, distance))
        return self._nothing if rows is None else rows[self._token]

    def end(self, requests: Iterable[int]) -> None:
        """Nothing is kept of a request."""


def _follow_each_other(requests: NDArray[np.int32]) -> bool:
    return int(np.count_nonzero(np.diff(requests))) + 1 == len(np.unique(requests))
