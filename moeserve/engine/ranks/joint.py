"""Steps of ranks that compute every layer together: `JointExecutor` on rank 0 sends the plan, others follow it.

Ranks wait for each other in every layer, so a step is over on all of them when it is on rank 0, whose result is that
of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from experts.errors import CollectiveError
from moeserve.engine.ranks.messages import ForwardStage, Shutdown
from moeserve.engine.ranks.plan_link import PlanSender
from moeserve.engine.ranks.transport import RankHub, find_fault
from moeserve.plan import Computed, Pending, StepPlan, StepResult
from moeserve.scheduling.steps import Runner


class JointExecutor:
    """Sends every rank the plan of a step and computes it together with them.

    A failure of another rank becomes a RankError that names it.
    """

    def __init__(self, runner: Runner, hub: RankHub, *, timeout: float, num_entered: Callable[[], int]) -> None:
        """timeout: the seconds that one rank may be behind another. num_entered: the number of collectives that this
        rank has entered."""
        self._runner, self._hub, self._timeout, self._num_entered = runner, hub, timeout, num_entered
        self._plans = PlanSender()

    def launch(self, plans: Sequence[StepPlan]) -> Pending[list[StepResult]]:
        """Compute a step on all ranks."""
        (plan,) = plans
        self._hub.send_all(ForwardStage(self._plans.encode(plan)))
        with self._blaming():
            return Computed([self._runner.launch(plan).result()])

    def check(self) -> None:
        """Raise RankError if a rank has died or fallen silent between steps."""
        while self._hub.receive(0) is not None:
            pass
        self._hub.check_signs_of_life(self._timeout)

    def close(self) -> None:
        """Send `Shutdown`. Raise RankError if a rank has ended before."""
        self._hub.check()
        self._hub.send_last(Shutdown())

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except CollectiveError as error:
            raise find_fault(self._hub, error, self._num_entered(), self._timeout) from error
