"""Placing layers anew over the steps of two ranks, without tensors: nobody switches early, failures cost nothing."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from experts.placement.placement import Placement, Ranks, contiguous, refilled
from experts.placement.rebalance import ExpertMigrator, Migration, Outcome, RebalancePolicy, Rebalancer
from moeserve.engine.experts.rebalancing import Rebalancing
from moeserve.engine.ranks.messages import DropLayer, LayerLoaded, PlaceLayer, ToRank
from moeserve.engine.ranks.steps import follow
from moeserve.plan import StepPlan


def plans_of(step: int) -> list[StepPlan]:
    return [StepPlan(step, []), StepPlan(step, [])]


SKEWED = np.array([[0, 1, 0, 1, 0, 2, 4, 6] * 200])


class Slots:
    """The slots of one rank, each with the name of the expert in it."""

    def __init__(self, placement: Placement, rank: int) -> None:
        self.placement = placement
        self.rank = rank
        self.weights = [[f"expert {e}" for e in held] for held in self.held()]
        self._slots = self.held()

    def held(self) -> list[tuple[int, ...]]:
        return [self.placement.experts_on(layer, self.rank) for layer in range(self.placement.num_layers)]

    def arrivals(self, layer: int, ranks: tuple[Ranks, ...]) -> dict[int, int]:
        after = refilled(self._slots[layer], self.placement.with_layer(layer, ranks).experts_on(layer, self.rank))
        return {slot: e for slot, e in enumerate(after) if e != self._slots[layer][slot]}

    def place(self, layer: int, ranks: tuple[Ranks, ...]) -> None:
        self.placement = self.placement.with_layer(layer, ranks)
        self._slots[layer] = refilled(self._slots[layer], self.held()[layer])

    def install(self, layer: int, slot: int, weights: str) -> None:
        self.weights[layer][slot] = weights

    def check(self) -> None:
        for held, weights in zip(self.held(), self.weights, strict=True):
            assert sorted(weights) == sorted(f"expert {e}" for e in held)


class Rank:
    """A rank's slots and its migrator. `gate` holds its reads back while it is cleared; `fails` makes them fail."""

    def __init__(self, rank: int) -> None:
        self.slots = Slots(contiguous(1, 8, 2), rank)
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self.read: list[int] = []
        self.migrator: ExpertMigrator[str] = ExpertMigrator(self.slots, self._read, self.slots.install)

    def _read(self, layer: int, expert: int) -> str:
        assert self.gate.wait(30)
        if self.fails:
            raise OSError("the disk is gone")
        self.read.append(expert)
        return f"expert {expert}"

    def wait(self) -> Outcome:
        """The outcome of its reader once it has ended."""
        while (outcome := self.migrator.outcome()) is None:
            reading = self.migrator._reading
            assert reading is not None
            reading.exception(timeout=30)
        return outcome


class Service:
    """Rank 1 is behind the wire: it follows what it is told, and switches to the version that a step names."""

    def __init__(self) -> None:
        self.ranks = Rank(0), Rank(1)
        self.told: list[ToRank] = []
        self.reports = True
        self.launched = 0
        self.now = 0.0
        self.rebalancer = Rebalancer(contiguous(1, 8, 2), RebalancePolicy(0.05), interval=2, timeout=50)
        self.rebalancing = Rebalancing(self.rebalancer, self.ranks[0].migrator, self.tell, lambda: self.now)

    @property
    def version(self) -> int:
        """The version of rank 0, which its steps name."""
        return self.ranks[0].migrator.version

    def tell(self, message: ToRank) -> None:
        self.told.append(message)
        assert isinstance(message, PlaceLayer | DropLayer)
        follow(message, self.ranks[1].migrator)

    def launch(self) -> None:
        self.now += 1
        self.launched += 1
        self.rebalancing.begin(plans_of(self.launched))
        other = self.ranks[1].migrator
        if self.version != other.version:
            other.switch(self.version)
        if self.reports and (outcome := other.outcome()):
            self.rebalancing.on_message(LayerLoaded(1, outcome.version, outcome.error))

    def step(self) -> None:
        self.launch()
        self.rebalancing.end(plans_of(self.launched), [])
        assert {rank.migrator.version for rank in self.ranks} == {self.version}
        assert self.ranks[0].slots.placement == self.ranks[1].slots.placement == self.rebalancer.placement
        for rank in self.ranks:
            rank.slots.check()


