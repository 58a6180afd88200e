"""One rank: what computes its steps, and who observes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experts.observer import StepObserver
from moeserve.plan import Pending, StepPlan, StepResult
from moeserve.steps import Runner

Observers = Sequence[StepObserver[StepPlan, StepResult]]


class Rank:
    """A runner whose steps are observed."""

    def __init__(self, runner: Runner, observers: Observers = ()) -> None:
        """observers: told of every step in this order."""
        self._runner = runner
        self._observers = observers

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        for observer in self._observers:
            observer.begin(plan)
        step = self._runner.launch(plan)
        for observer in self._observers:
            observer.launched()
        return _Observed(plan, step, self._observers)


@dataclass(frozen=True, slots=True)
class _Observed:
    plan: StepPlan
    step: Pending[StepResult]
    observers: Observers

    @property
    def done(self) -> bool:
        return self.step.done

    def result(self) -> StepResult:
        result = self.step.result()
        for observer in self.observers:
            observer.end(self.plan, result)
        return result
