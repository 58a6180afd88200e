"""Where absent experts are computed: the host and the link end as early as they can, and experts in use move in."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.memory.eviction import lru
from experts.memory.host_share import AbsentExpert, HostCosts, HostShare, UseRates, share_out
from experts.memory.residency import Priority, ResidencyControl, SlotState

BYTES = 4
COPY = 1.0  # seconds of a copy


def end_of(absent: list[AbsentExpert], on_host: frozenset[int], call: float) -> float:
    """The seconds until the host and the link have ended."""
    host = sum(each.host_seconds for each in absent if each.expert in on_host)
    link = sum(each.copy_seconds for each in absent if each.expert not in on_host)
    return max(host + call if on_host else 0.0, link)


@given(
    st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.01, 5.0)), min_size=1, max_size=7),
    st.floats(0.0, 2.0),
)
def test_sharing_is_no_slower_than_either_alone_and_near_the_best_of_all_ways(seconds, call):
    absent = [AbsentExpert(number, copy, host) for number, (copy, host) in enumerate(seconds)]
    everything = frozenset(range(len(absent)))
    found = end_of(absent, share_out(absent, call), call)
    assert found <= min(end_of(absent, everything, call), end_of(absent, frozenset(), call)) + 1e-9
    ways = product((True, False), repeat=len(absent))
    best = min(end_of(absent, frozenset(e for e in everything if way[e]), call) for way in ways)
    assert found <= best + max(min(copy, host) for copy, host in seconds) + call + 1e-9


def test_few_rows_are_computed_by_the_host_and_many_are_copied():
    costs = HostCosts(0.1, [(1, 0.2), (256, 20.0)])
    few = [AbsentExpert(expert, COPY, costs.seconds(1)) for expert in range(4)]
    many = [AbsentExpert(expert, COPY, costs.seconds(200)) for expert in range(4)]
    assert share_out(few, costs.call_seconds) == {0, 1, 2, 3}
    assert len(share_out(few, call_seconds=2.0)) == 2
    assert share_out(many, costs.call_seconds) == frozenset()
    assert share_out([], costs.call_seconds) == frozenset()


def test_a_busy_link_leaves_more_to_the_host():
    absent = [AbsentExpert(expert, COPY, 2 * COPY) for expert in range(3)]
    assert len(share_out(absent, 0.0)) == 1
    assert len(share_out(absent, 0.0, link_seconds=6.0)) == 3


def test_seconds_lie_between_the_measured_ones_and_grow_with_rows_behind_them():
    costs = HostCosts(0.5, [(1, 1.0), (5, 2.0), (10, 4.0)])
    assert [costs.seconds(rows) for rows in (1, 3, 5, 10, 30)] == [1.0, 1.5, 2.0, 4.0, 12.0]


@given(st.floats(0.2, 5.0), st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_costs_are_learnt_from_calls(factor, num_rows):
    costs, true = (HostCosts(scale, [(1, scale), (64, 8 * scale)]) for scale in (1.0, factor))
    seconds = true.call_seconds + sum(map(true.seconds, num_rows))
    for _ in range(2000):
        costs.learn(num_rows, seconds)
    assert costs.call_seconds + sum(map(costs.seconds, num_rows)) == pytest.approx(seconds, rel=0.01)


def test_one_call_that_was_held_up_changes_little():
    costs = HostCosts(1.0, [(1, 1.0)])
    costs.learn([1], 1000.0)
    assert costs.seconds(1) < 1.2


def test_use_rates_are_shares_of_the_latest_events():
    rates = UseRates(3)
    for number in range(1000):
        rates.add([0] if number % 4 else [0, 1])
    assert rates.of(0) == pytest.approx(1.0, abs=0.01)
    assert rates.of(1) == pytest.approx(0.25, abs=0.02)
    assert rates.of(2) == 0.0
    for _ in range(1000):
        rates.add([2])
    assert rates.of(0) < 0.01


def sharing(num_slots: int, *, waits_for_copies: bool, host_seconds: float = 0.5) -> tuple[HostShare, ResidencyControl]:
    control = ResidencyControl([num_slots], 6, BYTES, lambda _: lru(6))
    costs = HostCosts(0.0, [(1, host_seconds)])
    return HostShare(control, 6, costs, waits_for_copies=waits_for_copies), control


def copy_all(control: ResidencyControl) -> list[int]:
    copied = []
    while (transfer := control.next_transfer()) is not None:
        control.moved(transfer, BYTES - transfer.num_moved)
        control.finish(transfer)
        copied.append(transfer.expert)
    return copied


def run(share: HostShare, control: ResidencyControl, experts: list[int]) -> tuple[int, ...]:
    """Compute an event of one row of each expert; return the experts that the host computed."""
    access = share.access(0, dict.fromkeys(experts, 1), COPY)
    copy_all(control)
    control.release(0, [expert for expert in experts if expert not in access.elsewhere])
    return access.elsewhere


def test_a_host_that_computes_all_has_no_step_wait_and_fills_the_slots_meanwhile():
    share, control = sharing(2, waits_for_copies=False)
    assert run(share, control, [0, 1, 2]) == (0, 1, 2)
    assert control.counters.demand_bytes == 0
    assert control.layers[0].resident() == [0, 1]
    assert run(share, control, [0, 1, 2]) == (2,)
    assert (control.counters.num_hits, control.counters.num_misses, control.counters.num_elsewhere) == (2, 4, 4)


@pytest.mark.parametrize("waits_for_copies", [False, True])
def test_an_expert_moves_in_once_it_is_used_more_than_another_one_by_what_a_copy_costs(waits_for_copies):
    share, control = sharing(2, waits_for_copies=waits_for_copies, host_seconds=0.1)
    for _ in range(3):
        run(share, control, [0, 1])
    assert control.layers[0].resident() == [0, 1]
    run(share, control, [2])
    assert control.layers[0].resident() == [0, 1], "one use is no reason"
    for _ in range(200):
        run(share, control, [1, 2])
    assert control.layers[0].resident() == [1, 2]


def test_a_copy_that_has_almost_ended_is_waited_for():
    share, control = sharing(2, waits_for_copies=True)
    control.predict(0, [3], Priority.NEXT_LAYER)
    transfer = control.next_transfer()
    assert transfer is not None
    control.moved(transfer, BYTES - 1)
    access = share.access(0, {3: 1, 4: 1}, COPY)
    assert (access.loading, access.elsewhere) == ((3,), (4,))


def test_a_prefetch_that_has_begun_goes_on_though_the_host_was_faster():
    share, control = sharing(2, waits_for_copies=False)
    control.predict(0, [3, 5], Priority.NEXT_LAYER)
    transfer = control.next_transfer()
    assert transfer is not None
    control.moved(transfer, 1)
    assert share.access(0, {3: 1, 4: 1}, COPY).elsewhere == (3, 4)
    assert not control.must_stop(transfer)
    control.moved(transfer, BYTES - 1)
    control.finish(transfer)
    assert control.layers[0].state_of(3) is SlotState.READY
    assert copy_all(control) == [4], "the wrong prediction is cancelled, the expert in use moves in"


def test_experts_that_wait_to_move_in_give_way_to_those_of_the_next_step():
    share, control = sharing(1, waits_for_copies=False)
    share.access(0, {0: 1}, COPY)
    control.release(0, [])
    share.access(0, {1: 1}, COPY)
    assert copy_all(control) == [1]
