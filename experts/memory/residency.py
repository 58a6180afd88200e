"""Decide which experts the fast tier holds, which expert is copied next, and which one is evicted. Torch-free.

Each layer has slots of its own: layers are visited in turn, so one list of least recently used experts over all layers
would evict every expert shortly before its next use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from operator import sub
from typing import Any

from experts.memory.eviction import EvictionPolicy
from experts.routing.predictors import SourceRecall

# The largest distance, in layers, at which predictions are counted.
_FARTHEST = 3


class ResidencyControl:
    """Decides for all layers together which experts are resident and which transfer goes next.

    A runtime or a simulator drives it. The computation calls `access` and `release`, predictors call `predict`. A
    copier, one or several, calls `next_transfer`, then `moved` and `must_stop` after each chunk, and ends with `finish`
    or `stop`. It is not thread-safe; callers hold a lock of their own. Layers with experts are numbered in the order in
    which they are computed.
    """

    def __init__(
        self, num_slots: Sequence[int], num_experts: int, expert_bytes: int, policy_of: Callable[[int], EvictionPolicy]
    ) -> None:
        """num_slots: the slots of each layer. policy_of: makes the eviction policy of a layer."""
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
        """Start counting at zero; residency and transfers stay as they are."""
        self.counters = ResidencyCounters()

    @property
    def num_in_flight(self) -> int:
        """The number of transfers that are being copied."""
        return self._queue.num_active

    @property
    def has_waiting(self) -> bool:
        """True if a transfer waits to be copied."""
        return self._queue.has_waiting

    def access(self, layer: int, experts: Iterable[int], elsewhere: Collection[int] = ()) -> Access:
        """Begin one event, see `LayerResidency.access`. Missing experts are queued as demand loads, prefetches of
        wanted ones are promoted, and other prefetches for this event are cancelled."""
        members = frozenset(experts)
        access = self.layers[layer].access(members, elsewhere)
        self._count_foreseen(layer, members.union(elsewhere))
        counters = self.counters
        self._num_events += 1
        counters.num_events += 1
        counters.num_hits += len(access.ready)
        counters.num_late += len(access.loading)
        counters.num_misses += len(access.missing) + len(elsewhere)
        counters.num_elsewhere += len(elsewhere)
        counters.useful_bytes += len(access.used_prefetches) * self._expert_bytes
        self._current = layer
        self._predicted[layer] = frozenset()
        self._demand(layer, access.loads)
        self._settle(layer, wanted=frozenset(access.loading), used=frozenset(elsewhere))
        return access

    def release(self, layer: int, experts: Sequence[int]) -> None:
        """Release computed members of the layer's event. Their slots go to the experts that the event still misses."""
        self._demand(layer, self.layers[layer].release(experts))

    def end_event(self, layer: int) -> None:
        """End the layer's event, whose computation failed. Its loads continue; the next event may find them."""
        self.layers[layer].end_event()

    def predict(self, layer: int, experts: Sequence[int], priority: Priority) -> None:
        """Expect the layer's next event to want these experts, the likeliest first. Replaces the earlier prediction.

        Prefetches of the layer that are not named again are cancelled.
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
            if transfer.priority in _ASKED_AHEAD and transfer.generation != self._generation:
                self._cancel(transfer)

    def move_in(self, layer: int, experts: Sequence[int]) -> None:
        """Load experts that are used often, behind all other transfers; the first one first.

        They replace the layer's experts that still wait for their turn. Events and predictions do not cancel them.
        """
        for transfer in self._queue.of_layer(layer):
            if transfer.priority is Priority.IDLE and transfer.slot is None:
                self._queue.remove(transfer)
        residency = self.layers[layer]
        for rank, expert in enumerate(experts):
            if residency.slot_of(expert) is None and self._queue.find(layer, expert) is None:
                due = self._num_events + len(self.layers)
                self._queue.add(Transfer(layer, expert, Priority.IDLE, due, rank, self._generation, prefetched=True))

    def is_in_flight(self, layer: int, expert: int) -> bool:
        """Return whether a transfer of this expert is being copied."""
        transfer = self._queue.find(layer, expert)
        return transfer is not None and transfer.active

    def share_to_copy(self, layer: int, expert: int) -> float:
        """Return the share of the expert's bytes that a load has yet to copy: 1 before it begins, 0 if it is ready."""
        if self.layers[layer].state_of(expert) is SlotState.READY:
            return 0.0
        transfer = self._queue.find(layer, expert)
        return 1.0 if transfer is None else 1 - transfer.num_moved / self._expert_bytes

    def next_transfer(self, *, demanded: bool = False) -> Transfer | None:
        """Return the transfer to copy now, None if none waits. Copying begins at byte `num_moved`.

        The transfer is active until `stop` or `finish`. It waits while one of higher priority is copied. A prefetch
        gets its slot here and not earlier; a prefetch that finds no room is dropped. demanded: only demand loads.
        """
        for transfer in self._queue.waiting():
            is_demanded = transfer.priority is Priority.DEMAND
            if not is_demanded and (demanded or self._queue.has_before(transfer.priority, active=True)):
                break
            if transfer.slot is None and not self._bind(transfer):
                self._queue.remove(transfer)
                continue
            transfer.active = True
            return transfer
        return None

    def moved(self, transfer: Transfer, num_bytes: int) -> None:
        """Record that a chunk was copied."""
        transfer.num_moved += num_bytes
        if transfer.prefetched:
            self.counters.prefetch_bytes += num_bytes
        else:
            self.counters.demand_bytes += num_bytes

    def must_stop(self, transfer: Transfer) -> bool:
        """Return True if the copier should `stop`: the transfer is cancelled, or there is one of higher priority."""
        return transfer.cancelled or self._queue.has_before(transfer.priority)

    def stop(self, transfer: Transfer) -> None:
        """Record that the copier stopped between chunks: a cancelled transfer ends, any other waits to be continued."""
        transfer.active = False
        if transfer.cancelled:
            self._drop(transfer)

    def finish(self, transfer: Transfer) -> None:
        """Record that all bytes are in the slot. A transfer that was cancelled meanwhile is kept as a prefetch."""
        self._queue.remove(transfer)
        unasked = transfer.priority is not Priority.DEMAND
        if transfer.prefetched and not unasked:
            self.counters.late_bytes += self._expert_bytes
        self._demand(transfer.layer, self.layers[transfer.layer].finish(transfer.expert, prefetched=unasked))

    def _demand(self, layer: int, loads: Sequence[Load]) -> None:
        for load in loads:
            self._count_eviction(load)
            queued = self._queue.find(layer, load.expert)
            if queued is not None:  # A prefetch without a slot, so nothing has been copied yet.
                self._queue.remove(queued)
            transfer = Transfer(layer, load.expert, Priority.DEMAND, self._num_events, load.expert, 0)
            transfer.slot = load.slot
            self._queue.add(transfer)

    def _settle(self, layer: int, wanted: frozenset[int], used: frozenset[int]) -> None:
        """Promote the layer's transfers of `wanted` experts and cancel its other prefetches: the predicted event has
        come. A prefetch that has begun, of an expert that is `used` without it, goes on when nothing else is copied."""
        for transfer in self._queue.of_layer(layer):
            if transfer.expert in wanted and transfer.priority is not Priority.DEMAND:
                transfer.priority, transfer.cancelled = Priority.DEMAND, False
                transfer.due, transfer.rank = self._num_events, transfer.expert
            elif transfer.priority in _ASKED_AHEAD and transfer.expert in used and transfer.slot is not None:
                transfer.priority, transfer.cancelled = Priority.IDLE, False
            elif transfer.priority in _ASKED_AHEAD:
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


