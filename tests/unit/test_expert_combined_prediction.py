"""Sources combined and calibrated online; routes; predictors by name."""

import itertools

import numpy as np
import pytest

from experts.predictor import BEFORE, ObservedStep, StepPredictor
from experts.predictors import SOURCE_NAMES, CombinedSource, LearntAffinity, RouteSource, make_predictor, source_names
from experts.routing import RoutingStatistics, StatisticsSpec
from experts.simulator import SyntheticSpec, synthetic_trace


class Says:
    """A source whose rows a function makes of the true choice."""

    def __init__(self, rows_of):
        self.rows_of = rows_of
        self.truth = None

    def probabilities(self, step, layer, distance):
        return self.rows_of(self.truth)

    def learn(self, step):
        pass

    def end(self, requests):
        pass


def one_hot(expert, size=4):
    return np.eye(size, dtype=np.float32)[[expert]]


def run(sources, num_steps, seed=0):
    """One layer ahead of one; what the combination said of the chosen and of the other experts, late in the run."""
    random = np.random.default_rng(seed)
    combined = CombinedSource(sources, num_layers=2, max_distance=1)
    chosen, others = [], []
    for number in range(num_steps):
        truth = int(random.integers(4))
        for source in sources:
            source.truth = truth
        step = ObservedStep(np.zeros(1), np.zeros(1), {0: np.array([[0]]), 1: np.array([[truth]])})
        found = combined.probabilities(step, 0, 1)[0]
        combined.learn(step)
        if number >= num_steps // 2:
            chosen.append(found[truth])
            others.append(np.delete(found, truth).mean())
    return combined, float(np.mean(chosen)), float(np.mean(others))


def test_of_other_rows_sources_are_believed_as_they_have_deserved():
    rows = np.array([[0.9, 0.5, 0.2, 0.2]], np.float32)
    agreeing = [Says(lambda _: rows), Says(lambda _: rows)]
    combined, *_ = run(agreeing, 50)
    learnt = combined.if_all_said(0, 1, rows)
    assert learnt == pytest.approx(combined.probabilities(ObservedStep(np.zeros(1), np.zeros(1)), 0, 1), abs=1e-5)
    # The truth was any of the four.
    assert abs(learnt[0, 0] - 0.25) < 0.25
    assert combined.if_all_said(1, 1, rows) == pytest.approx(rows, abs=1e-5)


def test_a_source_that_knows_is_believed_and_noise_is_not():
    random = np.random.default_rng(1)
    knows = Says(lambda truth: 0.2 + 0.6 * one_hot(truth))
    noise = Says(lambda truth: random.random((1, 4)).astype(np.float32))
    combined, chosen, others = run([noise, knows], 400)
    assert chosen > 0.95
    assert others < 0.05
    weights = combined.weights(0, 1)
    assert weights[1] > 1 > 0.2 > abs(weights[0])


def test_a_single_source_is_calibrated():
    random = np.random.default_rng(1)
    # It is always sure, and right in half the cases.
    boasts = Says(lambda truth: 0.01 + 0.98 * one_hot(truth if random.random() < 0.5 else (truth + 1) % 4))
    _, chosen, _ = run([boasts], 800)
    assert chosen == pytest.approx(0.5 * 0.5 + 0.5 * 1 / 6, abs=0.06)


def test_before_anything_is_learnt_the_sources_count_alike_and_the_silent_ones_not_at_all():
    step = ObservedStep(np.zeros(1), np.zeros(1))
    eighty = Says(lambda truth: np.full((1, 4), 0.8, np.float32))
    silent = Says(lambda truth: None)
    assert CombinedSource([eighty, silent], 2, 1).probabilities(step, 0, 1)[0] == pytest.approx([0.8] * 4)
    assert CombinedSource([silent], 2, 1).probabilities(step, 0, 1) is None


def test_what_a_step_did_not_show_is_not_learnt():
    says = Says(lambda truth: np.full((1, 4), 0.3, np.float32))
    combined = CombinedSource([says], 3, 1)
    step = ObservedStep(np.zeros(1), np.zeros(1), {0: np.array([[0]])})
    combined.probabilities(step, 0, 1)
    before = combined.weights(0, 1).copy()
    combined.learn(step)
    assert (combined.weights(0, 1) == before).all()


def learnt_from(trace):
    statistics = RoutingStatistics(StatisticsSpec(len(trace.ids), trace.num_experts, trace.ids.shape[2]))
    for start in range(0, trace.ids.shape[1], 32):
        statistics.update(trace.ids[:, start : start + 32], trace.token_ids[start : start + 32])
    return LearntAffinity(statistics)


def best_path(affinity, chosen, length, target):
    """The probability of the most probable of all paths of so many steps from a chosen expert of layer 0."""
    found = 0.0
    for path in itertools.product(range(6), repeat=length - 1):
        for here in chosen:
            probability = 1.0
            for ahead, expert in enumerate((*path, target)):
                probability *= float(affinity.conditional(1)[ahead][here, expert])
                here = expert
            found = max(found, probability)
    return found


@pytest.mark.parametrize("chosen", [[2], [1, 4]])
def test_routes_are_the_most_probable_of_all_enumerated_ones(chosen):
    learnt = learnt_from(synthetic_trace(SyntheticSpec(5, 6, len(chosen)), 4, 50, 0))
    predictor = StepPredictor(RouteSource(learnt), 6)
    predictor.begin(np.array([0]), np.array([0]))
    predictor.observe(0, np.array([chosen]), np.ones((1, len(chosen)), np.float32))
    before = np.ones(6)
    for distance in (1, 2, 3):
        row = predictor.token_probabilities(0, distance)[0]
        assert row.max() <= before.max()
        before = row
        assert row == pytest.approx([best_path(learnt.current, chosen, distance, e) for e in range(6)], abs=1e-5)


@pytest.mark.parametrize("choice", [*SOURCE_NAMES, "affinity+signature+popularity"])
def test_every_named_predictor_follows_a_trace(choice):
    trace = synthetic_trace(SyntheticSpec(4, 8, 2), 4, 10, 0)
    predictor, sources = make_predictor(choice, learnt_from(trace))
    assert list(sources) == choice.split("+")
    for row in range(trace.ids.shape[1]):
        predictor.begin(trace.token_ids[row : row + 1], trace.requests[row : row + 1])
        found = [predictor.predict(BEFORE, 1)]
        for layer in range(4):
            predictor.observe(layer, trace.ids[layer, row : row + 1], np.full((1, 2), 0.5, np.float32))
            found += [predictor.predict(layer, distance) for distance in range(1, 4 - layer)]
        assert all(scores.shape == (8,) and (scores >= 0).all() and (scores <= 1).all() for scores in found)
    predictor.end(range(4))


def test_a_choice_that_cannot_be_is_named():
    with pytest.raises(ValueError, match="no predictor 'magic'; there are popularity"):
        source_names("affinity+magic")
    with pytest.raises(ValueError, match="twice"):
        source_names("affinity+affinity")
