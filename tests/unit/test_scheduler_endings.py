"""However and whenever a request ends, its blocks come back and nobody else notices."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from copy import deepcopy
from itertools import count

import pytest

from moeserve.plan import ChunkResult, FinishReason, Request, SamplingParams, StepPlan, StepResult
from tests.support.cache_invariants import check_invariants
from tests.support.kv_oracle import Record
from tests.support.parameters import first
from tests.support.scheduler_simulation import Simulation

PROMPT = list(range(20))


def state_of(record: Record) -> str:
    """Where the request stands, as its client's abort finds it."""
    request = record.request
    if record.finish_reason is not None:
        return "finished"
    if request.lease is None:
        return "preempted" if request.num_preemptions else "queued"
    kind = "decoding" if record.output else "prefilling"
    return f"{kind} in flight" if request.num_scheduled_tokens else kind


def crowded(depth: int, *, caching: bool = True) -> Simulation:
    """Six requests that need more places and more memory than there are; four begin alike."""
    simulation = Simulation(num_blocks=11, block_size=4, budget=7, max_num_seqs=4, depth=depth, caching=caching)
    for index in range(6):
        prompt = PROMPT[:13] if index % 3 else [index] * 11
        simulation.add(f"r{index}", [*prompt, index], SamplingParams(max_tokens=14, seed=index), priority=index % 2)
    return simulation


def stopped(whole: Simulation, stride: int, num_steps: int = 1000) -> Iterator[Simulation]:
    """Run a simulation for at most `num_steps`; yield copies of it at the beginning and after every `stride` steps."""
    for when in range(num_steps):
        if when % stride == 0:
            yield deepcopy(whole)
        if whole.scheduler.is_idle:
            return
        whole.step()


