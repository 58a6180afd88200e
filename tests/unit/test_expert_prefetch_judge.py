"""Prefetching is on where steps are shorter with it, and never costs more than its probes do."""

import random
from collections.abc import Callable

import pytest

from experts.prediction.cores import is_one_free
from experts.prediction.judge import JudgeRules, PrefetchJudge, least_rows, size_class

NUM_STEPS = 3000


def compete(
    judge: PrefetchJudge,
    ratio_at: Callable[[int], float],
    seed: int,
    noise: float = 0.2,
    num_steps: int = NUM_STEPS,
) -> tuple[float, int]:
    """Return the time of all steps on demand over the judged time, and the number of prefetching steps.

    ratio_at(step): the duration of a step with prefetching over that without.
    """
    generator = random.Random(seed)
    demand, judged, num_on = 0.0, 0.0, 0
    for step in range(num_steps):
        seconds = (1 + step / num_steps) * generator.lognormvariate(0.0, noise)
        is_on = judge.begin_step(4, has_free_core=True)
        taken = seconds * (ratio_at(step) if is_on else 1.0)
        judge.end_step(taken, waited=seconds / 2)
        demand, judged, num_on = demand + seconds, judged + taken, num_on + is_on
    return demand / judged, num_on


@pytest.mark.parametrize("num_steps", [NUM_STEPS // 10, NUM_STEPS])
@pytest.mark.parametrize("ratio", [1.0, 1.02, 1.05, 1.2, 1.6])
def test_where_it_loses_time_it_costs_less_than_a_hundredth(ratio: float, num_steps: int) -> None:
    shares = [compete(PrefetchJudge(), lambda _: ratio, seed, num_steps=num_steps)[0] for seed in range(20)]
    assert sum(shares) / len(shares) >= 0.99


@pytest.mark.parametrize("ratio", [1.05, 1.6, 3.0])
def test_trials_lose_no_more_than_the_budget_and_one_trial_on_top(ratio: float) -> None:
    rules = JudgeRules()
    for num_steps in (200, 1000, 5000):
        share, _ = compete(PrefetchJudge(rules), lambda _: ratio, 0, noise=0.0, num_steps=num_steps)
        lost = num_steps * (1 / share - 1)
        # The time of a step grows to twice as long.
        assert lost <= 2 * (rules.budget * num_steps + rules.block * (ratio - 1))


def test_steps_that_hardly_wait_for_experts_are_never_tried_with_prefetching() -> None:
    judge = PrefetchJudge()
    for _ in range(NUM_STEPS):
        assert not judge.begin_step(1, has_free_core=True)
        judge.end_step(1.0, waited=0.005)
    assert judge.gains() == []


def test_where_it_saves_a_fifth_nearly_all_of_that_is_had() -> None:
    share, num_on = compete(PrefetchJudge(), lambda _: 0.8, 1)
    assert share >= 1.2
    # The reference stays warm: one step in sixteen goes without.
    assert 0.05 <= 1 - num_on / NUM_STEPS <= 0.12


def test_it_is_let_go_when_it_stops_paying() -> None:
    judge = PrefetchJudge()
    compete(judge, lambda step: 0.8 if step < 1000 else 1.25, 2)
    assert not sum(judge.begin_step(4, has_free_core=True) for _ in range(1))
    assert judge.gains()[0][2] < 0


def test_it_is_found_again_when_it_begins_to_pay() -> None:
    share, num_on = compete(PrefetchJudge(), lambda step: 1.05 if step < 1000 else 0.7, 3)
    assert share > 1.1
    assert num_on > NUM_STEPS // 3


def test_batches_and_busy_machines_are_judged_apart() -> None:
    judge, generator = PrefetchJudge(), random.Random(4)
    ratios = {(1, True): 0.7, (1, False): 1.3, (64, True): 1.3, (64, False): 1.3}
    for _ in range(4000):
        rows, free = generator.choice(list(ratios))
        ratio = ratios[rows, free] if judge.begin_step(rows, has_free_core=free) else 1.0
        judge.end_step(rows * ratio * generator.lognormvariate(0.0, 0.1), waited=rows / 2)
    gains = {(rows, free): share for rows, free, share in judge.gains()}
    assert gains[1, True] > 0.2
    assert max(gains[1, False], gains[64, True], gains[64, False]) < -0.2
    assert judge.begin_step(1, has_free_core=True)


def test_one_held_up_step_decides_nothing() -> None:
    judge = PrefetchJudge()
    for step in range(600):
        is_on = judge.begin_step(1, has_free_core=True)
        judge.end_step(1000.0 if step in (301, 302) else 0.8 if is_on else 1.0, waited=0.5)
    assert judge.gains()[0][2] > 0.15


def test_a_failed_step_counts_for_nothing() -> None:
    judge = PrefetchJudge()
    judge.begin_step(1, has_free_core=True)
    judge.begin_step(1, has_free_core=True)
    judge.end_step(1.0, waited=0.5)
    assert judge.gains() == []


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 6, 8, 11, 12, 100, 512])
def test_a_class_of_steps_holds_rows_within_half_a_power_of_two(rows: int) -> None:
    size = size_class(rows)
    assert size_class(least_rows(size)) == size
    assert least_rows(size) <= rows < least_rows(size + 1)


def test_a_core_is_free_unless_threads_and_others_fill_the_machine() -> None:
    assert is_one_free(2, 1, 0.1)
    assert not is_one_free(2, 1, 0.9)
    assert not is_one_free(2, 2, 0.0)
