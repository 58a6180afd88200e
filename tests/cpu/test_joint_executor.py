"""Rank 0 of ranks that compute every layer together: what it sends, what it returns, and whom it blames."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from experts.errors import CollectiveError
from moeserve.engine.ranks.joint import JointExecutor
from moeserve.engine.ranks.messages import Forward, RankBeat, RankError, Shutdown
from moeserve.engine.ranks.plan_link import PlanReceiver
from moeserve.engine.ranks.transport import RankHub
from moeserve.plan import Chunk, Computed, SamplingParams, StepPlan, StepResult


class Ranks:
    """Stands for the hub of rank 0 and for its runner, which fails if `fails`. beats: of the other ranks."""

    def __init__(self, beats: Sequence[RankBeat] = (), *, fails: bool = False) -> None:
        self.others = range(1, 3)
        self.sent: list[object] = []
        self._plans, self._fails = PlanReceiver(), fails
        # What came before the failure is old.
        self._messages: list[RankBeat | None] = [None, *beats]

    def send_all(self, message: Forward) -> None:
        self.sent.append(self._plans.decode(message.plan))

    def send_last(self, message: Shutdown) -> None:
        self.sent.append(message)

    def receive(self, seconds: float) -> RankBeat | None:
        return self._messages.pop(0) if self._messages else None

    def check(self) -> None:
        """All ranks live."""

    def name(self, rank: int) -> str:
        return f"Rank {rank}"

    def launch(self, plan: StepPlan) -> Computed[StepResult]:
        if self._fails:
            raise CollectiveError("timed out")
        return Computed(StepResult(plan.step, []))


def executor_of(ranks: Ranks, *listeners: Callable[[object], None]) -> JointExecutor:
    return JointExecutor(ranks, cast("RankHub", ranks), listeners, timeout=0.2, num_entered=lambda: 7)


def plan(step: int) -> StepPlan:
    return StepPlan(step, [Chunk("a", array("i", [5]), step, array("i", [0]), SamplingParams(max_tokens=9))])


def test_all_ranks_get_the_plan_and_the_result_is_that_of_rank_0() -> None:
    ranks = Ranks()
    executor = executor_of(ranks)
    assert executor.launch([plan(0)]).result() == [StepResult(0, [])]
    executor.close()
    assert ranks.sent == [plan(0), Shutdown()]


def test_what_other_ranks_say_is_heard_while_steps_follow_each_other() -> None:
    heard: list[object] = []
    ranks = Ranks([RankBeat(1, 7), RankBeat(2, 7)])
    executor = executor_of(ranks, heard.append)
    for step in range(2):
        executor.launch([plan(step)]).result()
    assert heard == [RankBeat(1, 7), RankBeat(2, 7)]


def test_the_rank_that_is_behind_the_others_is_named() -> None:
    ranks = Ranks([RankBeat(1, 7), RankBeat(2, 6)], fails=True)
    with pytest.raises(RankError, match="Rank 2 hung"):
        executor_of(ranks).launch([plan(0)])


def test_a_rank_that_gives_no_sign_of_life_is_named() -> None:
    with pytest.raises(RankError, match="Rank 2 is lost or hung"):
        executor_of(Ranks([RankBeat(1, 7)], fails=True)).launch([plan(0)])
