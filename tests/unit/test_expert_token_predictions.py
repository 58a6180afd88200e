"""What is predicted of many tokens at once is what is predicted of each, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest

from experts.predictor import Tap
from experts.predictors import SOURCE_NAMES, LearntAffinity, make_predictor, make_source
from experts.routing import RoutingStatistics, StatisticsSpec
from experts.routing_files import GateGuesses
from experts.simulator import SyntheticSpec, predict_tokens, synthetic_trace

NUM_LAYERS, NUM_EXPERTS, TOP_K, MAX_DISTANCE = 5, 8, 2, 2
TAPS = (Tap.EARLY, Tap.LATE)


def guessed_trace():
    trace = synthetic_trace(SyntheticSpec(NUM_LAYERS, NUM_EXPERTS, TOP_K), 4, 25, 0)
    random = np.random.default_rng(0)
    shapes = {distance: (NUM_LAYERS - distance, trace.ids.shape[1], NUM_EXPERTS) for distance in (1, 2)}
    guesses = [
        GateGuesses(tap, distance, random.standard_normal(shape).astype(np.float16))
        for tap in TAPS
        for distance, shape in shapes.items()
    ]
    return replace(trace, guesses=tuple(guesses))


def fresh():
    spec = StatisticsSpec(NUM_LAYERS, NUM_EXPERTS, TOP_K, max_distance=3)
    return LearntAffinity(RoutingStatistics(spec), refresh_steps=16)


def asked_after_each_tap(trace, choice):
    """By tap, layer and distance: [T, E], of a predictor that follows one token after the other."""
    learnt = fresh()
    predictor, _ = make_predictor(choice, learnt)
    found = {}
    for row, request in enumerate(trace.requests.tolist()):
        if row and request != trace.requests[row - 1]:
            predictor.end([int(trace.requests[row - 1])])
        one = slice(row, row + 1)
        predictor.begin(trace.token_ids[one], trace.requests[one])
        for layer in range(NUM_LAYERS):
            chosen = trace.ids[layer, one]
            predictor.observe(layer, chosen, np.full(chosen.shape, 1 / TOP_K, np.float32))
            for tap in TAPS:
                for guesses in trace.guesses:
                    if guesses.tap is tap and layer + guesses.distance < NUM_LAYERS:
                        logits = guesses.logits[layer, one].astype(np.float32)
                        predictor.observe_gate(tap, layer, guesses.distance, logits)
                for distance in range(1, min(MAX_DISTANCE, NUM_LAYERS - 1 - layer) + 1):
                    rows = predictor.token_probabilities(layer, distance)
                    if rows is not None:
                        found.setdefault((tap, layer, distance), []).append((row, rows[0]))
        learnt.statistics.update(trace.ids[:, one], trace.token_ids[one])
        learnt.step_done()
    return found


@pytest.mark.parametrize("choice", [*SOURCE_NAMES, "gate-early+gate-late", "gate-early+affinity+signature"])
def test_tokens_at_once_are_predicted_as_one_after_the_other(choice):
    trace = guessed_trace()
    learnt = fresh()
    found = {}
    predictions = predict_tokens(
        trace, choice, make_source(choice, learnt), learnt, MAX_DISTANCE, [[tap] for tap in TAPS]
    )
    for predicted in predictions:
        for tap, of_moment in zip(TAPS, predicted.moments, strict=True):
            for (layer, distance), rows in of_moment.items():
                numbers = range(predicted.rows.start, predicted.rows.stop)
                found.setdefault((tap, layer, distance), []).extend(zip(numbers, rows, strict=True))
    expected = asked_after_each_tap(trace, choice)
    assert found.keys() == expected.keys()
    for key, rows in expected.items():
        assert [number for number, _ in found[key]] == [number for number, _ in rows]
        np.testing.assert_array_equal(np.stack([row for _, row in found[key]]), np.stack([row for _, row in rows]))
