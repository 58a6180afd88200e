"""Conditional probabilities: their sums, and their values for experts that were seen often or never."""

import numpy as np

from experts.routing.choices import Affinity, RoutingStatistics, StatisticsSpec

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


def test_lifts_are_those_of_the_probabilities_where_counts_bear_them_out_and_vanish_where_chance_explains_them():
    gathered = RoutingStatistics(StatisticsSpec(3, 8, 1, half_life=10**9, max_rows_per_step=1000))
    random = np.random.default_rng(0)
    first, last = random.integers(8, size=(2, 1000))
    gathered.update(np.stack([first, (first + 1) % 8, last])[..., None])
    affinity = Affinity.of(gathered)
    plain = np.log(affinity.conditional(1)) - np.log(affinity.popularity()[1:, None])
    assert np.abs(plain[1]).max() > 0.3
    assert np.abs(affinity.log_lifts(1, 1)).max() < 0.1
    np.testing.assert_allclose(affinity.log_lifts(0, 1), plain[0], rtol=0.01)


def test_unseen_experts_lift_nothing():
    affinity = Affinity.of(RoutingStatistics(StatisticsSpec(3, 8, 2)))
    assert not affinity.log_lifts(0, 2).any()
