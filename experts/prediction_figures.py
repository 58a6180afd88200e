"""How good predictors are on requests they have not seen, and what prefetching by them saves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experts.prediction import StepPredictor
from experts.prediction_sources import LearntAffinity
from experts.predictor_choice import make_predictor, make_source, source_names
from experts.simulation import SimulationResult
from experts.simulation_setup import SimulationSetup, simulate
from experts.statistics import RoutingStatistics, StatisticsSpec
from experts.traces import RoutingTrace

_REFRESH_STEPS = 128


@dataclass(frozen=True, slots=True)
class RecallFigure:
    """recall: of a token's k experts `distance` layers ahead, the share among the k likeliest; mean over tokens and
    layers, NaN where the predictor had nothing to say."""

    predictor: str
    distance: int
    recall: float


@dataclass(frozen=True, slots=True)
class StallFigure:
    """The same requests with demand loads alone and with prefetches."""

    beta: float
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

    Tokens come one at a time and are learnt after they were predicted; only held-out ones count.
    """
    found = []
    for choice in choices:
        recalls = _replay(held_out, _after(learning, choice, max_distance), max_distance)
        found += [RecallFigure(choice, distance, recall) for distance, recall in enumerate(recalls, start=1)]
    return found


def stall_figure(learning: RoutingTrace, held_out: RoutingTrace, setup: SimulationSetup) -> StallFigure:
    """The setup, which has a predictor, against the same without. What is compared with is up to its policy."""
    if setup.predictor is None:
        raise ValueError("a setup without a predictor has nothing to be compared")
    return StallFigure(
        setup.beta,
        simulate(learning, held_out, replace(setup, predictor=None)),
        simulate(learning, held_out, setup),
    )


def _after(learning: RoutingTrace, choice: str, max_distance: int) -> tuple[StepPredictor, LearntAffinity]:
    spec = StatisticsSpec(
        len(learning.ids), learning.num_experts, learning.ids.shape[2], max_distance=max(max_distance, 1)
    )
    learnt = LearntAffinity(RoutingStatistics(spec), _REFRESH_STEPS)
    names = source_names(choice)
    if len(names) == 1:
        # As it is: calibration does not change an order by itself, and costs time.
        predictor = StepPredictor(make_source(names[0], learnt), spec.num_experts)
    else:
        predictor, _ = make_predictor(choice, learnt)
    _replay(learning, (predictor, learnt), max_distance)
    return predictor, learnt


def _replay(trace: RoutingTrace, learner: tuple[StepPredictor, LearntAffinity], max_distance: int) -> list[float]:
    """Mean recall by distance."""
    predictor, learnt = learner
    sums, counts = np.zeros(max_distance), np.zeros(max_distance)
    previous = None
    for row, request in enumerate(trace.requests.tolist()):
        if previous not in (None, request):
            predictor.end([previous])
        previous = request
        one = slice(row, row + 1)
        predictor.begin(trace.token_ids[one], trace.requests[one])
        for layer in range(len(trace.ids)):
            chosen = trace.ids[layer, one]
            predictor.observe(layer, chosen, np.full(chosen.shape, 1 / chosen.shape[1], np.float32))
            for guesses in trace.guesses:
                if layer + guesses.distance < len(trace.ids) and guesses.distance <= max_distance:
                    logits = guesses.logits[layer, one].astype(np.float32)
                    predictor.observe_gate(guesses.tap, layer, guesses.distance, logits)
            for distance in range(1, min(max_distance, len(trace.ids) - 1 - layer) + 1):
                rows = predictor.token_probabilities(layer, distance)
                if rows is not None:
                    sums[distance - 1] += _recall(rows[0], trace.ids[layer + distance, row])
                    counts[distance - 1] += 1
        learnt.statistics.update(trace.ids[:, one], trace.token_ids[one])
        learnt.step_done()
    if previous is not None:
        predictor.end([previous])
    means: list[float] = np.divide(sums, counts, out=np.full(max_distance, np.nan), where=counts > 0).tolist()
    return means


def _recall(probabilities: NDArray[np.float32], chosen: NDArray[np.uint16]) -> float:
    likeliest = np.argpartition(-probabilities, len(chosen) - 1)[: len(chosen)]
    return float(np.isin(chosen, likeliest).mean())
