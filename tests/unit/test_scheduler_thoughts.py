"""Budgets of thought in the scheduler: the end is forced exactly at the budget, whatever else the request meets."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.plan import FinishReason, SamplingParams
from moeserve.thoughts import Marker, ThoughtBudget, ThoughtForm
from tests.support.examples import examples
from tests.support.kv_oracle import undisturbed
from tests.support.scheduler_simulation import VOCAB_SIZE, Simulation
from tests.unit.test_drafts import MOST_DRAFTS, KnowingDrafting

OPEN, CLOSE = 10, 11
FORM = ThoughtForm(Marker(1, {OPEN: 1}), (Marker(1, {CLOSE: 1}),))
PROMPT = [7, 8, 9]


def budget(max_tokens: int, *message: int, is_open: bool = True) -> ThoughtBudget:
    return ThoughtBudget(FORM, max_tokens, (*message, CLOSE), is_open=is_open)


def free_output(seed: int, max_tokens: int) -> list[int]:
    return undisturbed(PROMPT, SamplingParams(max_tokens=max_tokens, seed=seed), VOCAB_SIZE)[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_the_end_follows_the_last_token_of_the_budget_and_is_computed_in_one_step(depth: int) -> None:
    run = Simulation(num_blocks=20, block_size=4, depth=depth, run_ahead=bool(depth))
    record = run.add("a", PROMPT, SamplingParams(max_tokens=9), budget=budget(3, 20, 21))
    run.run_and_check()
    assert record.output[:6] == [*free_output(0, 3), 20, 21, CLOSE]
    assert len(record.output) == 9
    chunks = [len(chunk.token_ids) for plan in run.plans for chunk in plan.chunks]
    assert chunks == [3, 1, 1, 4, 1, 1]


def test_a_budget_of_nothing_begins_behind_the_thought() -> None:
    run = Simulation(num_blocks=20, block_size=4)
    record = run.add("a", PROMPT, SamplingParams(max_tokens=5), budget=budget(0))
    run.run_and_check()
    assert record.output[0] == CLOSE
    assert len(record.output) == 5


def test_no_end_is_forced_behind_the_last_token_or_a_stop_token() -> None:
    run = Simulation(num_blocks=20, block_size=4)
    cut = run.add("cut", PROMPT, SamplingParams(max_tokens=4), budget=budget(3, 20, 21))
    stopped = run.add("stopped", PROMPT, SamplingParams(max_tokens=9, stop_token_ids=(20,)), budget=budget(3, 20, 21))
    last = free_output(0, 3)[-1]
    natural = run.add("natural", PROMPT, SamplingParams(max_tokens=9, stop_token_ids=(last,)), budget=budget(3, 20))
    run.run_and_check()
    assert (cut.output, cut.finish_reason) == ([*free_output(0, 3), 20], FinishReason.LENGTH)
    assert (stopped.output, stopped.finish_reason) == ([*free_output(0, 3), 20], FinishReason.STOP)
    assert (natural.output[-1], natural.finish_reason) == (last, FinishReason.STOP)


def test_another_life_of_the_engine_goes_on_wherever_the_first_one_ended() -> None:
    sampling = SamplingParams(max_tokens=9)
    asked = budget(3, 20, 21)
    whole, _ = undisturbed(PROMPT, sampling, VOCAB_SIZE, asked)
    for num_known in range(9):
        run = Simulation(num_blocks=20, block_size=4)
        record = run.add("a", PROMPT, sampling, budget=asked, earlier_output=whole[:num_known], resumed_from=0.0)
        run.run()
        assert record.output == whole, num_known


def test_right_drafts_behind_the_end_of_a_thought_are_dropped() -> None:
    outputs = []
    for share_right in (None, 1.0):
        drafting = None if share_right is None else KnowingDrafting(Random(1), share_right)
        run = Simulation(num_blocks=32, block_size=4, drafting=drafting, most_drafts=MOST_DRAFTS)
        asks = [(SamplingParams(max_tokens=30, seed=number), budget(number, 20)) for number in range(8)]
        records = [run.add(f"{sampling.seed}", PROMPT, sampling, budget=asked) for sampling, asked in asks]
        run.run_and_check()
        outputs.append([record.output for record in records])
    assert outputs[0] == outputs[1]


@pytest.mark.slow
@examples(3)
@given(st.integers(0, 2**32 - 1))
def test_budgets_hold_with_preemptions_grammars_ranks_and_steps_ahead(seed: int) -> None:
    random = Random(seed)
    ahead = random.random() < 0.5
    run = Simulation(
        num_blocks=random.randrange(12, 40),
        block_size=4,
        budget=random.choice([8, 16]),
        max_model_len=48,
        depth=random.randrange(2) if ahead else 0,
        run_ahead=ahead,
        num_ranks=random.choice([1, 1, 2]),
        drafting=random.choice([None, KnowingDrafting(Random(seed), 0.9)]),
        most_drafts=MOST_DRAFTS,
    )
    for number in range(8):
        prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(1, 12))]
        sampling = SamplingParams(
            max_tokens=random.randrange(1, 30),
            seed=random.randrange(4),
            stop_token_ids=random.choice([(), (3, 4)]),
            min_tokens=random.choice([0, 0, 3]),
            presence_penalty=random.choice([0.0, 0.5]),
            logprobs=random.choice([None, 2]),
            prompt_logprobs=random.choice([None, None, 0]),
            grammar=random.choice([None, None, "g"]),
        )
        message = random.choice([(), (20, 21)])
        asked = budget(random.randrange(8), *message, is_open=random.random() < 0.8)
        run.add(f"{number}", prompt, sampling, budget=random.choice([None, asked, asked]))
        for _ in range(random.randrange(3)):
            run.step()
    run.run_and_check()
