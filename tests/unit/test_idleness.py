"""When the service falls asleep and wakes, from the ticks of its HTTP processes."""

from __future__ import annotations

from launcher.idleness import Idleness
from moeserve.wire import Tick


def ticks(*flags: Tick) -> bytes:
    return bytes(flags)


def test_it_sleeps_by_itself_only_when_no_process_has_had_a_request_for_long() -> None:
    idleness = Idleness(["0", "1"], 10.0)
    idleness.begin(100.0)
    idleness.observe("0", ticks(Tick.READY), 105.0)
    assert not idleness.wants_sleep("0", 109.9)
    assert idleness.wants_sleep("0", 110.0)
    idleness.observe("1", ticks(Tick.READY | Tick.BUSY), 111.0)
    assert not idleness.wants_sleep("0", 200.0)
    idleness.observe("1", ticks(Tick.READY), 120.0)
    assert not idleness.wants_sleep("0", 120.9)
    assert idleness.wants_sleep("0", 121.0)


def test_a_request_between_two_looks_counts() -> None:
    idleness = Idleness(["0"], 10.0)
    idleness.begin(0.0)
    idleness.observe("0", ticks(Tick.BUSY, Tick.READY), 9.0)
    assert not idleness.wants_sleep("0", 18.9)
    assert idleness.wants_sleep("0", 19.0)


def test_a_wish_to_sleep_waits_for_every_process_and_ends_with_who_has_it() -> None:
    idleness = Idleness(["0", "1"], None)
    assert not idleness.wants_sleep("0", 1e9)
    idleness.observe("0", ticks(Tick.SLEEP), 1.0)
    idleness.observe("1", ticks(Tick.BUSY), 1.0)
    assert not idleness.wants_sleep("0", 1.0)
    idleness.observe("1", ticks(Tick(0)), 2.0)
    assert idleness.wants_sleep("0", 2.0)
    # Who waited at "0" may have left since its last tick.
    assert not idleness.wants_sleep("1", 2.0)
    idleness.observe("0", ticks(Tick(0)), 3.0)
    assert not idleness.wants_sleep("0", 3.0)


def test_the_requests_and_wishes_of_a_process_end_with_it() -> None:
    idleness = Idleness(["0", "1"], None)
    idleness.observe("0", ticks(Tick.BUSY | Tick.WAKE), 1.0)
    idleness.observe("1", ticks(Tick.SLEEP), 1.0)
    assert idleness.wants_wake()
    idleness.forget("0")
    assert not idleness.wants_wake()
    assert idleness.wants_sleep("1", 1.0)
