"""Requests in turns: each step in flight has an equal part of the running requests, and each rank always has work."""

from __future__ import annotations

from array import array
from typing import cast

import pytest

from moeserve.plan import Chunk, Request, SamplingParams
from moeserve.scheduling.turns import Turns
from tests.support.scheduler_simulation import Simulation


def simulation(num_stages: int, **options: object) -> Simulation:
    settings: dict[str, object] = {"num_blocks": 200, "block_size": 4, "budget": 64, "max_num_seqs": 16}
    return Simulation(depth=num_stages - 1, in_turns=True, **settings | options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_requests", "num_stages"), [(16, 2), (16, 4), (15, 2), (3, 3), (7, 3)])
def test_steps_in_flight_have_equal_parts_of_the_running_requests(num_requests: int, num_stages: int) -> None:
    run = simulation(num_stages)
    for number in range(num_requests):
        run.add(f"{number}", [number + 1], SamplingParams(max_tokens=12))
    run.run_and_check()
    most, least = -(-num_requests // num_stages), num_requests // num_stages
    # Behind the first steps, and before the first request ends.
    sizes = [len(plan.chunks) for plan in run.plans[num_stages + 1 : -2 * num_stages]]
    assert set(sizes) <= {most, least, num_requests - (num_stages - 1) * most}
    for first in range(len(sizes) - num_stages + 1):
        assert sum(sizes[first : first + num_stages]) == num_requests


def test_of_each_rank_with_requests_of_its_own_a_step_has_an_equal_part() -> None:
    turns = Turns(2)
    requests = [request(name, rank) for name, rank in (("a", 0), ("b", 0), ("c", 0), ("d", 0), ("e", 1), ("f", 1))]
    for one in requests:
        turns.started(one)
    for expected in (["a", "b", "e"], ["a", "b", "e"]):
        turns.begin_step()
        named = list[str]()
        for one in requests:
            if not turns.holds(one):
                named.append(one.request_id)
                turns.planned(one, cast("Chunk", None))
        assert named == expected


def request(name: str, rank: int) -> Request:
    made = Request(name, array("i", [1]), SamplingParams(max_tokens=1))
    made.rank = rank
    return made


def test_a_single_request_is_in_one_step_at_a_time_and_waits_for_no_other() -> None:
    run = simulation(4)
    run.add("a", [1, 2, 3], SamplingParams(max_tokens=5))
    run.run_and_check()
    assert [[chunk.start for chunk in plan.chunks] for plan in run.plans] == [[0], [3], [4], [5], [6]]


def test_the_chunks_of_a_long_prompt_follow_each_other_without_a_wait() -> None:
    run = simulation(3, budget=16)
    run.add("a", list(range(40)), SamplingParams(max_tokens=1))
    for _ in range(2):
        run.step()
    assert len(run.in_flight) == 2
    run.run_and_check()
    assert [chunk.start for plan in run.plans for chunk in plan.chunks] == [0, 16, 32]


def test_requests_that_come_are_taken_whatever_part_the_running_ones_have() -> None:
    run = simulation(2)
    for number in range(4):
        run.add(f"{number}", [number + 1], SamplingParams(max_tokens=8))
    for _ in range(6):
        run.step()
    run.add("new", [9, 9], SamplingParams(max_tokens=1))
    run.step()
    assert "new" in [chunk.request_id for chunk in run.plans[-1].chunks]
    run.run_and_check()


def test_a_preempted_request_and_one_that_left_have_no_part() -> None:
    run = simulation(2, num_blocks=12)
    for number in range(6):
        run.add(f"{number}", [number + 1] * 5, SamplingParams(max_tokens=20))
    for _ in range(8):
        run.step()
    run.abort("5")
    run.run_and_check()
    assert run.scheduler.counters.preemptions > 0
