"""Planning one step ahead of its results: the same tokens, no step lost, nothing kept of rows computed in vain."""

from __future__ import annotations

import pytest

from moeserve.plan import SamplingParams
from tests.support.cache_invariants import evict_all
from tests.support.line_counts import num_lines
from tests.support.scheduler_simulation import Simulation

PROMPT = [7, 8, 9, 10, 11]


def simulation(**options: object) -> Simulation:
    return Simulation(num_blocks=40, block_size=4, depth=1, run_ahead=True, **options)  # type: ignore[arg-type]


def chunks_of(simulation: Simulation, request_id: str) -> list[tuple[int, int, int | None]]:
    """(step, start, drawn_by) of a request's chunks."""
    return [
        (plan.step, chunk.start, chunk.drawn_by)
        for plan in simulation.plans
        for chunk in plan.chunks
        if chunk.request_id == request_id
    ]


def test_a_request_advances_in_every_step_though_its_token_is_not_known_yet() -> None:
    run = simulation()
    run.add("a", PROMPT, SamplingParams(max_tokens=6))
    run.run_and_check()
    assert chunks_of(run, "a") == [(1, 0, None), *((step, 3 + step, 0) for step in range(2, 7))]


def test_a_long_prompt_goes_on_while_its_first_chunk_is_in_flight() -> None:
    run = simulation(budget=4, max_num_seqs=2)
    run.add("a", list(range(10)), SamplingParams(max_tokens=1))
    run.run_and_check()
    assert chunks_of(run, "a") == [(1, 0, None), (2, 4, None), (3, 8, None)]


def test_nothing_is_planned_beyond_the_last_token() -> None:
    run = simulation()
    run.add("a", PROMPT, SamplingParams(max_tokens=1))
    run.run_and_check()
    assert len(chunks_of(run, "a")) == 1


def test_drawn_by_counts_the_sampled_chunks_of_the_plan_before() -> None:
    run = simulation(budget=8)
    run.add("long", list(range(12)), SamplingParams(max_tokens=2))
    run.step()
    run.add("short", PROMPT[:2], SamplingParams(max_tokens=3, seed=1))
    run.run_and_check()
    assert [drawn_by for *_, drawn_by in chunks_of(run, "short")] == [None, 1, 1]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=8, min_tokens=4, stop_token_ids=tuple(range(0, 50, 2))),
        SamplingParams(max_tokens=8, presence_penalty=0.5),
        SamplingParams(max_tokens=8, prompt_logprobs=0),
        SamplingParams(max_tokens=8, min_tokens=3, repetition_penalty=1.2, prompt_logprobs=2, stop_token_ids=(1, 2, 3)),
    ],
    ids=["min_tokens", "penalty", "prompt_logprobs", "all"],
)
def test_penalties_bans_and_log_probabilities_of_prompts_halve_no_rate(sampling: SamplingParams) -> None:
    run = simulation()
    record = run.add("a", PROMPT, sampling)
    run.add("plain", PROMPT[::-1], SamplingParams(max_tokens=8))
    run.run_and_check()
    steps = [(step, drawn_by) for step, _, drawn_by in chunks_of(run, "a")]
    assert steps == [(1, None), *((step, 0) for step in range(2, 1 + len(steps)))]
    assert len(record.output) >= sampling.min_tokens


def test_a_grammar_waits_for_the_token_it_depends_on() -> None:
    run = simulation()
    run.add("a", PROMPT, SamplingParams(max_tokens=5, grammar="start: /a*/"))
    run.run_and_check()
    assert {drawn_by for *_, drawn_by in chunks_of(run, "a")} == {None}


def test_a_preempted_request_with_log_probabilities_of_its_prompt_runs_in_every_step_again() -> None:
    run = simulation()
    run.add("a", PROMPT, SamplingParams(max_tokens=20, prompt_logprobs=0))
    for _ in range(4):
        run.step()
    assert run.scheduler.requests["a"].is_plain
    run.run_and_check()
    assert len(chunks_of(run, "a")) == 20


def test_a_request_that_ends_early_drops_what_was_computed_beyond_and_frees_its_blocks_once() -> None:
    run = simulation()
    record = run.add("a", PROMPT, SamplingParams(max_tokens=12, stop_token_ids=tuple(range(0, 50, 2))))
    other = run.add("b", PROMPT[:3], SamplingParams(max_tokens=12, seed=5))
    run.run_and_check()
    assert record.output[-1] % 2 == 0
    assert len(record.output) < 12
    assert len(other.output) == 12
    # One chunk more than tokens: the one planned before the last token was known.
    assert len(chunks_of(run, "a")) == len(record.output) + 1


def test_an_error_drops_the_step_ahead_too_and_leaves_nothing_in_the_cache() -> None:
    run = simulation()
    run.oracle.fails = lambda chunk: chunk.start == 6
    record = run.add("a", PROMPT, SamplingParams(max_tokens=9))
    run.run()
    assert record.error is not None
    assert run.scheduler.is_idle
    run.scheduler.check_idle()
    evict_all(run.cache)
    assert run.cache.counts.num_free == run.cache.num_blocks


def test_an_abort_between_two_steps_in_flight_gives_the_blocks_back_after_the_second() -> None:
    run = simulation()
    run.add("a", PROMPT, SamplingParams(max_tokens=9))
    run.step()
    run.step()
    run.abort("a")
    run.run_and_check()


def test_short_of_memory_the_plain_path_preempts_and_all_end() -> None:
    run = Simulation(num_blocks=7, block_size=2, depth=1, run_ahead=True, max_num_seqs=3, max_model_len=14)
    for seed in range(3):
        run.add(f"{seed}", [seed, seed + 1, seed + 2], SamplingParams(max_tokens=8, seed=seed))
    run.run_and_check()
    assert run.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, min_tokens=20)])
def test_the_work_of_planning_ahead_grows_with_the_requests_and_not_faster(sampling: SamplingParams) -> None:
    lines = []
    for num_requests in (32, 256):
        run = Simulation(
            num_blocks=8 * num_requests,
            block_size=4,
            budget=8 * num_requests,
            max_num_seqs=num_requests,
            depth=1,
            run_ahead=True,
        )
        for number in range(num_requests):
            run.add(f"r{number}", PROMPT, sampling)
        for _ in range(3):
            run.step()
        plans = []
        lines.append(num_lines(lambda: plans.extend(run.scheduler.schedule())) / num_requests)  # noqa: B023
        assert [len(plan.chunks) for plan in plans] == [num_requests]
        assert all(chunk.drawn_by is not None for chunk in plans[0].chunks)
    assert lines[1] < 1.1 * lines[0]