def skewed_service() -> Service:
    service = Service()
    service.rebalancer.window.add(SKEWED[..., None].astype(np.int16))
    return service


def test_all_ranks_switch_before_the_same_step_once_the_slowest_has_read() -> None:
    service = skewed_service()
    first, other = service.ranks
    other.gate.clear()
    service.step()
    service.step()
    assert isinstance(service.told[-1], PlaceLayer)
    first.migrator._reading.exception(timeout=30)  # type: ignore[union-attr]
    for _ in range(3):
        service.step()
        assert service.version == 0
    assert service.rebalancing.stats().layer_in_progress == 0
    other.gate.set()
    other.migrator._reading.exception(timeout=30)  # type: ignore[union-attr]
    service.step()
    service.step()
    assert service.version == 1
    assert first.slots.placement != contiguous(1, 8, 2)
    stats = service.rebalancing.stats()
    assert (stats.num_migrations, stats.layer_in_progress, stats.seconds_since_success) == (1, None, 0.0)
    assert stats.num_experts_loaded == len(first.read) + len(other.read) > 0
    assert stats.steady_step_p99 == 0.0
    assert stats.migrating_step_p99 == 0.0


def test_where_steps_are_queued_ranks_switch_before_the_same_step_and_its_time_is_its_own() -> None:
    service = skewed_service()
    for step in range(8):
        service.launch()
        assert {rank.migrator.version for rank in service.ranks} == {service.version}
        if step:
            service.rebalancing.end(plans_of(service.launched - 1), [])
        for rank in service.ranks:
            if (reading := rank.migrator._reading) is not None:
                reading.exception(timeout=30)
    assert service.version == 1
    assert service.ranks[0].slots.placement == service.ranks[1].slots.placement == service.rebalancer.placement
    # Each is waited for a turn late, and lasts from the end of the one before.
    assert service.rebalancing.stats().steady_step_p99 == 1.0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_read_leaves_all_where_they_were(rank: int) -> None:
    service = skewed_service()
    service.ranks[rank].fails = True
    service.step()
    service.step()
    for each in service.ranks:
        each.migrator._reading.exception(timeout=30)  # type: ignore[union-attr]
    service.step()
    service.step()
    stats = service.rebalancing.stats()
    assert stats.num_migrations == 0
    assert stats.num_failures >= 1
    assert stats.last_error == f"rank {rank}: OSError: the disk is gone"
    assert service.version == 0
    assert DropLayer(1) in service.told
    service.ranks[rank].fails = False
    service.rebalancer.window.add(SKEWED[..., None].astype(np.int16))
    for _ in range(8):
        service.step()
        for each in service.ranks:
            if each.migrator._reading is not None:
                each.migrator._reading.exception(timeout=30)
    assert service.rebalancing.stats().num_migrations >= 1


def test_a_rank_that_is_silent_for_too_long_ends_the_attempt() -> None:
    service = skewed_service()
    service.reports = False
    service.step()
    service.step()
    service.ranks[0].migrator._reading.exception(timeout=30)  # type: ignore[union-attr]
    service.step()
    service.now += 60
    service.step()
    assert service.rebalancing.stats().last_error == "rank 1 has not loaded in 50 s"
    service.step()


def test_a_migration_that_begins_while_another_is_read_takes_its_place() -> None:
    rank = Rank(0)
    rank.gate.clear()
    ranks = tuple((1 - held[0],) for held in contiguous(1, 8, 2).ranks[0])
    rank.migrator.begin(Migration(1, 0, ranks))
    rank.migrator.begin(Migration(2, 0, ranks))
    rank.gate.set()
    assert rank.wait() == Outcome(2, None)
    assert rank.migrator.outcome() is None
    with pytest.raises(ValueError, match="placement 1 was not prepared"):
        rank.migrator.switch(1)
    rank.migrator.switch(2)
    rank.slots.check()
    assert rank.slots.placement.ranks[0] == ranks
