"""Placing layers anew between steps: rank 0 decides and tells the others, and every rank does its part."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from experts.placement import Placement
from experts.rebalance import Drop, Load, Migration, Outcome, RebalancePolicy, Rebalancer, RebalanceStats, Switch
from experts.residency import ExpertMemoryStats, ResidencyCounters
from moeserve.config import ServeConfig
from moeserve.experts.observe import ExpertRecording
from moeserve.plan import StepPlan, StepResult
from moeserve.ranks.messages import DropLayer, LayerLoaded, PlaceLayer, RankBeat, ToRank
from moeserve.steps import Executor, LaunchingExecutor

# A layer that has not been read by then will not be; the next attempt may go better.
_MIGRATION_SECONDS = 300.0

log = structlog.get_logger(__name__)


class Migrator(Protocol):
    """This rank's part (`experts.rebalance.ExpertMigrator`). version: the migration in use."""

    version: int

    def begin(self, migration: Migration) -> None: ...

    def outcome(self) -> Outcome | None: ...

    def switch(self, version: int) -> None: ...

    def drop(self, version: int) -> None: ...


class StepsOfRanks(Protocol):
    """Computes steps on all ranks (`moeserve.ranks.steps.RankedExecutor`)."""

    placement_version: int
    on_loaded: Callable[[LayerLoaded], None]

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]: ...

    def tell(self, message: ToRank) -> None: ...

    def check(self) -> None: ...


def rebalancing(
    executor: StepsOfRanks,
    config: ServeConfig,
    placement: Placement,
    migrator: Migrator,
    recording: ExpertRecording | None,
) -> Executor:
    """The executor itself unless the settings want experts to be placed anew while serving."""
    if not config.rebalance_interval or recording is None:
        return executor
    rebalancer = Rebalancer(
        placement,
        RebalancePolicy(config.rebalance_threshold),
        interval=config.rebalance_interval,
        timeout=_MIGRATION_SECONDS,
    )
    recording.listeners.append(rebalancer.window)
    if isinstance(executor, LaunchingExecutor):
        return RebalancingLauncher(executor, rebalancer, migrator)
    return RebalancingExecutor(executor, rebalancer, migrator)


def follow(message: PlaceLayer | DropLayer, migrator: Migrator) -> None:
    """What a rank does when rank 0 says so between steps."""
    match message:
        case PlaceLayer():
            migrator.begin(Migration(message.version, message.layer, message.ranks))
        case DropLayer():
            migrator.drop(message.version)


class RebalancingExecutor:
    """Rank 0: computes the steps and, between two of them, has a layer placed anew if the rebalancer says so."""

    def __init__(
        self,
        executor: StepsOfRanks,
        rebalancer: Rebalancer,
        migrator: Migrator,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._rebalancer = rebalancer
        self._migrator = migrator
        self._clock = clock
        self._ended = float("-inf")
        executor.on_loaded = lambda loaded: rebalancer.loaded(loaded.rank, loaded.version, loaded.error)

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        started = self._begin()
        results = self._executor.run(plans)
        self._end(started)
        return results

    def _begin(self) -> float:
        """What is to be done before a step; the time when it began."""
        started = self._clock()
        self._follow(self._rebalancer.begin_step(started))
        return started

    def _end(self, started: float) -> None:
        """Of a step that was begun: if others were computed then, it lasts from the end of the one before."""
        if outcome := self._migrator.outcome():
            self._rebalancer.loaded(0, outcome.version, outcome.error)
        started, self._ended = max(started, self._ended), self._clock()
        self._rebalancer.end_step(self._ended - started)

    def check(self) -> None:
        self._executor.check()

    def stats(self) -> RebalanceStats:
        return self._rebalancer.stats(self._clock())

    def _follow(self, command: Load | Switch | Drop | None) -> None:
        match command:
            case Load(migration):
                self._executor.tell(PlaceLayer(migration.version, migration.layer, migration.ranks))
                self._migrator.begin(migration)
            case Switch(migration):
                self._migrator.switch(migration.version)
                self._executor.placement_version = migration.version
                log.info("layer_placed_anew", layer=migration.layer, gain=self.stats().last_gain)
            case Drop(version):
                self._executor.tell(DropLayer(version))
                self._migrator.drop(version)
                log.warning("layer_not_placed", error=self.stats().last_error)


class LaunchingSteps(StepsOfRanks, Protocol):
    """Steps that are queued (`moeserve.ranks.steps.RankedLauncher`)."""

    def launch(self, plans: Sequence[StepPlan]) -> Callable[[], list[StepResult]]: ...


class RebalancingLauncher(RebalancingExecutor):
    """The same where steps are queued: what a switch changes on a device, it changes behind the steps queued there."""

    def __init__(
        self,
        executor: LaunchingSteps,
        rebalancer: Rebalancer,
        migrator: Migrator,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(executor, rebalancer, migrator, clock)
        self._launching = executor

    def launch(self, plans: Sequence[StepPlan]) -> Callable[[], list[StepResult]]:
        started = self._begin()
        wait = self._launching.launch(plans)

        def results() -> list[StepResult]:
            found = wait()
            self._end(started)
            return found

        return results


# The expert memories of all ranks, as rank 0 knows them.


class RankMemories:
    """Asks the memory of rank 0 and keeps what the others told last, a fraction of a second ago."""

    def __init__(self, own: Callable[[], ExpertMemoryStats], num_ranks: int, num_layers: int) -> None:
        self._own = own
        # What is true of all before their first step: they begin to count when they have warmed up.
        nothing = ExpertMemoryStats(ResidencyCounters(), 0.0, 0.0, 0, [[] for _ in range(num_layers)])
        self._told = [nothing] * (num_ranks - 1)

    def heed(self, beat: RankBeat) -> None:
        if beat.memory is not None:
            self._told[beat.rank - 1] = beat.memory

    def stats(self) -> list[ExpertMemoryStats]:
        """Of each rank."""
        return [self._own(), *self._told]
