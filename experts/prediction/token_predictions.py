"""What predictors say of a trace whose tokens come one at a time, many tokens at once: for measurements. Pure.

Sources that tell of each token by itself are asked for all tokens until what they go by is computed anew, instead of
for each token, layer and distance: the same objects and the same numbers in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.prediction.choice import follows_requests
from experts.prediction.combined import CombinedSource, Pair
from experts.prediction.predictor import Float, ObservedStep, Tap
from experts.prediction.sources import LearntAffinity
from experts.routing.traces import RoutingTrace

_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class TokenPredictions:
    """rows: the tokens, of the trace. moments: by layer and distance [T, E], as `Source.probabilities`; pairs of which
    nothing is known are left out."""

    rows: slice
    moments: list[dict[Pair, Float]]


def predict_tokens(
    trace: RoutingTrace,
    choice: str,
    source: CombinedSource,
    learnt: LearntAffinity,
    max_distance: int,
    moments: Sequence[Collection[Tap]],
) -> Iterator[TokenPredictions]:
    """Each token is predicted before it is learnt, by the source and by `learnt`, which it goes by.

    choice: the names of the sources. moments: predictions are wanted, after each layer, whenever the gates of one more
    of these were heard. Not before the first layer: first-layer experts are learnt with every token.
    """
    at_once = 1 if follows_requests(choice) else _MAX_TOKENS
    previous = None
    start = 0
    while start < len(trace.requests):
        rows = slice(start, min(start + min(at_once, learnt.steps_until_refresh), len(trace.requests)))
        request = int(trace.requests[start])
        if previous not in (None, request):
            source.end([previous])
        previous = request
        step, features = _through_layers(trace, rows, source, max_distance, moments)
        yield TokenPredictions(rows, source.one_by_one(features, step))
        for row in range(rows.start, rows.stop):
            one = slice(row, row + 1)
            learnt.statistics.update(trace.ids[:, one], trace.token_ids[one])
            learnt.step_done()
        start = rows.stop
    if previous is not None:
        source.end([previous])


def _through_layers(
    trace: RoutingTrace,
    rows: slice,
    source: CombinedSource,
    max_distance: int,
    moments: Sequence[Collection[Tap]],
) -> tuple[ObservedStep, list[dict[Pair, NDArray[np.float32]]]]:
    """The complete step, and what its sources said meanwhile."""
    step = ObservedStep(trace.token_ids[rows], trace.requests[rows])
    features: list[dict[Pair, Float]] = [{} for _ in moments]
    num_layers = len(trace.ids)
    for layer in range(num_layers):
        chosen = trace.ids[layer, rows]
        step.ids[layer] = chosen.astype(np.int64)
        step.weights[layer] = np.full(chosen.shape, 1 / chosen.shape[1], np.float32)
        distances = range(1, min(max_distance, num_layers - 1 - layer) + 1)
        for taps, of_moment in zip(moments, features, strict=True):
            for guesses in trace.guesses:
                if guesses.tap in taps and guesses.distance in distances:
                    step.gates[guesses.tap, layer, guesses.distance] = guesses.logits[layer, rows].astype(np.float32)
            for distance in distances:
                found = source.features(step, layer, distance)
                if found is not None:
                    of_moment[layer, distance] = found
    return step, features
