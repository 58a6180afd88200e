"""Steps of several ranks: `RankSteps` computes the plans that rank 0 sends to every other rank.

`RankedExecutor` sends them where ranks have requests of their own.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from experts.errors import CollectiveError
from experts.placement.rebalance import ExpertMigrator, Migration
from moeserve.engine.ranks.copies import MemberCopies
from moeserve.engine.ranks.messages import (
    CancelCopies,
    CopyBlocks,
    DropLayer,
    Forward,
    LayerLoaded,
    OpenDisk,
    PlaceLayer,
    RankError,
    RankResult,
    Shutdown,
)
from moeserve.engine.ranks.plan_link import PlanReceiver, PlanSender
from moeserve.engine.ranks.together import StepRows
from moeserve.engine.ranks.transport import BeatThread, RankHub, RankLink, find_fault
from moeserve.plan import Pending, StepPlan, StepResult
from moeserve.scheduling.steps import Runner

_POLL_SECONDS = 0.1  # between two looks whether a rank is late
# Between two looks at the device and at the socket: about as long as a launch takes.
_SECONDS_BETWEEN_LOOKS = 20e-6


class RankedExecutor:
    """Sends every rank its plan, launches the plan of rank 0 and collects all results.

    The next step may be launched while one is computed. A failure of another rank becomes a RankError that names it.
    """

    def __init__(
        self,
        runner: Runner,
        begin_step: Callable[[StepRows], None],
        hub: RankHub,
        *,
        timeout: float,
        num_entered: Callable[[], int],
        placement_version: Callable[[], int],
        listeners: Sequence[Callable[[object], None]],
        num_shards: int = 1,
    ) -> None:
        """timeout: the seconds that one rank may be behind another in a step. num_entered: the number of collectives
        that this rank has entered. placement_version: the version for the next step. listeners: each receives every
        message of the other ranks that is no result. num_shards: the neighbouring ranks that compute a plan together.
        """
        self._runner = runner
        self._begin_step = begin_step
        self._hub = hub
        self._timeout = timeout
        self._num_entered = num_entered
        self._placement_version = placement_version
        self._listeners = listeners
        self._num_shards = num_shards
        self._plans = {rank: PlanSender() for rank in hub.others}
        self._in_flight: dict[int, Pending[StepResult]] = {}
        self._results: defaultdict[int, dict[int, StepResult]] = defaultdict(dict)

    def launch(self, plans: Sequence[StepPlan]) -> Pending[list[StepResult]]:
        rows, number = StepRows.of(plans).of_first_ranks(self._num_shards), plans[0].step
        counts = tuple(rows.num_rows), tuple(rows.num_logit_rows), rows.only_decodes
        for rank, sender in self._plans.items():
            plan = sender.encode(plans[rank // self._num_shards])
            self._hub.send(rank, Forward(plan, *counts, self._placement_version()))
        self._begin_step(rows)
        with self._blaming():
            step = self._in_flight[number] = self._runner.launch(plans[0])
        return _RankedStep(step, lambda: self._wait(number))

    def check(self) -> None:
        while (message := self._hub.receive(0)) is not None:
            self._take(message)
        self._hub.check_signs_of_life(self._timeout)

    def close(self) -> None:
        """Finish the steps in flight, then send `Shutdown`. Raise RankError if a rank has ended before.

        A rank that left during a step would leave the others waiting in a collective.
        """
        for number in sorted(self._in_flight):
            self._wait(number)
        self._hub.check()
        self._hub.send_last(Shutdown())

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except CollectiveError as error:
            raise find_fault(self._hub, error, self._num_entered(), self._timeout) from error

    def _wait(self, number: int) -> list[StepResult]:
        step = self._in_flight.pop(number)
        with self._blaming():
            own = step.result()
        return self._with_others(own)

    def _with_others(self, own: StepResult) -> list[StepResult]:
        """Return the results of all plans of a step. Keep results of later steps, which may come in between."""
        deadline = time.monotonic() + self._timeout
        while len(results := self._results[own.step]) < len(self._hub.others):
            message = self._hub.receive(_POLL_SECONDS)
            self._take(message)
            if not isinstance(message, RankResult) and time.monotonic() > deadline:
                late = next(rank for rank in self._hub.others if rank not in results)
                raise RankError(f"{self._hub.name(late)} hung: it did not finish step {own.step}.")
        del self._results[own.step]
        return [own, *(results[rank] for rank in self._hub.others)][:: self._num_shards]

    def _take(self, message: object) -> None:
        if isinstance(message, RankResult):
            self._results[message.result.step][message.rank] = message.result
        elif message is not None:
            for listener in self._listeners:
                listener(message)


@dataclass(frozen=True, slots=True)
class _RankedStep:
    """A step of all ranks in flight. own: the step of rank 0. wait: returns the results of all ranks."""

    own: Pending[StepResult]
    wait: Callable[[], list[StepResult]]

    @property
    def done(self) -> bool:
        return self.own.done

    def result(self) -> list[StepResult]:
        return self.wait()


class RankSteps:
    """Computes the steps that rank 0 sends and returns their results in order.

    On a device with a queue the next step is launched while one is computed.
    """

    def __init__(
        self,
        rank: int,
        link: RankLink,
        runner: Runner,
        begin_step: Callable[[StepRows], None],
        beats: BeatThread,
        copies: MemberCopies,
        *,
        migrator: ExpertMigrator[Any] | None = None,
        returns_results: bool = True,
    ) -> None:
        """begin_step: see `Rank`. migrator: None where experts stay where they are. returns_results: False where those
        of rank 0 are the same."""
        self._returns_results = returns_results
        self._rank, self._link, self._beats = rank, link, beats
        self._copies = copies
        self._runner, self._begin_step, self._migrator = runner, begin_step, migrator
        self._plans = PlanReceiver()
        self._in_flight: deque[Pending[StepResult]] = deque()

    def run(self) -> None:
        """Follow rank 0 until it sends `Shutdown` or ends."""
        self._beats.busy.clear()
        try:
            while not isinstance(message := self._next(), Shutdown):
                if isinstance(message, Forward):
                    self._begin(message)
                elif isinstance(message, OpenDisk | CopyBlocks | CancelCopies):
                    self._copies.follow(message)
                elif self._migrator is not None:
                    follow(message, self._migrator)
        except CollectiveError:
            # Rank 0 finds the rank at fault and ends, which ends the wait here. Beats show that this rank is alive.
            self._link.receive()

    def _next(self) -> Any:
        """Return the next message of rank 0. Meanwhile finish steps; rank 0 bounds the time that they may take."""
        while self._in_flight:
            if self._in_flight[0].done:
                self._finish(self._in_flight.popleft())
                # Where the next step is launched before this one ends, there may always be one in flight.
                self._copies.tell_ends()
            elif (message := self._link.poll()) is not None:
                return message
            else:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        return self._copies.receive(self._link, self._beats)

    def _begin(self, step: Forward) -> None:
        self._beats.busy.set()
        if self._migrator is not None and step.placement_version != self._migrator.version:
            self._migrator.switch(step.placement_version)
        self._begin_step(StepRows(step.num_rows, step.num_logit_rows, step.only_decodes))
        self._in_flight.append(self._runner.launch(self._plans.decode(step.plan)))

    def _finish(self, step: Pending[StepResult]) -> None:
        result = step.result()
        if self._migrator is not None and (outcome := self._migrator.outcome()):
            self._link.send(LayerLoaded(self._rank, outcome.version, outcome.error))
        if not self._returns_results:
            return
        if result.routing is not None:
            result.routing = bytes(result.routing)
        self._link.send(RankResult(self._rank, result))


def follow(message: PlaceLayer | DropLayer, migrator: ExpertMigrator[Any]) -> None:
    """Carry out a migration message of rank 0, between steps."""
    match message:
        case PlaceLayer():
            migrator.begin(Migration(message.version, message.layer, message.ranks))
        case DropLayer():
            migrator.drop(message.version)
