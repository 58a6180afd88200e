"""Exact assignment, and ExFlow's objective against enumeration and integer programming."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experts.synthetic_traces import MIXTRAL_LIKE, synthetic_trace
from experts.placement.placement import hops, round_robin
from experts.placement.search import affinity_placement, balanced_assignment, staying
from experts.routing.files import shuffled_control, uniform_control
from tests.support.examples import examples
from tests.support.parameters import first


@cache
def balanced(num_items, num_ranks):
    """Ranks of the items in every assignment that gives all ranks as many."""
    even = [rank for rank in range(num_ranks) for _ in range(num_items // num_ranks)]
    return np.array(sorted(set(itertools.permutations(even))))


@given(st.sampled_from([(4, 2), (6, 2), (6, 3), (8, 4), (5, 5)]), st.integers(0, 10**6), st.booleans())
@examples(0.6)
def test_the_assignment_is_the_best_of_all(sizes, seed, whole_numbers):
    num_items, num_ranks = sizes
    random = np.random.default_rng(seed)
    gain = random.integers(0, 4, sizes).astype(float) if whole_numbers else random.normal(size=sizes)
    even = np.arange(num_items) % num_ranks
    most = gain[np.arange(num_items), balanced(num_items, num_ranks)].sum(axis=1).max()
    found = balanced_assignment(gain, random.permutation(even))
    assert (np.bincount(found, minlength=num_ranks) == num_items // num_ranks).all()
    assert gain[np.arange(num_items), found].sum() == pytest.approx(most)


@pytest.mark.parametrize(("num_items", "num_ranks"), [(64, 4), (128, 8), (256, 64)])
def test_a_large_assignment_is_as_good_as_that_of_scipy(num_items, num_ranks):
    optimize = pytest.importorskip("scipy.optimize")
    gain = np.random.default_rng(num_items).normal(size=(num_items, num_ranks))
    columns = np.repeat(np.arange(num_ranks), num_items // num_ranks)
    rows, chosen = optimize.linear_sum_assignment(gain[:, columns], maximize=True)
    found = balanced_assignment(gain, np.arange(num_items) % num_ranks)
    assert gain[np.arange(num_items), found].sum() == pytest.approx(gain[rows, columns[chosen]].sum())


def test_experts_that_always_follow_each_other_share_a_rank():
    random = np.random.default_rng(3)
    paths = np.stack([random.permutation(16) for _ in range(6)])
    transitions = np.zeros((5, 16, 16))
    for layer in range(5):
        transitions[layer, paths[layer], paths[layer + 1]] = 10
    placement = affinity_placement(transitions, 4)
    assert staying(placement.first_ranks(), transitions) == transitions.sum()
    assert placement == affinity_placement(transitions, 4)


def most_staying(transitions, num_ranks):
    """The optimum of ExFlow's objective: the best chain of layers through all partitions of the experts."""
    share = transitions.shape[1] // num_ranks
    ranks = np.repeat(np.arange(num_ranks), share)
    partitions = np.array(sorted(set(itertools.permutations(ranks.tolist()))))
    places = np.eye(num_ranks)[partitions]
    flat = places.reshape(len(partitions), -1)
    best = np.zeros(len(partitions))
    for counts in transitions:
        stays = np.einsum("ij,pir->pjr", counts, places).reshape(len(partitions), -1) @ flat.T
        best = (best[:, None] + stays).max(axis=0)
    return best.max()


@pytest.mark.slow
@pytest.mark.parametrize(("num_experts", "num_ranks"), [(8, 2), (6, 3)])
@pytest.mark.parametrize("seed", first(1, range(3)))
def test_alternating_assignment_comes_within_two_percent_of_the_optimum(num_experts, num_ranks, seed):
    spec = replace(MIXTRAL_LIKE, num_experts=num_experts)
    transitions = synthetic_trace(spec, 10, 100, seed).transitions()
    crossing = transitions.sum() - staying(affinity_placement(transitions, num_ranks).first_ranks(), transitions)
    assert crossing <= 1.02 * (transitions.sum() - most_staying(transitions, num_ranks))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_eight_experts_on_four_ranks_come_within_two_percent_of_the_optimum(seed):
    transitions = synthetic_trace(MIXTRAL_LIKE, 32, 100, seed).transitions()
    crossing = transitions.sum() - staying(affinity_placement(transitions, 4).first_ranks(), transitions)
    assert crossing <= 1.02 * (transitions.sum() - most_staying(transitions, 4))


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(1, range(5)))
def test_with_one_expert_per_rank_each_transition_reaches_its_optimum(seed):
    transitions = synthetic_trace(MIXTRAL_LIKE, 32, 100, seed).transitions()
    # Only the permutation from layer to layer counts, so every transition is an assignment by itself.
    most = sum(counts[np.arange(8), balanced_assignment(counts, np.arange(8))].sum() for counts in transitions)
    assert staying(affinity_placement(transitions, 8).first_ranks(), transitions) == most


