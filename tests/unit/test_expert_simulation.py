"""The simulator against timelines worked out by hand, and against another way of counting hits."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.experts.lab_traces import LabTrace
from benchmarks.experts.simulator import AffinityAhead, Belady, LayerTiming, LinkModel, Simulation, steps_of
from benchmarks.experts.synthetic_traces import SyntheticSpec, synthetic_trace
from experts.memory.eviction import lru
from experts.memory.residency import ResidencyControl, ResidencyCounters
from experts.prediction.planning import PrefetchPlanner, PrefetchRules
from tests.support.trace_figures import hit_rate

EXPERT_BYTES = 100
# A load takes two seconds, one per chunk; a layer takes two seconds, one before its experts are known: beta is 1.
LINK = LinkModel(bytes_per_second=50, chunk_bytes=50)
TIMING = LayerTiming(attention=1, experts=1)


def trace_of(*tokens, requests=None):
    """tokens: for each the chosen experts of each layer."""
    ids = np.array(tokens, np.uint16)
    ids = ids[..., None] if ids.ndim == 2 else ids
    number = np.zeros(len(tokens)) if requests is None else np.array(requests)
    none = np.zeros(len(tokens), np.int32)
    return LabTrace(4, np.ascontiguousarray(ids.swapaxes(0, 1)), number.astype(np.int32), none)


# Three layers, one expert per token.
BY_HAND = trace_of([0, 1, 2], [0, 1, 3], [1, 0, 2])


def lru_control(num_slots=2, num_layers=3):
    return ResidencyControl([num_slots] * num_layers, 4, EXPERT_BYTES, lambda layer: lru(4))


class Foretold:
    """Expects of each step what it was told, with certainty, for the next layer alone."""

    def __init__(self, steps):
        self.steps = iter(steps)
        self.step = []

    def begin(self, token_ids):
        self.step = next(self.steps)

    def observe(self, layer, expert_ids):
        pass

    def predict(self, layer, distance):
        scores = np.zeros(4, np.float32)
        scores[self.step[layer + distance]] = 1
        return scores

    def end_step(self):
        pass


def foretelling(control, steps):
    predictor = Foretold(steps)
    planner = PrefetchPlanner(predictor, control, EXPERT_BYTES, PrefetchRules(max_distance=1))
    return Simulation(control, EXPERT_BYTES, LINK, TIMING, AffinityAhead(predictor, planner))


def test_demand_loads_alone_on_the_trace_worked_out_by_hand():
    """Six experts are missing at first use or after eviction: each stalls for two seconds.

    token 0: 1 wait 3, 4 | 5 wait 7, 8 | 9 wait 11, 12     three misses
    token 1: 13, 14 | 15, 16 | 17 wait 19, 20              0 and 1 are there, 3 is not
    token 2: 21 wait 23, 24 | 25 wait 27, 28 | 29, 30      1 and 0 are not there, 2 is
    """
    result = Simulation(lru_control(), EXPERT_BYTES, LINK, TIMING).replay(BY_HAND)
    assert (result.num_steps, result.seconds, result.exposed_stall) == (3, 30, 12)
    assert result.counters == ResidencyCounters(num_events=9, num_hits=3, num_misses=6, demand_bytes=600)
    assert result.miss_rate == pytest.approx(6 / 9)


def test_perfect_foresight_of_one_layer_on_the_trace_worked_out_by_hand():
    """A layer is long enough to hide one load; only the first layer of tokens 0 and 2 is foreseen too late.

    token 0: load 0-2, asked for at 1: wait 2, 3 | loaded 2-4, needed at 4, 5 | loaded 4-6, needed at 6, 7
    token 1: 8, 9 | 10, 11 | loaded 10-12, needed at 12, 13
    token 2: load 13-15, asked for at 14: wait 15, 16 | loaded 15-17, needed at 17, 18 | 19, 20
    """
    simulation = foretelling(lru_control(), BY_HAND.ids[..., 0].T.tolist())
    result = simulation.replay(BY_HAND)
    assert (result.seconds, result.exposed_stall) == (20, 2)
    assert result.counters == ResidencyCounters(
        num_events=9,
        num_hits=7,
        num_late=2,
        prefetch_bytes=600,
        useful_bytes=400,
        late_bytes=200,
        num_foreseeable=(9, 0, 0),
        num_foreseen=(9, 0, 0),
    )
    assert result.wasted_share == 0


def test_a_wrong_prefetch_is_wasted_when_it_is_evicted_unused():
    """Layer 1 of token 0 is foretold as 3, loaded 2-4; its 1 is asked for at 4 and comes at 6, a stall of two seconds.

    At token 2 layer 1 has 3 and 1; 0 is foretold rightly and evicts 3.
    """
    result = foretelling(lru_control(), [[0, 3, 2], [0, 1, 3], [1, 0, 2]]).replay(BY_HAND)
    assert result.exposed_stall == 1 + 2 + 1
    counters = result.counters
    assert (counters.num_misses, counters.demand_bytes) == (1, 100)
    assert (counters.prefetch_bytes, counters.wasted_bytes, counters.useful_bytes) == (600, 100, 300)
    assert result.wasted_share == pytest.approx(100 / 700)


def test_a_demand_overtakes_between_chunks_and_the_prefetch_that_nobody_wants_any_more_is_cancelled():
    """Layer 0 is foretold as 3: its load begins at 0. At 0.5 comes the demand for 0; it is loaded 1-3."""
    control = lru_control(num_layers=1)
    predictor = Foretold([[3]])
    planner = PrefetchPlanner(predictor, control, EXPERT_BYTES, PrefetchRules())
    timing = replace(TIMING, attention=0.5)
    result = Simulation(control, EXPERT_BYTES, LINK, timing, AffinityAhead(predictor, planner)).replay(trace_of([0]))
    assert (result.exposed_stall, result.seconds) == (2.5, 4)
    assert result.counters == ResidencyCounters(
        num_events=1,
        num_misses=1,
        demand_bytes=100,
        prefetch_bytes=50,
        cancelled_bytes=50,
        num_foreseeable=(1, 0, 0),
    )


def test_experts_that_are_there_are_computed_while_the_others_come():
    """Both experts of an event load one after the other, 1-3 and 3-5; the first is computed in between, 3-3.5."""
    trace = trace_of([[0, 1]])
    result = Simulation(lru_control(num_layers=1), EXPERT_BYTES, LINK, TIMING).replay(trace)
    assert (result.seconds, result.exposed_stall) == (5.5, 2 + 1.5)


def test_an_event_larger_than_its_slots_goes_through_them():
    trace = trace_of([[0, 1, 2]])
    result = Simulation(lru_control(num_layers=1, num_slots=1), EXPERT_BYTES, LINK, TIMING).replay(trace)
    # Nothing overlaps: 1 + 3 x (2 + 1/3).
    assert result.seconds == pytest.approx(8)
    assert result.counters.num_misses == 3


def test_a_prediction_costs_its_time():
    timing = replace(TIMING, prediction=0.25)
    control = lru_control(num_layers=1)
    predictor = Foretold([[0]])
    planner = PrefetchPlanner(predictor, control, EXPERT_BYTES, PrefetchRules())
    result = Simulation(control, EXPERT_BYTES, LINK, timing, AffinityAhead(predictor, planner)).replay(trace_of([0]))
    # Twice, before the layer and at its gate; the copy is asked for after the first.
    assert result.prediction_seconds == 0.5
    assert result.seconds == 0.25 + 2 + 1


def test_requests_share_steps_as_streams_and_follow_each_other():
    trace = trace_of(*[[0]] * 6, requests=[4, 4, 4, 7, 9, 9])
    assert [rows.tolist() for rows in steps_of(trace, 1)] == [[0], [1], [2], [3], [4], [5]]
    assert [rows.tolist() for rows in steps_of(trace, 2)] == [[0, 3], [1, 4], [2, 5]]
    assert [rows.tolist() for rows in steps_of(trace, 9)] == [[0, 3, 4], [1, 5], [2]]


def test_an_event_holds_the_experts_of_all_streams_once():
    trace = trace_of([[0, 1]], [[1, 2]], requests=[0, 1])
    result = Simulation(lru_control(4, 1), EXPERT_BYTES, LINK, TIMING).replay(trace, num_streams=2)
    assert (result.num_steps, result.counters.num_misses) == (1, 3)


# With one expert per event no two are equally recent, which either count would decide in its own way.
@pytest.mark.parametrize(("clairvoyant", "top_k"), [(False, 1), (True, 3)])
def test_hits_are_those_of_an_independent_count(clairvoyant, top_k):
    trace = synthetic_trace(SyntheticSpec(3, 16, top_k, popularity=0.8), 1, 200, 0)

    def policy_of(layer):
        return Belady(trace.ids[layer].tolist()) if clairvoyant else lru(16)

    control = ResidencyControl([6] * 3, 16, EXPERT_BYTES, policy_of)
    counters = Simulation(control, EXPERT_BYTES, LINK, TIMING).replay(trace).counters
    assert counters.num_hits / trace.ids.size == pytest.approx(hit_rate(trace, 6, clairvoyant=clairvoyant))


def test_what_was_replayed_before_is_not_counted_again():
    simulation = Simulation(lru_control(4), EXPERT_BYTES, LINK, TIMING)
    simulation.replay(BY_HAND)
    again = simulation.replay(BY_HAND)
    assert again.counters == ResidencyCounters(num_events=9, num_hits=9)
    assert (again.seconds, again.exposed_stall) == (18, 0)
