"""Residency of experts: events are atomic, members stay, transfers keep order, and every byte is accounted for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.memory.eviction import POLICIES, POLICY_NAMES, Affinity, Static, lru, make_policies
from experts.memory.residency import LayerResidency, Priority, ResidencyControl, SlotState
from tests.support.examples import examples

BYTES = 4


def control(num_slots=(2, 2, 2), num_experts=6, policy=lru):
    return ResidencyControl(num_slots, num_experts, BYTES, lambda _: policy(num_experts))


def copy_all(residency: ResidencyControl) -> list[tuple[int, int]]:
    """Copy until nothing waits; return the copied experts in order."""
    copied = []
    while (transfer := residency.next_transfer()) is not None:
        residency.moved(transfer, BYTES - transfer.num_moved)
        residency.finish(transfer)
        copied.append((transfer.layer, transfer.expert))
    return copied


def run_event(residency: ResidencyControl, layer: int, experts: set[int]) -> None:
    access = residency.access(layer, experts)
    left = set(experts)
    while left:
        copy_all(residency)
        ready = [expert for expert in sorted(left) if residency.layers[layer].state_of(expert) is SlotState.READY]
        assert ready, access
        residency.release(layer, ready[:1])
        left.remove(ready[0])


class ModelLru:
    """The simplest thing that could be right, for events that fit."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.now = 0
        self.last_use: dict[int, int] = {}

    def access(self, experts: set[int]) -> tuple[list[int], list[int]]:
        self.now += 1
        hits = sorted(experts & self.last_use.keys())
        misses = sorted(experts - self.last_use.keys())
        for expert in experts:
            self.last_use[expert] = self.now
        while len(self.last_use) > self.num_slots:
            others = [(use, expert) for expert, use in self.last_use.items() if expert not in experts]
            del self.last_use[min(others)[1]]
        return hits, misses


@given(st.integers(2, 6), st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=6), max_size=40))
def test_lru_decides_events_as_a_brute_force_model_does(num_slots, events):
    residency = LayerResidency(10, num_slots, lru(10))
    model = ModelLru(num_slots)
    for experts in events:
        experts = set(sorted(experts)[:num_slots])
        access = residency.access(experts)
        assert (list(access.ready), list(access.missing)) == model.access(experts)
        assert [load.expert for load in access.loads] == list(access.missing)
        assert not {load.victim for load in access.loads} & experts
        for load in access.loads:
            residency.finish(load.expert, prefetched=False)
        residency.release(sorted(experts))
        assert residency.resident() == sorted(model.last_use)


@given(
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 5),
    st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=1, max_size=20),
)
def test_an_event_of_any_size_is_served_through_the_slots(policy, num_slots, events):
    residency = control((num_slots,), 8, POLICIES[policy])
    for experts in events:
        before = set(residency.layers[0].resident())
        hits, misses = residency.counters.num_hits, residency.counters.num_misses
        run_event(residency, 0, experts)
        assert residency.counters.num_hits - hits == len(experts & before)
        assert residency.counters.num_misses - misses == len(experts - before)
    assert residency.counters.demand_bytes == residency.counters.num_misses * BYTES


def test_policies_choose_their_victims():
    def victim(policy, events, new):
        residency = LayerResidency(6, 3, policy)
        for experts in events:
            for load in residency.access(experts).loads:
                residency.finish(load.expert, prefetched=False)
            residency.release(sorted(experts))
        return residency.access({new}).loads[0].victim

    history = [{0}, {0}, {0}, {1}, {1}, {2}]
    assert victim(POLICIES["lru"](6), history, 5) == 0
    assert victim(POLICIES["lfu"](6), history, 5) == 2
    assert victim(POLICIES["lfru"](6), [{0}, {0}, {1}, {2}, {2}, {2}, {2}], 5) == 1
    assert victim(Static([3.0, 1.0, 2.0, 0.0, 0.0, 0.0]), history, 5) == 1
    rated = Affinity(6)
    rated.rate([0.5, 0.9, 0.1, 0.0, 0.0, 0.0])
    assert victim(rated, history, 5) == 2


