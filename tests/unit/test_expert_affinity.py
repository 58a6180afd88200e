"""Conditional probabilities and paths, against counting and enumeration."""

import itertools

import numpy as np
import pytest

from experts.routing.affinity import Affinity
from experts.routing.statistics import RoutingStatistics, StatisticsSpec

LAYERS, EXPERTS, TOP_K = 5, 6, 2


def statistics(num_tokens=400, seed=0):
    random = np.random.default_rng(seed)
    gathered = RoutingStatistics(StatisticsSpec(LAYERS, EXPERTS, TOP_K, half_life=10**9, max_rows_per_step=1000))
    gathered.update(random.random((LAYERS, num_tokens, EXPERTS)).argsort(axis=2)[..., :TOP_K])
    return gathered


def test_probabilities_of_the_next_experts_sum_to_the_number_chosen():
    affinity = Affinity.of(statistics())
    np.testing.assert_allclose(affinity.popularity().sum(axis=1), TOP_K, rtol=1e-5)
    for distance in (1, 2, 3):
        np.testing.assert_allclose(affinity.conditional(distance).sum(axis=2), TOP_K, rtol=1e-5)
        assert affinity.conditional(distance).max() <= 1
    np.testing.assert_allclose(affinity.predict(1, [0, 3], 2).sum(), TOP_K, rtol=1e-5)


def test_what_always_follows_is_found_and_what_was_never_seen_is_as_popular_as_ever():
    gathered = RoutingStatistics(StatisticsSpec(2, 8, 1, half_life=10**9))
    for _ in range(50):
        gathered.update(np.array([[[0], [1]], [[5], [6]]]))
    affinity = Affinity.of(gathered)
    assert affinity.conditional(1)[0, 0, 5] > 0.95
    assert affinity.conditional(1)[0, 0].argmax() == 5
    np.testing.assert_allclose(affinity.conditional(1)[0, 7], affinity.popularity()[1], rtol=1e-5)


def test_without_observations_every_expert_is_as_probable():
    affinity = Affinity.of(RoutingStatistics(StatisticsSpec(3, 8, 2)))
    np.testing.assert_allclose(affinity.conditional(1), 0.25, rtol=1e-6)


@pytest.mark.parametrize("budget", [1, 4, 9, 18])
def test_paths_are_the_most_probable_of_all_enumerated_ones_and_a_tree(budget):
    affinity = Affinity.of(statistics(60))
    chosen, first, depth = [1, 4], 1, 3
    best = {}
    for length in range(1, depth + 1):
        for path in itertools.product(range(EXPERTS), repeat=length):
            for source in chosen:
                probability, here = 1.0, source
                for ahead, expert in enumerate(path):
                    probability *= float(affinity.conditional(1)[first + ahead][here, expert])
                    here = expert
                at = (first + length, path[-1])
                best[at] = max(best.get(at, 0.0), probability)
    found = affinity.paths(first, chosen, depth, budget)
    assert [step.probability for step in found] == pytest.approx(sorted(best.values(), reverse=True)[:budget], rel=1e-5)
    reached = {(first, expert) for expert in chosen}
    for step in found:
        assert step.probability == pytest.approx(best[step.layer, step.expert], rel=1e-5)
        assert (step.layer - 1, step.parent) in reached
        reached.add((step.layer, step.expert))


def test_paths_lead_through_residents_without_returning_them():
    affinity = Affinity.of(statistics(60))
    resident = np.zeros((LAYERS, EXPERTS), np.bool_)
    resident[2] = True
    free = affinity.paths(1, [0], 2, 100)
    assert affinity.paths(1, [0], 2, 100, resident) == [step for step in free if step.layer == 3]


def test_paths_end_with_the_last_layer():
    affinity = Affinity.of(statistics())
    assert affinity.paths(LAYERS - 1, [0], 3, 10) == []
    assert {step.layer for step in affinity.paths(LAYERS - 2, [0], 3, 100)} == {LAYERS - 1}
