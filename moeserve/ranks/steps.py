"""Steps computed by several ranks together; this process is rank 0."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from experts.errors import CollectiveError
from moeserve.experts.rebalancing import Migrator, follow
from moeserve.plan import StepPlan, StepResult
from moeserve.ranks.messages import Forward, LayerLoaded, RankBeat, RankError, RankResult, Shutdown, StepRows, ToRank
from moeserve.ranks.transport import BeatThread, RankHub, RankLink, find_fault
from moeserve.steps import LaunchedStep, LaunchingRunner, Runner, launch_on
from moeserve.wire import decode_plan, decode_result, encode_plan, encode_result

_POLL_SECONDS = 0.1


class StepSizes(Protocol):
    """Whoever needs to know how many rows every rank has in the step that begins."""

    def begin_step(self, rows: StepRows) -> None: ...


class RankedExecutor:
    """Hands every rank its plan, computes that of rank 0 and collects the results.

    timeout: seconds that the ranks may be apart in a step. num_entered: how many collectives this rank has entered.
    placement_version: what the next step is computed with. on_loaded: told of every rank that has loaded a layer.
    on_beat: told of signs of life.
    Whatever goes wrong with another rank becomes a RankError that names it.
    """

    def __init__(
        self, runner: Runner, sizes: StepSizes, hub: RankHub, *, timeout: float, num_entered: Callable[[], int]
    ) -> None:
        self._runner = runner
        self._sizes = sizes
        self._hub = hub
        self._timeout = timeout
        self._num_entered = num_entered
        self._results: defaultdict[int, dict[int, StepResult]] = defaultdict(dict)
        self.placement_version = 0
        self.on_loaded: Callable[[LayerLoaded], None] = lambda _: None
        self.on_beat: Callable[[RankBeat], None] = lambda _: None

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        self._announce(plans)
        with self._blaming():
            result = self._runner.run(plans[0])
        return self._with_others(result)

    def tell(self, message: ToRank) -> None:
        """Sends every other rank the same, before the next step."""
        for rank in self._hub.others:
            self._hub.send(rank, message)

    def check(self) -> None:
        """Raises RankError if a rank has died or fallen silent while nothing was to be done."""
        while (message := self._hub.receive(0)) is not None:
            self._heed(message)
        self._hub.check_signs_of_life(self._timeout)

    def close(self) -> None:
        """Lets the other ranks go. Raises RankError if one has gone before."""
        self._hub.check()
        for rank in self._hub.others:
            self._hub.send(rank, Shutdown())

    def _announce(self, plans: Sequence[StepPlan]) -> None:
        """Tells all ranks of a step that this one computes next."""
        rows = StepRows.of(plans)
        counts = [*rows.num_rows], [*rows.num_logit_rows], rows.only_decodes
        for rank in self._hub.others:
            self._hub.send(rank, Forward(encode_plan(plans[rank]), *counts, self.placement_version))
        self._sizes.begin_step(rows)

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except CollectiveError as error:
            raise find_fault(self._hub, error, self._num_entered(), self._timeout) from error

    def _with_others(self, own: StepResult) -> list[StepResult]:
        """The results of all ranks for a step. Those of a later one may come before the last of this one."""
        deadline = time.monotonic() + self._timeout
        while len(results := self._results[own.step]) < len(self._hub.others):
            message = self._hub.receive(_POLL_SECONDS)
            self._heed(message)
            if not isinstance(message, RankResult) and time.monotonic() > deadline:
                late = next(rank for rank in self._hub.others if rank not in results)
                raise RankError(f"{self._hub.name(late)} hung: it did not finish step {own.step}.")
        del self._results[own.step]
        return [own, *(results[rank] for rank in self._hub.others)]

    def _heed(self, message: object) -> None:
        if isinstance(message, RankResult):
            result = decode_result(message.result)
            self._results[result.step][message.rank] = result
        elif isinstance(message, LayerLoaded):
            self.on_loaded(message)
        elif isinstance(message, RankBeat):
            self.on_beat(message)


class RankedLauncher(RankedExecutor):
    """The same where every rank queues its steps: the next one is announced while one is computed."""

    def __init__(
        self, runner: LaunchingRunner, sizes: StepSizes, hub: RankHub, *, timeout: float, num_entered: Callable[[], int]
    ) -> None:
        super().__init__(runner, sizes, hub, timeout=timeout, num_entered=num_entered)
        self._launching = runner
        self._in_flight: dict[int, LaunchedStep] = {}

    def launch(self, plans: Sequence[StepPlan]) -> Callable[[], list[StepResult]]:
        """Steps are waited for in their order."""
        self._announce(plans)
        number = plans[0].step
        with self._blaming():
            self._in_flight[number] = self._launching.launch(plans[0])
        return lambda: self._wait(number)

    def close(self) -> None:
        """What is still in flight is computed first: nobody leaves the others alone in a step."""
        for number in sorted(self._in_flight):
            self._wait(number)
        super().close()

    def _wait(self, number: int) -> list[StepResult]:
        step = self._in_flight.pop(number)
        with self._blaming():
            own = step.result()
        return self._with_others(own)


def ranked_executor(
    runner: Runner, sizes: StepSizes, hub: RankHub, *, timeout: float, num_entered: Callable[[], int]
) -> RankedExecutor:
    """Launches steps if the runner does."""
    if isinstance(runner, LaunchingRunner):
        return RankedLauncher(runner, sizes, hub, timeout=timeout, num_entered=num_entered)
    return RankedExecutor(runner, sizes, hub, timeout=timeout, num_entered=num_entered)


# The steps of every rank but 0, as rank 0 sends them.


# Between two looks at the device and at what rank 0 says. Nobody's step is longer for it than a launch takes.
_RANK_STEPS_POLL_SECONDS = 20e-6


class Member(Protocol):
    """See `moeserve.ranks.members.RankMember`."""

    @property
    def runner(self) -> Runner: ...

    @property
    def migrator(self) -> Migrator: ...

    def begin_step(self, rows: StepRows) -> None: ...


class RankSteps:
    """Where steps are queued, the next one that rank 0 sends is launched while one is computed; results go home in
    the order of their steps."""

    def __init__(self, rank: int, link: RankLink, member: Member, beats: BeatThread) -> None:
        self._rank, self._link, self._member, self._beats = rank, link, member, beats
        self._in_flight: deque[LaunchedStep] = deque()

    def run(self) -> None:
        """Until rank 0 says `Shutdown` or is gone."""
        self._beats.busy.clear()
        try:
            while not isinstance(message := self._next(), Shutdown):
                if isinstance(message, Forward):
                    self._begin(message)
                else:
                    follow(message, self._member.migrator)
        except CollectiveError:
            # Rank 0 finds out whose fault it is and ends, which ends the wait here. The beats say that it is not ours.
            self._link.receive()

    def _next(self) -> Any:
        """What rank 0 says next. Meanwhile steps come to their end, which may take as long as rank 0 waits for it."""
        while self._in_flight:
            if self._in_flight[0].is_done():
                self._finish(self._in_flight.popleft())
            elif (message := self._link.poll()) is not None:
                return message
            else:
                time.sleep(_RANK_STEPS_POLL_SECONDS)
        self._beats.busy.clear()
        return self._link.receive(self._beats.say_waiting)

    def _begin(self, step: Forward) -> None:
        self._beats.busy.set()
        member = self._member
        if step.placement_version != member.migrator.version:
            member.migrator.switch(step.placement_version)
        member.begin_step(StepRows(step.num_rows, step.num_logit_rows, step.only_decodes))
        self._in_flight.append(launch_on(member.runner, decode_plan(step.plan)))

    def _finish(self, step: LaunchedStep) -> None:
        result = step.result()
        if outcome := self._member.migrator.outcome():
            self._link.send(LayerLoaded(self._rank, outcome.version, outcome.error))
        self._link.send(RankResult(self._rank, encode_result(result)))
