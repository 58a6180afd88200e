"""What prediction and placement gain on held-out requests, and that they gain nothing where there is no structure."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.experts.lab_traces import GateGuesses, shuffled_control, uniform_control
from benchmarks.experts.placement import remote_ranks_figure
from benchmarks.experts.prediction import StallFigure
from benchmarks.experts.simulator import (
    POLICY_NAMES,
    POPULARITY,
    LayerTiming,
    SimulationSetup,
    link_for,
    recall_figures,
    simulate,
)
from benchmarks.experts.synthetic_traces import SyntheticSpec, synthetic_trace
from experts.prediction.planning import PrefetchRules
from experts.routing.files import Tap

EXPERT_BYTES = 2**20
TIMING = LayerTiming(attention=0.5e-3, experts=0.5e-3)
COUPLED = SyntheticSpec(5, 8, 2, coupling=3.0, topic=0.5, persistence=0.2, edge=1.0)


def coupled(seed=0):
    """Ten requests whose experts follow each other; the gates of later layers see half of them coming."""
    trace = synthetic_trace(COUPLED, 10, 30, seed)
    random = np.random.default_rng(seed)
    guesses = []
    for distance in (1, 2):
        logits = random.standard_normal((5 - distance, trace.ids.shape[1], 8))
        chosen = np.take_along_axis(logits, trace.ids[distance:].astype(np.int64), 2) + 2.5 / distance
        np.put_along_axis(logits, trace.ids[distance:].astype(np.int64), chosen, 2)
        guesses.append(GateGuesses(Tap.EARLY, distance, logits.astype(np.float16)))
    return replace(trace, guesses=tuple(guesses))


def setup_of(beta=1.0, policy="lfru", **changes):
    link = link_for(beta, EXPERT_BYTES, TIMING)
    return SimulationSetup(0.5, policy, link, TIMING, EXPERT_BYTES, **changes)


def recalls(trace, *choices):
    figures = recall_figures(*trace.split(), choices, max_distance=2)
    return {(figure.predictor, figure.distance): figure.recall for figure in figures}


def test_recall_by_predictor_and_distance():
    found = recalls(coupled(), POPULARITY, "affinity", "gate-early", "gate-shared")
    assert found["affinity", 1] > 1.25 * found[POPULARITY, 1]
    assert found["gate-early", 1] > found["gate-early", 2] > found[POPULARITY, 2]
    assert np.isnan(found["gate-shared", 1])


@pytest.mark.parametrize("control", [uniform_control, shuffled_control])
def test_without_structure_no_predictor_is_better_than_popularity(control):
    found = recalls(control(coupled(), 0), POPULARITY, "affinity", "gate-early")
    for (_, distance), recall in found.items():
        assert recall < found[POPULARITY, distance] + 0.05


def compared(learning, held_out, setup):
    """The setup, which has a predictor, against the same without."""
    on_demand = simulate(learning, held_out, replace(setup, predictor=None))
    return StallFigure(on_demand, simulate(learning, held_out, setup))


def test_prefetching_hides_stall():
    figure = compared(*coupled().split(), setup_of(predictor="gate-early"))
    assert figure.stall_saved > 0.25
    assert figure.prefetching.wasted_share < 0.25
    assert figure.on_demand.counters.prefetch_bytes == 0


@pytest.mark.parametrize("control", [uniform_control, shuffled_control])
def test_prefetching_gains_next_to_nothing_without_structure(control):
    figure = compared(*control(coupled(), 0).split(), setup_of(predictor="gate-early"))
    assert abs(figure.stall_saved) < 0.06


def test_a_prediction_that_costs_more_than_it_saves_shows_as_a_loss():
    slow = replace(setup_of(predictor="affinity"), timing=replace(TIMING, prediction=5e-3))
    assert compared(*coupled().split(), slow).stall_saved < 0


def test_no_policy_beats_the_bound():
    learning, held_out = coupled().split()
    misses = {
        policy: simulate(learning, held_out, setup_of(policy=policy)).counters.num_misses for policy in POLICY_NAMES
    }
    assert min(misses, key=misses.__getitem__) == "belady"
    assert misses["belady"] < 0.95 * misses["lru"]


def test_with_all_experts_resident_nothing_stalls_after_the_warm_up():
    result = simulate(*coupled().split(), replace(setup_of(predictor="affinity"), residency=1.0))
    assert result.exposed_stall == 0
    assert result.counters.prefetch_bytes == 0


def test_streams_share_what_a_step_needs():
    learning, held_out = coupled().split()
    alone = simulate(learning, held_out, setup_of())
    together = simulate(learning, held_out, setup_of(num_streams=5))
    assert together.num_steps == alone.num_steps / 5
    assert together.exposed_stall < alone.exposed_stall


def test_a_setup_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="no policy 'mru'"):
        setup_of(policy="mru")
    with pytest.raises(ValueError, match="no predictor 'magic'"):
        setup_of(predictor="magic")
    with pytest.raises(ValueError, match="no share"):
        replace(setup_of(), residency=1.5)


@pytest.mark.slow
def test_a_byte_budget_bounds_what_prefetches_move():
    learning, held_out = coupled().split()
    free = simulate(learning, held_out, setup_of(predictor="affinity"))
    none = simulate(learning, held_out, setup_of(predictor="affinity", rules=PrefetchRules(max_bytes=0)))
    assert free.counters.prefetch_bytes > 0 == none.counters.prefetch_bytes


def test_learnt_placements_save_ranks_where_there_is_structure_only():
    spec = SyntheticSpec(4, 8, 2, coupling=2.5, kinship=0.8)
    trace = synthetic_trace(spec, 40, 80, 0)
    uniform = uniform_control(trace, 0)
    assert remote_ranks_figure(*trace.split(), 4).saved > 0.05 > abs(remote_ranks_figure(*uniform.split(), 4).saved)
    assert remote_ranks_figure(*trace.split(), 4).num_ranks == 4
