"""Rebalancing: few moves help, hysteresis holds, and an attempt ends well or leaves everything as it was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from experts.placement.balanced import load_balanced
from experts.placement.moves import evened_out, load_shares
from experts.placement.placement import Placement, balancedness, contiguous, rank_load
from experts.placement.rebalance import Drop, Load, LoadWindow, RebalancePolicy, Rebalancer, Switch
from tests.support.examples import examples


def zipf(num_experts: int, seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).permutation(1 / np.arange(1, num_experts + 1))


def routing_of(load: NDArray[np.float64], num_tokens: int, seed: int = 0) -> NDArray[np.int64]:
    """[L, T, 1], drawn as the loads [L, E] say."""
    random = np.random.default_rng(seed)
    shares = load / load.sum(axis=1, keepdims=True)
    return np.stack([random.choice(load.shape[1], (num_tokens, 1), p=share) for share in shares])


@given(
    st.sampled_from([(8, 2, 2), (8, 4, 0), (16, 4, 8), (12, 3, 6), (4, 4, 12)]),
    st.integers(0, 10_000),
    st.integers(0, 6),
)
@examples(1.5)
def test_moves_are_few_and_keep_a_valid_placement(sizes: tuple[int, int, int], seed: int, max_moves: int) -> None:
    num_experts, num_ranks, num_redundant = sizes
    before = load_balanced(zipf(num_experts, seed)[None], num_ranks, num_redundant=num_redundant)
    load = zipf(num_experts, seed + 1) * np.random.default_rng(seed).integers(0, 3, num_experts)
    ranks = evened_out(before.ranks[0], load, num_ranks, max_moves)
    after = Placement(num_ranks, (ranks,))
    assert after.slots_per_rank(0) == before.slots_per_rank(0)
    arrived = sum(len(set(new) - set(old)) for new, old in zip(ranks, before.ranks[0], strict=True))
    assert arrived <= 2 * max_moves
    np.testing.assert_allclose(load @ load_shares(ranks, num_ranks), rank_load(load[None], after)[0])


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_eight_moves_balance_a_layer_whose_load_has_changed(num_ranks: int, seed: int) -> None:
    before = load_balanced(zipf(64, seed)[None], num_ranks, num_redundant=8)
    load = zipf(64, seed + 100)
    after = Placement(num_ranks, (evened_out(before.ranks[0], load, num_ranks, 8),))
    assert balancedness(load[None], before)[0] < 0.85
    assert balancedness(load[None], after)[0] > 0.88


def test_the_window_counts_choices_and_forgets_slowly() -> None:
    window = LoadWindow(2, 3)
    window.add(np.array([[[0, 2]], [[-1, -1]]]))
    window.add(np.array([[[0, 1]], [[2, 1]]], np.int16))
    assert window.load.tolist() == [[2, 1, 1], [0, 1, 1]]
    assert not window.is_full()
    window.fade()
    assert window.load.tolist() == [[1, 0.5, 0.5], [0, 0.5, 0.5]]


def make_rebalancer(threshold: float = 0.05, interval: int = 1) -> Rebalancer:
    return Rebalancer(contiguous(3, 8, 2), RebalancePolicy(threshold), interval=interval, timeout=60)


SKEWED = np.array([[1.0] * 8, [4.0] * 4 + [1.0] * 4, [9, 9] + [1.0] * 6])


def test_the_worst_layer_moves_first_and_all_switch_once_all_have_loaded() -> None:
    rebalancer = make_rebalancer()
    rebalancer.window.add(routing_of(SKEWED, 4000))
    command = rebalancer.begin_step(10.0)
    assert isinstance(command, Load)
    migration = command.migration
    assert migration.layer == 2
    rebalancer.loaded(1, migration.version, None)
    rebalancer.loaded(0, migration.version + 7, None)
    assert rebalancer.begin_step(11.0) is None
    assert rebalancer.placement == contiguous(3, 8, 2)
    assert rebalancer.stats(11.0).layer_in_progress == 2
    rebalancer.loaded(0, migration.version, None)
    assert rebalancer.begin_step(12.0) == Switch(migration)
    assert rebalancer.placement.ranks[2] == migration.ranks
    stats = rebalancer.stats(15.0)
    assert (stats.num_migrations, stats.num_failures, stats.seconds_since_success) == (1, 0, 3.0)
    assert stats.num_experts_loaded > 0
    assert stats.last_gain is not None
    assert stats.last_gain[1] > stats.last_gain[0] + 0.05
    following = rebalancer.begin_step(16.0)
    assert isinstance(following, Load)
    assert following.migration.layer == 1


@pytest.mark.parametrize("fails", ["a rank says so", "a rank is silent"])
def test_a_failure_leaves_the_placement_and_is_counted(fails: str) -> None:
    rebalancer = make_rebalancer()
    rebalancer.window.add(routing_of(SKEWED, 4000))
    command = rebalancer.begin_step(0.0)
    assert isinstance(command, Load)
    rebalancer.loaded(0, command.migration.version, None)
    if fails == "a rank says so":
        rebalancer.loaded(1, command.migration.version, "the disk is gone")
        assert rebalancer.begin_step(1.0) == Drop(command.migration.version)
    else:
        assert rebalancer.begin_step(60.0) is None
        assert rebalancer.begin_step(60.1) == Drop(command.migration.version)
    assert rebalancer.placement == contiguous(3, 8, 2)
    stats = rebalancer.stats(99.0)
    assert (stats.num_migrations, stats.num_failures, stats.seconds_since_success) == (0, 1, None)
    assert stats.last_error is not None
    assert stats.last_error.startswith("rank 1")
    again = rebalancer.begin_step(100.0)
    assert isinstance(again, Load)
    assert again.migration.version > command.migration.version


def test_a_gain_below_the_threshold_moves_nothing() -> None:
    nearly = np.array([[1.0] * 8, [1.1] * 4 + [1.0] * 4, [1.0] * 8])
    for threshold, moves in ((0.2, False), (0.0, True)):
        rebalancer = make_rebalancer(threshold)
        rebalancer.window.add(routing_of(nearly, 4000))
        assert isinstance(rebalancer.begin_step(0.0), Load) is moves


def test_nothing_is_decided_before_the_interval_or_with_too_little_seen() -> None:
    rebalancer = make_rebalancer(interval=3)
    rebalancer.window.add(routing_of(SKEWED, 20))
    assert [rebalancer.begin_step(0.0) for _ in range(6)] == [None] * 6
    rebalancer.window.add(routing_of(SKEWED, 4000))
    assert [isinstance(rebalancer.begin_step(0.0), Load) for _ in range(3)] == [False, False, True]


def test_layers_that_cannot_be_helped_do_not_keep_others_waiting() -> None:
    # Everything on one expert of a layer, without replicas: nothing helps there.
    hopeless = np.zeros((6, 8))
    hopeless[:, 0] = 1
    hopeless[5] = [3, 3, 1, 1, 1, 1, 1, 1]
    policy, placement = RebalancePolicy(0.05), contiguous(6, 8, 2)
    assert policy.choose(hopeless, placement) is None
    choice = policy.choose(hopeless, placement)
    assert choice is not None
    assert choice.layer == 5
