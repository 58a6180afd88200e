"""Steps computed by several ranks together; this process is rank 0."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from experts.errors import CollectiveError
from experts.rebalance import Migration, Migrator
from moeserve.plan import Pending, StepPlan, StepResult
from moeserve.ranks.messages import DropLayer, Forward, LayerLoaded, PlaceLayer, RankError, RankResult, Shutdown
from moeserve.ranks.together import StepRows
from moeserve.ranks.transport import BeatThread, RankHub, RankLink, find_fault
from moeserve.steps import Runner
from moeserve.wire import decode_plan, decode_result, encode_plan, encode_result

_POLL_SECONDS = 0.1
# Between two looks at the device and at what rank 0 says. Nobody's step is longer for it than a launch takes.
_BETWEEN_LOOKS = 20e-6


class StepSizes(Protocol):
    """Whoever needs to know how many rows every rank has in the step that begins."""

    def begin_step(self, rows: StepRows) -> None: ...


class RankedExecutor:
    """Hands every rank its plan, launches that of rank 0 and collects the results.

    Where ranks queue their steps, the next one is announced while one is computed. Whatever goes wrong with another
    rank becomes a RankError that names it.
    """

    def __init__(
        self,
        runner: Runner,
        sizes: StepSizes,
        hub: RankHub,
        *,
        timeout: float,
        num_entered: Callable[[], int],
        placement_version: Callable[[], int],
        heed: Sequence[Callable[[object], None]] = (),
    ) -> None:
        """timeout: seconds that the ranks may be apart in a step. num_entered: how many collectives this rank has
        entered. placement_version: what the next step is computed with. heed: each is told what the other ranks say
        besides their results."""
        self._runner = runner
        self._sizes = sizes
        self._hub = hub
        self._timeout = timeout
        self._num_entered = num_entered
        self._placement_version = placement_version
        self._heed = heed
        self._in_flight: dict[int, Pending[StepResult]] = {}
        self._results: defaultdict[int, dict[int, StepResult]] = defaultdict(dict)

    def launch(self, plans: Sequence[StepPlan]) -> Pending[list[StepResult]]:
        """Steps are waited for in their order."""
        rows, number = StepRows.of(plans), plans[0].step
        counts = [*rows.num_rows], [*rows.num_logit_rows], rows.only_decodes
        for rank in self._hub.others:
            self._hub.send(rank, Forward(encode_plan(plans[rank]), *counts, self._placement_version()))
        self._sizes.begin_step(rows)
        with self._blaming():
            step = self._in_flight[number] = self._runner.launch(plans[0])
        return _OfAllRanks(step, lambda: self._wait(number))

    def check(self) -> None:
        """Raise RankError if a rank has died or fallen silent while nothing was to be done."""
        while (message := self._hub.receive(0)) is not None:
            self._take(message)
        self._hub.check_signs_of_life(self._timeout)

    def close(self) -> None:
        """Let the other ranks go. Raise RankError if one has gone before.

        What is still in flight is computed first: nobody leaves the others alone in a step.
        """
        for number in sorted(self._in_flight):
            self._wait(number)
        self._hub.check()
        self._hub.send_all(Shutdown())

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
        """The results of all ranks for a step. Those of a later one may come before the last of this one."""
        deadline = time.monotonic() + self._timeout
        while len(results := self._results[own.step]) < len(self._hub.others):
            message = self._hub.receive(_POLL_SECONDS)
            self._take(message)
            if not isinstance(message, RankResult) and time.monotonic() > deadline:
                late = next(rank for rank in self._hub.others if rank not in results)
                raise RankError(f"{self._hub.name(late)} hung: it did not finish step {own.step}.")
        del self._results[own.step]
        return [own, *(results[rank] for rank in self._hub.others)]

    def _take(self, message: object) -> None:
        if isinstance(message, RankResult):
            result = decode_result(message.result)
            self._results[result.step][message.rank] = result
        elif message is not None:
            for heed in self._heed:
                heed(message)


@dataclass(frozen=True, slots=True)
class _OfAllRanks:
    """A step of all ranks. own: that of rank 0."""

    own: Pending[StepResult]
    wait: Callable[[], list[StepResult]]

    @property
    def done(self) -> bool:
        return self.own.done

    def result(self) -> list[StepResult]:
        return self.wait()


class RankSteps:
    """Where steps are queued, the next one that rank 0 sends is launched while one is computed; results go home in
    the order of their steps."""

    def __init__(
        self, rank: int, link: RankLink, runner: Runner, sizes: StepSizes, migrator: Migrator, beats: BeatThread
    ) -> None:
        self._rank, self._link, self._beats = rank, link, beats
        self._runner, self._sizes, self._migrator = runner, sizes, migrator
        self._in_flight: deque[Pending[StepResult]] = deque()

    def run(self) -> None:
        """Until rank 0 says `Shutdown` or is gone."""
        self._beats.busy.clear()
        try:
            while not isinstance(message := self._next(), Shutdown):
                if isinstance(message, Forward):
                    self._begin(message)
                else:
                    follow(message, self._migrator)
        except CollectiveError:
            # Rank 0 finds out whose fault it is and ends, which ends the wait here. The beats say that it is not ours.
            self._link.receive()

    def _next(self) -> Any:
        """What rank 0 says next. Meanwhile steps come to their end, which may take as long as rank 0 waits for it."""
        while self._in_flight:
            if self._in_flight[0].done:
                self._finish(self._in_flight.popleft())
            elif (message := self._link.poll()) is not None:
                return message
            else:
                time.sleep(_BETWEEN_LOOKS)
        self._beats.busy.clear()
        return self._link.receive(self._beats.say_waiting)

    def _begin(self, step: Forward) -> None:
        self._beats.busy.set()
        if step.placement_version != self._migrator.version:
            self._migrator.switch(step.placement_version)
        self._sizes.begin_step(StepRows(step.num_rows, step.num_logit_rows, step.only_decodes))
        self._in_flight.append(self._runner.launch(decode_plan(step.plan)))

    def _finish(self, step: Pending[StepResult]) -> None:
        result = step.result()
        if outcome := self._migrator.outcome():
            self._link.send(LayerLoaded(self._rank, outcome.version, outcome.error))
        self._link.send(RankResult(self._rank, encode_result(result)))


def follow(message: PlaceLayer | DropLayer, migrator: Migrator) -> None:
    """What a rank does when rank 0 says so between steps."""
    match message:
        case PlaceLayer():
            migrator.begin(Migration(message.version, message.layer, message.ranks))
        case DropLayer():
            migrator.drop(message.version)
