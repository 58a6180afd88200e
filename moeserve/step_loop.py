"""One step after another: planned, computed, committed. The plain loop, and one that plans while a step is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from moeserve.executor import Executor, LaunchingExecutor
from moeserve.outputs import RequestOutput
from moeserve.plan import StepPlan, StepResult
from moeserve.scheduler import Scheduler


class StepLoop(Protocol):
    """`step` is the number of the last step committed."""

    step: int

    def advance(self) -> list[RequestOutput] | None:
        """What came of one turn, or None if there was nothing to do."""


class PlainSteps:
    """A step is planned when the one before is committed."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self.step = 0

    def advance(self) -> list[RequestOutput] | None:
        """Plans a step, waits for it and commits it."""
        plans = self._scheduler.schedule()
        if plans is None:
            return None
        outputs = self._scheduler.commit(plans, self._executor.run(plans))
        self.step = plans[0].step
        return outputs


class OverlappedSteps:
    """A step is planned and queued while the one before is computed, so that the device never waits for the host.

    The scheduler runs ahead. Tokens come a turn later than from the plain loop, and are the same.
    """

    def __init__(self, scheduler: Scheduler, executor: LaunchingExecutor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._in_flight: tuple[list[StepPlan], Callable[[], list[StepResult]]] | None = None
        self.step = 0

    def advance(self) -> list[RequestOutput] | None:
        """Queues the next step if there is one, then waits for the one before and commits it."""
        plans = self._scheduler.schedule()
        queued = None if plans is None else (plans, self._executor.launch(plans))
        before, self._in_flight = self._in_flight, queued
        if before is None:
            return None if queued is None else []
        done, results = before
        outputs = self._scheduler.commit(done, results())
        self.step = done[0].step
        return outputs
