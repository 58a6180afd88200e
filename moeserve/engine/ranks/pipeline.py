"""Layers over ranks: each rank computes a stage of every step, and hands the rows on to the next one.

All ranks get the same plan and hold blocks with the same ids, each with the keys, values and states of its own layers.
So there is one scheduler and one prefix cache, as for a single rank, and the bits are those of a single rank.
`PipelineExecutor` on rank 0 sends the plans; the last rank samples.

Where the ranks of a stage share its experts, there is a plan and a prefix cache for each of them, and all of this holds
for the ranks at one place of their stages.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from experts.errors import CollectiveError
from moeserve.engine.ranks.messages import Forward, RankBeat, RankError, RankResult, Shutdown
from moeserve.engine.ranks.plan_link import PlanSender
from moeserve.engine.ranks.together import StepRows
from moeserve.engine.ranks.transport import RankHub
from moeserve.plan import Pending, StepPlan, StepResult
from moeserve.scheduling.steps import Runner

_POLL_SECONDS = 0.1  # between two looks whether a rank hangs


class PipelineExecutor:
    """Sends every rank the plan of a step, launches the stage of rank 0 and collects the results of all ranks.

    A failure of another rank becomes a RankError that names it.
    """

    def __init__(
        self,
        runner: Runner,
        hub: RankHub,
        on_message: Callable[[object], None],
        *,
        timeout: float,
        begin_step: Callable[[StepRows], None] = lambda _: None,
        width: int = 1,
        num_shards: int = 1,
    ) -> None:
        """on_message: receives every message of the other ranks that is not about a step. timeout: the seconds in which
        some rank has to get on while rank 0 waits for a step. begin_step: see `Rank`. width: the ranks of a
        stage with rows of their own. num_shards: the neighbouring ranks that have the same rows."""
        self._runner, self._hub, self._on_message, self._timeout = runner, hub, on_message, timeout
        self._begin_step = begin_step
        self._plans, self._num_shards = [PlanSender() for _ in range(width)], num_shards
        # The number of each step, its first stage, and when it was launched.
        self._in_flight: deque[tuple[int, Pending[StepResult], float]] = deque()
        self._ended_at = 0.0
        self._results: defaultdict[int, dict[int, StepResult]] = defaultdict(dict)
        self._work_of: dict[int, int] = {}
        self._num_signs = 0

    def launch(self, plans: Sequence[StepPlan]) -> Pending[list[StepResult]]:
        launched_at, rows = time.monotonic(), StepRows.of(plans)
        counts = (tuple(rows.num_rows), tuple(rows.num_logit_rows)) if len(plans) > 1 else ()
        for place, (sender, plan) in enumerate(zip(self._plans, plans, strict=True)):
            message = Forward(sender.encode(plan), *counts)
            for rank in self._hub.others:
                if rank // self._num_shards % len(plans) == place:
                    self._hub.send(rank, message)
        self._begin_step(rows)
        with self._blaming():
            self._in_flight.append((plans[0].step, self._runner.launch(plans[0]), launched_at))
        return _PipelineStep(self)

    def signs_of_work(self) -> int:
        """Return a count that moves while other ranks compute and rank 0 waits for them."""
        return self._num_signs

    def check(self) -> None:
        while (message := self._hub.receive(0)) is not None:
            self._take(message)
        self._hub.check_signs_of_life(self._timeout)

    def close(self) -> None:
        """Finish the steps in flight, then send `Shutdown`. Raise RankError if a rank has ended before."""
        while self._in_flight:
            self.wait()
        self._hub.check()
        self._hub.send_last(Shutdown())

    @property
    def is_done(self) -> bool:
        """True if the results of the oldest step in flight are there."""
        return len(self._results[self._in_flight[0][0]]) == len(self._hub.others)

    def wait(self) -> list[StepResult]:
        """Wait for the oldest step in flight. Raise RankError if a rank dies, or none gets on for too long."""
        number, step, launched_at = self._in_flight.popleft()
        with self._blaming():
            own = step.result()
        results, seen, deadline = self._results[number], self._num_signs, time.monotonic() + self._timeout
        while len(results) < len(self._hub.others):
            self._take(self._hub.receive(_POLL_SECONDS))
            now = time.monotonic()
            if self._num_signs != seen:
                seen, deadline = self._num_signs, now + self._timeout
            elif now > deadline:
                # Ranks of a stage wait for each other: the silent one is at fault.
                self._hub.check_signs_of_life(self._timeout)
                late = next(rank for rank in self._hub.others if rank not in results)
                raise RankError(f"{self._hub.name(late)} hung: it did not finish step {number}.")
        del self._results[number]
        results[0] = own
        began_at, self._ended_at = max(launched_at, self._ended_at), time.monotonic()
        seconds = self._ended_at - began_at
        return [joined([results[rank] for rank in self._at_place(place)], seconds) for place in range(len(self._plans))]

    def _at_place(self, place: int) -> range:
        """Return the ranks at a place of their stages, of shards the first, in the order of the stages."""
        return range(place * self._num_shards, len(self._hub.others) + 1, len(self._plans) * self._num_shards)

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except CollectiveError as error:
            fault = self._hub.fault_behind(error)
            self.check()
            raise fault from error

    def _take(self, message: object) -> None:
        if isinstance(message, RankResult):
            self._num_signs += 1
            self._results[message.result.step][message.rank] = message.result
        elif not isinstance(message, RankBeat):
            self._on_message(message)
        elif self._work_of.get(message.rank) != message.num_entered:
            self._num_signs += 1
            self._work_of[message.rank] = message.num_entered


@dataclass(frozen=True, slots=True)
class _PipelineStep:
    """The oldest step of a pipeline when its result is taken."""

    executor: PipelineExecutor

    @property
    def done(self) -> bool:
        return self.executor.is_done

    def result(self) -> list[StepResult]:
        return self.executor.wait()


def joined(results: Sequence[StepResult], seconds: float | None = None) -> StepResult:
    """Return the result of a step whose stages have these results, in their order.

    seconds: since it was launched, or since the step before it ended.
    """
    last, routing = results[-1], None
    if last.routing is not None:
        # Layer by layer, as a rank with all layers has it.
        routing = b"".join(bytes(result.routing) for result in results)
    sent = None
    if last.sent is not None:
        sent = [sum(of_stages) for of_stages in zip(*(result.sent or () for result in results), strict=True)]
    return StepResult(last.step, last.chunks, routing, sent, seconds)
