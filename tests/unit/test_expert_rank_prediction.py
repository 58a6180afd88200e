"""What one rank of several expects: of its own rows what is known of them, of others what such rows chose so far."""

import numpy as np
import pytest

from experts.prediction.choice import make_predictor
from experts.prediction.predictor import BEFORE
from experts.prediction.rank_predictor import RankPredictor, VisitorShares
from experts.prediction.recall import RecallSample
from experts.prediction.sources import LearntAffinity
from experts.routing.statistics import RoutingStatistics, StatisticsSpec

SPEC = StatisticsSpec(num_layers=2, num_experts=4, top_k=1)


class Home:
    """A predictor that expects the same of each layer, and remembers what it is told."""

    def __init__(self, expected):
        self.expected = np.array(expected, np.float32)
        self.steps = 0
        self.heard = []
        self.ended = []

    def begin(self, token_ids, requests):
        self.steps += 1

    def observe(self, layer, expert_ids, weights):
        self.heard.append((layer, expert_ids.tolist()))

    def observe_gate(self, tap, layer, distance, logits):
        self.heard.append((tap, layer, distance))

    def predict(self, layer, distance):
        return self.expected

    def end(self, requests):
        self.ended += requests


class Rank:
    """A predictor of a rank, and what it asks."""

    def __init__(self, own):
        self.here = [frozenset({0, 1}), frozenset({0, 1})]
        self.num_visitors = 0
        learnt = LearntAffinity(RoutingStatistics(SPEC))
        self.predictor = RankPredictor(own, learnt, lambda layer: self.here[layer], lambda _: self.num_visitors)

    def step(self, home, computed, layer=0):
        """A step whose rows at home chose `home` and whose rows computed here came for `computed`, in one layer."""
        num_rows = len(home)
        self.predictor.begin(np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64))
        ids = np.array(home, np.int64).reshape(num_rows, 1)
        self.predictor.observe(layer, ids, np.ones((num_rows, 1), np.float32))
        self.predictor.visited(layer, np.array(computed, np.int64).reshape(len(computed), 1))


def test_nothing_is_expected_of_experts_that_are_elsewhere():
    rank = Rank(Home([0.9, 0.2, 0.8, 0.7]))
    rank.predictor.begin(np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert rank.predictor.predict(0, 1) == pytest.approx([0.9, 0.2, 0, 0])


def test_what_is_here_is_asked_for_anew_when_a_layer_is_placed_anew():
    rank = Rank(Home([0.9, 0.2, 0.8, 0.7]))
    rank.predictor.begin(np.zeros(1, np.int64), np.zeros(1, np.int64))
    rank.predictor.predict(0, 1)
    rank.here[1] = frozenset({1, 2})
    assert rank.predictor.predict(0, 1) == pytest.approx([0, 0.2, 0.8, 0])
    assert rank.predictor.predict(BEFORE, 1) == pytest.approx([0.9, 0.2, 0, 0])


def test_rows_of_other_ranks_are_expected_to_come_for_what_such_rows_came_for():
    rank = Rank(Home([0, 0, 0, 0]))
    rank.num_visitors = 10
    for _ in range(200):
        # Eight of the ten come for expert 0, and none for expert 1; the row at home chooses expert 1.
        rank.step([1], [1] + 8 * [0])
    rank.num_visitors = 1
    assert rank.predictor.predict(BEFORE, 1) == pytest.approx([0.8, 0, 0, 0], abs=0.01)
    rank.num_visitors = 2
    assert rank.predictor.predict(BEFORE, 1) == pytest.approx([0.96, 0, 0, 0], abs=0.01)


def test_own_rows_and_others_need_an_expert_independently():
    rank = Rank(Home([0.5, 0, 0.5, 0]))
    rank.num_visitors = 2
    for _ in range(2000):
        rank.step([2], [0])
    assert rank.predictor.predict(BEFORE, 1)[0] == pytest.approx(1 - 0.5 * 0.5**2, abs=0.01)


def test_a_rank_without_rows_predicts_for_those_of_others_alone():
    own = Home([1, 1, 1, 1])
    rank = Rank(own)
    rank.num_visitors = 4
    for _ in range(500):
        rank.step([], [1, 1, 1, 1])
    assert own.steps == 0
    assert own.heard == []
    assert rank.predictor.predict(BEFORE, 1) == pytest.approx([0, 1, 0, 0], abs=0.05)
    rank.predictor.end([3])
    assert own.ended == [3]


@pytest.mark.parametrize("choice", ["popularity+affinity+routes+signature+activation-matrix+gate-early", "routes"])
def test_every_source_bears_steps_with_rows_and_without(choice):
    learnt = LearntAffinity(RoutingStatistics(SPEC))
    recall = RecallSample(interval=1)
    own, _ = make_predictor(choice, learnt, recall)
    predictor = RankPredictor(own, learnt, lambda _: frozenset({0, 3}), lambda _: 1)
    for requests in ([7], [], [], [7, 8], []):
        tokens = np.array(requests, np.int64)
        predictor.begin(tokens, tokens)
        assert np.all(predictor.predict(BEFORE, 2)[1:3] == 0)
        for layer in range(2):
            ids = np.zeros((len(requests), 1), np.int64)
            predictor.observe(layer, ids, np.ones(ids.shape, np.float32))
            predictor.visited(layer, ids)
        predictor.end([])
    # Three rows chose one expert each; steps without rows count for nothing.
    assert {count.num_chosen for count in recall.counts()} == {3}


def test_an_expert_that_comes_is_thought_as_popular_as_at_home_at_first():
    shares = VisitorShares(1, 3)
    popularity = np.array([0.5, 0.3, 0.2], np.float32)
    assert shares.of(0, popularity) == pytest.approx([0.5, 0.3, 0.2])
    for _ in range(1000):
        shares.add(0, 1, np.array([1, 0, 1]), np.array([True, True, False]))
    found = shares.of(0, popularity)
    assert found == pytest.approx([1, 0, 0.2], abs=0.01)


def test_older_rows_of_others_fade():
    shares = VisitorShares(1, 1, half_life=10)
    everywhere = np.array([True])
    shares.add(0, 100, np.array([100]), everywhere)
    for _ in range(100):
        shares.add(0, 1, np.array([0]), everywhere)
    assert shares.of(0, np.zeros(1, np.float32))[0] < 0.01
