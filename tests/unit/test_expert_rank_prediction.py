"""What one rank of several expects: of its own rows what is known of them, of others what such rows chose so far."""

import numpy as np
import pytest

from experts.predictor import BEFORE, RecallSample, Tap
from experts.predictors import CombinedSource, GateSource, LearntAffinity, open_predictor
from experts.rank_predictor import RankPredictor, VisitorShares
from experts.routing import RoutingStatistics, StatisticsSpec

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
    """A predictor of a rank, its part in each layer, and what it asks."""

    def __init__(self, own, combined=None):
        self.here = [frozenset({0, 1}), frozenset({0, 1})]
        self.num_visitors = 0
        combined = combined or CombinedSource([GateSource(Tap.EARLY, SPEC.top_k)], SPEC.num_layers, 1)
        self.predictor = RankPredictor(own, combined, LearntAffinity(RoutingStatistics(SPEC)), self)

    def experts_here(self, layer):
        return self.here[layer]

    def num_rows_elsewhere(self, layer):
        return self.num_visitors

    def step(self, home, computed):
        """A step that has computed its first layer: what rows at home chose, and what those computed here came for."""
        tokens = np.zeros(len(home), np.int64)
        self.predictor.begin(tokens, tokens)
        self.predictor.visited(0, column(home), column(computed))
        self.predictor.observe(0, column(home), np.ones((len(home), 1), np.float32))


def column(experts):
    """[T, 1]"""
    return np.array(experts, np.int64).reshape(-1, 1)


def logits_for(*experts):
    """[T, E] of gates that are sure."""
    return np.eye(SPEC.num_experts, dtype=np.float32)[list(experts)]


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


def test_rows_that_come_are_expected_to_choose_what_gates_say_of_them():
    rank = Rank(Home([0, 0, 0, 0]))
    rank.num_visitors = 1
    # Of two rows at home one is computed here; the row of the other rank goes on to expert 1.
    rank.step([0, 3], [0, 0])
    assert rank.predictor.wants_gates_of_computed()
    rank.predictor.observe_gate_of_computed(0, 1, logits_for(0, 1))
    rank.predictor.observe_gate(Tap.EARLY, 0, 1, logits_for(0, 3))
    found = rank.predictor.predict(0, 1)
    assert found[1] > 0.9
    assert found[0] < 0.1
    rank.step([0, 3], [0, 0])
    assert rank.predictor.predict(0, 1)[1] < 0.5


def test_rows_that_stay_away_count_by_what_such_rows_chose_whatever_gates_say_of_the_others():
    rank = Rank(Home([0, 0, 0, 0]))
    rank.num_visitors = 2
    rank.step([], [0])
    rank.predictor.observe_gate_of_computed(0, 1, logits_for(1))
    # One of four experts, as nothing is known of that layer yet.
    assert rank.predictor.predict(0, 1) == pytest.approx([0.25, 1, 0, 0], abs=0.01)


@pytest.mark.parametrize(("home", "computed"), [([1], [1]), ([2], []), ([], list(range(2)) * 40)])
def test_gates_are_not_asked_of_nobody_and_not_of_crowds(home, computed):
    rank = Rank(Home([0, 0, 0, 0]))
    rank.num_visitors = 200
    rank.step(home, computed)
    assert not rank.predictor.wants_gates_of_computed()


@pytest.mark.parametrize("choice", ["popularity+affinity+routes+signature+activation-matrix+gate-early", "routes"])
def test_every_source_bears_steps_with_rows_and_without(choice):
    learnt = LearntAffinity(RoutingStatistics(SPEC))
    recall = RecallSample(interval=1)
    own, _, combined = open_predictor(choice, learnt, recall)
    rank = Rank(own, combined)
    for requests in ([7], [], [], [7, 8], []):
        rank.step(len(requests) * [0], [0, 1])
        assert np.all(rank.predictor.predict(0, 1)[2:] == 0)
        assert np.all(rank.predictor.predict(BEFORE, 1)[2:] == 0)
        rank.predictor.end([])
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
