"""What ranks have sent is told with results, as of when their step was launched."""

from __future__ import annotations

import pytest

from moeserve.engine.experts.observe import LinkCounts, SentCounter
from moeserve.engine.rank import ObservedRunner
from moeserve.plan import Computed, StepPlan, StepResult


def test_what_was_said_last_is_kept() -> None:
    links, plans = LinkCounts(2), [StepPlan(3, []), StepPlan(3, [])]
    for sent in (3, 4):
        links.end(
            plans, [StepResult(3, [], sent=[0, sent, 0, 10 * sent]), StepResult(3, [], sent=[2 * sent, 0, 20, 0])]
        )
    links.end(plans, [StepResult(3, []), StepResult(3, [], sent=[9, 0, 21, 0])])
    assert links.links() == [[0, 1, 4, 40], [1, 0, 9, 21]]


def test_a_launched_step_tells_what_was_sent_when_it_was_launched() -> None:
    class Runner:
        def launch(self, plan: StepPlan) -> Computed[StepResult]:
            sent.append(plan.step)
            return Computed(StepResult(plan.step, []))

    sent: list[int] = []
    rank = ObservedRunner(Runner(), [SentCounter(lambda: [*sent])])
    first, second = (rank.launch(StepPlan(step, [])) for step in (1, 2))
    assert (first.result().sent, second.result().sent) == ([1], [1, 2])


def test_a_failed_step_takes_its_counts_with_it() -> None:
    class Step:
        done = True

        def __init__(self, number: int) -> None:
            self.number = number

        def result(self) -> StepResult:
            if self.number == 1:
                raise OSError("the device is gone")
            return StepResult(self.number, [])

    class Runner:
        def launch(self, plan: StepPlan) -> Step:
            sent.append(plan.step)
            return Step(plan.step)

    sent: list[int] = []
    rank = ObservedRunner(Runner(), [SentCounter(lambda: [*sent])])
    first, second = (rank.launch(StepPlan(step, [])) for step in (1, 2))
    with pytest.raises(OSError, match="gone"):
        first.result()
    assert second.result().sent == [1, 2]
