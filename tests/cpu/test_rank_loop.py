"""A rank that follows rank 0: the work that it queues on its device, and its messages."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from experts.errors import CollectiveError
from experts.placement.rebalance import Migration, Outcome
from moeserve.engine.kv.disk.copier import BlockCopier
from moeserve.engine.ranks.copies import MemberCopies
from moeserve.engine.ranks.messages import (
    CopiesEnded,
    CopyBlocks,
    Forward,
    LayerLoaded,
    OpenDisk,
    PlaceLayer,
    RankResult,
    Shutdown,
)
from moeserve.engine.ranks.plan_link import PlanSender
from moeserve.engine.ranks.steps import RankSteps
from moeserve.engine.ranks.together import StepRows
from moeserve.engine.ranks.transport import BeatThread, RankLink
from moeserve.plan import Chunk, ChunkResult, SamplingParams, StepPlan, StepResult
from moeserve.scheduling.arrivals import Result
from moeserve.scheduling.lower_tier import CopyJob


@dataclass(frozen=True)
class Done:
    """The device is through with a step."""

    step: int


class Service:
    """Rank 0's end, this rank's device and its log, in one. happens: what rank 0 sends, and what the device does."""

    def __init__(self, happens: Sequence[object]) -> None:
        self.log: list[str] = []
        self.busy = threading.Event()
        self.version = 0
        self.done: set[int] = set()
        self._happens = iter(happens)
        self._outcomes: list[Outcome] = []

    # The link.
    def poll(self) -> Any:
        happened = next(self._happens)
        if isinstance(happened, Done):
            self.done.add(happened.step)
            return None
        return happened

    def receive(self, on_wait: Callable[[], None] = lambda: None) -> Any:
        assert not self.busy.is_set()
        on_wait()
        return self.poll()

    def send(self, message: object) -> None:
        if isinstance(message, RankResult):
            self.log.append(f"result {message.result.step}")
        elif isinstance(message, LayerLoaded):
            self.log.append(f"loaded {message.version}")
        elif isinstance(message, CopiesEnded):
            self.log.append(f"copied {message.number}")

    def say_waiting(self) -> None:
        self.log.append("idle")

    # The runner, the sizes of steps and the migrator.
    def begin_step(self, rows: StepRows) -> None:
        assert rows.only_decodes

    def launch(self, plan: StepPlan) -> Step:
        self.log.append(f"launch {plan.step}")
        return Step(self, plan)

    def begin(self, migration: Migration) -> None:
        self.log.append(f"load {migration.version}")
        self._outcomes.append(Outcome(migration.version, None))

    def outcome(self) -> Outcome | None:
        return self._outcomes.pop() if self._outcomes else None

    def switch(self, version: int) -> None:
        self.log.append(f"switch {version}")
        self.version = version

    def drop(self, version: int) -> None: ...

    def serve(self) -> list[str]:
        copies = MemberCopies(1, lambda *_: cast("BlockCopier", CopiesAtOnce()), self.send)
        beats = cast("BeatThread", self)
        RankSteps(1, cast("RankLink", self), self, self.begin_step, beats, copies, migrator=self).run()
        return self.log


class CopiesAtOnce:
    """A copier whose jobs end as they begin."""

    def __init__(self) -> None:
        self._ended: list[Result[CopyJob]] = []

    def start(self, job: CopyJob) -> None:
        self._ended.append(Result(job, [], 0.0))

    def take(self, seconds: float) -> list[Result[CopyJob]]:
        ended, self._ended = self._ended, []
        return ended


class Step:
    def __init__(self, service: Service, plan: StepPlan) -> None:
        self._service, self._plan = service, plan

    @property
    def done(self) -> bool:
        return self._plan.step in self._service.done

    def result(self) -> StepResult:
        assert self.done
        return StepResult(self._plan.step, [ChunkResult(1)])


def forward(step: int, version: int = 0) -> Forward:
    chunk = Chunk("a", array("i", [5]), 3, array("i", [0]), SamplingParams(max_tokens=2))
    return Forward(PlanSender().encode(StepPlan(step, [chunk])), (1, 1), (1, 1), True, version)


def test_the_next_step_is_launched_while_one_is_computed_and_results_go_home_as_they_come() -> None:
    log = Service([forward(1), forward(2), Done(1), forward(3), Done(2), Done(3), Shutdown()]).serve()
    assert log == ["idle", "launch 1", "launch 2", "result 1", "launch 3", "result 2", "result 3", "idle"]


def test_the_end_is_heard_while_a_step_is_in_flight() -> None:
    assert Service([forward(1), Shutdown()]).serve() == ["idle", "launch 1"]


def test_the_end_of_copies_is_told_though_there_is_always_a_step_in_flight(tmp_path: Path) -> None:
    copies = [OpenDisk(str(tmp_path), "a"), forward(1), CopyBlocks(7, [], is_write=True, is_gentle=True)]
    log = Service([*copies, forward(2), Done(1), forward(3), Shutdown()]).serve()
    assert [line for line in log if line != "idle"] == ["launch 1", "launch 2", "result 1", "copied 7", "launch 3"]


def test_a_rank_switches_placements_between_the_steps_that_say_so() -> None:
    happens = [PlaceLayer(1, 0, ((0,), (1,))), forward(1), Done(1), forward(2, version=1), Done(2), Shutdown()]
    log = [line for line in Service(happens).serve() if line != "idle"]
    assert log == ["load 1", "launch 1", "loaded 1", "result 1", "switch 1", "launch 2", "result 2"]


def test_a_rank_whose_collective_fails_waits_for_rank_0_to_end() -> None:
    class Failing(Service):
        def launch(self, plan: StepPlan) -> Step:
            raise CollectiveError("timed out")

        def receive(self, on_wait: Callable[[], None] = lambda: None) -> Any:
            self.log.append("receive")
            return self.poll()

    assert Failing([forward(1), Shutdown()]).serve() == ["receive", "receive"]