@dataclass(slots=True)
class ResidencyCounters:
    """Counts since the start. An event's expert is a hit if it was ready, late if its prefetch was under way, else a
    miss. num_elsewhere: the misses that were computed where the expert lies.

    Bytes moved by prefetches are useful if an event found the expert ready, late if the event came before the copy
    ended, wasted if the expert was evicted unused, cancelled if the copy was ended early; the rest is not decided yet.

    num_foreseeable: experts of events for which predictions had been made 1, 2, 3 layers ahead. num_foreseen: the
    number of these experts that the predictions named. The ratio of both is the recall of predictions. They are tuples,
    so that a copy of the counters is a snapshot.
    """

    num_events: int = 0
    num_hits: int = 0
    num_late: int = 0
    num_misses: int = 0
    num_elsewhere: int = 0
    num_evictions: int = 0
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    useful_bytes: int = 0
    late_bytes: int = 0
    wasted_bytes: int = 0
    cancelled_bytes: int = 0
    num_foreseeable: tuple[int, ...] = (0,) * _FARTHEST
    num_foreseen: tuple[int, ...] = (0,) * _FARTHEST

    def since(self, before: ResidencyCounters) -> ResidencyCounters:
        """Return the counts since `before`, an earlier copy of this object."""
        changes: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            new, old = getattr(self, name), getattr(before, name)
            changes[name] = tuple(map(sub, new, old)) if isinstance(new, tuple) else new - old
        return ResidencyCounters(**changes)


