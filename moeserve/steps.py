"""One step after another: planned, computed, committed. The plain loop, and one that plans while a step is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from moeserve.plan import StepPlan, StepResult
from moeserve.scheduler import RequestOutput, Scheduler

# Whoever computes the plans of a step: this process alone, or all ranks of a group (`ranked_executor`).


class Executor(Protocol):
    """Computes steps, one after the other."""

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        """The results of all ranks, `plans[r]` being what rank r computes."""

    def check(self) -> None:
        """Called now and then while the engine idles. Raises what would make the next step fail."""


class Runner(Protocol):
    """Computes the plan of one rank."""

    def run(self, plan: StepPlan) -> StepResult: ...


class LocalExecutor:
    """The only rank, in this process."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        (plan,) = plans
        return [self._runner.run(plan)]

    def check(self) -> None:
        """Nothing can be missing."""


class LaunchedStep(Protocol):
    """A step on a device's queue."""

    def is_done(self) -> bool:
        """Whether its result is there without waiting."""

    def result(self) -> StepResult: ...


@runtime_checkable
class LaunchingRunner(Runner, Protocol):
    """Computes plans on a device that works while the host goes on."""

    def launch(self, plan: StepPlan) -> LaunchedStep: ...


class FinishedStep:
    """A launched step to whose result something is added."""

    def __init__(self, step: LaunchedStep, finish: Callable[[StepResult], StepResult]) -> None:
        self._step = step
        self._finish = finish

    def is_done(self) -> bool:
        return self._step.is_done()

    def result(self) -> StepResult:
        return self._finish(self._step.result())


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """What a runner has computed that launches nothing."""

    computed: StepResult

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.computed


def launch_on(runner: Runner, plan: StepPlan) -> LaunchedStep:
    """Launches a plan; computes it where the runner cannot do otherwise."""
    return runner.launch(plan) if isinstance(runner, LaunchingRunner) else ComputedStep(runner.run(plan))


@runtime_checkable
class LaunchingExecutor(Executor, Protocol):
    """Queues steps on a device, in order."""

    def launch(self, plans: Sequence[StepPlan]) -> Callable[[], list[StepResult]]:
        """Returns at once; what it returns waits for the step."""


class LocalLauncher(LocalExecutor):
    """The only rank, in this process, on a device with a queue."""

    def __init__(self, runner: LaunchingRunner) -> None:
        super().__init__(runner)
        self._launching = runner

    def launch(self, plans: Sequence[StepPlan]) -> Callable[[], list[StepResult]]:
        """Queues a step; what it returns waits for it."""
        (plan,) = plans
        step = self._launching.launch(plan)
        return lambda: [step.result()]


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
