"""Experts of several ranks as rank 0 sees them: `Rebalancing` moves them between steps, `RankMemories` keeps counters.

Rank 0 decides on a new placement of a layer and announces it; every rank loads its share before the switch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from experts.memory.residency import ExpertMemoryStats, ResidencyCounters
from experts.placement.placement import Placement
from experts.placement.rebalance import (
    Drop,
    ExpertMigrator,
    Load,
    LoadWindow,
    RebalancePolicy,
    Rebalancer,
    RebalanceStats,
    Switch,
)
from moeserve.config import ServeConfig
from moeserve.engine.ranks.messages import DropLayer, LayerLoaded, PlaceLayer, RankBeat, ToRank
from moeserve.plan import StepPlan, StepResult
from moeserve.scheduling.steps import RanksObserver

# Seconds after which an attempt to place a layer ends; a later attempt may succeed.
_MIGRATION_SECONDS = 300.0

log = structlog.get_logger(__name__)


class Rebalancing(RanksObserver):
    """Gives a layer a new placement between two steps, when the rebalancer decides so. Lives on rank 0.

    On a device with a queue the changes of a switch come after the steps that are queued.
    """

    def __init__(
        self,
        rebalancer: Rebalancer,
        migrator: ExpertMigrator[Any],
        send_all: Callable[[ToRank], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """send_all: sends every other rank a message, before the next step."""
        self._rebalancer = rebalancer
        self._migrator = migrator
        self._send_all = send_all
        self._clock = clock
        # By the number of a step in flight, on the clock.
        self._begun: dict[int, float] = {}
        self._ended = float("-inf")

    @property
    def window(self) -> LoadWindow:
        """The load on which the rebalancer decides. As a listener of `ExpertRecording` it gets all routing."""
        return self._rebalancer.window

    def begin(self, plans: Sequence[StepPlan]) -> None:
        now = self._clock()
        self._begun[plans[0].step] = now
        self._follow(self._rebalancer.begin_step(now))

    def end(self, plans: Sequence[StepPlan], results: Sequence[StepResult]) -> None:
        """Measure the time of a step. A step that began during the previous step counts from the end of that step."""
        if outcome := self._migrator.outcome():
            self._rebalancer.loaded(0, outcome.version, outcome.error)
        started, self._ended = max(self._begun.pop(plans[0].step), self._ended), self._clock()
        self._rebalancer.end_step(self._ended - started)

    def abandon(self, plans: Sequence[StepPlan]) -> None:
        self._begun.pop(plans[0].step, None)

    def on_message(self, message: object) -> None:
        if isinstance(message, LayerLoaded):
            self._rebalancer.loaded(message.rank, message.version, message.error)

    def stats(self) -> RebalanceStats:
        return self._rebalancer.stats(self._clock())

    def _follow(self, command: Load | Switch | Drop | None) -> None:
        match command:
            case Load(migration):
                self._send_all(PlaceLayer(migration.version, migration.layer, migration.ranks))
                self._migrator.begin(migration)
            case Switch(migration):
                self._migrator.switch(migration.version)
                log.info("layer_placed_anew", layer=migration.layer, gain=self.stats().last_gain)
            case Drop(version):
                self._send_all(DropLayer(version))
                self._migrator.drop(version)
                log.warning("layer_not_placed", error=self.stats().last_error)


def start_rebalancing(
    config: ServeConfig, placement: Placement, migrator: ExpertMigrator[Any], send_all: Callable[[ToRank], None]
) -> Rebalancing | None:
    """Return None unless the settings ask for rebalancing. It needs the recorded routing."""
    if not config.rebalance_interval or not config.record_experts:
        return None
    rebalancer = Rebalancer(
        placement,
        RebalancePolicy(config.rebalance_threshold),
        interval=config.rebalance_interval,
        timeout=_MIGRATION_SECONDS,
    )
    return Rebalancing(rebalancer, migrator, send_all)


class RankMemories:
    """The counters of all ranks' expert memories: of rank 0 as they are now, of other ranks from their last beat."""

    def __init__(self, own: Callable[[], ExpertMemoryStats], num_ranks: int, num_layers: int) -> None:
        self._own = own
        # Ranks begin to count after they have warmed up.
        nothing = ExpertMemoryStats(ResidencyCounters(), 0.0, 0.0, 0, [[] for _ in range(num_layers)])
        self._latest = [nothing] * (num_ranks - 1)

    def on_message(self, message: object) -> None:
        if isinstance(message, RankBeat) and message.memory is not None:
            self._latest[message.rank - 1] = message.memory

    def stats(self) -> list[ExpertMemoryStats]:
        return [self._own(), *self._latest]
