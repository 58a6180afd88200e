"""What ranks have sent is told with results, whether steps are queued or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from moeserve.experts.observe import CountedLauncher, count_links
from moeserve.plan import StepPlan, StepResult
from moeserve.steps import ComputedStep, Executor, LaunchedStep, LaunchingExecutor


class Plain:
    """Two ranks that have sent ever more."""

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        step = plans[0].step
        return [StepResult(step, [], sent=[0, step, 0, 10 * step]), StepResult(step, [], sent=[2 * step, 0, 20, 0])]

    def check(self) -> None: ...


class Launching(Plain):
    def launch(self, plans: Sequence[StepPlan]) -> Callable[[], list[StepResult]]:
        return lambda: self.run(plans)


def both(step: int) -> list[StepPlan]:
    return [StepPlan(step, []), StepPlan(step, [])]


@pytest.mark.parametrize("executor", [Plain(), Launching()], ids=["waits", "launches"])
def test_what_was_said_last_is_kept(executor: Executor) -> None:
    links = count_links(executor, 2)
    links.run(both(3))
    assert links.links() == [[0, 1, 3, 30], [1, 0, 6, 20]]
    assert isinstance(links, LaunchingExecutor) == isinstance(executor, LaunchingExecutor)
    if isinstance(links, LaunchingExecutor):
        wait = links.launch(both(4))
        assert links.links()[0] == [0, 1, 3, 30]
        wait()
        assert links.links()[0] == [0, 1, 4, 40]


def test_a_launched_step_tells_what_was_sent_when_it_was_launched() -> None:
    class Runner:
        def run(self, plan: StepPlan) -> StepResult:
            raise NotImplementedError

        def launch(self, plan: StepPlan) -> LaunchedStep:
            sent.append(plan.step)
            return ComputedStep(StepResult(plan.step, []))

    sent: list[int] = []
    runner = CountedLauncher(Runner(), lambda: [*sent])
    first, second = (runner.launch(StepPlan(step, [])) for step in (1, 2))
    assert (first.result().sent, second.result().sent) == ([1], [1, 2])
