"""A request that outgrows the original context of its rotary embedding is computed anew, by other angles, once."""

from __future__ import annotations

import random

import pytest

from moeserve.plan import SamplingParams
from tests.support.scheduler_simulation import Simulation

SWITCH = 8


def simulation(**options: object) -> Simulation:
    return Simulation(**{"num_blocks": 40, "block_size": 4, "rope_switch": SWITCH, **options})  # type: ignore[arg-type]


def chunks_of(run: Simulation, request_id: str) -> list[tuple[int, int, int]]:
    """(start, number of tokens, first angle) of a request's chunks."""
    return [
        (chunk.start, len(chunk.token_ids), chunk.first_angle)
        for plan in run.plans
        for chunk in plan.chunks
        if chunk.request_id == request_id
    ]


@pytest.mark.parametrize("options", [{}, {"depth": 1, "run_ahead": True}], ids=["plain", "run ahead"])
def test_a_request_that_grows_beyond_the_switch_starts_again_with_other_angles(options: dict[str, object]) -> None:
    run = simulation(**options)
    run.add("a", [1, 2, 3, 4, 5], SamplingParams(max_tokens=6))
    run.run_and_check()
    assert chunks_of(run, "a") == [(0, 5, 0), (5, 1, 0), (6, 1, 0), (7, 1, 0), (0, 9, SWITCH), (9, 1, SWITCH)]


def test_a_prompt_beyond_the_switch_has_other_angles_from_its_start() -> None:
    run = simulation(budget=8)
    run.add("fits", list(range(8)), SamplingParams(max_tokens=1))
    run.add("longer", list(range(20, 29)), SamplingParams(max_tokens=2))
    run.run_and_check()
    assert chunks_of(run, "fits") == [(0, 8, 0)]
    assert chunks_of(run, "longer") == [(0, 8, SWITCH), (8, 1, SWITCH), (9, 1, SWITCH)]


def test_requests_on_both_sides_share_no_keys_and_those_on_one_side_do() -> None:
    run = simulation()
    cached = []
    for number, length in enumerate((8, 12, 12, 8)):
        record = run.add(str(number), list(range(length)), SamplingParams(max_tokens=1))
        run.run()
        cached.append(record.request.num_cached_tokens)
    run.check_all_done()
    assert cached == [0, 0, 8, 4]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{}, {"depth": 1}, {"depth": 1, "run_ahead": True}, {"num_ranks": 2}], ids=str)
def test_any_mixture_of_requests_ends_as_undisturbed_ones(options: dict[str, object], seed: int) -> None:
    rng = random.Random(seed)
    run = simulation(num_blocks=14, budget=7, max_num_seqs=4, **options)
    for number in range(12):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 18))]
        sampling = SamplingParams(max_tokens=rng.randrange(1, 14), seed=rng.randrange(3))
        run.add(str(number), prompt, sampling, namespace=rng.choice(["", "other"]))
        run.step()
    run.run_and_check()
    for number in range(12):
        sides = [angle for _, _, angle in chunks_of(run, str(number))]
        assert sides == sorted(sides)
        assert all(angle == SWITCH for start, count, angle in chunks_of(run, str(number)) if start + count > SWITCH)
