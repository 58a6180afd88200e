"""What affinity expects of a step, by numbers worked out by hand and on traces that have or lack the structure."""

import numpy as np
import pytest

from benchmarks.experts.lab_traces import shuffled_control
from benchmarks.experts.simulator import POPULARITY, recall_figures
from benchmarks.experts.synthetic_traces import SyntheticSpec, synthetic_trace
from experts.routing.choices import RoutingStatistics, StatisticsSpec
from experts.routing.predictors import BEFORE, AffinityPredictor, LearntAffinity, RecallSample, any_token


def rows(*values):
    return np.array(values, np.float32)


def learnt_from(routing, num_experts, token_ids=None):
    statistics = RoutingStatistics(StatisticsSpec(len(routing), num_experts, routing.shape[2], half_life=10**9))
    for start in range(0, routing.shape[1], 50):
        part = slice(start, start + 50)
        statistics.update(routing[:, part], None if token_ids is None else token_ids[part])
    return LearntAffinity(statistics)


def begun(learnt, token_ids, **bounds):
    predictor = AffinityPredictor(learnt, **bounds)
    predictor.begin(np.array(token_ids))
    return predictor


def test_an_expert_is_needed_if_any_token_chooses_it():
    assert any_token(rows([0.5, 0.0, 1.0], [0.5, 0.0, 0.0]), 2) == pytest.approx([0.75, 0.0, 1.0], abs=1e-3)


def test_a_sample_of_the_tokens_stands_for_all_of_them():
    assert any_token(rows([0.5, 0.1]), 2) == pytest.approx([0.75, 0.19], abs=1e-5)


def test_a_long_step_is_followed_by_an_even_sample():
    routing = np.array([[[0], [1]] * 50, [[1], [0]] * 50])
    learnt = learnt_from(routing, 2)
    long, short = begun(learnt, np.zeros(5, np.int64), max_rows=2), begun(learnt, [0, 0])
    long.observe(0, np.array([[0], [1], [1], [1], [1]]))
    short.observe(0, np.array([[0], [1]]))
    each = 1 - short.predict(0, 1)
    assert 1 - long.predict(0, 1) == pytest.approx(each ** (5 / 2), abs=1e-4)


def test_what_is_not_known_is_not_predicted():
    learnt = learnt_from(np.array([[[0], [1]] * 50] * 3), 2)
    with pytest.raises(ValueError, match="no step"):
        AffinityPredictor(learnt).predict(0, 1)
    predictor = begun(learnt, [0, 0])
    assert predictor.predict(0, 1).tolist() == [0, 0]
    # A layer that computed one of two rows counts as left out.
    predictor.observe(0, np.array([[1]]))
    assert predictor.predict(0, 1).tolist() == [0, 0]


def test_a_rank_expects_its_own_experts_alone_also_once_a_layer_is_placed_anew():
    here = [{0, 1}, {0, 1}]
    learnt = learnt_from(np.array([[[0], [1], [2]] * 40, [[1], [2], [0]] * 40]), 3)
    everywhere, rank = begun(learnt, [0, 0, 0]), begun(learnt, [0, 0, 0], experts_here=here.__getitem__)
    for predictor in (everywhere, rank):
        predictor.observe(0, np.array([[0], [1], [2]]))
    for held in ({0, 1}, {1, 2}):
        here[1] = held
        wanted = [chance if expert in held else 0 for expert, chance in enumerate(everywhere.predict(0, 1))]
        assert rank.predict(0, 1).tolist() == wanted
        assert min(rank.predict(0, 1)[[*held]]) > 0.5
    assert rank.predict(BEFORE, 1)[2] == 0


def test_steps_without_rows_of_its_own_count_for_nothing_on_a_rank():
    recall = RecallSample(interval=1)
    predictor = AffinityPredictor(learnt_from(np.array([[[0], [1]] * 50] * 2), 2), recall, experts_here=lambda _: {0})
    for num_rows in (1, 0, 0, 2, 0):
        predictor.begin(np.zeros(num_rows, np.int64))
        predictor.observe(0, np.zeros((num_rows, 1), np.int64))
        assert predictor.predict(0, 1)[1] == predictor.predict(BEFORE, 1)[1] == 0
        predictor.observe(1, np.zeros((num_rows, 1), np.int64))
        predictor.end_step()
    # Three rows chose one expert in each of two layers.
    assert {count.num_chosen for count in recall.counts()} == {6}


def test_affinity_expects_what_followed_before():
    routing = np.array([[[0], [1]] * 50, [[1], [0]] * 50, [[1], [0]] * 50])
    predictor = begun(learnt_from(routing, 2), [0])
    predictor.observe(0, np.array([[0]]))
    assert predictor.predict(0, 1)[1] > 0.98
    assert predictor.predict(0, 2)[1] > 0.98
    predictor.observe(1, np.array([[1]]))
    assert predictor.predict(1, 1)[1] > 0.98


def test_affinity_looks_further_back_than_one_layer():
    routing = np.array([[[0], [1]] * 50, [[0], [0]] * 50, [[1], [0]] * 50])
    predictor = begun(learnt_from(routing, 2), [0])
    predictor.observe(0, np.array([[0]]))
    predictor.observe(1, np.array([[0]]))
    # Both requests chose the same in the layer before.
    assert predictor.predict(1, 1)[1] > 0.98


def test_the_factors_of_a_tokens_experts_are_multiplied_with_a_damping_exponent():
    first = np.random.default_rng(0).random((500, 4)).argsort(axis=1)[:, :2]
    learnt = learnt_from(np.stack([first, np.where(np.arange(500)[:, None] % 3, (first + 1) % 4, first)]), 4)
    predictor = begun(learnt, [0])
    predictor.observe(0, np.array([[0, 3]]))
    popularity = learnt.current.popularity()[1]
    lift = np.exp(learnt.current.log_lifts(0, 1)[[0, 3]])
    assert lift.max() > 1.2
    odds = popularity * np.prod(lift, axis=0) ** (1 / np.sqrt(2))
    assert predictor.predict(0, 1) == pytest.approx(2 * odds / odds.sum(), abs=1e-5)


def test_a_known_token_announces_its_first_experts_and_those_that_follow_them():
    routing = np.array([[[0], [1]] * 50, [[1], [0]] * 50])
    learnt = learnt_from(routing, 2, np.array([7, 8] * 50))
    predictor = begun(learnt, [7])
    # 50 choices against a prior of one token whose experts are equally popular.
    assert predictor.predict(BEFORE, 1) == pytest.approx([50.5 / 51, 0.5 / 51], abs=1e-4)
    assert predictor.predict(BEFORE, 2)[1] > 0.95
    assert begun(learnt, [9]).predict(BEFORE, 1) == pytest.approx([0.5, 0.5], abs=1e-5)


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


@pytest.mark.slow
@pytest.mark.parametrize("distance", [1, 2])
def test_affinity_beats_popularity_where_layers_depend_on_each_other_and_nowhere_else(distance):
    def gain(trace):
        figures = recall_figures(*trace.split(), ("affinity", POPULARITY), distance)
        recall = {figure.predictor: figure.recall for figure in figures if figure.distance == distance}
        return recall["affinity"] / recall[POPULARITY]

    trace = synthetic_trace(SyntheticSpec(8, 16, 2, coupling=2.0, topic=0.3), 40, 60, 0)
    assert gain(trace) > 1.2
    assert 0.97 < gain(shuffled_control(trace, 0)) < 1.03
