"""What a service does when more is asked than it can do: a scripted clock over the scheduler and the admission."""

from __future__ import annotations

from functools import cache
from hashlib import sha256

import pytest

from moeserve.engine.ranks.plan_link import PlanSender
from moeserve.plan import SamplingParams, Terms
from moeserve.scheduling.outcomes import TooLateError
from moeserve.scheduling.pacing import UNBOUNDED, Slo
from tests.support.overload_simulation import Client, OverloadSimulation, poisson, seconds_of
from tests.support.scheduler_simulation import Simulation

TTFT_S = 2.0
# What the scripted engine serves of these requests, per second.
CAPACITY = 6.0
SECONDS = 30.0
# The crowds in overload that are tried every time.
CROWDS = {(2.0, "impatient"), (4.0, "patient"), (5.0, "retrying")}
A, B = Terms("a"), Terms("b")


def clients(load: float, *, leaves_s: float | None = None, tries: int = 1) -> list[Client]:
    return [
        Client(f"c{number}", at, leaves_s=leaves_s, tries=tries)
        for number, at in enumerate(poisson(load * CAPACITY, SECONDS, 1))
    ]


def num_good(asked: list[Client]) -> int:
    return sum(client.met(TTFT_S) and client.asked_at < SECONDS for client in asked)


def crowd(load: float, kind: str) -> list[Client]:
    return clients(load, leaves_s=5.0 if kind == "impatient" else None, tries=20 if kind == "retrying" else 1)


@cache
def good_at_capacity(kind: str) -> int:
    asked = crowd(1.0, kind)
    OverloadSimulation().run(asked)
    return num_good(asked)


@pytest.mark.parametrize(
    ("load", "kind"),
    [
        pytest.param(load, kind, marks=() if (load, kind) in CROWDS else pytest.mark.long)
        for load in (2.0, 4.0, 5.0)
        for kind in ("patient", "impatient", "retrying")
    ],
)
def test_goodput_in_overload_is_that_at_capacity(load: float, kind: str) -> None:
    asked = crowd(load, kind)
    simulation = OverloadSimulation()
    simulation.run(asked)
    assert num_good(asked) >= 0.95 * good_at_capacity(kind)
    simulation.scheduler.check_idle()


@pytest.mark.parametrize(("slowness", "best"), [(1.1, 20), (1.3, 16)])
def test_clients_who_leave_get_as_many_answers_as_with_the_best_number_of_places(slowness: float, best: int) -> None:
    """With the usual number of places an answer takes longer than they wait. The work of refusing slows an engine."""
    good = []
    for num_seqs in (64, best):
        asked = [Client(f"c{number}", at, leaves_s=5.0) for number, at in enumerate(poisson(5 * CAPACITY, 50, 1))]
        OverloadSimulation(max_num_seqs=num_seqs, slowness=slowness).run(asked)
        good.append(sum(client.met(TTFT_S) for client in asked if client.at > 20))
    assert good[0] >= 0.95 * good[1]


def test_who_would_be_dropped_in_the_end_is_dropped_as_soon_as_that_is_clear() -> None:
    """A burst that does not end is an overload after 10 s."""
    asked = clients(4.0)
    OverloadSimulation().run(asked)
    waited = [(c.at, c.ended_at - c.at) for c in asked if c.ended_at and c.first_at is None]
    assert waited
    assert max(waits for _, waits in waited) < 12.0
    assert max((waits for at, waits in waited if at > 12.0), default=0.0) < TTFT_S


def test_several_frontends_refuse_as_well_as_one() -> None:
    asked = crowd(4.0, "retrying")
    simulation = OverloadSimulation(num_frontends=4)
    simulation.run(asked)
    assert num_good(asked) >= 0.95 * good_at_capacity("retrying")
    simulation.scheduler.check_idle()


@pytest.mark.parametrize("load", [2.0, 4.0])
def test_goodput_holds_where_a_full_step_takes_most_of_the_time_to_the_first_token(load: float) -> None:
    slow = 3.0
    good = []
    for rate in (CAPACITY / slow, load * CAPACITY / slow):
        asked = [Client(f"c{number}", at) for number, at in enumerate(poisson(rate, 80, 1))]
        OverloadSimulation(slo=Slo(TTFT_S), slowness=slow).run(asked)
        good.append(sum(client.met(TTFT_S) for client in asked))
    assert good[1] >= 0.95 * good[0]


