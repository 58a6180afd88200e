"""A step that fails as a whole: the requests that make it fail end, the others do not notice."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest

from moeserve.engine.containment import ContainingExecutor, part_of
from moeserve.plan import Chunk, ChunkResult, Computed, FinishReason, Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.steps import Steps
from radix_cache import PrefixCache

BLOCK_SIZE = 4


@dataclass
class FaultyRunner:
    """The next token is the last one plus one. A step with one of `poison` among its last tokens fails, as does every
    step while `broken`. `written` are the blocks that were written since they were cleared, `parts` the announced
    blocks of failed steps."""

    poison: Collection[int] = ()
    broken: bool = False
    launches: int = 0
    written: set[int] = field(default_factory=set)
    parts: list[Sequence[StepPlan]] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> Computed[StepResult]:
        self.launches += 1
        self.written -= set(plan.zeroed_blocks)
        if self.broken or any(chunk.token_ids[-1] in self.poison for chunk in plan.chunks):
            raise ValueError("top_k is out of range")
        results = []
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.token_ids)
            assert all(chunk.block_table[n] in self.written for n in range(chunk.start // BLOCK_SIZE))
            self.written |= {chunk.block_table[n] for n in range(-(-end // BLOCK_SIZE))}
            results.append(ChunkResult(None if chunk.sampling is None else chunk.token_ids[-1] + 1))
        return Computed(StepResult(plan.step, results))


def run(runner: FaultyRunner, first_tokens: list[int]) -> tuple[dict[str, list[int]], dict[str, str], Scheduler]:
    """Run one request for each first token; return their tokens, and the errors of failed requests."""
    cache = PrefixCache(64, BLOCK_SIZE)
    scheduler = Scheduler([cache], max_num_seqs=16, max_num_batched_tokens=64, max_num_queued_reqs=16, max_model_len=64)
    steps = Steps(scheduler, ContainingExecutor(runner, BLOCK_SIZE, runner.parts.append), depth=0)
    for token in first_tokens:
        scheduler.add(Request(f"from {token}", array("i", [token]), SamplingParams(max_tokens=6)))
    tokens: dict[str, list[int]] = {}
    errors: dict[str, str] = {}
    while (outputs := steps.advance()) is not None:
        for output in outputs:
            name = output.request.request_id
            if output.token_id is not None:
                tokens.setdefault(name, []).append(output.token_id)
            if output.finish_reason is FinishReason.ERROR:
                errors[name] = output.error or ""
    return tokens, errors, scheduler


@pytest.mark.parametrize("guilty", [[100], [100, 400], [100, 200, 300, 400, 500]])
def test_only_the_guilty_end(guilty: list[int]) -> None:
    first = [100, 200, 300, 400, 500, 600, 700]
    tokens, errors, scheduler = run(FaultyRunner({token + 2 for token in guilty}), first)
    assert set(errors) == {f"from {token}" for token in guilty}
    assert all("ValueError: top_k is out of range" in error for error in errors.values())
    for token in first:
        expected = [token + 1, token + 2] if token in guilty else [token + n for n in range(1, 7)]
        assert tokens[f"from {token}"] == expected
    scheduler.check_idle()


def test_a_request_that_is_alone_ends_and_the_engine_goes_on() -> None:
    _, errors, scheduler = run(FaultyRunner({102}), [100])
    assert list(errors) == ["from 100"]
    scheduler.check_idle()


def test_a_runner_that_computes_nothing_any_more_is_no_fault_of_the_requests() -> None:
    with pytest.raises(ValueError, match="top_k"):
        run(FaultyRunner(broken=True), [100, 200])


def test_one_guilty_request_among_many_costs_few_steps() -> None:
    undisturbed, disturbed = FaultyRunner(), FaultyRunner({102})
    first = [100 * n for n in range(1, 17)]
    run(undisturbed, first)
    run(disturbed, first)
    assert disturbed.launches <= undisturbed.launches + 2 * 4


def test_each_part_is_announced_before_it_is_computed() -> None:
    runner = FaultyRunner({102})
    run(runner, [100, 200, 300, 400])
    named = [[chunk.token_ids[-1] for chunk in plan.chunks] for [plan] in runner.parts]
    assert named == [[102, 202], [102], [202], [302, 402]]


def test_a_part_clears_its_own_blocks_alone() -> None:
    one = Chunk("a", array("i", [1]), 4, array("i", [3, 5]), None)
    other = Chunk("b", array("i", [2]), 0, array("i", [7]), None)
    plan = StepPlan(1, [one, other], array("i", [5, 7]))
    assert list(part_of(plan, [one]).zeroed_blocks) == [5]
    assert list(part_of(plan, [other]).zeroed_blocks) == [7]


def test_a_part_copies_to_its_own_blocks_and_to_those_that_no_chunk_names() -> None:
    forked = Chunk("a", array("i", [1]), 5, array("i", [3, 5]), None)
    fork = Chunk("b", array("i", [2]), 5, array("i", [3, 6]), None)
    plan = StepPlan(1, [forked, fork], copied_blocks=array("i", [5, 6, 5, 9]))
    assert list(part_of(plan, [forked]).copied_blocks) == [5, 9]
    assert list(part_of(plan, [fork]).copied_blocks) == [5, 6, 5, 9]