def _added(counts: tuple[int, ...], distance: int, number: int) -> tuple[int, ...]:
    """Return `counts` with `number` added at `distance`. A distance beyond the tuple is not counted."""
    return tuple([count + number if place == distance else count for place, count in enumerate(counts, start=1)])


class SlotState(Enum):
    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Load:
    """An expert to be copied into a slot. wasted: the victim had been prefetched and was never used."""

    expert: int
    slot: int
    victim: int | None
    wasted: bool


@dataclass(frozen=True, slots=True)
class Access:
    """The state in which an event found its experts: ready, loading or missing, each in ascending order.

    loads: the missing experts that have a slot now; the others get one when members of the event are released.
    used_prefetches: the ready experts that a prefetch had brought and no event had used since. elsewhere: the experts
    that the event uses without slots.
    """

    ready: tuple[int, ...]
    loading: tuple[int, ...]
    missing: tuple[int, ...]
    loads: tuple[Load, ...]
    used_prefetches: tuple[int, ...]
    elsewhere: tuple[int, ...] = ()


@dataclass(slots=True)
class _Slot:
    """unused: a prefetch brought the expert and no event has used it. awaited: the layer has had no event since."""

    expert: int = -1
    state: SlotState = SlotState.EMPTY
    references: int = 0
    unused: bool = False
    awaited: bool = False


