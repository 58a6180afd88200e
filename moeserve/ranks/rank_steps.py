"""The steps of every rank but 0, as rank 0 sends them."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol

from experts.errors import CollectiveError
from moeserve.executor import LaunchedStep, Runner, launch_on
from moeserve.expert_service.rebalancing import Migrator, follow
from moeserve.plan_codec import decode_plan
from moeserve.ranks.link import BeatThread, RankLink
from moeserve.ranks.messages import Forward, LayerLoaded, RankResult, Shutdown
from moeserve.ranks.step_rows import StepRows
from moeserve.result_codec import encode_result

# Between two looks at the device and at what rank 0 says. Nobody's step is longer for it than a launch takes.
_POLL_SECONDS = 20e-6


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
                time.sleep(_POLL_SECONDS)
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
