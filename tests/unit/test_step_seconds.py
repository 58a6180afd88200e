"""Steps are kept short by what they are predicted to take, on a scripted clock."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random

import pytest

from moeserve.plan import ChunkResult, Request, SamplingParams, StepPlan, StepResult, Terms
from moeserve.scheduling.cost_model import CostModel, StepSize
from moeserve.scheduling.pacing import LEAST_PROMPT_TOKENS, Pace, Slo
from moeserve.scheduling.parts import Part
from moeserve.scheduling.plan_draft import PlanDraft
from moeserve.scheduling.scheduler import Scheduler
from radix_cache import PrefixCache

TTFT_S = 2.0
# Two thirds of the time to the first token, where nobody waits.
BOUND_S = TTFT_S * 2 / 3
BUDGET = 256
USUAL = Slo(TTFT_S, burst_s=100.0)


@dataclass
class Machine:
    """Computes steps that take `step_s`, `row_s` per row and `position_s` per attended position."""

    step_s: float = 0.02
    row_s: float = 0.001
    position_s: float = 1e-6

    def seconds(self, plan: StepPlan) -> float:
        attended = sum(len(c.token_ids) * (c.start + 0.5 * len(c.token_ids)) for c in plan.chunks)
        return self.step_s + self.row_s * plan.num_tokens + self.position_s * attended


class Forecast(Part):
    """Predicts each step from the steps before it, as the pace does."""

    def __init__(self) -> None:
        self.predicted: list[float] = []
        self._cost = CostModel()

    def begin_commit(self, draft: PlanDraft) -> None:
        self.predicted.append(self._cost.seconds(draft.size.rows, draft.size.attended))

    def counted(self, size: StepSize, seconds: float, *, has_prompts: bool) -> None:
        self._cost.observe(size.rows, size.attended, seconds)


class Clock:
    def __init__(self, machine: Machine, slo: Slo = USUAL, num_ranks: int = 1) -> None:
        self.machine, self.now, self.forecast = machine, 0.0, Forecast()
        self.scheduler = Scheduler(
            [PrefixCache(4000, 16) for _ in range(num_ranks)],
            max_num_seqs=64,
            max_num_batched_tokens=BUDGET,
            max_num_queued_reqs=64,
            max_model_len=60_000,
            pace=Pace(slo, BUDGET, 64, num_ranks),
            parts=[self.forecast],
        )
        self.seconds: list[float] = []
        self.plans: list[StepPlan] = []

    def add(self, name: str, num_tokens: int, max_tokens: int = 1, terms: Terms | None = None) -> None:
        random = Random(name)
        prompt = array("i", (random.randrange(1000) for _ in range(num_tokens)))
        request = Request(name, prompt, SamplingParams(max_tokens), arrived_at=self.now)
        request.terms = terms or request.terms
        self.scheduler.add(request)

    def step(self) -> list[StepPlan]:
        scheduler = self.scheduler
        scheduler.set_time(self.now)
        plans = scheduler.schedule()
        assert plans is not None
        seconds = max(self.machine.seconds(plan) for plan in plans)
        self.now += seconds
        self.seconds.append(seconds)
        self.plans += plans
        results = [
            StepResult(plan.step, [ChunkResult(5 if chunk.sampling else None) for chunk in plan.chunks])
            for plan in plans
        ]
        scheduler.commit(plans, results)
        scheduler.count_step(seconds)
        return plans

    def run(self) -> None:
        while not self.scheduler.is_idle:
            self.step()


@pytest.mark.parametrize("num_decodes", [0, 20])
@pytest.mark.parametrize("position_s", [2e-7, 1e-6, 2.5e-6])
def test_a_step_is_predicted_to_stay_within_its_bound_at_any_context_with_nobody_waiting(
    position_s: float, num_decodes: int
) -> None:
    """The slowest: 256 tokens at a context of 15,000 would take 10 s."""
    clock = Clock(Machine(position_s=position_s))
    for number in range(num_decodes):
        clock.add(f"decode {number}", 30, 2000)
    if num_decodes:
        clock.step()
    clock.add("long", 15_000)
    while clock.scheduler.num_running > num_decodes or clock.scheduler.num_waiting:
        clock.step()
    for plan, predicted in zip(clock.plans[1:], clock.forecast.predicted[1:], strict=True):
        prompt_tokens = sum(len(c.token_ids) for c in plan.chunks if c.request_id == "long")
        assert predicted <= BOUND_S * 1.001 or prompt_tokens <= LEAST_PROMPT_TOKENS
    # The prediction lags behind a context that grows.
    assert max(clock.seconds) < 2 * BOUND_S
    assert max(clock.seconds[len(clock.seconds) // 2 :]) < 1.1 * BOUND_S


def test_short_steps_cost_little_throughput() -> None:
    seconds = []
    for slo in (USUAL, Slo(1e9, burst_s=1e9)):
        clock = Clock(Machine(), slo)
        clock.add("long", 15_000)
        clock.run()
        seconds.append(clock.now)
    assert seconds[0] < 1.05 * seconds[1]


def test_where_every_step_loads_experts_for_longer_steps_are_as_full_as_they_can_be() -> None:
    clock = Clock(Machine(step_s=8.0))
    clock.add("long", 5000)
    clock.run()
    assert [plan.num_tokens for plan in clock.plans[6:-1]] == [BUDGET] * len(clock.plans[6:-1])


def test_a_pace_for_running_requests_holds_though_little_of_a_prompt_fits() -> None:
    clock = Clock(Machine(), Slo(TTFT_S, 0.1, 100.0))
    for number in range(20):
        clock.add(f"decode {number}", 30, 500)
    while clock.scheduler.num_waiting or len(clock.plans) < 40:
        clock.step()
    clock.add("long", 1500)
    clock.step()
    first = len(clock.plans)
    while clock.scheduler.num_running > 20:
        clock.step()
    assert max(clock.forecast.predicted[first:]) <= 0.1 * 1.001


def test_short_requests_pass_a_long_one_whose_chunks_time_cuts_short() -> None:
    """Half of a step's time is theirs, so they do not wait for all of a prompt with a long context."""
    clock = Clock(Machine(position_s=2.5e-6))
    clock.add("long", 15_000)
    while clock.now < 150:
        clock.step()
    clock.add("short", 100, 1)
    steps = 0
    while "short" in clock.scheduler.requests:
        clock.step()
        steps += 1
        assert any(c.request_id == "long" for c in clock.plans[-1].chunks)
    assert steps <= 3
    assert clock.seconds[-1] < 2 * BOUND_S