class LayerResidency:
    """The slots of one layer. An event (`access`) holds a reference to each of its experts until it is released."""

    def __init__(self, num_experts: int, num_slots: int, policy: EvictionPolicy) -> None:
        """num_slots: at least 1; with top-k slots or more, the experts of one token need no loading in turns."""
        if not 1 <= num_slots <= num_experts:
            raise ValueError(f"{num_slots} slots for {num_experts} experts")
        self._num_experts = num_experts
        self._policy = policy
        self._slots = [_Slot() for _ in range(num_slots)]
        self._slot_of: dict[int, int] = {}
        self._waiting: deque[int] = deque()
        # The ready and the loading experts, which are read far more often than they change; None after a change.
        self._known: tuple[list[int], list[int]] | None = None

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        """The number of missing experts of the current event that have no slot yet."""
        return len(self._waiting)

    @property
    def num_empty(self) -> int:
        """The number of slots that nothing has been loaded into."""
        return len(self._slots) - len(self._slot_of)

    def state_of(self, expert: int) -> SlotState:
        """Return the state of the expert's slot, EMPTY without a slot."""
        slot = self._slot_of.get(expert)
        return SlotState.EMPTY if slot is None else self._slots[slot].state

    def slot_of(self, expert: int) -> int | None:
        """Return the slot that holds the expert or is being filled with it, None without one."""
        return self._slot_of.get(expert)

    def contents(self) -> list[int]:
        """Return the expert that is ready in each slot, -1 for none."""
        return [slot.expert if slot.state is SlotState.READY else -1 for slot in self._slots]

    def resident(self) -> list[int]:
        """Return the experts that are ready, in ascending order."""
        return list(self._numbers()[0])

    def loading(self) -> list[int]:
        """Return the experts that are being loaded into a slot, in ascending order."""
        return list(self._numbers()[1])

    def access(self, experts: Iterable[int], elsewhere: Collection[int] = ()) -> Access:
        """Begin an event. Missing experts get slots as far as non-members can be evicted; members are not evicted.

        elsewhere: experts that the step uses without a slot, none of them ready. ValueError while an earlier event
        holds references.
        """
        members = sorted(set(experts))
        used = sorted({*members, *elsewhere})
        if not used or used[0] < 0 or used[-1] >= self._num_experts:
            raise ValueError(f"an event of experts {used} of {self._num_experts}")
        if self._waiting or any(slot.references for slot in self._slots):
            raise ValueError("the layer's earlier event is not over")
        self._policy.touch(used)
        for slot in self._slots:
            slot.awaited = False
        ready: list[int] = []
        loading: list[int] = []
        missing: list[int] = []
        used_prefetches = []
        for expert in members:
            number = self._slot_of.get(expert)
            if number is None:
                missing.append(expert)
                continue
            slot = self._slots[number]
            slot.references = 1
            (ready if slot.state is SlotState.READY else loading).append(expert)
            if slot.unused:
                used_prefetches.append(expert)
                slot.unused = False
        self._waiting.extend(missing)
        states = tuple(ready), tuple(loading), tuple(missing)
        return Access(*states, self._place_waiting(), tuple(used_prefetches), tuple(sorted(elsewhere)))

    def release(self, experts: Sequence[int]) -> tuple[Load, ...]:
        """Make computed members of the event evictable; return the loads for which there is room now."""
        for expert in experts:
            slot = self._slots[self._slot_of[expert]]
            if slot.references == 0 or slot.state is not SlotState.READY:
                raise ValueError(f"expert {expert} is {slot.state.value} with {slot.references} references")
            slot.references -= 1
        return self._place_waiting()

    def end_event(self) -> None:
        """End an event whose computation failed: nothing waits for a slot, and its experts may be evicted."""
        self._waiting.clear()
        for slot in self._slots:
            slot.references = 0

    def finish(self, expert: int, *, prefetched: bool) -> tuple[Load, ...]:
        """Mark the expert as ready; return the loads for which there is room now.

        prefetched: no event has asked for the expert yet, so it may be evicted.
        """
        slot = self._slots[self._slot_of[expert]]
        if slot.state is not SlotState.LOADING:
            raise ValueError(f"expert {expert} is {slot.state.value}, not loading")
        slot.state = SlotState.READY
        self._known = None
        slot.unused = slot.awaited = prefetched
        return self._place_waiting()

    def abandon(self, expert: int) -> tuple[Load, ...]:
        """End an unfinished load that no event waits for; return the loads for which there is room now."""
        number = self._slot_of[expert]
        slot = self._slots[number]
        if slot.state is not SlotState.LOADING or slot.references:
            raise ValueError(f"expert {expert} is {slot.state.value} with {slot.references} references")
        del self._slot_of[expert]
        self._slots[number] = _Slot()
        self._known = None
        return self._place_waiting()

    def reserve(self, expert: int, keep: Collection[int]) -> Load | None:
        """Make room for a prefetch; return None if the expert has a slot, or if no expert may be evicted for it.

        The event's own experts, the experts in `keep` and prefetches for the layer's next event are not evicted.
        """
        if expert in self._slot_of or self._waiting:
            return None
        return self._place(expert, keep=keep)

    def _place_waiting(self) -> tuple[Load, ...]:
        loads = []
        while self._waiting and (load := self._place(self._waiting[0])):
            self._slots[load.slot].references = 1
            self._waiting.popleft()
            loads.append(load)
        return tuple(loads)

    def _place(self, expert: int, keep: Collection[int] | None = None) -> Load | None:
        """keep: None for a demand load, which may also evict predicted experts and prefetches for the next event."""
        number = self._least_worth(keep)
        if number is None:
            return None
        slot = self._slots[number]
        victim = None
        if slot.state is SlotState.READY:
            victim = slot.expert
            del self._slot_of[victim]
        load = Load(expert, number, victim, slot.unused)
        self._slots[number] = _Slot(expert, SlotState.LOADING)
        self._known = None
        self._slot_of[expert] = number
        return load

    def _least_worth(self, keep: Collection[int] | None) -> int | None:
        candidates = []
        for number, slot in enumerate(self._slots):
            if slot.state is SlotState.EMPTY:
                return number
            if slot.state is SlotState.LOADING or slot.references:
                continue
            if keep is None or not (slot.awaited or slot.expert in keep):
                candidates.append(number)
        if not candidates:
            return None
        return min(
            candidates, key=lambda number: (self._policy.worth(self._slots[number].expert), self._expert(number))
        )

    def _numbers(self) -> tuple[list[int], list[int]]:
        """Return the ready and the loading experts, each in ascending order."""
        if self._known is None:
            ready = sorted([slot.expert for slot in self._slots if slot.state is SlotState.READY])
            loading = sorted([slot.expert for slot in self._slots if slot.state is SlotState.LOADING])
            self._known = ready, loading
        return self._known

    def _expert(self, number: int) -> int:
        return self._slots[number].expert


class Priority(IntEnum):
    """The priority of a transfer; the smallest value goes first. IDLE: for later steps, if nothing else is copied."""

    DEMAND = 0
    NEXT_LAYER = 1
    SPECULATIVE = 2
    IDLE = 3


_ASKED_AHEAD = frozenset((Priority.NEXT_LAYER, Priority.SPECULATIVE))