def test_a_demand_overtakes_prefetches_and_the_next_layer_overtakes_speculation():
    residency = control()
    residency.predict(2, [0, 1], Priority.SPECULATIVE)
    first = residency.next_transfer()
    residency.moved(first, 1)
    residency.predict(1, [3], Priority.NEXT_LAYER)
    assert residency.must_stop(first)
    residency.stop(first)
    residency.access(0, {4})
    assert copy_all(residency) == [(0, 4), (1, 3), (2, 0), (2, 1)]
    assert residency.counters.prefetch_bytes == 3 * BYTES
    assert first.num_moved == BYTES


def test_several_copiers_share_demand_loads_and_prefetches_wait_until_all_are_copied():
    residency = control()
    residency.predict(1, [3], Priority.NEXT_LAYER)
    prefetch = residency.next_transfer()
    residency.access(0, {4, 5})
    first = residency.next_transfer(demanded=True)
    second = residency.next_transfer(demanded=True)
    assert (first.expert, second.expert) == (4, 5)
    assert residency.must_stop(prefetch)
    residency.stop(prefetch)
    residency.moved(first, BYTES)
    residency.finish(first)
    assert residency.next_transfer() is None
    residency.moved(second, BYTES)
    residency.finish(second)
    assert residency.next_transfer(demanded=True) is None
    assert residency.next_transfer() is prefetch


def test_a_demand_for_a_prefetch_under_way_promotes_it():
    residency = control()
    residency.predict(1, [3], Priority.SPECULATIVE)
    transfer = residency.next_transfer()
    residency.moved(transfer, 3)
    access = residency.access(1, {3})
    assert access.loading == (3,)
    assert not access.missing
    assert residency.next_transfer() is None
    assert not residency.must_stop(transfer)
    residency.moved(transfer, 1)
    residency.finish(transfer)
    residency.release(1, [3])
    assert residency.counters.num_late == 1
    assert residency.counters.late_bytes == BYTES
    assert residency.counters.demand_bytes == 0


def test_a_cancelled_copy_that_is_wanted_before_it_stops_goes_on():
    residency = control()
    residency.predict(1, [3], Priority.NEXT_LAYER)
    transfer = residency.next_transfer()
    residency.predict(1, [4], Priority.NEXT_LAYER)
    assert residency.must_stop(transfer)
    residency.access(1, {3})
    assert not residency.must_stop(transfer)


def test_a_new_prediction_cancels_the_old_and_an_event_cancels_what_it_does_not_want():
    residency = control()
    residency.predict(1, [3, 4], Priority.NEXT_LAYER)
    transfer = residency.next_transfer()
    residency.moved(transfer, 2)
    residency.predict(1, [5], Priority.NEXT_LAYER)
    residency.stop(transfer)
    assert residency.layers[1].state_of(3) is SlotState.EMPTY
    assert residency.counters.cancelled_bytes == 2
    assert copy_all(residency) == [(1, 5)]
    residency.predict(2, [0, 1], Priority.SPECULATIVE)
    residency.access(2, {2, 3})
    assert copy_all(residency) == [(2, 2), (2, 3)]


def test_prefetched_bytes_are_useful_once_used_and_wasted_once_evicted_unused():
    residency = control((2,))
    residency.predict(0, [0, 1], Priority.NEXT_LAYER)
    copy_all(residency)
    run_event(residency, 0, {0})
    assert residency.counters.num_hits == 1
    run_event(residency, 0, {2, 3})
    counters = residency.counters
    assert (counters.useful_bytes, counters.wasted_bytes, counters.num_evictions) == (BYTES, BYTES, 2)


def test_a_prefetch_never_evicts_what_was_predicted_beside_it_or_is_computed_now():
    residency = control((2,))
    run_event(residency, 0, {0, 1})
    residency.predict(0, [1, 2, 3], Priority.NEXT_LAYER)
    assert copy_all(residency) == [(0, 2)]
    assert residency.layers[0].resident() == [1, 2]
    residency.access(0, {1, 2})
    residency.predict(0, [4], Priority.SPECULATIVE)
    assert copy_all(residency) == []


def test_an_event_waits_for_its_turn_while_useless_copies_hold_the_slots():
    residency = control((2,))
    residency.predict(0, [4, 5], Priority.NEXT_LAYER)
    under_way = [residency.next_transfer(), residency.next_transfer()]
    residency.access(0, {0, 1})
    assert residency.next_transfer() is None
    residency.moved(under_way[0], BYTES)
    residency.finish(under_way[0])
    residency.stop(under_way[1])
    assert sorted(copy_all(residency)) == [(0, 0), (0, 1)]
    assert residency.counters.wasted_bytes == BYTES


