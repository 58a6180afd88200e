"""One step after another: planned, launched, committed; with depth 1 a step is planned while the last one is computed.

Whoever computes has one verb, `launch`. A device with a queue returns at once; a CPU has computed the step by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moeserve.plan import Pending, StepPlan, StepResult
from moeserve.scheduler import RequestOutput, Scheduler


class Runner(Protocol):
    """Computes the plans of one rank."""

    def launch(self, plan: StepPlan) -> Pending[StepResult]: ...


class Executor(Protocol):
    """Computes the plans of all ranks (`LocalExecutor`, `moeserve.ranks.steps.RankedExecutor`)."""

    def launch(self, plans: Sequence[StepPlan]) -> Pending[list[StepResult]]:
        """Launch the step in which rank r computes `plans[r]`; its results are those of all ranks."""

    def check(self) -> None:
        """Raise what would make the next step fail. Called now and then while the engine idles."""


class LocalExecutor:
    """The only rank, in this process."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def launch(self, plans: Sequence[StepPlan]) -> Pending[list[StepResult]]:
        (plan,) = plans
        return _OfOneRank(self._runner.launch(plan))

    def check(self) -> None:
        """Do nothing: no other rank can be missing."""


@dataclass(frozen=True, slots=True)
class _OfOneRank:
    step: Pending[StepResult]

    @property
    def done(self) -> bool:
        return self.step.done

    def result(self) -> list[StepResult]:
        return [self.step.result()]


class RanksObserver:
    """Observes the steps of all ranks, on the engine's side. Steps end in the order in which they began."""

    def begin(self, plans: Sequence[StepPlan]) -> None:
        """The step is launched next; the one before may not have ended."""

    def end(self, plans: Sequence[StepPlan], results: Sequence[StepResult]) -> None:
        """The results of all ranks have come."""


class Steps:
    """The engine's loop over steps.

    Depth 0: a step is planned when the one before is committed. Depth 1: it is planned and launched while the one
    before is computed, so that a device never waits for the host; tokens come a turn later, and are the same. The
    scheduler has to run ahead as far. `step` is the number of the last step committed.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, depth: int, observers: Sequence[RanksObserver] = ()
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._observers = observers
        self._in_flight: deque[tuple[list[StepPlan], Pending[list[StepResult]]]] = deque()
        self.step = 0

    def advance(self) -> list[RequestOutput] | None:
        """Launch the next step if there is one, then commit the oldest if as many are in flight as may be.

        Return what came of it, or None if there was nothing to do.
        """
        plans = self._scheduler.schedule()
        if plans is not None:
            for observer in self._observers:
                observer.begin(plans)
            self._in_flight.append((plans, self._executor.launch(plans)))
            if len(self._in_flight) <= self._depth:
                return []
        return self._commit() if self._in_flight else None

    def check(self) -> None:
        """Raise what would make the next step fail. Called now and then while there is nothing to do."""
        self._executor.check()

    def _commit(self) -> list[RequestOutput]:
        plans, pending = self._in_flight.popleft()
        results = pending.result()
        for observer in self._observers:
            observer.end(plans, results)
        outputs = self._scheduler.commit(plans, results)
        self.step = plans[0].step
        return outputs
