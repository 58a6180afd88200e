"""Each reason to expect an expert, by numbers worked out by hand or on traces that have or lack the structure."""

import numpy as np
import pytest

from experts.predictor import BEFORE, StepPredictor, Tap
from experts.predictors import AffinitySource, GateSource, LearntAffinity, PopularitySource, gate_margin
from experts.routing import RoutingStatistics, StatisticsSpec
from experts.routing_files import shuffled_control
from experts.simulator import SyntheticSpec, synthetic_trace


def learnt_from(routing, num_experts, token_ids=None):
    statistics = RoutingStatistics(StatisticsSpec(len(routing), num_experts, routing.shape[2], half_life=10**9))
    for start in range(0, routing.shape[1], 50):
        part = slice(start, start + 50)
        statistics.update(routing[:, part], None if token_ids is None else token_ids[part])
    return LearntAffinity(statistics)


def begun(source, token_ids, num_experts):
    predictor = StepPredictor(source, num_experts)
    predictor.begin(np.array(token_ids), np.zeros(len(token_ids), np.int64))
    return predictor


def choose(predictor, layer, *tokens):
    ids = np.array(tokens)
    predictor.observe(layer, ids, np.ones(ids.shape, np.float32))


def test_popularity_expects_what_tokens_choose_most():
    routing = np.array([[[0], [0], [0], [1]], [[1], [1], [1], [1]]])
    predictor = begun(PopularitySource(learnt_from(routing, 2)), [0], 2)
    # A prior of E / 4 = 0.5 tokens, spread evenly: (3 + 0.25) / 4.5.
    assert predictor.predict(BEFORE, 1) == pytest.approx([3.25 / 4.5, 1.25 / 4.5], abs=1e-5)
    assert predictor.predict(BEFORE, 2) == pytest.approx([0.25 / 4.5, 4.25 / 4.5], abs=1e-5)


def test_affinity_expects_what_followed_before():
    routing = np.array([[[0], [1]] * 50, [[1], [0]] * 50, [[1], [0]] * 50])
    predictor = begun(AffinitySource(learnt_from(routing, 2)), [0], 2)
    choose(predictor, 0, [0])
    assert predictor.predict(0, 1)[1] > 0.98
    assert predictor.predict(0, 2)[1] > 0.98
    choose(predictor, 1, [1])
    assert predictor.predict(1, 1)[1] > 0.98


def test_affinity_looks_further_back_than_one_layer():
    routing = np.array([[[0], [1]] * 50, [[0], [0]] * 50, [[1], [0]] * 50])
    predictor = begun(AffinitySource(learnt_from(routing, 2)), [0], 2)
    choose(predictor, 0, [0])
    choose(predictor, 1, [0])
    # Both requests chose the same in the layer before.
    assert predictor.predict(1, 1)[1] > 0.98


def test_the_factors_of_a_tokens_experts_are_multiplied_with_a_damping_exponent():
    first = np.random.default_rng(0).random((500, 4)).argsort(axis=1)[:, :2]
    learnt = learnt_from(np.stack([first, np.where(np.arange(500)[:, None] % 3, (first + 1) % 4, first)]), 4)
    predictor = begun(AffinitySource(learnt), [0], 4)
    choose(predictor, 0, [0, 3])
    popularity = learnt.current.popularity()[1]
    lift = np.exp(learnt.current.log_lifts(0, 1)[[0, 3]])
    assert lift.max() > 1.2
    odds = popularity * np.prod(lift, axis=0) ** (1 / np.sqrt(2))
    assert predictor.predict(0, 1) == pytest.approx(2 * odds / odds.sum(), abs=1e-5)


def test_a_known_token_announces_its_first_experts_and_those_that_follow_them():
    routing = np.array([[[0], [1]] * 50, [[1], [0]] * 50])
    learnt = learnt_from(routing, 2, np.array([7, 8] * 50))
    predictor = begun(AffinitySource(learnt), [7], 2)
    # 50 choices against a prior of one token whose experts are equally popular.
    assert predictor.predict(BEFORE, 1) == pytest.approx([50.5 / 51, 0.5 / 51], abs=1e-4)
    assert predictor.predict(BEFORE, 2)[1] > 0.95
    assert begun(AffinitySource(learnt), [9], 2).predict(BEFORE, 1) == pytest.approx([0.5, 0.5], abs=1e-5)


def test_affinity_is_learnt_at_growing_intervals():
    statistics = RoutingStatistics(StatisticsSpec(1, 2, 1))
    learnt = LearntAffinity(statistics, refresh_steps=32)
    changes = []
    for step in range(100):
        before = learnt.current
        statistics.update(np.zeros((1, 1, 1), np.int64))
        learnt.step_done()
        if learnt.current is not before:
            changes.append(step + 1)
    assert changes == [16, 48, 80]
    assert learnt.current.popularity()[0, 0] > 0.9


def test_the_margin_is_zero_between_the_chosen_and_the_rest():
    logits = np.array([[3.0, 1.0, 0.0, -1.0]], np.float32)
    assert gate_margin(logits, 2)[0] * logits.std() == pytest.approx([2.5, 0.5, -0.5, -1.5], abs=1e-5)
    assert (gate_margin(logits, 4) > 0).all()


def test_a_gate_is_heard_from_its_tap_and_layer_only():
    predictor = begun(GateSource(Tap.EARLY, 1), [0], 2)
    predictor.observe_gate(Tap.EARLY, 1, 2, np.array([[2.0, -2.0]], np.float32))
    assert predictor.predict(1, 2)[0] > 0.9 > 0.1 > predictor.predict(1, 2)[1]
    assert predictor.predict(1, 1).tolist() == [0, 0]
    assert begun(GateSource(Tap.LATE, 1), [0], 2).predict(1, 2).tolist() == [0, 0]


def recall(source, trace, distance):
    """The mean share of a token's experts among the k that the source thinks likeliest."""
    top_k = trace.ids.shape[2]
    predictor = StepPredictor(source, trace.num_experts, max_rows=trace.ids.shape[1])
    predictor.begin(trace.token_ids, trace.requests)
    found = []
    for layer in range(len(trace.ids) - distance):
        choose(predictor, layer, *trace.ids[layer].tolist())
        likeliest = np.argsort(-predictor.token_probabilities(layer, distance), axis=1)[:, :top_k]
        found.append((likeliest[:, :, None] == trace.ids[layer + distance][:, None]).any(axis=2).mean())
    return float(np.mean(found))


@pytest.mark.parametrize("distance", [1, 2])
def test_affinity_beats_popularity_where_layers_depend_on_each_other_and_nowhere_else(distance):
    trace = synthetic_trace(SyntheticSpec(8, 16, 2, coupling=2.0, topic=0.3), 40, 60, 0)
    learnt_part, held_out = trace.split()
    learnt = learnt_from(learnt_part.ids, 16)
    gain = recall(AffinitySource(learnt), held_out, distance) / recall(PopularitySource(learnt), held_out, distance)
    learnt_part, held_out = shuffled_control(trace, 0).split()
    learnt = learnt_from(learnt_part.ids, 16)
    control = recall(AffinitySource(learnt), held_out, distance) / recall(PopularitySource(learnt), held_out, distance)
    assert gain > 1.2
    assert 0.97 < control < 1.03
