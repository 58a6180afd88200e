"""Experts that tokens choose together, on as few ranks as possible."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from experts.placement.coactivation_placement import coactivation_placement
from experts.placement.metrics import balancedness, remote_ranks
from experts.placement.placement import contiguous, from_first_ranks, round_robin
from experts.routing.synthetic import MIXTRAL_LIKE, SPARSE, synthetic_trace
from experts.routing.traces import shuffled_control, uniform_control


def grouped_routing(num_tokens, num_experts, top_k, seed):
    """[1, T, k]: each token chooses within one of the hidden groups of E / 4 experts."""
    random = np.random.default_rng(seed)
    groups = random.permutation(num_experts).reshape(4, -1)
    of_token = groups[np.arange(num_tokens) % 4]
    return random.permuted(of_token, axis=1)[None, :, :top_k]


def cost(routing, placement):
    """Remote ranks, mean over all homes."""
    every = [np.full(routing.shape[1], home) for home in range(placement.num_ranks)]
    return float(np.mean([remote_ranks(routing, homes, placement) for homes in every]))


@pytest.mark.parametrize("seed", range(3))
def test_hidden_groups_are_found(seed):
    routing = grouped_routing(800, 16, 3, seed)
    placement = coactivation_placement(routing, 16, 4)
    touched = placement.first_ranks()[0][routing[0]]
    assert (touched == touched[:, :1]).all()
    assert placement == coactivation_placement(routing, 16, 4)


@pytest.mark.parametrize("seed", range(5))
def test_exchanges_come_close_to_the_best_of_all_placements(seed):
    routing = synthetic_trace(MIXTRAL_LIKE, 8, 50, seed).ids[12:13]
    found = coactivation_placement(routing, 8, 2, max_load=2.0)
    best = min(
        cost(routing, from_first_ranks(np.isin(np.arange(8), half).astype(int)[None], 2))
        for half in itertools.combinations(range(8), 4)
    )
    assert cost(routing, found) <= 1.02 * best


def test_the_bound_on_load_holds():
    random = np.random.default_rng(0)
    skewed = random.permutation(16) - 2 * np.log(np.arange(1, 17))
    routing = (skewed + 3 * random.gumbel(size=(1, 2000, 16))).argsort(axis=2)[..., -4:]
    load = np.bincount(routing.reshape(-1), minlength=16)[None]
    loose = coactivation_placement(routing, 16, 4, max_load=4.0)
    tight = coactivation_placement(routing, 16, 4, max_load=1.1)
    assert 1 / balancedness(load, tight)[0] <= 1.1 + 1e-9 < 1 / balancedness(load, loose)[0]


def test_homes_count_where_requests_that_choose_alike_live_together():
    routing = grouped_routing(800, 16, 3, 0)
    group = coactivation_placement(routing, 16, 4).first_ranks()[0][routing[0, :, 0]]
    homes = np.roll(np.arange(4), 1)[group]
    told = coactivation_placement(routing, 16, 4, homes)
    assert remote_ranks(routing, homes, told).tolist() == [0]


def reduction(trace, num_ranks, *, by_family):
    """Remote ranks saved on held-out requests, against the better of contiguous and round-robin."""
    learnt, held_out = trace.split()
    sizes = (trace.ids.shape[0], trace.num_experts, num_ranks)
    homes = held_out.family_homes(num_ranks) if by_family else held_out.homes(num_ranks)
    plain = min(remote_ranks(held_out.ids, homes, build(*sizes)).mean() for build in (contiguous, round_robin))
    known_homes = learnt.family_homes(num_ranks) if by_family else None
    placement = coactivation_placement(learnt.ids, trace.num_experts, num_ranks, known_homes, num_starts=3)
    return 1 - remote_ranks(held_out.ids, homes, placement).mean() / plain


@pytest.mark.parametrize(
    ("spec", "by_family", "least"),
    [(MIXTRAL_LIKE, False, 0.03), (SPARSE, False, 0.08), (SPARSE, True, 0.15)],
    ids=["mixtral", "sparse", "sparse-families"],
)
def test_structured_traces_touch_fewer_ranks_and_controls_do_not(spec, by_family, least):
    trace = synthetic_trace(replace(spec, num_layers=6), 48, 128, seed=0)
    assert reduction(trace, 4, by_family=by_family) >= least
    assert reduction(uniform_control(trace, 0), 4, by_family=by_family) < 0.01
    assert reduction(shuffled_control(trace, 0), 4, by_family=by_family) < 0.02