def test_without_an_objective_the_same_load_is_a_collapse() -> None:
    asked = clients(4.0, leaves_s=5.0)
    OverloadSimulation(slo=UNBOUNDED).run(asked)
    assert num_good(asked) < 0.5 * good_at_capacity("impatient")


def test_after_the_storm_waits_are_as_before_within_seconds() -> None:
    storm = clients(5.0)
    later = [Client(f"later {number}", at) for number, at in enumerate(poisson(3.0, 20, 2, SECONDS + 5))]
    OverloadSimulation().run(storm + later)
    assert all(client.met(TTFT_S) for client in later)


def test_clients_that_come_back_as_told_are_all_answered_after_few_tries() -> None:
    asked = clients(5.0, tries=20)
    OverloadSimulation(slo=Slo(TTFT_S)).run(asked)
    assert all(client.first_at is not None for client in asked)
    assert sum(len(client.refusals) for client in asked) < 5 * len(asked)


def test_a_burst_after_quiet_is_served_and_not_refused() -> None:
    burst = [Client(f"c{number}", 1.0) for number in range(50)]
    OverloadSimulation().run(burst)
    assert all(client.first_at is not None and not client.refusals for client in burst)


def test_a_burst_right_after_the_start_is_served_though_the_first_steps_are_slow() -> None:
    """The steps of the warm-up are the measure of later ones, not the first that compute requests."""
    warm_up = [(count, seconds_of(count)) for count in (1, 2, 4, 8, 16, 64, 256)]
    burst = [Client(f"c{number}", 0.05 * min(number, 1)) for number in range(24)]
    OverloadSimulation(num_cold=2, warm_up=warm_up).run(burst)
    assert all(client.first_at is not None and not client.refusals for client in burst)


@pytest.mark.parametrize("measured", [True, False])
def test_a_burst_is_served_on_a_machine_that_others_keep_busy(measured: bool) -> None:
    """A step takes eight times as long. measured: when the service started, the machine was as busy as now."""
    slowness = 8.0
    warm_up = [(count, (slowness if measured else 1.0) * seconds_of(count)) for count in (1, 2, 4, 8, 16, 64, 256)]
    burst = [Client(f"c{number}", 0.05 * min(number, 1)) for number in range(24)]
    OverloadSimulation(num_cold=2, slowness=slowness, warm_up=warm_up).run(burst)
    assert all(client.first_at is not None and not client.refusals for client in burst)


def test_agents_with_long_first_prompts_are_all_served() -> None:
    agents = [Client(f"agent {number}", 2.0 * number, num_prompt_tokens=7600) for number in range(4)]
    short = [Client(f"short {number}", 15 + 0.5 * number) for number in range(20)]
    simulation = OverloadSimulation(num_blocks=3000)
    simulation.run(agents + short)
    assert all(client.first_at is not None and not client.refusals for client in agents)
    assert all(client.met(TTFT_S) and not client.refusals for client in short)
    simulation.scheduler.check_idle()


@pytest.mark.parametrize(("slowness", "num_tokens"), [(8.0, 90), (1.0, 7600)])
def test_a_lasting_overload_is_refused_where_the_objective_cannot_be_kept(slowness: float, num_tokens: int) -> None:
    alone = Client("alone", 0.0, num_prompt_tokens=num_tokens)
    OverloadSimulation(slowness=slowness, num_blocks=4000).run([alone])
    assert alone.ttft is not None
    rate = 4.0 / alone.ttft if num_tokens > 256 else 4.0 * CAPACITY / slowness
    asked = [Client(f"c{n}", at, num_prompt_tokens=num_tokens) for n, at in enumerate(poisson(rate, 600, 1))]
    OverloadSimulation(slowness=slowness, num_blocks=4000).run(asked)
    waits = [client.ttft for client in asked if client.ttft is not None]
    assert 0.6 < 1 - len(waits) / len(asked) < 0.85
    assert max(waits) < 100
    assert max((c.ended_at - c.at for c in asked if c.ended_at and c.first_at is None), default=0.0) < 100


FLOODS = {
    "400 connections": [(0.001 * number, 200, 64) for number in range(400)],
    "long answers in every place": [(0.001 * number, 20, 700) for number in range(64)],
    "giant prompts": [(2.0 * number, 6000, 100) for number in range(20)],
    "prompts that fill the cache": [(1.0 * number, 1000, 50) for number in range(40)],
}


