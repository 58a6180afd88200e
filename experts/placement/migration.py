"""A rank's part in placing a layer anew: what it is to hold next is read beside the steps, then put in place at once.

Double-buffered: until the switch the rank computes with what it had, so a reader that is slow or fails costs nothing
but the attempt. Who decides and when all switch is `experts.placement.rebalance`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from experts.placement.placement import Ranks
from experts.placement.rebalance import Migration

Weights = TypeVar("Weights")


class PlacedExperts(Protocol):
    """Knows which expert is in which of this rank's slots (`experts.dispatch.ExpertParallel`)."""

    def arrivals(self, layer: int, ranks: tuple[Ranks, ...]) -> Mapping[int, int]: ...

    def place(self, layer: int, ranks: tuple[Ranks, ...]) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has become of reading for an attempt; `error` is None if all is there."""

    version: int
    error: str | None


class ExpertMigrator(Generic[Weights]):
    """Used by the thread that computes the steps; reads in one of its own. Layers are those of the placement."""

    def __init__(
        self,
        placed: PlacedExperts,
        read: Callable[[int, int], Weights],
        install: Callable[[int, int, Weights], None],
    ) -> None:
        """read(layer, expert): called in the other thread, may raise. install(layer, slot, weights): between steps."""
        self.version = 0
        self._placed = placed
        self._read = read
        self._install = install
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="migration")
        self._migration: Migration | None = None
        self._reading: Future[dict[int, Weights]] | None = None
        self._told = True

    def begin(self, migration: Migration) -> None:
        """Starts to read what the migration brings here. Another one that had begun is dropped."""
        arrivals = self._placed.arrivals(migration.layer, migration.ranks)
        self._migration, self._told = migration, False
        self._reading = self._pool.submit(self._read_all, migration, arrivals)

    def outcome(self) -> Outcome | None:
        """Once for every attempt, when reading has ended."""
        if self._migration is None or self._reading is None or self._told or not self._reading.done():
            return None
        self._told = True
        error = self._reading.exception()
        return Outcome(self._migration.version, None if error is None else f"{type(error).__name__}: {error}")

    def switch(self, version: int) -> None:
        """Takes what was read into use, between two steps. ValueError if this attempt is not ready here."""
        if self._migration is None or self._reading is None or self._migration.version != version:
            raise ValueError(f"placement {version} was not prepared here")
        migration, arrived = self._migration, self._reading.result(timeout=0)
        for slot, weights in arrived.items():
            self._install(migration.layer, slot, weights)
        self._placed.place(migration.layer, migration.ranks)
        self.version = version
        self._migration = self._reading = None

    def drop(self, version: int) -> None:
        """Forgets an attempt."""
        if self._migration is not None and self._migration.version == version:
            self._migration = self._reading = None

    def _read_all(self, migration: Migration, arrivals: Mapping[int, int]) -> dict[int, Weights]:
        arrived = {}
        for slot, expert in arrivals.items():
            if self._migration is not migration:
                break
            arrived[slot] = self._read(migration.layer, expert)
        return arrived
