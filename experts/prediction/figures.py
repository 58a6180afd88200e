"""How good predictors are on requests they have not seen, and what prefetching by them saves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan

import numpy as np
from numpy.typing import NDArray

from experts.prediction.choice import make_source, taps_of
from experts.prediction.recall import num_recalled
from experts.prediction.sources import LearntAffinity
from experts.prediction.token_predictions import TokenPredictions, predict_tokens
from experts.routing.statistics import RoutingStatistics, StatisticsSpec
from experts.routing.traces import RoutingTrace
from experts.simulation.replay import SimulationResult

_REFRESH_STEPS = 128
# As far back as affinity looks.
_HISTORY = 6
# Tokens of the learning requests that are predicted before they are learnt, to calibrate probabilities.
_CALIBRATING = 500


@dataclass(frozen=True, slots=True)
class RecallFigure:
    """recall: of a token's k experts `distance` layers ahead, the share among the k likeliest; mean over tokens and
    layers. precision: of the experts that are given even odds or better, the share that is chosen. NaN where the
    predictor said nothing of the kind."""

    predictor: str
    distance: int
    recall: float
    precision: float


@dataclass(frozen=True, slots=True)
class StallFigure:
    """The same requests with demand loads alone and with prefetches."""

    on_demand: SimulationResult
    prefetching: SimulationResult

    @property
    def stall_saved(self) -> float:
        """The share of the exposed stall that prefetching, with all it costs, takes away; 0 without stall."""
        stalled = self.on_demand.exposed_stall
        remaining = self.prefetching.exposed_stall + self.prefetching.prediction_seconds
        return 1 - remaining / stalled if stalled else 0.0


def recall_figures(
    learning: RoutingTrace, held_out: RoutingTrace, choices: Sequence[str], max_distance: int = 3
) -> list[RecallFigure]:
    """Recall of each choice of predictors at each distance, from layers that were observed.

    Tokens come one at a time and are learnt after they were predicted, but for the first of many that are learnt from:
    these only enter the statistics. Held-out ones count.
    """
    traces = learning, held_out
    found = []
    for choice in choices:
        taps = taps_of(choice)
        learning, held_out = (
            replace(trace, guesses=tuple(guesses for guesses in trace.guesses if guesses.tap in taps))
            for trace in traces
        )
        spec = StatisticsSpec(
            len(learning.ids), learning.num_experts, learning.ids.shape[2], max_distance=max(max_distance, _HISTORY)
        )
        statistics = RoutingStatistics(spec)
        is_first = np.arange(len(learning.requests)) < len(learning.requests) - _CALIBRATING
        for start in range(0, int(is_first.sum()), spec.max_rows_per_step):
            rows = slice(start, min(start + spec.max_rows_per_step, int(is_first.sum())))
            statistics.update(learning.ids[:, rows], learning.token_ids[rows])
        learnt = LearntAffinity(statistics, _REFRESH_STEPS)
        source = make_source(choice, learnt)
        scores = [_Score() for _ in range(max_distance)]
        for trace, counts in ((learning.select(~is_first), False), (held_out, True)):
            for predicted in predict_tokens(trace, choice, source, learnt, max_distance, (taps,)):
                if counts:
                    _count(scores, predicted, trace)
        for distance, score in enumerate(scores, start=1):
            recall = score.recalled / score.num_chosen if score.num_chosen else nan
            precision = score.confirmed / score.num_expected if score.num_expected else nan
            found.append(RecallFigure(choice, distance, recall, precision))
    return found


@dataclass(slots=True)
class _Score:
    """Experts counted over tokens and layers, of one distance."""

    num_chosen: int = 0
    recalled: int = 0
    num_expected: int = 0
    confirmed: int = 0

    def add(self, probabilities: NDArray[np.float32], chosen: NDArray[np.uint16]) -> None:
        """probabilities: [T, E]. chosen: [T, k]."""
        self.num_chosen += chosen.size
        self.recalled += num_recalled(probabilities, chosen)
        is_expected = probabilities >= 0.5
        self.num_expected += int(is_expected.sum())
        self.confirmed += int(np.take_along_axis(is_expected, chosen.astype(np.int64), 1).sum())


def _count(scores: Sequence[_Score], predicted: TokenPredictions, trace: RoutingTrace) -> None:
    """scores: by distance."""
    for (layer, distance), rows in predicted.moments[-1].items():
        scores[distance - 1].add(rows, trace.ids[layer + distance, predicted.rows])
