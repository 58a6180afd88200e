"""A request with a grammar is computed only with the mask of its next token, and no other request waits for that."""

from __future__ import annotations

import pytest

from moeserve.plan import FinishReason, SamplingParams, Terms
from tests.support.scheduler_simulation import Simulation

BOUND = SamplingParams(max_tokens=4, grammar="start: /a*/")
FREE = SamplingParams(max_tokens=4)


def simulation(*, depth: int = 0, **changes: int) -> Simulation:
    return Simulation(**({"num_blocks": 40, "block_size": 4} | changes), depth=depth, run_ahead=depth > 0)  # type: ignore[arg-type]


def in_last_plan(run: Simulation) -> list[str]:
    return [chunk.request_id for chunk in run.plans[-1].chunks]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_whose_grammar_is_not_compiled_is_passed_by_all_others(depth: int) -> None:
    run = simulation(depth=depth, max_num_seqs=1)
    run.masks.late = {"bound"}
    run.add("bound", [1, 2, 3], BOUND, terms=Terms("a"))
    run.add("same key", [4, 5, 6], FREE, terms=Terms("a"))
    run.add("other key", [7, 8, 9], FREE, terms=Terms("b"))
    assert run.scheduler.num_waiting == 3
    for _ in range(20):
        run.step()
    assert {name for name, record in run.records.items() if record.finish_reason} == {"same key", "other key"}
    assert (run.scheduler.num_waiting, run.scheduler.is_idle) == (1, False)
    assert run.scheduler.schedule() is None
    run.masks.late.clear()
    run.run_and_check()


def test_with_its_mask_it_takes_its_place_by_arrival() -> None:
    run = simulation(max_num_seqs=1)
    run.masks.late = {"first"}
    run.add("running", [1], SamplingParams(max_tokens=2))
    run.step()
    run.add("first", [2, 3], BOUND)
    run.add("second", [4, 5], FREE)
    run.masks.late.clear()
    order = []
    while not run.scheduler.is_idle:
        run.step()
        order += [name for name in in_last_plan(run) if name not in order]
    assert order == ["running", "first", "second"]
    run.check_all_done()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_late_mask_leaves_its_own_row_out_of_steps_and_no_other(depth: int) -> None:
    run = simulation(depth=depth)
    run.add("late", [1, 2, 3], SamplingParams(max_tokens=9, grammar="start: /a*/"))
    run.add("bound", [4, 5, 6], SamplingParams(max_tokens=9, seed=1, grammar="start: /a*/"))
    run.add("free", [7, 8, 9], SamplingParams(max_tokens=9, seed=2))
    while len(run.records["late"].output) < 2:
        run.step()
    run.masks.late = {"late"}
    while run.records["bound"].finish_reason is None:
        run.step()
    assert len(run.records["late"].output) <= 3
    run.masks.late.clear()
    run.run_and_check()
    assert [len(record.output) for record in run.records.values()] == [9, 9, 9]


@pytest.mark.parametrize("depth", [0, 1])
def test_an_abort_before_the_first_mask_leaves_nothing(depth: int) -> None:
    run = simulation(depth=depth)
    run.masks.late = {"bound"}
    request = run.add("bound", [1, 2, 3], BOUND).request
    run.step()
    run.abort("bound")
    assert run.records["bound"].finish_reason is FinishReason.ABORT
    assert (run.scheduler.is_idle, run.scheduler.num_waiting) == (True, 0)
    run.step()
    assert request not in run.masks.unmasked
    run.check_all_done()


def test_a_failed_grammar_ends_its_request_alone() -> None:
    run = simulation()
    run.masks.late = {"waits"}
    run.add("waits", [1, 2, 3], BOUND)
    run.add("runs", [4, 5, 6], BOUND)
    run.add("free", [7, 8, 9], FREE)
    run.step()
    run.masks.broken, run.masks.late = {"waits", "runs"}, set()
    run.step()
    for name in ("waits", "runs"):
        assert (run.records[name].finish_reason, run.records[name].error) == (FinishReason.ERROR, "broken")
    run.run_and_check()
    assert len(run.records["free"].output) == 4


def test_requests_that_wait_for_a_grammar_count_as_waiting_and_go_when_they_are_late() -> None:
    from moeserve.scheduling.outcomes import QueueFullError
    from moeserve.scheduling.pacing import Slo

    run = Simulation(num_blocks=40, block_size=4, max_num_seqs=1, max_num_queued_reqs=1, slo=Slo(1.0, burst_s=1.0))
    run.scheduler.set_time(0.0)
    run.masks.late = {"a", "b"}
    run.add("a", [1, 2, 3], BOUND)
    run.add("b", [1, 2, 3], BOUND)
    with pytest.raises(QueueFullError):
        run.add("c", [1, 2, 3], FREE)
    run.scheduler.set_time(5.9)
    assert run.scheduler.drop_late() == []
    run.scheduler.set_time(6.5)  # of a burst, they may wait six times as long as they were taken in with
    assert [output.finish_reason for output in run.scheduler.drop_late()] == [FinishReason.LATE] * 2
    assert run.scheduler.is_idle


def test_a_preempted_request_keeps_its_mask_and_one_without_waits_for_it() -> None:
    run = simulation(num_blocks=6, max_num_seqs=3)
    for number, name in enumerate(("a", "b", "c")):
        run.add(name, [number] * 5, SamplingParams(max_tokens=9, seed=number, grammar="start: /a*/"))
    for _ in range(3):
        run.step()
    run.masks.late = {"c"}
    for _ in range(6):
        run.step()
    assert run.scheduler.counters.preemptions > 0
    run.masks.late.clear()
    run.run_and_check()


def test_plans_are_the_same_bytes_when_masks_come_at_the_same_steps() -> None:
    def plans() -> list[object]:
        run = simulation(depth=1)
        for number in range(4):
            run.add(f"{number}", [number] * 6, SamplingParams(max_tokens=6, seed=number, grammar="start: /a*/"))
        for turn in range(12):
            run.masks.late = {f"{turn % 4}"}
            run.step()
        run.masks.late.clear()
        run.run()
        return list(run.plans)

    assert plans() == plans()
