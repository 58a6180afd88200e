"""The predictions of one rank of several: its own rows by their history, other rows by earlier choices of such rows."""

import numpy as np
import pytest

from experts.routing.choices import RoutingStatistics, StatisticsSpec
from experts.routing.predictors import (
    BEFORE,
    AffinityPredictor,
    LearntAffinity,
    RankPredictor,
    RecallSample,
    RemoteRowShares,
)

SPEC = StatisticsSpec(num_layers=2, num_experts=4, top_k=1)


class Local:
    """A predictor that expects the same of each layer, and remembers what it is told."""

    def __init__(self, expected):
        self.expected = np.array(expected, np.float32)
        self.steps = 0
        self.heard = []

    def begin(self, token_ids):
        self.steps += 1

    def observe(self, layer, expert_ids):
        self.heard.append((layer, expert_ids.tolist()))

    def predict(self, layer, distance):
        return self.expected

    def end_step(self):
        self.heard.append("end")


class Rank:
    """A predictor of a rank, its part in each layer, and what it asks."""

    def __init__(self, local):
        self.here = [frozenset({0, 1}), frozenset({0, 1})]
        self.num_remote = 0
        self.predictor = RankPredictor(local, LearntAffinity(RoutingStatistics(SPEC)), self)

    def experts_here(self, layer):
        return self.here[layer]

    def num_rows_elsewhere(self, layer):
        return self.num_remote

    def step(self, local, computed):
        """A step that has computed its first layer: what local rows chose, and what those computed here came for."""
        self.predictor.begin(np.zeros(len(local), np.int64))
        self.predictor.observe_computed(0, column(local), column(computed))
        self.predictor.observe(0, column(local))


def column(experts):
    """[T, 1]"""
    return np.array(experts, np.int64).reshape(-1, 1)


def test_nothing_is_expected_of_experts_that_are_elsewhere():
    rank = Rank(Local([0.9, 0.2, 0.8, 0.7]))
    rank.predictor.begin(np.zeros(1, np.int64))
    assert rank.predictor.predict(0, 1) == pytest.approx([0.9, 0.2, 0, 0])


def test_what_is_here_is_asked_for_anew_when_a_layer_is_placed_anew():
    rank = Rank(Local([0.9, 0.2, 0.8, 0.7]))
    rank.predictor.begin(np.zeros(1, np.int64))
    rank.predictor.predict(0, 1)
    rank.here[1] = frozenset({1, 2})
    assert rank.predictor.predict(0, 1) == pytest.approx([0, 0.2, 0.8, 0])
    assert rank.predictor.predict(BEFORE, 1) == pytest.approx([0.9, 0.2, 0, 0])


def test_rows_of_other_ranks_are_expected_to_come_for_what_such_rows_came_for():
    rank = Rank(Local([0, 0, 0, 0]))
    rank.num_remote = 10
    for _ in range(200):
        # Eight of the ten come for expert 0, and none for expert 1; the local row chooses expert 1.
        rank.step([1], [1] + 8 * [0])
    rank.num_remote = 1
    assert rank.predictor.predict(BEFORE, 1) == pytest.approx([0.8, 0, 0, 0], abs=0.01)
    rank.num_remote = 2
    assert rank.predictor.predict(BEFORE, 1) == pytest.approx([0.96, 0, 0, 0], abs=0.01)


def test_own_rows_and_others_need_an_expert_independently():
    rank = Rank(Local([0.5, 0, 0.5, 0]))
    rank.num_remote = 2
    for _ in range(2000):
        rank.step([2], [0])
    assert rank.predictor.predict(BEFORE, 1)[0] == pytest.approx(1 - 0.5 * 0.5**2, abs=0.01)


def test_a_rank_without_rows_predicts_for_those_of_others_alone():
    local = Local([1, 1, 1, 1])
    rank = Rank(local)
    rank.num_remote = 4
    for _ in range(500):
        rank.step([], [1, 1, 1, 1])
    assert local.steps == 0
    assert local.heard == []
    assert rank.predictor.predict(BEFORE, 1) == pytest.approx([0, 1, 0, 0], abs=0.05)
    rank.predictor.end_step()
    assert local.heard == []


def test_steps_with_rows_and_without_are_followed_and_the_latter_count_for_nothing():
    recall = RecallSample(interval=1)
    rank = Rank(AffinityPredictor(LearntAffinity(RoutingStatistics(SPEC)), recall))
    for num_rows in (1, 0, 0, 2, 0):
        rank.step(num_rows * [0], [0, 1])
        assert np.all(rank.predictor.predict(0, 1)[2:] == 0)
        assert np.all(rank.predictor.predict(BEFORE, 1)[2:] == 0)
        rank.predictor.end_step()
    # Three rows chose one expert each.
    assert {count.num_chosen for count in recall.counts()} == {3}


def test_an_expert_that_comes_is_thought_as_popular_as_at_home_at_first():
    shares = RemoteRowShares(1, 3)
    popularity = np.array([0.5, 0.3, 0.2], np.float32)
    assert shares.of(0, popularity) == pytest.approx([0.5, 0.3, 0.2])
    for _ in range(1000):
        shares.add(0, 1, np.array([1, 0, 1]), np.array([True, True, False]))
    found = shares.of(0, popularity)
    assert found == pytest.approx([1, 0, 0.2], abs=0.01)


def test_older_rows_of_others_fade():
    shares = RemoteRowShares(1, 1, half_life=10)
    everywhere = np.array([True])
    shares.add(0, 100, np.array([100]), everywhere)
    for _ in range(100):
        shares.add(0, 1, np.array([0]), everywhere)
    assert shares.of(0, np.zeros(1, np.float32))[0] < 0.01
