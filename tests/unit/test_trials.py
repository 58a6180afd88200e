"""The trial of suspects: one at a time may be in the steps in flight."""

from __future__ import annotations

from array import array

from moeserve.plan import Chunk, FinishReason, Request, SamplingParams
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.trials import Trial

UNTIL = {"a": 4, "b": 4}
CHUNK = Chunk("r", array("i", [1]), 0, array("i", [0]), None)


CHUNK = Chunk("a", array("i", [1]), 0, array("i", [0]), None)


def on_trial(*names: str) -> tuple[Trial, list[Request]]:
    """A trial, and requests that have entered; those named in `UNTIL` are suspects."""
    trial = Trial(lambda request_id: UNTIL.get(request_id, 0))
    requests = [Request(name, array("i", [1, 2]), SamplingParams(3)) for name in names]
    assert [trial.enter(request) for request in requests] == [name in UNTIL for name in names]
    return trial, requests


def test_a_suspect_waits_while_plans_name_another_one_and_nobody_else_does() -> None:
    trial, (first, second, innocent) = on_trial("a", "b", "c")
    trial.planned(first, CHUNK)
    first.num_scheduled_tokens = 2
    assert [trial.holds(one) for one in (first, second, innocent)] == [False, True, False]
    trial.begin_step()
    assert trial.holds(second)


def test_the_next_suspect_has_its_turn_once_the_first_is_cleared_or_in_no_plan() -> None:
    for num_computed, in_flight in ((4, 1), (3, 0)):
        trial, (first, second) = on_trial("a", "b")
        first.num_scheduled_tokens = in_flight
        trial.planned(first, CHUNK)
        trial.computed(first, num_computed)
        assert trial.holds(second)
        trial.begin_step()
        assert not trial.holds(second)


def test_a_suspect_is_cleared_once_it_has_computed_as_much_as_before() -> None:
    for num_tokens, is_cleared in ((3, False), (4, True)):
        trial, (first, second) = on_trial("a", "b")
        trial.computed(first, num_tokens)
        trial.planned(second, CHUNK)
        assert trial.holds(first) is not is_cleared


def test_a_suspect_that_has_ended_is_on_trial_while_a_plan_names_it() -> None:
    trial, (first, second) = on_trial("a", "b")
    trial.planned(first, CHUNK)
    first.num_scheduled_tokens, first.finished = 2, True
    trial.left(RequestOutput(first, finish_reason=FinishReason.ABORT))
    trial.begin_step()
    assert trial.holds(second)
    first.num_scheduled_tokens = 0
    trial.begin_step()
    assert not trial.holds(second)