def milp_staying(transitions, num_ranks):
    """The optimum of ExFlow's objective by integer programming."""
    optimize = pytest.importorskip("scipy.optimize")
    sparse = pytest.importorskip("scipy.sparse")
    num_layers, num_experts = len(transitions) + 1, transitions.shape[1]
    place = np.arange(num_layers * num_experts * num_ranks).reshape(num_layers, num_experts, num_ranks)
    pairs = np.argwhere(transitions > 0)
    both = place.size + np.arange(len(pairs) * num_ranks).reshape(len(pairs), num_ranks)
    size = place.size + both.size
    columns = [*place.reshape(-1, num_ranks), *place.transpose(0, 2, 1).reshape(-1, num_experts)]
    exactly = [1] * (num_layers * num_experts) + [num_experts // num_ranks] * (num_layers * num_ranks)
    equal = sparse.lil_matrix((len(columns), size))
    for row, members in enumerate(columns):
        equal[row, members] = 1
    # both[p, r] is at most each of the two places it needs.
    needs = [(place[layer, i], place[layer + 1, j]) for layer, i, j in pairs]
    below = sparse.lil_matrix((2 * both.size, size))
    for row, (one, needed) in enumerate(
        (both[pair, rank], places[rank])
        for pair, two in enumerate(needs)
        for places in two
        for rank in range(num_ranks)
    ):
        below[row, [one, needed]] = 1, -1
    gain = np.zeros(size)
    gain[both] = transitions[tuple(pairs.T)][:, None]
    # Ranks are interchangeable: the first expert of the first layer is on the first.
    lower = np.zeros(size)
    lower[place[0, 0, 0]] = 1
    result = optimize.milp(
        -gain,
        constraints=[
            optimize.LinearConstraint(equal.tocsr(), exactly, exactly),
            optimize.LinearConstraint(below.tocsr(), -np.inf, 0),
        ],
        bounds=optimize.Bounds(lower, np.ones(size)),
        integrality=np.r_[np.ones(place.size), np.zeros(both.size)],
    )
    assert result.status == 0
    return -result.fun


@pytest.mark.slow
def test_integer_programming_finds_the_same_optimum():
    transitions = synthetic_trace(replace(MIXTRAL_LIKE, num_experts=6), 10, 100, 0).transitions()[9:11]
    most = milp_staying(transitions, 2)
    assert most == pytest.approx(most_staying(transitions, 2))
    assert staying(affinity_placement(transitions, 2).first_ranks(), transitions) >= 0.98 * most


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "reduction"), first(1, [(4, 0.22), (8, 0.16)]))
def test_structured_traces_hop_less_and_controls_do_not(num_ranks, reduction):
    trace = synthetic_trace(MIXTRAL_LIKE, 64, 100, seed=0)
    saved = {}
    for name, measured in (
        ("structured", trace),
        ("uniform", uniform_control(trace, 0)),
        ("shuffled", shuffled_control(trace, 0)),
    ):
        learnt, held_out = measured.split()
        placement = affinity_placement(learnt.transitions(), num_ranks, num_starts=2)
        before = hops(held_out.ids[..., 0], round_robin(trace.ids.shape[0], 8, num_ranks))
        saved[name] = 1 - hops(held_out.ids[..., 0], placement) / before
    assert saved["structured"] >= reduction
    assert abs(saved["uniform"]) < 0.02
    assert abs(saved["shuffled"]) < 0.04
