"""Experts that tokens choose together, on as few ranks as possible."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.experts.lab_traces import remote_ranks, shuffled_control, uniform_control
from benchmarks.experts.synthetic_traces import MIXTRAL_LIKE, SPARSE, synthetic_trace
from experts.placement.coactivation import Exchanges, coactivation_placement, fewest_ranks, token_sets
from experts.placement.placement import balancedness, contiguous, round_robin


def grouped_routing(num_tokens, num_experts, top_k, seed):
    """[1, T, k]: each token chooses within one of the hidden groups of E / 4 experts."""
    random = np.random.default_rng(seed)
    groups = random.permutation(num_experts).reshape(4, -1)
    of_token = groups[np.arange(num_tokens) % 4]
    return random.permuted(of_token, axis=1)[None, :, :top_k]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_exchanges_find_the_best_of_all_placements(seed, num_ranks):
    sets = token_sets(synthetic_trace(MIXTRAL_LIKE, 8, 50, seed).ids[12], 8, num_ranks)
    even = np.arange(8) % num_ranks
    least = min(sets.ranks_touched(np.array(rank_of)) for rank_of in set(itertools.permutations(even.tolist())))
    assert sets.ranks_touched(fewest_ranks(sets, even, np.inf, patience=20)) == least


def test_gains_are_those_of_placements_made_anew():
    random = np.random.default_rng(0)
    ids = random.random((200, 12)).argsort(axis=1)[:, :3]
    sets = token_sets(ids, 12, 3)
    exchanges = Exchanges(sets, np.arange(12) % 3)
    for one, other in ((0, 1), (4, 5), (1, 2), (0, 4)):
        before = sets.ranks_touched(exchanges.rank_of)
        gain = exchanges.gain()[one, other]
        exchanges.make(one, other)
        assert before - sets.ranks_touched(exchanges.rank_of) == gain
    assert np.allclose(exchanges.gain(), Exchanges(sets, exchanges.rank_of).gain())


def test_what_does_not_help_on_other_tokens_is_not_done():
    random = np.random.default_rng(0)
    by_chance = random.random((4, 300, 16)).argsort(axis=2)[..., :2]
    assert coactivation_placement(by_chance, 16, 4) in (contiguous(4, 16, 4), round_robin(4, 16, 4))
    few = grouped_routing(20, 16, 3, 0)
    assert coactivation_placement(few, 16, 4) in (contiguous(1, 16, 4), round_robin(1, 16, 4))


def test_pairs_that_round_robin_keeps_together_stay_however_busy_they_are():
    """As the tied demos choose: experts e and e + E / 2 always together, some pairs far more often."""
    random = np.random.default_rng(0)
    first = random.choice(8, (3, 600, 1), p=np.arange(8, 0, -1) / 36)
    placement = coactivation_placement(np.concatenate([first, first + 8], axis=2), 16, 8)
    assert placement == round_robin(3, 16, 8)


def test_the_bound_on_load_holds():
    random = np.random.default_rng(0)
    groups = random.permutation(16).reshape(4, 4)
    of_token = groups[random.choice(4, 2000, p=[0.4, 0.3, 0.2, 0.1])]
    routing = random.permuted(of_token, axis=1)[None, :, :3]
    load = np.bincount(routing.reshape(-1), minlength=16)[None]
    everywhere = np.arange(2000) % 4
    loose = coactivation_placement(routing, 16, 4, max_load=2.0)
    tight = coactivation_placement(routing, 16, 4, max_load=1.1)
    plain = [build(1, 16, 4) for build in (contiguous, round_robin)]
    remote = [remote_ranks(routing, everywhere, placement)[0] for placement in (loose, tight, *plain)]
    assert remote[0] < remote[1] < min(remote[2:])
    assert 1 / balancedness(load, tight)[0] <= 1.1 + 1e-9 < 1 / balancedness(load, loose)[0]
    even = coactivation_placement(routing, 16, 4, max_load=None)
    reference = plain[int(np.argmin(remote[2:]))]
    assert balancedness(load, even)[0] >= balancedness(load, reference)[0]


def reduction(trace, num_ranks):
    """Remote ranks saved on held-out requests, against the better of contiguous and round-robin."""
    learnt, held_out = trace.split()
    sizes = (trace.ids.shape[0], trace.num_experts, num_ranks)
    homes = held_out.homes(num_ranks)
    plain = min(remote_ranks(held_out.ids, homes, build(*sizes)).mean() for build in (contiguous, round_robin))
    placement = coactivation_placement(learnt.ids, trace.num_experts, num_ranks)
    return 1 - remote_ranks(held_out.ids, homes, placement).mean() / plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "least"),
    [(MIXTRAL_LIKE, 0.03), pytest.param(SPARSE, 0.08, marks=pytest.mark.long)],
    ids=["mixtral", "sparse"],
)
def test_structured_traces_touch_fewer_ranks_and_controls_do_not(spec, least):
    trace = synthetic_trace(replace(spec, num_layers=6), 48, 128, seed=0)
    assert reduction(trace, 4) >= least
    assert reduction(uniform_control(trace, 0), 4) < 0.01
    assert reduction(shuffled_control(trace, 0), 4) < 0.02
