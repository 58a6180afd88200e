"""How long a request may wait, and how long it will by what the engine has told."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from random import Random

import pytest

from moeserve.plan import FinishReason, Request, SamplingParams, Terms
from moeserve.scheduling.cost_model import StepSize
from moeserve.scheduling.pacing import UNBOUNDED, Backlog, Load, Pace, Patience, Slo, allowance

SLO = Slo(2.0, burst_s=10.0)
STEP_S = 0.5


def load(places: int = 8, place_s: float = 0.0, **tenants: Backlog) -> Load:
    """100 tokens of prompts a second."""
    return Load(0.0, 5.0, 0.5, 50, places, place_s, 20, tenants)


def test_a_burst_may_wait_and_a_lasting_overload_may_not() -> None:
    patience = Patience(SLO)
    patience.observe(0.0, None, STEP_S)
    for now in range(1, 10):
        patience.observe(float(now), (now - 1.0, float(now)), STEP_S)
        assert patience.limit(0.5) == 10.0
    patience.observe(10.0, (9.0, 10.0), STEP_S)
    assert patience.limit(0.5) == 1.5


def test_a_burst_that_nobody_follows_is_no_lasting_overload() -> None:
    patience = Patience(SLO)
    patience.observe(0.0, None, STEP_S)
    for now in range(1, 100):
        patience.observe(float(now), (0.5, 9.0), STEP_S)
        assert not patience.is_lasting
    patience.observe(100.0, (0.5, 100.0), STEP_S)
    assert patience.is_lasting


def test_a_burst_lasts_longer_on_a_machine_whose_steps_take_more_than_their_share() -> None:
    patience = Patience(SLO)
    patience.observe(0.0, None, 4.0)
    patience.observe(59.0, (9.0, 59.0), 4.0)
    assert patience.limit(0.5) == pytest.approx(60.0)
    patience.observe(60.0, (10.0, 60.0), 4.0)
    assert patience.limit(0.5) == 1.5


def test_a_prompt_longer_than_the_objective_may_wait_in_proportion_at_any_load() -> None:
    patience = Patience(SLO)
    patience.observe(0.0, None, STEP_S)
    patience.observe(20.0, (19.0, 20.0), STEP_S)
    assert patience.limit(60.0) == 300.0
    assert patience.limit(2.0) == 0.5
    assert Patience(Slo(2.0)).limit(60.0) == 0.5


def test_tokens_beside_others_cost_what_they_add_to_the_steps() -> None:
    pace = Pace(UNBOUNDED, 64, 8, warm_up=[(1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0), (16, 1.5), (32, 2.5), (64, 4.5)])
    assert pace.compute_s(0, 64) == pytest.approx(4.5)
    assert pace.compute_s(0, 60, rows=4) == pytest.approx(3.5)
    assert pace.compute_s(0, 8, rows=8) == pytest.approx(0.5)
    assert pace.compute_s(0, 120, rows=4) == pytest.approx(7.0)


def test_an_empty_queue_begins_the_burst_anew() -> None:
    patience = Patience(SLO)
    for now in range(0, 100):
        patience.observe(float(now), None if now % 9 == 0 else (now - 5.0, float(now)), STEP_S)
        assert patience.limit(0.5) == 10.0


def test_a_lasting_overload_is_over_when_nobody_has_waited_for_long() -> None:
    patience = Patience(SLO)
    for now in range(0, 31):
        # The queue is empty now and then, since most are refused.
        patience.observe(float(now), None if now in (0, 15, 25) else (now - 1.0, float(now)), STEP_S)
    assert patience.limit(0.5) == 1.5
    for now in range(31, 40):
        patience.observe(float(now), (now - 0.2, float(now)), STEP_S)
        assert patience.limit(0.5) == 1.5
    patience.observe(40.0, (39.8, 40.0), STEP_S)
    assert patience.limit(0.5) == 10.0


def test_without_time_for_bursts_the_objective_holds_at_once() -> None:
    patience = Patience(Slo(2.0))
    for now in range(5):
        patience.observe(float(now), (now - 3.0, float(now)), STEP_S)
        assert patience.limit(0.5) == 1.5


def test_a_long_prompt_may_wait_for_a_part_of_the_objective() -> None:
    assert allowance(2.0, 0.5) == 1.5
    assert allowance(2.0, 30.0) == 0.5


def test_nothing_waits_for_nobody() -> None:
    assert load().wait_s("a", 1.0) == 0.0
    assert load(a=Backlog(1.0, 3, 0, 0, 20)).wait_s("a", 1.0) == 0.0


def test_one_tenant_waits_for_all_that_it_has_asked() -> None:
    mine = load(a=Backlog(1.0, 8, 5, 300, 20))
    assert mine.wait_s("a", 1.0) == pytest.approx(3.0)
    assert mine.wait_s("a", 1.0, num_new=5) == pytest.approx(4.0)


def test_places_count_where_they_are_scarcer_than_prompts() -> None:
    full = load(place_s=2.0, a=Backlog(1.0, 8, 4, 40, 10))
    assert full.wait_s("a", 1.0) == pytest.approx(10.0)
    assert full.wait_s("b", 1.0) == 0.0, "it has a share of the places"


def test_another_tenant_counts_as_far_as_it_has_work() -> None:
    both = load(a=Backlog(1.0, 1, 4, 100, 25), b=Backlog(1.0, 1, 40, 5000, 125))
    assert both.wait_s("a", 1.0) == pytest.approx(2.0)
    assert both.wait_s("b", 1.0) == pytest.approx(51.0)
    heavy = load(a=Backlog(4.0, 1, 4, 100, 25), b=Backlog(1.0, 1, 40, 5000, 125))
    assert heavy.wait_s("a", 4.0) == pytest.approx(1.25)


@pytest.mark.parametrize("seed", range(20))
def test_the_wait_for_prompts_is_that_of_a_fluid_served_by_weight(seed: int) -> None:
    random = Random(seed)
    backlogs = {name: Backlog(random.choice([0.5, 1.0, 3.0]), 1, 1, random.randrange(1, 500), 20) for name in "abcd"}
    # Drops of work, to whom has had least by its weight, until nothing is left of a.
    left, had = {name: backlog.tokens for name, backlog in backlogs.items()}, dict.fromkeys(backlogs, 0.0)
    served = 0
    while left["a"]:
        name = min((name for name in left if left[name]), key=lambda name: (had[name], name))
        had[name] += 1 / backlogs[name].weight
        left[name] -= 1
        served += 1
    expected = served / 100
    assert load(**backlogs).wait_s("a", backlogs["a"].weight) == pytest.approx(expected, abs=0.12)


def request(num_tokens: int = 10, arrived_at: float = 0.0, **terms: float | bool) -> Request:
    made = Request("r", array("i", [1] * num_tokens), SamplingParams(1))
    made.terms, made.arrived_at = Terms(**terms), arrived_at  # type: ignore[arg-type]
    return made


def test_a_request_has_its_own_time_the_services_or_none() -> None:
    pace = Pace(SLO, 256, 64)
    pace.count_step(StepSize(256), 0.4)
    assert pace.limit(request()) == 60.0
    assert pace.admits(request(), 15.0)
    assert not pace.admits(request(), 15.1)
    assert pace.limit(request(1500)) == pytest.approx(12.0)
    assert pace.limit(request(ttft_s=1.0)) == pytest.approx(0.6)
    assert pace.limit(request(1000, ttft_s=2.0)) == pytest.approx(0.5)
    assert pace.limit(request(patient=True)) == float("inf")
    assert Pace(UNBOUNDED, 256, 64).limit(request()) == float("inf")
    assert Pace(UNBOUNDED, 256, 64).limit(request(ttft_s=1.0)) == 1.0


def test_a_request_is_late_when_its_first_token_cannot_come_in_time() -> None:
    pace = Pace(SLO, 256, 64)
    pace.count_step(StepSize(256), 0.4)
    pace.set_time(101.5)
    assert not pace.is_late(request(arrived_at=100.0))
    assert pace.is_late(request(arrived_at=99.8))
    assert not Pace(UNBOUNDED, 256, 64).is_late(request())


def test_what_the_warm_up_measured_is_expected_before_the_first_step_and_outlives_a_slow_one() -> None:
    pace = Pace(SLO, 256, 64, warm_up=[(count, 0.02 + 0.001 * count) for count in (1, 2, 4, 8, 16, 64, 256)])
    assert pace.load({}, lacks_memory=False).step_s == pytest.approx(0.276)
    pace.count_step(StepSize(30), 60.0)
    assert pace.load({}, lacks_memory=False).step_s == pytest.approx(0.276)
    assert Pace(SLO, 256, 64).load({}, lacks_memory=False).step_s == 0.0


def answered() -> Request:
    answered = request(60)
    answered.num_uncached_tokens = 60
    answered.token_ids.extend([1] * 16)
    return answered


def measured_pace(step_seconds: Callable[[int], float], context: int = 0) -> Pace:
    """Return a pace that has learnt steps of all sizes, and requests of 60 prompt tokens and 16 output tokens.

    context: positions that each row attends to, for 0.1 µs each.
    """
    pace = Pace(SLO, 256, 64)
    for _ in range(100):
        pace.count_start(answered())
        pace.count_end(answered(), FinishReason.LENGTH)
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            pace.count_step(StepSize(rows, context * rows), step_seconds(rows) + 1e-7 * context * rows)
    return pace


def end(pace: Pace, count: int, age_s: float, reason: FinishReason = FinishReason.LENGTH) -> None:
    pace.set_time(age_s)
    for _ in range(count):
        pace.count_end(answered(), reason)
    pace.record_waiting(None, is_awaited=False)


def linear(rows: int) -> float:
    return 0.05 + 0.001 * rows


def answer_s(num_running: int) -> float:
    """Return how long an answer takes while a number of them run with 4.75 rows each in a step, as `linear` has it."""
    return 16 * linear(round(4.75 * num_running))


def test_so_many_requests_run_at_once_that_answers_are_whole_before_clients_leave() -> None:
    pace = measured_pace(linear)
    pace.record_waiting(None, is_awaited=False)
    assert pace.num_places() == 64
    end(pace, 20, 3.5, FinishReason.ABORT)
    assert 2.5 < answer_s(pace.num_places()) < 3.5


def test_a_few_clients_who_leave_first_shorten_no_wait_of_their_tenant() -> None:
    pace = measured_pace(linear)
    left = request(tenant="new")
    left.token_ids.append(1)
    pace.set_time(3.5)
    limits = []
    for _ in range(16):
        pace.count_end(left, FinishReason.ABORT)
        pace.record_waiting(None, is_awaited=False)
        limits.append(pace.load({}, lacks_memory=False).limit_of("new"))
    assert limits[:15] == [pace.load({}, lacks_memory=False).limit_of("other")] * 15
    assert limits[15] < 1.0


def test_fewer_requests_run_at_once_where_contexts_are_long() -> None:
    places = []
    for context in (0, 10_000):
        pace = measured_pace(linear, context)
        end(pace, 20, 3.5, FinishReason.ABORT)
        places.append(pace.num_places())
    # A row takes 2 ms in place of 1.
    assert places[1] < 0.7 * places[0]


def test_nothing_is_given_up_for_the_few_who_leave_and_for_those_who_leave_at_once() -> None:
    pace = measured_pace(linear)
    for _ in range(20):
        end(pace, 19, 4.9)
        end(pace, 1, 3.5, FinishReason.ABORT)
        end(pace, 10, 0.1, FinishReason.ABORT)
    assert pace.num_places() == 64


def test_where_no_number_of_requests_is_quick_enough_half_of_the_throughput_stays() -> None:
    pace = measured_pace(linear)
    end(pace, 1000, 0.9, FinishReason.ABORT)
    # 64 requests and more are 837 rows a second.
    num_rows = 4.75 * pace.num_places()
    assert num_rows / linear(round(num_rows)) >= 0.5 * 837


def test_who_would_not_have_the_whole_answer_in_time_is_not_waited_for() -> None:
    pace = measured_pace(linear)
    end(pace, 20, 3.5, FinishReason.ABORT)
    assert not pace.is_late(request(arrived_at=3.1))
    assert pace.is_late(request(arrived_at=2.5))
    assert 0.5 <= pace.limit(request()) < 1.0
    assert pace.limit(request(ttft_s=3.0)) > 2.0, "it has said how long it waits"
    assert pace.load({}, lacks_memory=False).limit_of("") < 1.0


def test_a_tenant_whose_clients_leave_takes_no_place_and_no_time_from_others() -> None:
    pace = measured_pace(linear)
    end(pace, 20, 3.5, FinishReason.ABORT)
    assert pace.num_places() < 64
    patient = request(tenant="patient")
    assert pace.load({}, lacks_memory=False).limit_of("patient") > 1.0
    patient.token_ids.append(1)
    pace.count_end(patient, FinishReason.LENGTH)
    pace.record_waiting(None, is_awaited=False)
    assert pace.num_places() == 64
    assert pace.limit(patient) > pace.limit(request())
    assert pace.load({}, lacks_memory=False).limit_of("") < 1.0


def test_a_tenant_that_asks_no_more_holds_no_places() -> None:
    pace = measured_pace(linear)
    patient = request(tenant="patient")
    patient.token_ids.append(1)
    pace.count_end(patient, FinishReason.LENGTH)
    pace.record_waiting(None, is_awaited=False)
    end(pace, 8 * 64, 3.5, FinishReason.ABORT)
    assert pace.num_places() == 64
    end(pace, 20, 3.5, FinishReason.ABORT)
    assert pace.num_places() < 64


def test_clients_who_have_become_patient_are_found_out() -> None:
    pace = measured_pace(linear)
    end(pace, 20, 3.5, FinishReason.ABORT)
    before = pace.num_places()
    end(pace, 100, 3.0)
    assert pace.num_places() == before
    for _ in range(100):
        end(pace, 100, 3.0)
    assert pace.num_places() == 64


def longest_step_s(pace: Pace, num_streams: int) -> float:
    decodes = [answered() for _ in range(num_streams)]
    return pace.step_bound(decodes).seconds(StepSize(num_streams, 0.0))


def test_a_step_with_streams_is_short_while_nobody_waits_and_longer_for_those_who_do() -> None:
    pace = measured_pace(lambda rows: 0.02 + 0.0005 * rows)
    pace.record_waiting(None, is_awaited=False)
    assert longest_step_s(pace, 1) == 0.25
    assert longest_step_s(pace, 0) == pytest.approx(2 / 3 * SLO.ttft_s)
    pace.record_waiting((pace.now, pace.now), is_awaited=True)
    assert longest_step_s(pace, 1) == pytest.approx(1 / 3 * SLO.ttft_s)


def test_a_step_with_streams_is_no_shorter_than_five_times_their_work_and_twice_the_least_step() -> None:
    pace = measured_pace(linear)
    pace.record_waiting(None, is_awaited=False)
    assert longest_step_s(pace, 8) == pytest.approx(5 * linear(8), rel=0.05)
    pace = measured_pace(lambda rows: 0.02 * rows)
    pace.record_waiting(None, is_awaited=False)
    assert longest_step_s(pace, 1) == pytest.approx(2 * 0.02 * 17, rel=0.05)


def test_steps_keep_a_pace_although_other_processes_stretch_those_with_prompts() -> None:
    pace = measured_pace(lambda rows: 0.02 + 0.0005 * rows)
    pace.record_waiting(None, is_awaited=False)
    stream = answered()
    stream.terms = Terms(tpot_s=0.1)

    def longest_s() -> float:
        return pace.step_bound([stream]).seconds(StepSize(1, 0.0))

    # Nobody has told: the first step of a crowd may take twice as long.
    assert longest_s() == pytest.approx(0.05)
    for _ in range(12):
        pace.count_step(StepSize(50), 0.045, has_prompts=True)
    assert longest_s() == pytest.approx(0.1, rel=0.01)
    pace.count_step(StepSize(50), 3 * 0.045, has_prompts=True)
    assert longest_s() == pytest.approx(0.1 / 2, rel=0.01)
    for _ in range(200):
        pace.count_step(StepSize(1), 0.0205)
    assert longest_s() == pytest.approx(0.05, rel=0.01)