@pytest.mark.parametrize("num_blocks", [426, 2000])
@pytest.mark.parametrize("flood", FLOODS)
def test_another_key_is_served_at_once_under_a_flood(flood: str, num_blocks: int) -> None:
    theirs = [Client(f"a{number}", at, A, prompt, out) for number, (at, prompt, out) in enumerate(FLOODS[flood])]
    ours = [Client(f"b{number}", at, B, 40, 8) for number, at in enumerate(poisson(0.7, 35, 3, 2.0))]
    simulation = OverloadSimulation(num_blocks=num_blocks)
    simulation.run(theirs + ours)
    assert all(client.met(TTFT_S) and not client.refusals for client in ours)
    simulation.scheduler.check_idle()


@pytest.mark.parametrize("num_long", [1, 6])
def test_short_requests_of_the_same_key_are_served_at_once_beside_long_prompts(num_long: int) -> None:
    """Without keys all clients are one tenant."""
    before = [Client(f"before {number}", 0.5 * number) for number in range(20)]
    long = [Client(f"long {number}", 12 + 0.1 * number, num_prompt_tokens=7600) for number in range(num_long)]
    short = [Client(f"short {number}", 13 + 0.5 * number) for number in range(40)]
    simulation = OverloadSimulation()
    simulation.run(before + long + short)
    assert all(client.met(TTFT_S) and not client.refusals for client in short)
    alone = Client("alone", 0.0, num_prompt_tokens=7600)
    OverloadSimulation().run([alone])
    assert long[0].ttft is not None
    assert alone.ttft is not None
    assert alone.ttft < long[0].ttft < 2 * alone.ttft
    simulation.scheduler.check_idle()


def test_background_requests_are_done_and_stand_in_nobodys_way() -> None:
    background = Terms(patient=True, background=True)
    later = [Client(f"back {number}", 0.0, background, 300, 200, 2**31) for number in range(100)]
    soon = [Client(f"c{number}", at) for number, at in enumerate(poisson(3.0, 30, 4, 2.0))]
    OverloadSimulation(num_blocks=800).run(later + soon)
    assert all(client.met(TTFT_S) for client in soon)
    assert all(client.first_at is not None for client in later)


def test_weights_decide_what_two_floods_get() -> None:
    heavy, light = Terms("a", weight=3.0), Terms("b")
    floods = [
        Client(f"{terms.tenant}{number}", at, terms, tries=1)
        for terms, seed in ((heavy, 5), (light, 6))
        for number, at in enumerate(poisson(3 * CAPACITY, SECONDS, seed))
    ]
    OverloadSimulation(slo=Slo(TTFT_S)).run(floods)
    served = {name: sum(c.first_at is not None for c in floods if c.terms.tenant == name) for name in "ab"}
    assert served["a"] / served["b"] == pytest.approx(3.0, rel=0.15)


def test_two_runs_of_one_script_plan_the_same_bytes() -> None:
    digests = []
    for _ in range(2):
        simulation = OverloadSimulation(num_blocks=426)
        asked = [
            Client(f"{terms.tenant}{number}", at, terms, 200, 30, tries=2)
            for terms, seed in ((A, 1), (B, 2))
            for number, at in enumerate(poisson(8.0, 10, seed))
        ]
        simulation.run(asked)
        digests.append([sha256(PlanSender().encode(plan)).hexdigest() for plan in simulation.plans])
    assert digests[0] == digests[1]


def test_requests_that_share_a_prompt_are_not_taken_for_as_much_work_each() -> None:
    simulation = Simulation(num_blocks=400, block_size=4, max_num_seqs=2, slo=Slo(1.0))
    simulation.scheduler.set_time(0.0)
    shared = [number % 50 for number in range(600)]
    simulation.add("first", shared, SamplingParams(1))
    simulation.step()
    simulation.scheduler.count_step(0.1)
    for number in range(8):
        simulation.add(f"like it {number}", [*shared[:599], number], SamplingParams(1))

    def add_others() -> None:
        for number in range(8):
            simulation.add(f"other {number}", [number, *shared], SamplingParams(1))

    with pytest.raises(TooLateError):
        add_others()
    simulation.run_and_check()
