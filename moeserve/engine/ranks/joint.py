"""Steps of ranks that compute every layer together: `JointExecutor` on rank 0 sends the plan, others follow it.

Ranks wait for each other in every layer, so a step is over on all of them when it is on rank 0, whose result is that
of all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from experts.errors import CollectiveError
from moeserve.engine.ranks.messages import Forward, Shutdown
from moeserve.engine.ranks.plan_link import PlanSender
from moeserve.engine.ranks.transport import RankHub, find_fault
from moeserve.plan import Pending, StepPlan, StepResult
from moeserve.scheduling.steps import Runner


class JointExecutor:
    """Sends every rank the plan of a step and computes it together with them.

    A failure of another rank becomes a RankError that names it.
    """

    def __init__(
        self,
        runner: Runner,
        hub: RankHub,
        listeners: Sequence[Callable[[object], None]],
        *,
        timeout: float,
        num_entered: Callable[[], int],
    ) -> None:
        """listeners: each receives every message of the other ranks. timeout: the seconds that one rank may be behind
        another. num_entered: the number of collectives that this rank has entered."""
        self._runner, self._hub, self._timeout, self._num_entered = runner, hub, timeout, num_entered
        self._listeners = listeners
        self._plans = PlanSender()
        self._in_flight: deque[Pending[StepResult]] = deque()

    def launch(self, plans: Sequence[StepPlan]) -> Pending[list[StepResult]]:
        (plan,) = plans
        self._hub.send_all(Forward(self._plans.encode(plan)))
        with self._blaming():
            self._in_flight.append(self._runner.launch(plan))
        return _JointStep(self, self._in_flight[-1])

    def check(self) -> None:
        self._take_messages()
        self._hub.check_signs_of_life(self._timeout)

    def close(self) -> None:
        """Finish the steps in flight, then send `Shutdown`. Raise RankError if a rank has ended before."""
        while self._in_flight:
            self.wait()
        self._hub.check()
        self._hub.send_last(Shutdown())

    def wait(self) -> list[StepResult]:
        """Wait for the oldest step in flight."""
        with self._blaming():
            result = self._in_flight.popleft().result()
        self._take_messages()
        return [result]

    def _take_messages(self) -> None:
        while (message := self._hub.receive(0)) is not None:
            for listener in self._listeners:
                listener(message)

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except CollectiveError as error:
            raise find_fault(self._hub, error, self._num_entered(), self._timeout) from error


@dataclass(frozen=True, slots=True)
class _JointStep:
    """A step of all ranks in flight. own: the step of rank 0."""

    executor: JointExecutor
    own: Pending[StepResult]

    @property
    def done(self) -> bool:
        return self.own.done

    def result(self) -> list[StepResult]:
        return self.executor.wait()
