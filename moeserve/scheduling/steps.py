"""The engine's loop over steps: plan, launch, commit.

Runners and executors have one verb, `launch`. On a device with a queue it returns at once; on a CPU it returns when the
step is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from moeserve.plan import Pending, StepPlan, StepResult
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.scheduler import Scheduler


class Runner(Protocol):
    """Computes the plans of one rank."""

    def launch(self, plan: StepPlan) -> Pending[StepResult]: ...


class Executor(Protocol):
    """Computes the plans of all ranks: `LocalExecutor`, `moeserve.engine.containment.ContainingExecutor`, or one of
    `moeserve.engine.ranks`, whose methods raise RankError once a rank has died or is silent."""

    def launch(self, plans: Sequence[StepPlan]) -> Pending[list[StepResult]]:
        """Launch the step in which rank r computes `plans[r]`. The result lists one result per rank.

        Results are taken in the order of the steps.
        """

    def check(self) -> None:
        """Raise the error that would make the next step fail. The engine calls this now and then while it idles."""


class LocalExecutor:
    """Computes the plans of the only rank, in this process."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def launch(self, plans: Sequence[StepPlan]) -> Pending[list[StepResult]]:
        (plan,) = plans
        return _LocalStep(self._runner.launch(plan))

    def check(self) -> None:
        """Do nothing: no other rank can be missing."""


@dataclass(frozen=True, slots=True)
class _LocalStep:
    step: Pending[StepResult]

    @property
    def done(self) -> bool:
        return self.step.done

    def result(self) -> list[StepResult]:
        return [self.step.result()]


class RanksObserver:
    """Observes the steps of all ranks in the engine's process. Steps end in the order in which they began."""

    def begin(self, plans: Sequence[StepPlan]) -> None:
        """Observe that a step is about to be launched. The previous step may not have ended."""

    def end(self, plans: Sequence[StepPlan], results: Sequence[StepResult]) -> None:
        """Observe the results of all ranks; results[r] belongs to plans[r]."""

    def abandon(self, plans: Sequence[StepPlan]) -> None:
        """Observe, in place of `end`, that a step that had begun has failed."""


@contextmanager
def abandoned_if_it_fails(step: object, observers: Sequence[Any]) -> Iterator[None]:
    """Have the observers of a step abandon it if the block fails: the ones in `observers` at that time. The block adds
    an observer as it begins, or removes it as it ends."""
    try:
        yield
    except Exception:
        for observer in observers:
            observer.abandon(step)
        raise


class Steps:
    """Plans, launches and commits one step after another.

    With depth 0 each step is planned when the previous step is committed. With depth 1 it is planned and launched while
    the previous step is computed, so that a device never waits for the host; the tokens are the same and come one turn
    later. The scheduler must then run ahead. Ranks that share the layers compute as many steps at once as they are, of
    different requests: the depth is less by one.

    step: the number of the last committed step. device_s: its seconds by the clock of the slowest rank's device, None
    without such clocks. waited_s: how long this process has waited for devices since it began.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        depth: int,
        observers: Sequence[RanksObserver] = (),
        progress: Callable[[], int] = lambda: 0,
    ) -> None:
        """progress: returns a count that moves within a long step too."""
        self.scheduler = scheduler
        self.progress = progress
        self._executor = executor
        self._depth = depth
        self._observers = observers
        self._in_flight: deque[tuple[list[StepPlan], Pending[list[StepResult]]]] = deque()
        self.step = 0
        self.device_s: float | None = None
        self.waited_s = 0.0

    def advance(self, planned: Callable[[], None] = lambda: None) -> list[RequestOutput] | None:
        """Launch the next step if there is one. Without one, or with more than `depth` in flight, commit the oldest.

        planned: is called before the launch, which may last as long as the step. Return the outputs of the committed
        step, none without a commit, and of requests that parts decline; None if there was nothing to do.
        """
        declined = self.scheduler.end_declined()
        plans = self.scheduler.schedule()
        if plans is not None:
            planned()
            begun: list[RanksObserver] = []
            with abandoned_if_it_fails(plans, begun):
                for observer in self._observers:
                    begun.append(observer)
                    observer.begin(plans)
                self._in_flight.append((plans, self._executor.launch(plans)))
            if len(self._in_flight) <= self._depth:
                return declined
        if self._in_flight:
            return declined + self._commit()
        return declined or None

    def check(self) -> None:
        """Raise the error that would make the next step fail. The engine calls this now and then while it idles."""
        self._executor.check()

    def _commit(self) -> list[RequestOutput]:
        plans, pending = self._in_flight.popleft()
        left = list(self._observers)
        with abandoned_if_it_fails(plans, left):
            results = pending.result()
            while left:
                left.pop(0).end(plans, results)
        outputs = self.scheduler.commit(plans, results)
        self.step = plans[0].step
        self.device_s = max((result.seconds for result in results if result.seconds is not None), default=None)
        self.waited_s += results[0].waited_s
        return outputs
