"""Migrate layers to better placements while serving: when, each rank's part, and counts of rows sent. Torch-free.

One layer migrates at a time, in three steps. Every rank loads the experts that it will hold, beside the experts in use.
Once all ranks have loaded, all switch before the same step. Then the experts that have left are dropped. If a rank
cannot load, the attempt ends and the placement in use stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from experts.placement.moves import evened_out, load_shares
from experts.placement.placement import Placement, Ranks, Serving

Weights = TypeVar("Weights")

_MAX_MOVES = 8  # experts of a layer that a migration moves at most
# A window with fewer choices per expert says more about chance than about experts.
_CHOICES_PER_EXPERT = 8
_LAYERS_TRIED_AT_ONCE = 4  # layers that are searched for a better placement between two steps
_STEPS_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Migration:
    """A layer's new placement. `version` numbers the attempts."""

    version: int
    layer: int
    ranks: tuple[Ranks, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """The order to every rank to load the experts that the migration gives it."""

    migration: Migration


@dataclass(frozen=True, slots=True)
class Switch:
    """The order to use the migration from the step that begins now, since all ranks have loaded."""

    migration: Migration


@dataclass(frozen=True, slots=True)
class Drop:
    """The order to drop the experts loaded for an attempt, since it has failed."""

    version: int


@dataclass(frozen=True, slots=True)
class RebalanceStats:
    """Counts and times of migrations, for operators.

    seconds_since_success: None before the first. last_gain: the predicted balancedness of the layer, before and after.
    num_experts_loaded: by all ranks, in successful attempts. layer_in_progress: None between attempts. steady_step_p99,
    migrating_step_p99: seconds, of the latest steps without and with a migration; None before the first such step.
    """

    num_migrations: int = 0
    num_failures: int = 0
    num_experts_loaded: int = 0
    seconds_since_success: float | None = None
    last_gain: tuple[float, float] | None = None
    last_error: str | None = None
    layer_in_progress: int | None = None
    steady_step_p99: float | None = None
    migrating_step_p99: float | None = None


class Rebalancer:
    """Decides on rank 0 when a layer migrates. Reads no clock: all times are seconds of one steady clock."""

    def __init__(self, placement: Placement, policy: RebalancePolicy, *, interval: int, timeout: float) -> None:
        """interval: steps between two decisions. timeout: seconds that ranks may load."""
        self.placement = placement
        self.window = LoadWindow(placement.num_layers, placement.num_experts)
        self._policy = policy
        self._interval = interval
        self._timeout = timeout
        self._num_steps = 0
        self._version = 0
        self._attempt: _Attempt | None = None
        self._succeeded_at: float | None = None
        self._stats = RebalanceStats()
        self._was_migrating = False
        self._step_seconds: dict[bool, deque[float]] = {
            migrating: deque(maxlen=_STEPS_REMEMBERED) for migrating in (False, True)
        }

    @property
    def is_migrating(self) -> bool:
        return self._attempt is not None

    def begin_step(self, now: float) -> Load | Switch | Drop | None:
        """Return the order to all ranks before the step that begins, None without one."""
        self._num_steps += 1
        self._was_migrating = self.is_migrating
        if self._attempt is not None:
            return self._proceed(self._attempt, now)
        if self._num_steps % self._interval == 0 and self.window.is_full():
            return self._decide(now)
        return None

    def end_step(self, seconds: float) -> None:
        """Record the seconds of a step, including the work that was ordered before it."""
        self._step_seconds[self._was_migrating or self.is_migrating].append(seconds)

    def loaded(self, rank: int, version: int, error: str | None) -> None:
        """Record that a rank has loaded its part of an attempt, or why it could not. Earlier attempts are ignored."""
        attempt = self._attempt
        if attempt is None or version != attempt.migration.version:
            return
        if error is None:
            attempt.missing.discard(rank)
        elif attempt.error is None:
            attempt.error = f"rank {rank}: {error}"

    def stats(self, now: float) -> RebalanceStats:
        since = None if self._succeeded_at is None else now - self._succeeded_at
        layer = None if self._attempt is None else self._attempt.migration.layer
        return replace(
            self._stats,
            seconds_since_success=since,
            layer_in_progress=layer,
            steady_step_p99=_p99(self._step_seconds[False]),
            migrating_step_p99=_p99(self._step_seconds[True]),
        )

    def _decide(self, now: float) -> Load | None:
        choice = self._policy.choose(self.window.load, self.placement)
        self.window.fade()
        if choice is None:
            return None
        self._version += 1
        migration = Migration(self._version, choice.layer, choice.ranks)
        old = self.placement.ranks[choice.layer]
        num_experts = sum(len(set(new) - set(held)) for new, held in zip(choice.ranks, old, strict=True))
        everybody = set(range(self.placement.num_ranks))
        self._attempt = _Attempt(migration, now, choice.gain, num_experts, everybody)
        return Load(migration)

    def _proceed(self, attempt: _Attempt, now: float) -> Switch | Drop | None:
        migration, stats = attempt.migration, self._stats
        if attempt.error is None and attempt.missing and now - attempt.since > self._timeout:
            attempt.error = f"rank {min(attempt.missing)} has not loaded in {self._timeout:g} s"
        if attempt.error is not None:
            self._attempt = None
            self._stats = replace(stats, num_failures=stats.num_failures + 1, last_error=attempt.error)
            return Drop(migration.version)
        if attempt.missing:
            return None
        self._attempt = None
        self._succeeded_at = now
        self.placement = self.placement.with_layer(migration.layer, migration.ranks)
        self._stats = replace(
            stats,
            num_migrations=stats.num_migrations + 1,
            num_experts_loaded=stats.num_experts_loaded + attempt.num_experts,
            last_gain=attempt.gain,
        )
        return Switch(migration)


@dataclass(slots=True)
class _Attempt:
    migration: Migration
    since: float
    gain: tuple[float, float]
    num_experts: int
    missing: set[int]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A layer's new ranks; `gain` is its balancedness before and after."""

    layer: int
    ranks: tuple[Ranks, ...]
    gain: tuple[float, float]


class LoadWindow:
    """Recent choices per layer and expert; every `fade` halves the counts."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.load = np.zeros((num_layers, num_experts))

    def add(self, ids: NDArray[np.int16], token_ids: Sequence[int] = ()) -> None:
        """Count choices. ids: [L, T, k], -1 where a layer did not compute a token. token_ids are ignored."""
        num_layers, num_experts = self.load.shape
        cells = ids + np.arange(num_layers)[:, None, None] * num_experts
        self.load += np.bincount(cells[ids >= 0], minlength=self.load.size).reshape(self.load.shape)

    def fade(self) -> None:
        self.load /= 2

    def is_full(self) -> bool:
        """Return True if enough choices were counted for a decision."""
        return bool(self.load.sum() >= _CHOICES_PER_EXPERT * self.load.size)


class RebalancePolicy:
    """Chooses a badly balanced layer whose balancedness can be raised by more than `threshold`."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._tried: set[int] = set()
        self._shares: dict[int, tuple[Sequence[Ranks], NDArray[np.float64]]] = {}

    def choose(self, load: NDArray[np.floating], placement: Placement) -> Choice | None:
        """Try untried layers, the worst balanced first; return None if none gains enough. load: [L, E]."""
        before = np.array([self._balancedness(load[layer], placement, layer) for layer in range(placement.num_layers)])
        worth_trying = [layer for layer in np.argsort(before, kind="stable") if 1 - before[layer] > self._threshold]
        if self._tried.issuperset(worth_trying):
            self._tried.clear()
        untried = [int(layer) for layer in worth_trying if layer not in self._tried]
        for layer in untried[:_LAYERS_TRIED_AT_ONCE]:
            self._tried.add(layer)
            ranks = evened_out(placement.ranks[layer], load[layer], placement.num_ranks, _MAX_MOVES)
            after = _balancedness(load[layer], load_shares(ranks, placement.num_ranks))
            if after > before[layer] + self._threshold:
                return Choice(layer, ranks, (float(before[layer]), after))
        return None

    def _balancedness(self, load: NDArray[np.floating], placement: Placement, layer: int) -> float:
        ranks = placement.ranks[layer]
        known = self._shares.get(layer)
        if known is None or known[0] is not ranks:
            known = self._shares[layer] = ranks, load_shares(ranks, placement.num_ranks)
        return _balancedness(load, known[1])


def _balancedness(load: NDArray[np.floating], shares: NDArray[np.float64]) -> float:
    of_ranks = load @ shares
    return float(of_ranks.mean() / of_ranks.max()) if of_ranks.any() else 1.0


def _p99(seconds: Collection[float]) -> float | None:
    return float(np.quantile(list(seconds), 0.99)) if seconds else None


class PlacedExperts(Protocol):
    """Knows which expert is in which of this rank's slots (`experts.parallel.dispatch.ExpertParallel`)."""

    def arrivals(self, layer: int, ranks: tuple[Ranks, ...]) -> Mapping[int, int]: ...

    def place(self, layer: int, ranks: tuple[Ranks, ...]) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of reading for an attempt; `error` is None if all experts were read."""

    version: int
    error: str | None


class ExpertMigrator(Generic[Weights]):
    """A rank's part in migrations: reads arriving experts beside the steps, then installs them all at once.

    Double-buffered: until the switch the rank computes with its old experts, so a slow or failing reader costs only the
    attempt. Used by the thread that computes the steps; reads in a thread of its own. Layers are numbered as in the
    placement.
    """

    def __init__(
        self, placed: PlacedExperts, read: Callable[[int, int], Weights], install: Callable[[int, int, Weights], None]
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
        """Start to read the experts that the migration brings to this rank, and drop an earlier migration."""
        arrivals = self._placed.arrivals(migration.layer, migration.ranks)
        self._migration, self._told = migration, False
        self._reading = self._pool.submit(self._read_all, migration, arrivals)

    def outcome(self) -> Outcome | None:
        """Return the outcome when reading has ended, once for every attempt; else None."""
        if self._migration is None or self._reading is None or self._told or not self._reading.done():
            return None
        self._told = True
        error = self._reading.exception()
        return Outcome(self._migration.version, None if error is None else f"{type(error).__name__}: {error}")

    def switch(self, version: int) -> None:
        """Install the experts that were read, between two steps. ValueError if this attempt is not prepared here."""
        if self._migration is None or self._reading is None or self._migration.version != version:
            raise ValueError(f"placement {version} was not prepared here")
        migration, arrived = self._migration, self._reading.result(timeout=0)
        for slot, weights in arrived.items():
            self._install(migration.layer, slot, weights)
        self._placed.place(migration.layer, migration.ranks)
        self.version = version
        self._migration = self._reading = None

    def drop(self, version: int) -> None:
        if self._migration is not None and self._migration.version == version:
            self._migration = self._reading = None

    def _read_all(self, migration: Migration, arrivals: Mapping[int, int]) -> dict[int, Weights]:
        arrived = {}
        for slot, expert in arrivals.items():
            if self._migration is not migration:
                break
            arrived[slot] = self._read(migration.layer, expert)
        return arrived


class RemoteRanks:
    """Counts `num_rows` (rows: a token in a layer) and `num_sent`, the remote ranks of each row, each rank once."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_sent = 0
        self._placement: Placement | None = None
        self._serving: list[Serving] = []

    def add(self, ids: NDArray[np.int16], home: int, placement: Placement) -> None:
        """Count a step. ids: [L, T, k] of tokens at home on rank `home`, negative where a layer left a row out."""
        if placement is not self._placement:
            self._placement = placement
            self._serving = [placement.serving(layer) for layer in range(placement.num_layers)]
        for serving, of_layer in zip(self._serving, ids, strict=True):
            known = of_layer[of_layer[:, 0] >= 0]
            ranks = serving.ranks(np.full(len(known), home), known).astype(np.uint64)
            reached = np.bitwise_or.reduce(np.left_shift(np.uint64(1), ranks), axis=1)
            reached &= ~np.left_shift(np.uint64(1), np.uint64(home))
            self.num_rows += len(known)
            self.num_sent += int(np.bitwise_count(reached).sum())
