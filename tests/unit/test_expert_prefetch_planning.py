"""Which predicted experts are asked for, and how many."""

import numpy as np
import pytest

from experts.memory.eviction import Affinity, lru
from experts.memory.residency import ResidencyControl, SlotState
from experts.prediction.planning import LookaheadPlanner, PrefetchPlanner, PrefetchRules
from experts.routing.predictors import BEFORE

EXPERT_BYTES = 100


class Table:
    """Predicts the rows it was given, one per distance."""

    def __init__(self, *rows):
        self.rows = rows

    def predict(self, layer, distance):
        return np.array(self.rows[distance - 1], np.float32)


def control_of(num_layers=4, num_experts=4, num_slots=4, policy=lru):
    return ResidencyControl([num_slots] * num_layers, num_experts, EXPERT_BYTES, lambda layer: policy(num_experts))


def plan(control, predictor, layer=BEFORE, loads_per_layer=100.0, **rules):
    planner = PrefetchPlanner(predictor, control, EXPERT_BYTES, PrefetchRules(**rules))
    planner.request(layer, planner.expect(layer), loads_per_layer)


def drain(control):
    """Copies all that is asked for; returns it in order."""
    found = []
    while (transfer := control.next_transfer()) is not None:
        found.append((transfer.layer, transfer.expert))
        control.moved(transfer, EXPERT_BYTES)
        control.finish(transfer)
    return found


def test_likely_absent_experts_are_asked_for_nearest_layer_first():
    control = control_of()
    plan(control, Table([0.9, 0.1, 0.6, 0.0], [0.0, 0.0, 0.0, 0.99], [0.1] * 4), min_probability=0.5)
    assert drain(control) == [(0, 0), (0, 2), (1, 3)]


def test_only_what_can_be_on_time_is_asked_for_and_the_likeliest_of_that():
    control = control_of()
    # One expert per layer time: one by layer 0, two by layer 1, three by layer 2.
    plan(control, Table([0.6, 0.7, 0, 0], [0.9, 0.8, 0.95, 0], [0.99, 0.5, 0, 0]), loads_per_layer=1.0)
    # Taken in order of probability: 0.99 of layer 2; 0.95 and 0.9 of layer 1 leave no time for anything else.
    assert drain(control) == [(1, 2), (1, 0), (2, 0)]


def test_copies_under_way_take_their_time_on_the_link():
    control = control_of()
    plan(control, Table([0.9, 0, 0, 0]), max_distance=1)
    assert control.next_transfer().expert == 0
    plan(control, Table([0.8, 0.9, 0, 0]), max_distance=1, loads_per_layer=1.0)
    assert drain(control) == []
    plan(control, Table([0.8, 0.9, 0, 0]), max_distance=1, loads_per_layer=2.0)
    assert drain(control) == [(0, 1)]


def test_a_byte_budget_bounds_one_plan():
    control = control_of()
    plan(control, Table([0.9, 0.8, 0.7, 0.6], [0.95] * 4, [0.1] * 4), max_bytes=2 * EXPERT_BYTES + 99)
    assert len(drain(control)) == 2


def test_an_expert_must_be_likelier_than_the_one_it_evicts():
    control = control_of(num_slots=2)
    plan(control, Table([0.9, 0.9, 0, 0]), max_distance=1)
    assert drain(control) == [(0, 0), (0, 1)]
    control.access(0, [0, 1])
    control.release(0, [0, 1])
    plan(control, Table([0.55, 0.5, 0.6, 0]), max_distance=1, margin=0.2)
    assert drain(control) == []
    plan(control, Table([0.55, 0.1, 0.6, 0]), max_distance=1, margin=0.2)
    assert drain(control) == [(0, 2)]
    assert control.layers[0].state_of(0) is SlotState.READY


def test_a_wavering_prediction_does_not_cancel_what_is_under_way():
    control = control_of()
    plan(control, Table([0.9, 0, 0, 0]), max_distance=1)
    transfer = control.next_transfer()
    plan(control, Table([0.2, 0, 0, 0]), max_distance=1)
    assert not control.must_stop(transfer)
    plan(control, Table([0.05, 0, 0, 0]), max_distance=1)
    assert control.must_stop(transfer)


def test_a_predictor_that_knows_nothing_yet_cancels_nothing():
    control = control_of()
    plan(control, Table([0.9, 0, 0, 0]), max_distance=1)
    transfer = control.next_transfer()
    plan(control, Table([0, 0, 0, 0]), max_distance=1)
    assert not control.must_stop(transfer)


def test_nothing_is_predicted_beyond_the_last_layer():
    control = control_of(num_layers=2)
    plan(control, Table([0.9, 0, 0, 0]), layer=0)
    assert drain(control) == [(1, 0)]
    plan(control, Table(), layer=1)
    assert drain(control) == []


def test_the_affinity_policy_gets_the_scores():
    policies = [Affinity(2), Affinity(2)]
    control = ResidencyControl([1, 1], 2, EXPERT_BYTES, lambda layer: policies[layer])
    planner = PrefetchPlanner(Table([0.3, 0.2], [0.1, 0.6]), control, EXPERT_BYTES, PrefetchRules(), policies)
    planner.request(BEFORE, planner.expect(BEFORE), 1.0)
    assert [policy.worth(1)[0] for policy in policies] == pytest.approx([0.2, 0.6])


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("reach", [1, 2, 3])
def test_every_layer_but_the_first_is_looked_at_once_within_reach(num_layers, reach):
    planner = LookaheadPlanner(control_of(num_layers), 2, reach)
    looks = [(layer, distance) for layer in range(num_layers) for distance in planner.distances(layer, reach)]
    assert sorted(layer + distance for layer, distance in looks) == list(range(1, num_layers))
    assert all(1 <= distance <= reach for _, distance in looks)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([[5, 4, 0, -2]], [0, 1]),
        ([[-2, 4, 0, 5]], [3, 1]),
        # The second and the third are alike, so either may be chosen.
        ([[5, 1, 0.9, -2]], [0]),
        ([[1, 1, 1, 1]], []),
        ([[0, 4, 5, -2], [5, 4, 0, -2], [0, 4, -2, 5]], [1, 0, 2, 3]),
        ([[5, 1, 0.9, -2], [0.9, 1, 5, -2]], [0, 2]),
    ],
)
def test_gates_ask_for_the_experts_that_are_sure_to_be_chosen(logits, expected):
    control = control_of(num_layers=2)
    LookaheadPlanner(control, 2, 1).ask(0, [1], [np.array(logits, np.float32)])
    assert drain(control) == [(1, expert) for expert in expected]
