"""Placing layers anew between steps: rank 0 decides and tells the others, and every rank does its part."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from experts.placement import Placement
from experts.rebalance import (
    Drop,
    Load,
    LoadWindow,
    Migrator,
    RebalancePolicy,
    Rebalancer,
    RebalanceStats,
    Switch,
)
from experts.residency import ExpertMemoryStats, ResidencyCounters
from moeserve.config import ServeConfig
from moeserve.plan import StepPlan, StepResult
from moeserve.ranks.messages import DropLayer, LayerLoaded, PlaceLayer, RankBeat, ToRank
from moeserve.steps import RanksObserver

# A layer that has not been read by then will not be; the next attempt may go better.
_MIGRATION_SECONDS = 300.0

log = structlog.get_logger(__name__)


class Rebalancing(RanksObserver):
    """Rank 0: between two steps it has a layer placed anew if the rebalancer says so.

    What a switch changes on a device with a queue, it changes behind the steps queued there.
    """

    def __init__(
        self,
        rebalancer: Rebalancer,
        migrator: Migrator,
        tell: Callable[[ToRank], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """tell: sends every other rank a message, before the next step."""
        self._rebalancer = rebalancer
        self._migrator = migrator
        self._tell = tell
        self._clock = clock
        self._begun: deque[float] = deque()
        self._ended = float("-inf")

    @property
    def window(self) -> LoadWindow:
        """What the rebalancer goes by; somebody adds the routing of all steps."""
        return self._rebalancer.window

    def begin(self, plans: Sequence[StepPlan]) -> None:
        now = self._clock()
        self._begun.append(now)
        self._follow(self._rebalancer.begin_step(now))

    def end(self, plans: Sequence[StepPlan], results: Sequence[StepResult]) -> None:
        """If other steps were computed when it began, it has lasted from the end of the one before."""
        if outcome := self._migrator.outcome():
            self._rebalancer.loaded(0, outcome.version, outcome.error)
        started, self._ended = max(self._begun.popleft(), self._ended), self._clock()
        self._rebalancer.end_step(self._ended - started)

    def heed(self, message: object) -> None:
        """Another rank has said something."""
        if isinstance(message, LayerLoaded):
            self._rebalancer.loaded(message.rank, message.version, message.error)

    def stats(self) -> RebalanceStats:
        return self._rebalancer.stats(self._clock())

    def _follow(self, command: Load | Switch | Drop | None) -> None:
        match command:
            case Load(migration):
                self._tell(PlaceLayer(migration.version, migration.layer, migration.ranks))
                self._migrator.begin(migration)
            case Switch(migration):
                self._migrator.switch(migration.version)
                log.info("layer_placed_anew", layer=migration.layer, gain=self.stats().last_gain)
            case Drop(version):
                self._tell(DropLayer(version))
                self._migrator.drop(version)
                log.warning("layer_not_placed", error=self.stats().last_error)


def start_rebalancing(
    config: ServeConfig, placement: Placement, migrator: Migrator, tell: Callable[[ToRank], None]
) -> Rebalancing | None:
    """None unless the settings want experts to be placed anew while serving, which goes by what is recorded."""
    if not config.rebalance_interval or not config.record_experts:
        return None
    rebalancer = Rebalancer(
        placement,
        RebalancePolicy(config.rebalance_threshold),
        interval=config.rebalance_interval,
        timeout=_MIGRATION_SECONDS,
    )
    return Rebalancing(rebalancer, migrator, tell)


# The expert memories of all ranks, as rank 0 knows them.


class RankMemories:
    """Asks the memory of rank 0 and keeps what the others told last, a fraction of a second ago."""

    def __init__(self, own: Callable[[], ExpertMemoryStats], num_ranks: int, num_layers: int) -> None:
        self._own = own
        # What is true of all before their first step: they begin to count when they have warmed up.
        nothing = ExpertMemoryStats(ResidencyCounters(), 0.0, 0.0, 0, [[] for _ in range(num_layers)])
        self._told = [nothing] * (num_ranks - 1)

    def heed(self, message: object) -> None:
        """Another rank has said something."""
        if isinstance(message, RankBeat) and message.memory is not None:
            self._told[message.rank - 1] = message.memory

    def stats(self) -> list[ExpertMemoryStats]:
        """Of each rank."""
        return [self._own(), *self._told]