def test_misuse_is_refused():
    residency = LayerResidency(4, 2, lru(4))
    with pytest.raises(ValueError, match="0 slots"):
        LayerResidency(4, 0, lru(4))
    with pytest.raises(ValueError, match="experts"):
        residency.access([4])
    residency.access([1])
    with pytest.raises(ValueError, match="not over"):
        residency.access([1])
    with pytest.raises(ValueError, match="loading"):
        residency.release([1])


commands = st.one_of(
    st.tuples(st.just("event"), st.sets(st.integers(0, 5), min_size=1)),
    st.tuples(st.just("predict"), st.lists(st.integers(0, 5), unique=True), st.integers(0, 2), st.sampled_from([1, 2])),
    st.tuples(st.just("copy"), st.integers(1, BYTES)),
)


@examples(2)
@given(st.sampled_from(sorted(POLICIES)), st.lists(commands, max_size=60))
def test_whatever_happens_slots_hold_one_expert_each_and_every_byte_is_accounted_for(policy, script):
    residency = control((1, 2, 3), 6, POLICIES[policy])
    copiers = []
    layer = 0
    for name, *arguments in script:
        if name == "predict":
            experts, of_layer, priority = arguments
            residency.predict(of_layer, experts, Priority(priority))
        elif name == "copy":
            _copy_a_chunk(residency, copiers, arguments[0])
        else:
            _finish_copies(residency, copiers)
            run_event(residency, layer, arguments[0])
            layer = (layer + 1) % 3
        _check(residency)
    _finish_copies(residency, copiers)
    _check(residency)
    counters = residency.counters
    undecided = sum(slot.unused for of_layer in residency.layers for slot in of_layer._slots) * BYTES
    decided = counters.useful_bytes + counters.late_bytes + counters.wasted_bytes + counters.cancelled_bytes
    assert counters.prefetch_bytes == decided + undecided
    assert counters.demand_bytes == counters.num_misses * BYTES


def _copy_a_chunk(residency, copiers, num_bytes):
    """One of two copiers moves a chunk."""
    if len(copiers) < 2 and (transfer := residency.next_transfer()):
        copiers.append(transfer)
    if copiers:
        transfer = copiers.pop(0)
        residency.moved(transfer, min(num_bytes, BYTES - transfer.num_moved))
        if transfer.num_moved == BYTES:
            residency.finish(transfer)
        elif residency.must_stop(transfer):
            residency.stop(transfer)
        else:
            copiers.append(transfer)


def _finish_copies(residency, copiers):
    while copiers:
        _copy_a_chunk(residency, copiers, BYTES)
    copy_all(residency)


def _check(residency):
    for layer in residency.layers:
        held = [slot.expert for slot in layer._slots if slot.state is not SlotState.EMPTY]
        assert len(held) == len(set(held))
        assert all(layer.slot_of(expert) is not None for expert in held)


def test_every_policy_can_be_made_by_name():
    load = [[5.0, 1.0, 3.0], [1.0, 2.0, 3.0]]
    for name in POLICY_NAMES:
        policies = make_policies(name, 2, 3, load)
        assert len({id(policy) for policy in policies}) == 2
    static = make_policies("static", 2, 3, load)
    assert [min(range(3), key=policy.worth) for policy in static] == [1, 0]


@pytest.mark.parametrize("load", [None, [[1.0, 2.0, 3.0]]])
def test_a_static_policy_needs_the_load_of_every_layer(load):
    with pytest.raises(ValueError, match="load of 2 layers"):
        make_policies("static", 2, 3, load)


def test_what_was_named_ahead_is_counted_by_distance():
    residency = control((2, 2, 2), 6, lru)
    residency.access(0, [0])
    residency.predict(1, [1, 2], Priority.NEXT_LAYER)
    residency.predict(2, [3], Priority.SPECULATIVE)
    residency.access(1, [1])
    residency.access(2, [3, 4])
    counters = residency.counters
    assert counters.num_foreseeable == (1, 2, 0)
    assert counters.num_foreseen == (1, 1, 0)