@dataclass(slots=True, eq=False)
class Transfer:
    """One expert on its way into a slot.

    due: the number of the event that will want it. rank: its place in the prediction. Among equal priorities the
    smaller due goes first, then the smaller rank. slot: None until there is room for it. num_moved: bytes copied so
    far, where a paused transfer goes on. prefetched: it began as a prefetch, even if an event wants it now. active: it
    is being copied. cancelled: no event is expected to want it; the copier stops.
    """

    layer: int
    expert: int
    priority: Priority
    due: int
    rank: int
    generation: int
    slot: int | None = None
    num_moved: int = 0
    prefetched: bool = False
    active: bool = False
    cancelled: bool = False


class TransferQueue:
    """All unfinished transfers, at most one per expert of a layer. The caller assigns slots and updates counters."""

    def __init__(self) -> None:
        self._transfers: dict[tuple[int, int], Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    @property
    def num_active(self) -> int:
        return sum(transfer.active for transfer in self._transfers.values())

    def find(self, layer: int, expert: int) -> Transfer | None:
        return self._transfers.get((layer, expert))

    def of_layer(self, layer: int) -> list[Transfer]:
        return [transfer for transfer in self._transfers.values() if transfer.layer == layer]

    def add(self, transfer: Transfer) -> None:
        key = (transfer.layer, transfer.expert)
        if key in self._transfers:
            raise ValueError(f"expert {transfer.expert} of layer {transfer.layer} is on its way already")
        self._transfers[key] = transfer

    def remove(self, transfer: Transfer) -> None:
        del self._transfers[transfer.layer, transfer.expert]

    def waiting(self) -> Iterator[Transfer]:
        """Return the waiting transfers in copying order: demand loads, then the next layer, then speculation."""
        idle = [transfer for transfer in self._transfers.values() if not transfer.active]
        return iter(sorted(idle, key=lambda transfer: (transfer.priority, transfer.due, transfer.rank)))

    @property
    def has_waiting(self) -> bool:
        return any(not transfer.active for transfer in self._transfers.values())

    def has_before(self, priority: Priority, *, active: bool = False) -> bool:
        """Return whether a transfer of higher priority waits or is copied; with `active` whether one is copied."""
        return any(transfer.priority < priority and transfer.active >= active for transfer in self._transfers.values())


@dataclass(frozen=True, slots=True)
class ComputeCosts:
    """Seconds, as learnt: to copy an expert to the device, of a call of the host beside its experts, and of the host
    for one expert, by its number of rows."""

    copy: float
    call: float
    by_rows: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class ExpertMemoryStats:
    """Counters of an expert memory since the start, in types that can be sent between ranks.

    stall_seconds: time that the computation waited for experts. predictor_seconds: time that the computing thread spent
    on predictions. num_in_flight: loads under way now. resident: the experts that are ready now, layer by layer.
    recall: the recall of each source of predictions, on a sample of the steps. host_seconds: time that the host
    computed experts in place of a device. costs: what decides where experts are computed, None without a choice.
    """

    counters: ResidencyCounters
    stall_seconds: float
    predictor_seconds: float
    num_in_flight: int
    resident: list[list[int]]
    recall: list[SourceRecall] = field(default_factory=list)
    host_seconds: float = 0.0
    costs: ComputeCosts | None = None


def least_slots(num_held: Sequence[int], top_k: int) -> list[int]:
    """Return the slots that each layer needs for the experts of one token. num_held: experts of each layer on this
    rank."""
    return [min(top_k, held) for held in num_held]


def share_slots(count: int, num_held: Sequence[int], top_k: int) -> tuple[int, ...] | None:
    """Share `count` slots among the layers as evenly as possible, at most one per expert that a layer holds.

    Return None if all experts fit. ValueError if there are fewer slots than `least_slots`.
    """
    if count >= sum(num_held):
        return None
    slots = least_slots(num_held, top_k)
    left = count - sum(slots)
    if left < 0:
        raise ValueError(f"{count} slots, but at least {sum(slots)} are needed")
    while left:
        for layer in _smallest(slots, num_held)[:left]:
            slots[layer] += 1
            left -= 1
    return tuple(slots)


def _smallest(slots: Sequence[int], num_held: Sequence[int]) -> list[int]:
    """Return the layers with the fewest slots among the layers that can use one more."""
    open_layers = [layer for layer, held in enumerate(num_held) if slots[layer] < held]
    fewest = min(slots[layer] for layer in open_layers)
    return [layer for layer in open_layers if slots[layer] == fewest]
