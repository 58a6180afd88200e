"""The trial of suspects: one at a time may be in the steps in flight."""

from __future__ import annotations

from array import array

from moeserve.plan import Request, SamplingParams
from moeserve.scheduling.trials import Trial


def request(name: str, suspect_until: int = 0) -> Request:
    return Request(name, array("i", [1, 2]), SamplingParams(3), suspect_until=suspect_until)


def test_a_suspect_waits_while_plans_name_another_one_and_nobody_else_does() -> None:
    trial, first, second, innocent = Trial(), request("a", 4), request("b", 4), request("c")
    trial.record_planned(first)
    first.num_scheduled_tokens = 2
    assert [trial.is_awaited_by(one) for one in (first, second, innocent)] == [False, True, False]
    trial.begin_step()
    assert trial.is_awaited_by(second)


def test_the_next_suspect_has_its_turn_once_the_first_is_cleared_or_in_no_plan() -> None:
    for num_computed, in_flight in ((4, 1), (3, 0)):
        trial, first, second = Trial(), request("a", 4), request("b", 4)
        first.num_scheduled_tokens = in_flight
        trial.record_planned(first)
        trial.record_computed(first, num_computed)
        assert trial.is_awaited_by(second)
        trial.begin_step()
        assert not trial.is_awaited_by(second)


def test_a_suspect_is_cleared_once_it_has_computed_as_much_as_before() -> None:
    suspect = request("a", 4)
    for num_tokens, left in ((3, 4), (4, 0)):
        Trial().record_computed(suspect, num_tokens)
        assert suspect.suspect_until == left
