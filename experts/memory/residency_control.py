"""Residency of all layers and the transfers between tiers, decided together. Pure.

One `ResidencyControl` is driven by whoever really copies, or by a simulator: `access` and `release` follow the
computation, `predict` follows predictors, and the copier asks `next_transfer`, reports `moved`, looks at `must_stop`
between chunks and ends with `finish` or `stop`. It is not thread-safe; callers hold a lock of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import sub
from typing import Any

from experts.memory.eviction import EvictionPolicy
from experts.memory.residency import Access, LayerResidency, Load
from experts.memory.transfers import Priority, Transfer, TransferQueue

# Layers ahead up to which it is counted what was foreseen.
_FARTHEST = 3


@dataclass(slots=True)
class ResidencyCounters:
    """Since the start. An event's expert is a hit if it was ready, late if its prefetch was under way, else a miss.

    Bytes moved by prefetches are useful when an event found the expert ready, late when the event came before the end,
    wasted when the expert was evicted unused, cancelled when the copy was given up; the rest is not decided yet.

    num_foreseeable: experts of events for which some had been named 1, 2, 3 layers ahead; num_foreseen: how many of
    them were among these. Their ratio is the recall of what was asked for. Tuples, so that a copy is a snapshot.
    """

    num_events: int = 0
    num_hits: int = 0
    num_late: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    num_cancelled: int = 0
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    useful_bytes: int = 0
    late_bytes: int = 0
    wasted_bytes: int = 0
    cancelled_bytes: int = 0
    num_foreseeable: tuple[int, ...] = (0,) * _FARTHEST
    num_foreseen: tuple[int, ...] = (0,) * _FARTHEST

    def since(self, before: ResidencyCounters) -> ResidencyCounters:
        """What was counted after `before`, an earlier copy of these."""
        changes: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            new, old = getattr(self, name), getattr(before, name)
            changes[name] = tuple(map(sub, new, old)) if isinstance(new, tuple) else new - old
        return ResidencyCounters(**changes)


class ResidencyControl:
    """Layers are numbered among those that have experts, in the order in which they are computed."""

    def __init__(
        self,
        num_slots: Sequence[int],
        num_experts: int,
        expert_bytes: int,
        policy_of: Callable[[int], EvictionPolicy],
    ) -> None:
        """num_slots: of each layer. expert_bytes: what one expert takes. policy_of: makes a layer's policy."""
        self.layers = [LayerResidency(num_experts, count, policy_of(layer)) for layer, count in enumerate(num_slots)]
        self.counters = ResidencyCounters()
        self._expert_bytes = expert_bytes
        self._queue = TransferQueue()
        self._predicted: list[frozenset[int]] = [frozenset()] * len(self.layers)
        self._named: list[dict[int, frozenset[int]]] = [{} for _ in self.layers]
        self._generation = 0
        self._current = len(self.layers) - 1
        self._num_events = 0

    def forget_counts(self) -> None:
        """Starts counting at zero; what is resident and on its way stays."""
        self.counters = ResidencyCounters()

    @property
    def num_in_flight(self) -> int:
        """Transfers that somebody copies."""
        return self._queue.num_active

    @property
    def has_waiting(self) -> bool:
        """Whether there is something to copy that nobody copies yet."""
        return self._queue.has_waiting

    def access(self, layer: int, experts: Iterable[int]) -> Access:
        """One event: see `LayerResidency.access`. Missing experts are queued as demand loads, prefetches of wanted
        ones are promoted, and what else was predicted for this event is cancelled."""
        members = frozenset(experts)
        access = self.layers[layer].access(members)
        self._count_foreseen(layer, members)
        counters = self.counters
        self._num_events += 1
        counters.num_events += 1
        counters.num_hits += len(access.ready)
        counters.num_late += len(access.loading)
        counters.num_misses += len(access.missing)
        counters.useful_bytes += len(access.used_prefetches) * self._expert_bytes
        self._current = layer
        self._predicted[layer] = frozenset()
        self._demand(layer, access.loads)
        self._settle(layer, wanted=frozenset(access.loading))
        return access

    def release(self, layer: int, experts: Sequence[int]) -> None:
        """Members of the layer's event are computed. Room that this makes goes to what the event still misses."""
        self._demand(layer, self.layers[layer].release(experts))

    def predict(self, layer: int, experts: Sequence[int], priority: Priority) -> None:
        """These are thought to be wanted by the layer's next event, the likeliest first; replaces what was thought.

        Copies that are under way and not named again are cancelled.
        """
        self._generation += 1
        self._predicted[layer] = predicted = frozenset(experts)
        events_between = (layer - self._current - 1) % len(self.layers)
        self._named[layer][events_between + 1] = predicted
        due = self._num_events + events_between
        residency = self.layers[layer]
        for rank, expert in enumerate(experts):
            transfer = self._queue.find(layer, expert)
            if transfer is None:
                if residency.slot_of(expert) is None:
                    self._queue.add(Transfer(layer, expert, priority, due, rank, self._generation, prefetched=True))
            elif transfer.priority is not Priority.DEMAND:
                transfer.priority, transfer.due, transfer.rank = priority, due, rank
                transfer.generation, transfer.cancelled = self._generation, False
        for transfer in self._queue.of_layer(layer):
            if transfer.priority is not Priority.DEMAND and transfer.generation != self._generation:
                self._cancel(transfer)

    def is_predicted(self, layer: int) -> bool:
        """Whether anything is thought of the layer's next event."""
        return bool(self._predicted[layer])

    def next_transfer(self) -> Transfer | None:
        """What to copy now, from byte `num_moved` on into the slot it names; the caller has it until it ends.

        A prefetch gets its slot here and not earlier; one that finds no room is dropped.
        """
        for transfer in self._queue.waiting():
            if transfer.slot is None and not self._bind(transfer):
                self._queue.remove(transfer)
                continue
            transfer.active = True
            return transfer
        return None

    def moved(self, transfer: Transfer, num_bytes: int) -> None:
        """A chunk was copied."""
        transfer.num_moved += num_bytes
        if transfer.prefetched:
            self.counters.prefetch_bytes += num_bytes
        else:
            self.counters.demand_bytes += num_bytes

    def must_stop(self, transfer: Transfer) -> bool:
        """Whether the copier should `stop`: nobody wants it any more, or one of higher priority overtakes it."""
        return transfer.cancelled or self._queue.has_waiting_before(transfer.priority)

    def stop(self, transfer: Transfer) -> None:
        """The copier left off between chunks: a cancelled transfer ends, another one waits for its turn to go on."""
        transfer.active = False
        if transfer.cancelled:
            self._drop(transfer)

    def finish(self, transfer: Transfer) -> None:
        """All bytes are in the slot. A transfer that was cancelled meanwhile is kept as a prefetch."""
        self._queue.remove(transfer)
        unasked = transfer.priority is not Priority.DEMAND
        if transfer.prefetched and not unasked:
            self.counters.late_bytes += self._expert_bytes
        self._demand(transfer.layer, self.layers[transfer.layer].finish(transfer.expert, prefetched=unasked))

    def _demand(self, layer: int, loads: Sequence[Load]) -> None:
        for load in loads:
            self._count_eviction(load)
            queued = self._queue.find(layer, load.expert)
            if queued is not None:  # Predicted, but nothing of it has moved: it has no slot.
                self._queue.remove(queued)
            transfer = Transfer(layer, load.expert, Priority.DEMAND, self._num_events, load.expert, 0)
            transfer.slot = load.slot
            self._queue.add(transfer)

    def _settle(self, layer: int, wanted: frozenset[int]) -> None:
        """The event that predictions for this layer meant has come."""
        for transfer in self._queue.of_layer(layer):
            if transfer.priority is Priority.DEMAND:
                continue
            if transfer.expert in wanted:
                transfer.priority, transfer.cancelled = Priority.DEMAND, False
                transfer.due, transfer.rank = self._num_events, transfer.expert
            else:
                self._cancel(transfer)

    def _bind(self, transfer: Transfer) -> bool:
        load = self.layers[transfer.layer].reserve(transfer.expert, self._predicted[transfer.layer])
        if load is None:
            return False
        self._count_eviction(load)
        transfer.slot = load.slot
        return True

    def _cancel(self, transfer: Transfer) -> None:
        transfer.cancelled = True
        if not transfer.active:
            self._drop(transfer)

    def _drop(self, transfer: Transfer) -> None:
        self._queue.remove(transfer)
        if transfer.slot is not None:
            self.counters.num_cancelled += 1
            self.counters.cancelled_bytes += transfer.num_moved
            self._demand(transfer.layer, self.layers[transfer.layer].abandon(transfer.expert))

    def _count_foreseen(self, layer: int, members: frozenset[int]) -> None:
        named, self._named[layer] = self._named[layer], {}
        counters = self.counters
        for distance, experts in named.items():
            counters.num_foreseeable = _added(counters.num_foreseeable, distance, len(members))
            if found := members & experts:
                counters.num_foreseen = _added(counters.num_foreseen, distance, len(found))

    def _count_eviction(self, load: Load) -> None:
        if load.victim is not None:
            self.counters.num_evictions += 1
        if load.wasted:
            self.counters.wasted_bytes += self._expert_bytes


def _added(counts: tuple[int, ...], distance: int, number: int) -> tuple[int, ...]:
    """Of things farther ahead than there are counts nothing is counted."""
    return tuple([count + number if place == distance else count for place, count in enumerate(counts, start=1)])
