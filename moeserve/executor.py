"""Whoever computes the plans of a step: this process alone, or all ranks of a group (`ranked_executor`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from moeserve.plan import StepPlan, StepResult


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
