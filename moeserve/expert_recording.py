"""Recording the routing of all ranks: each rank's runner listens, the executor of the engine gathers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from experts.recorder import RoutingRecorder
from experts.step_routing import RoutingShape, unpack
from moeserve.executor import Executor, Runner
from moeserve.plan import StepPlan, StepResult


class Tap(Protocol):
    """Hears what the gates of this process choose (`experts.routing_tap`)."""

    def begin(self) -> None: ...

    def take(self) -> bytes: ...


class TappedRunner:
    """A runner whose results carry the routing of its rows."""

    def __init__(self, runner: Runner, tap: Tap) -> None:
        self._runner = runner
        self._tap = tap

    def run(self, plan: StepPlan) -> StepResult:
        self._tap.begin()
        result = self._runner.run(plan)
        result.routing = self._tap.take()
        return result


class RecordingExecutor:
    """Takes the routing out of the results of all ranks and counts it."""

    def __init__(self, executor: Executor, recorder: RoutingRecorder, shape: RoutingShape) -> None:
        self._executor = executor
        self._recorder = recorder
        self._shape = shape

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        results = self._executor.run(plans)
        for plan, result in zip(plans, results, strict=True):
            if plan.chunks and result.routing is not None:
                self._record(plan, result.routing)
        return results

    def check(self) -> None:
        self._executor.check()

    def _record(self, plan: StepPlan, routing: bytes) -> None:
        token_ids: array[int] = array("i")
        logit_rows: list[int] = []
        for chunk in plan.chunks:
            token_ids += chunk.token_ids
            num_rows = len(token_ids)
            logit_rows.extend(range(num_rows - chunk.num_logit_rows, num_rows))
        ids = unpack(routing, self._shape, len(token_ids), logit_rows)
        self._recorder.add(ids, token_ids)
