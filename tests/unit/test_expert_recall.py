"""What each source of predictions had ranked first of what tokens then chose, counted on a sample of the steps."""

import numpy as np
import pytest

from benchmarks.experts.simulator import recall_figures
from benchmarks.experts.synthetic_traces import SyntheticSpec, synthetic_trace
from experts.routing.choices import RoutingStatistics, StatisticsSpec
from experts.routing.predictors import AffinityPredictor, LearntAffinity, RecallSample, SourceRecall, num_recalled

SCORES = np.array([[0.1, 0.9, 0.8, 0.2], [0.7, 0.1, 0.2, 0.6]])


def test_recall_is_what_is_among_each_tokens_own_likeliest():
    assert num_recalled(SCORES, np.array([[1, 2], [1, 2]])) == 2
    assert num_recalled(SCORES, np.array([[1, 3], [3, 0]])) == 3


def test_sources_and_distances_are_told_apart():
    sample = RecallSample(interval=1)
    sample.rank("gate", 0, 1, SCORES)
    sample.rank("gate", 0, 2, SCORES)
    sample.rank("popularity", 1, 1, -SCORES)
    sample.end_step({1: np.array([[1, 2], [0, 3]]), 2: np.array([[1, 0], [1, 2]])})
    assert sample.counts() == [
        SourceRecall("gate", 1, 4, 4),
        SourceRecall("gate", 2, 4, 1),
        SourceRecall("popularity", 1, 4, 3),
    ]
    sample.forget()
    assert sample.counts() == []


def test_of_what_is_ranked_twice_the_last_counts():
    sample = RecallSample(interval=1)
    sample.rank("gate", 0, 1, -SCORES)
    sample.rank("gate", 0, 1, SCORES)
    sample.end_step({1: np.array([[1, 2], [0, 3]])})
    assert sample.counts() == [SourceRecall("gate", 1, 4, 4)]


def test_layers_that_computed_other_rows_and_padding_do_not_count():
    sample = RecallSample(interval=1)
    sample.rank("gate", 0, 1, SCORES)
    sample.rank("gate", 1, 1, SCORES)
    sample.rank("gate", 2, 1, SCORES)
    sample.end_step({1: np.array([[1, 2]]), 2: np.array([[1, 2], [-1, -1]])})
    assert sample.counts() == [SourceRecall("gate", 1, 2, 2)]


def test_one_step_in_the_interval_is_counted_and_of_it_so_many_rows():
    sample = RecallSample(interval=3, max_rows=4)
    counted = []
    for _ in range(7):
        counted.append(sample.is_counting)
        sample.rank("gate", 0, 1, np.repeat(SCORES, 50, axis=0))
        sample.end_step({1: np.repeat(np.array([[1, 2], [1, 2]]), 50, axis=0)})
    assert counted == [True, False, False] * 2 + [True]
    # The first and the last row are among an even sample of four of a hundred rows; half of these recall everything.
    assert sample.counts() == [SourceRecall("gate", 1, 3 * 4 * 2, 3 * 2 * 2)]


def test_what_was_ranked_is_kept_as_it_was():
    sample = RecallSample(interval=1)
    scores = SCORES.copy()
    sample.rank("gate", 0, 1, scores)
    scores[:] = -scores
    sample.end_step({1: np.array([[1, 2], [0, 3]])})
    assert sample.counts() == [SourceRecall("gate", 1, 4, 4)]


def test_a_predictor_counts_what_it_said_as_the_figures_do():
    trace = synthetic_trace(SyntheticSpec(5, 8, 2, coupling=3.0, edge=1.0), 8, 40, 0)
    learning, held_out = trace.split()
    statistics = RoutingStatistics(StatisticsSpec(5, 8, 2, max_distance=6, max_rows_per_step=1000))
    statistics.update(learning.ids, learning.token_ids)
    sample = RecallSample(interval=1)
    predictor = AffinityPredictor(LearntAffinity(statistics), sample)
    for row in range(len(held_out.requests)):
        one = slice(row, row + 1)
        predictor.begin(held_out.token_ids[one])
        for layer in range(5):
            predictor.observe(layer, held_out.ids[layer, one])
            for distance in range(1, min(3, 4 - layer) + 1):
                predictor.predict(layer, distance)
        predictor.end_step()
    found = {(count.source, count.distance): count for count in sample.counts()}
    assert {source for source, _ in found} == {"affinity"}
    assert found["affinity", 1].num_chosen == 2 * 4 * len(held_out.requests)
    for figure in recall_figures(learning, held_out, ["affinity"], 3):
        count = found[figure.predictor, figure.distance]
        # The figures go on learning from what they have judged.
        assert count.num_recalled / count.num_chosen == pytest.approx(figure.recall, abs=0.05)
