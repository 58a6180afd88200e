"""Rank 0 of a pipeline over scripted ranks: how long it waits, whom it blames, and which seconds it measures."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moeserve.engine.ranks import pipeline
from moeserve.engine.ranks.messages import CopiesEnded, Forward, RankBeat, RankError, RankResult
from moeserve.engine.ranks.pipeline import PipelineExecutor, joined
from moeserve.engine.ranks.plan_link import PlanReceiver
from moeserve.engine.ranks.together import StepRows
from moeserve.engine.ranks.transport import RankHub
from moeserve.plan import Chunk, ChunkResult, Computed, SamplingParams, StepPlan, StepResult

TIMEOUT = 4.0


class Ranks:
    """Stands for the hub of rank 0 and for the runner of its stage, which takes no time. now: the time.

    Each call of `receive` takes a second, after which comes what `script` says of that time.
    """

    def __init__(self, num_others: int, script: Callable[[float], object]) -> None:
        self.others = range(1, num_others + 1)
        self.now = 100.0
        self.sent: list[tuple[int, StepPlan, tuple[int, ...]]] = []
        self.others_said: list[object] = []
        self._script = script
        self._plans: dict[int, PlanReceiver] = {}

    def monotonic(self) -> float:
        return self.now

    def send(self, rank: int, message: Forward) -> None:
        plan = self._plans.setdefault(rank, PlanReceiver()).decode(message.plan)
        self.sent.append((rank, plan, tuple(message.num_rows)))

    def check_signs_of_life(self, patience: float) -> None:
        """All ranks give some."""

    def receive(self, seconds: float) -> object:
        self.now += 1.0
        return self._script(self.now - 100.0)

    def name(self, rank: int) -> str:
        return f"Rank {rank}"

    def launch(self, plan: StepPlan) -> Computed[StepResult]:
        return Computed(StepResult(plan.step, [], b"0"))


def executor_of(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> PipelineExecutor:
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=ranks.monotonic))
    return PipelineExecutor(ranks, cast("RankHub", ranks), ranks.others_said.append, timeout=TIMEOUT)


def plan(step: int) -> StepPlan:
    chunk = Chunk("a", array("i", [5]), step, array("i", [0]), SamplingParams(max_tokens=9))
    return StepPlan(step, [chunk])


def result(rank: int, step: int, *tokens: int) -> RankResult:
    return RankResult(rank, StepResult(step, [ChunkResult(token) for token in tokens], b"%d" % rank))


def test_the_last_rank_samples_and_the_routing_is_that_of_all_layers_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script: dict[float, Any] = {1: result(2, 1, 7), 2: result(1, 1)}
    ranks = Ranks(2, script.get)
    step = executor_of(ranks, monkeypatch).launch([plan(1)])
    (found,) = step.result()
    assert ranks.sent == [(1, plan(1), ()), (2, plan(1), ())]
    assert (found.step, found.chunks, found.routing) == (1, [ChunkResult(7)], b"012")
    assert joined([StepResult(1, []), StepResult(1, [ChunkResult(7)])]).routing is None


def test_ranks_at_one_place_of_their_stages_get_its_plan_and_the_rows_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    of_place = {0: [], 1: [], 2: [7], 3: [8]}
    script: dict[float, Any] = {4 - rank: result(rank, 1, *tokens) for rank, tokens in of_place.items() if rank}
    ranks = Ranks(3, script.get)
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=ranks.monotonic))
    begun: list[StepRows] = []
    executor = PipelineExecutor(
        ranks, cast("RankHub", ranks), ranks.others_said.append, timeout=TIMEOUT, begin_step=begun.append, width=2
    )
    plans = [plan(1), StepPlan(1, [])]
    results = executor.launch(plans).result()
    assert ranks.sent == [(2, plans[0], (1, 0)), (1, plans[1], (1, 0)), (3, plans[1], (1, 0))]
    assert [rows.num_rows for rows in begun] == [[1, 0]]
    assert [(one.chunks, one.routing) for one in results] == [([ChunkResult(7)], b"02"), ([ChunkResult(8)], b"13")]


def test_the_ends_of_copies_are_handed_on_while_a_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = CopiesEnded(1, 5, [9], 0.5, None)
    ranks = Ranks(1, {1: ended, 2: result(1, 1, 7)}.get)
    executor_of(ranks, monkeypatch).launch([plan(1)]).result()
    assert ranks.others_said == [ended]


def test_results_of_later_steps_are_kept_until_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    script: dict[float, Any] = {1: result(1, 2, 8), 2: result(1, 1, 7)}
    executor = executor_of(Ranks(1, script.get), monkeypatch)
    first, second = executor.launch([plan(1)]), executor.launch([plan(2)])
    assert [step.result()[0].chunks for step in (first, second)] == [[ChunkResult(7)], [ChunkResult(8)]]


def test_a_rank_that_gets_on_within_its_work_is_waited_for_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(now: float) -> object:
        return result(1, 1, 7) if now == 60 else RankBeat(1, int(now // 3))

    executor = executor_of(Ranks(1, script), monkeypatch)
    assert executor.launch([plan(1)]).result()[0].chunks == [ChunkResult(7)]
    # So the supervisor does not take rank 0 for hung either.
    assert executor.signs_of_work() > 10


def test_the_first_rank_that_has_not_finished_is_blamed_once_none_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(now: float) -> object:
        if now == 1:
            return result(1, 1)
        return RankBeat(2 + int(now) % 2, 5)  # Ranks 2 and 3 show life and do nothing.

    ranks = Ranks(3, script)
    with pytest.raises(RankError, match=r"Rank 2 hung: .*step 1"):
        executor_of(ranks, monkeypatch).launch([plan(1)]).result()
    assert ranks.now - 100.0 < 3 * TIMEOUT


def test_a_step_takes_the_time_since_its_launch_or_since_the_step_before_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script: dict[float, Any] = {5: result(1, 1, 7), 7: result(1, 2, 7), 23: result(1, 3, 7)}
    ranks = Ranks(1, script.get)
    executor = executor_of(ranks, monkeypatch)
    monkeypatch.setattr(executor, "_timeout", 100.0)
    first, second = executor.launch([plan(1)]), executor.launch([plan(2)])
    assert [step.result()[0].seconds for step in (first, second)] == [5.0, 2.0]
    ranks.now += 13.0  # Nothing is in flight meanwhile.
    assert executor.launch([plan(3)]).result()[0].seconds == 3.0
