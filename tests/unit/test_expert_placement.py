"""Placements: valid ones, where tokens go, balance with replicas, and the figures that judge them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experts.lab_traces import remote_ranks
from experts.placement.balanced import load_balanced, with_replicas
from experts.placement.placement import (
    Placement,
    PlacementError,
    balancedness,
    contiguous,
    from_first_ranks,
    rank_load,
    round_robin,
)
from tests.support.examples import examples


def zipf(num_layers, num_experts, seed, exponent=1.0):
    """[L, E]: Zipf's law, its places dealt to experts at random."""
    random = np.random.default_rng(seed)
    load = 1 / np.arange(1, num_experts + 1) ** exponent
    return np.stack([random.permutation(load) for _ in range(num_layers)])


def test_contiguous_and_round_robin_are_what_they_say():
    assert contiguous(2, 6, 3).first_ranks().tolist() == [[0, 0, 1, 1, 2, 2]] * 2
    assert round_robin(1, 6, 3).first_ranks().tolist() == [[0, 1, 2, 0, 1, 2]]
    assert contiguous(1, 6, 3).experts_on(0, 1) == (2, 3)
    assert contiguous(1, 6, 3).slots_per_rank(0) == 2


@pytest.mark.parametrize(
    ("num_ranks", "ranks"),
    [
        (0, ()),
        (2, (((0,), ()),)),
        (2, (((0,), (2,)),)),
        (2, (((0,), (-1,)),)),
        (2, (((0, 0), (1, 1)),)),
        (2, (((0,), (0,)),)),
        (2, (((0,), (1,)), ((0,), (1,), (0,), (1,)))),
    ],
)
def test_a_placement_that_cannot_be_is_refused(num_ranks, ranks):
    with pytest.raises(PlacementError):
        Placement(num_ranks, ranks)


@pytest.mark.parametrize("build", [contiguous, round_robin])
def test_ranks_that_do_not_divide_the_experts_are_refused(build):
    with pytest.raises(PlacementError, match=r"8 experts .* 3 ranks"):
        build(1, 8, 3)


def test_a_token_is_served_at_home_or_by_replicas_in_turn():
    placement = Placement(4, (((2, 0), (1,), (3,), (0,), (1,), (3,), (2,)),))
    assert placement.destinations(0)[:, 0].tolist() == [0, 2, 2, 0]
    assert placement.destinations(0)[:, 1].tolist() == [1, 1, 1, 1]


def test_remote_ranks_count_each_rank_once_and_not_the_home():
    placement = contiguous(1, 8, 4)
    ids = np.array([[[0, 1, 2], [2, 3, 0], [4, 6, 2], [0, 1, 2]]])
    assert remote_ranks(ids, np.array([0, 1, 1, 3]), placement).tolist() == [(1 + 1 + 2 + 2) / 4]


def serving_ranks(held, destinations, home, experts):
    """The ranks that serve a token's experts, by plain counting."""
    served = {expert: home for expert in experts if home in held[expert]}
    served |= {expert: held[expert][0] for expert in experts if len(held[expert]) == 1}
    sent = set(served.values())
    for expert in experts:
        if expert not in served:
            able = sent.intersection(held[expert])
            destination = int(destinations[expert])
            served[expert] = destination if destination in able or not able else min(able)
    return set(served.values())


@given(st.integers(0, 10_000))
@examples(0.25)
def test_remote_ranks_and_loads_equal_plain_counting_with_replicas(seed):
    random = np.random.default_rng(seed)
    placement = load_balanced(zipf(2, 8, seed), 4, num_redundant=4)
    ids = random.random((2, 20, 8)).argsort(axis=2)[..., :3]
    homes = random.integers(4, size=20)
    load = np.zeros((2, 8))
    sent = np.zeros((2, 4))
    for layer in range(2):
        table = placement.destinations(layer)
        remote = 0
        for token in range(20):
            ranks = serving_ranks(placement.ranks[layer], table[homes[token]], int(homes[token]), ids[layer, token])
            assert all(int(table[homes[token], expert]) in placement.ranks[layer][expert] for expert in range(8))
            remote += len(ranks - {int(homes[token])})
            for expert in ids[layer, token]:
                load[layer, expert] += 1
        for home in range(4):
            for expert in range(8):
                sent[layer, table[home, expert]] += load[layer, expert] / 4
        assert remote_ranks(ids, homes, placement)[layer] == pytest.approx(remote / 20)
    np.testing.assert_allclose(rank_load(load, placement), sent)


def test_balancedness_is_mean_over_maximum():
    load = np.array([[3.0, 1.0, 1.0, 1.0], [0, 0, 0, 0]])
    assert balancedness(load, contiguous(2, 4, 2)).tolist() == [0.75, 1.0]


@given(
    st.sampled_from([(8, 2, 0), (8, 4, 4), (8, 8, 8), (12, 3, 6), (4, 4, 12), (6, 2, 2), (4, 2, 4), (16, 8, 0)]),
    st.integers(0, 10_000),
    st.floats(0, 6),
)
@examples(2)
def test_load_balanced_is_valid_for_any_load(sizes, seed, exponent):
    num_experts, num_ranks, num_redundant = sizes
    load = zipf(2, num_experts, seed, exponent) * np.random.default_rng(seed).integers(0, 3, (2, num_experts))
    placement = load_balanced(load, num_ranks, num_redundant=num_redundant)
    assert placement.slots_per_rank(0) == (num_experts + num_redundant) // num_ranks
    assert placement == load_balanced(load, num_ranks, num_redundant=num_redundant)
    first = round_robin(2, num_experts, num_ranks) if num_experts % num_ranks == 0 else None
    if first is not None and num_redundant % num_ranks == 0:
        grown = with_replicas(first, load, num_redundant)
        held = list(itertools.product(range(2), range(num_ranks)))
        assert all(set(first.experts_on(*at)) <= set(grown.experts_on(*at)) for at in held)
        assert grown.slots_per_rank(0) == placement.slots_per_rank(0)


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_replicas_balance_zipf_loads(num_ranks, seed):
    known = zipf(4, 64, seed)
    random = np.random.default_rng(seed)
    met = np.stack([random.multinomial(100_000, of_layer / of_layer.sum()) for of_layer in known])
    placement = load_balanced(known, num_ranks, num_redundant=8)
    assert balancedness(met, placement).min() >= 0.90
    if num_ranks == 8:
        # The busiest expert alone is more than a rank's share.
        assert balancedness(met, load_balanced(known, num_ranks)).max() < 0.62
    even = np.ones((4, 64))
    assert balancedness(even, load_balanced(even, num_ranks)).min() == 1.0


def test_groups_stay_within_their_node():
    load = zipf(3, 16, 0)
    placement = load_balanced(load, 4, num_redundant=4, num_nodes=2, num_groups=8)
    for layer in range(3):
        for group in range(8):
            nodes = {rank // 2 for expert in (2 * group, 2 * group + 1) for rank in placement.ranks[layer][expert]}
            assert len(nodes) == 1


@pytest.mark.parametrize(("num_ranks", "num_redundant"), [(3, 0), (4, 3), (2, 10), (2, -2)])
def test_redundant_experts_that_do_not_fit_are_refused(num_ranks, num_redundant):
    with pytest.raises(PlacementError):
        load_balanced(np.ones((1, 8)), num_ranks, num_redundant=num_redundant)
    with pytest.raises(PlacementError):
        with_replicas(from_first_ranks(np.arange(8)[None] % 2, 2), np.ones((1, 8)), 10)