@pytest.mark.slow
@pytest.mark.parametrize("depth", first(1, [1, 0]))
@pytest.mark.parametrize("how", ["abort", "finish"])
def test_a_request_can_end_at_every_step(how: str, depth: int) -> None:
    states: set[str] = set()
    # Every step of one request, and a third of the steps of requests that begin as others do.
    for victim, stride in (("r0", 1), ("r3", 3), ("r4", 3)):
        for simulation in stopped(crowded(depth), stride):
            record = simulation.records[victim]
            states.add(state_of(record))
            ended = record.finish_reason
            for _ in range(2):
                if how == "abort":
                    simulation.abort(victim)
                else:
                    simulation.finish(victim, len(record.output) // 2)
            check_invariants(simulation.cache)
            assert record.finish_reason == (ended or (FinishReason.ABORT if how == "abort" else FinishReason.STOP))
            if depth == 0:
                assert record.request.lease is None
            simulation.run()
            for other in simulation.records.values():
                assert other is record or other.finish_reason is FinishReason.LENGTH
            if how == "finish" and ended is None:
                assert record.request.num_output_tokens == len(record.output) // 2
                record.finish_reason = FinishReason.ABORT
            simulation.check_all_done()
    busy = {"prefilling in flight", "decoding in flight"} if depth else {"prefilling", "decoding"}
    assert states >= busy | {"queued", "preempted", "finished"}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_everybody_can_leave_at_once(depth: int) -> None:
    for simulation in stopped(crowded(depth), 1, num_steps=40):
        for request_id in simulation.records:
            simulation.abort(request_id)
        assert simulation.scheduler.num_running == simulation.scheduler.num_waiting == 0
        simulation.run_and_check()


def test_ending_an_unknown_request_is_a_no_op() -> None:
    simulation = Simulation(num_blocks=8, block_size=4)
    assert simulation.scheduler.abort("nobody") is None
    assert simulation.scheduler.finish("nobody", 3) is None
    simulation.check_all_done()


def test_tokens_behind_a_stop_string_do_not_stay_cached() -> None:
    simulation = Simulation(num_blocks=16, block_size=4)
    record = simulation.add("r", PROMPT, SamplingParams(max_tokens=40))
    while len(record.output) < 13:
        simulation.step()
    simulation.finish("r", 5)
    assert simulation.cache.counts.num_cached == (20 + 5) // 4
    again = simulation.add("again", [*PROMPT, *record.output[:5], 1, 2], SamplingParams(max_tokens=1))
    simulation.run()
    assert again.request.num_cached_tokens == 24


def test_finish_with_an_absurd_count_keeps_the_prompt() -> None:
    simulation = Simulation(num_blocks=16, block_size=4)
    record = simulation.add("r", PROMPT, SamplingParams(max_tokens=40))
    for _ in range(4):
        simulation.step()
    simulation.finish("r", -30)
    assert record.request.token_ids.tolist() == PROMPT
    simulation.scheduler.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("faulty_chunk", range(8))
def test_an_error_ends_one_request_alone(faulty_chunk: int, depth: int) -> None:
    simulation = crowded(depth)
    numbers = count()
    simulation.oracle.fails = lambda chunk: chunk.request_id == "r4" and next(numbers) == faulty_chunk
    record = simulation.records["r4"]
    simulation.run()
    assert record.finish_reason is FinishReason.ERROR
    assert record.error
    assert [r.finish_reason for r in simulation.records.values() if r is not record] == [FinishReason.LENGTH] * 5
    simulation.check_all_done()


@pytest.mark.parametrize("faulty_chunk", range(8))
def test_an_error_of_a_request_that_left_already_is_not_told(faulty_chunk: int) -> None:
    simulation = crowded(depth=1)
    numbers = count()
    simulation.oracle.fails = lambda chunk: chunk.request_id == "r4" and next(numbers) == faulty_chunk
    for _ in range(faulty_chunk + 6):
        simulation.step()
    simulation.abort("r4")
    simulation.run_and_check()


def test_a_failed_prompt_is_computed_anew() -> None:
    simulation = Simulation(num_blocks=16, block_size=4, budget=8)
    simulation.oracle.fails = lambda chunk: chunk.request_id == "bad" and chunk.start >= 16
    bad = simulation.add("bad", PROMPT, SamplingParams(max_tokens=4))
    simulation.run()
    assert bad.finish_reason is FinishReason.ERROR
    assert simulation.cache.counts.num_cached == 0
    good = simulation.add("good", PROMPT, SamplingParams(max_tokens=4))
    simulation.run()
    assert good.request.num_cached_tokens == 0
    simulation.check_all_done()


def test_a_failed_request_takes_nothing_from_those_who_share_its_prefix() -> None:
    simulation = Simulation(num_blocks=32, block_size=4, budget=8)
    simulation.oracle.fails = lambda chunk: chunk.request_id == "bad" and chunk.start >= 16
    good = simulation.add("good", PROMPT, SamplingParams(max_tokens=30))
    for _ in range(4):
        simulation.step()
    bad = simulation.add("bad", PROMPT, SamplingParams(max_tokens=4))
    simulation.run()
    assert bad.finish_reason is FinishReason.ERROR
    assert good.finish_reason is FinishReason.LENGTH
    simulation.check_all_done()


def test_a_result_without_a_token_fails_its_request_alone() -> None:
    simulation = Simulation(num_blocks=16, block_size=4)
    for name in ("a", "b"):
        simulation.add(name, PROMPT[:4], SamplingParams(max_tokens=4))
    plans = simulation.scheduler.schedule()
    assert plans is not None
    result = StepResult(plans[0].step, [ChunkResult(), ChunkResult(token_id=1)])
    failed, other = simulation.scheduler.commit(plans, [result])
    assert (failed.finish_reason, failed.token_id) == (FinishReason.ERROR, None)
    assert (other.finish_reason, other.token_id) == (None, 1)
    simulation.scheduler.abort("b")
    simulation.scheduler.check_idle()


def test_results_are_taken_in_the_order_of_the_plans_only() -> None:
    scheduler = Simulation(num_blocks=16, block_size=4).scheduler
    steps: list[list[StepPlan]] = []
    for name in ("a", "b"):
        scheduler.add(Request(name, array("i", PROMPT[:4]), SamplingParams(max_tokens=4)))
        plans = scheduler.schedule()
        assert plans is not None
        steps.append(plans)
    first, second = steps
    token = ChunkResult(token_id=1)
    assert scheduler.schedule() is None
    with pytest.raises(ValueError, match="not the oldest"):
        scheduler.commit(second, [StepResult(second[0].step, [token])])
    for wrong in (StepResult(first[0].step, []), StepResult(second[0].step, [token])):
        with pytest.raises(ValueError, match="do not belong together"):
            scheduler.commit(first, [wrong])
    for plans in steps:
        assert scheduler.commit(plans, [StepResult(plans[0].step, [ChunkResult(token_id=1)])])
