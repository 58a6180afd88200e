"""Which experts of one layer are in its slots of the fast tier, and which make room. Decisions only. Pure.

Each layer has slots of its own: layers are visited in turn, so one list of least recently used experts over all layers
would evict every expert shortly before its next use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from experts.memory.eviction import EvictionPolicy


class SlotState(Enum):
    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Load:
    """An expert that is to be copied into a slot. wasted: the victim had been prefetched and was never used."""

    expert: int
    slot: int
    victim: int | None
    wasted: bool


@dataclass(frozen=True, slots=True)
class Access:
    """What an event found. ready, loading and missing are its experts in ascending order.

    loads: the missing experts that have a slot now; the others get one when members of the event are released.
    used_prefetches: the ready experts that a prefetch had brought and nobody had used since.
    """

    ready: tuple[int, ...]
    loading: tuple[int, ...]
    missing: tuple[int, ...]
    loads: tuple[Load, ...]
    used_prefetches: tuple[int, ...]


@dataclass(slots=True)
class _Slot:
    """unused: a prefetch brought the expert and no event has used it. awaited: nor has the layer had an event since."""

    expert: int = -1
    state: SlotState = SlotState.EMPTY
    references: int = 0
    unused: bool = False
    awaited: bool = False


class LayerResidency:
    """The slots of one layer. An event (`access`) holds a reference to each of its experts until it is released."""

    def __init__(self, num_experts: int, num_slots: int, policy: EvictionPolicy) -> None:
        """num_slots: at least 1, better no less than a token's experts."""
        if not 1 <= num_slots <= num_experts:
            raise ValueError(f"{num_slots} slots for {num_experts} experts")
        self._num_experts = num_experts
        self._policy = policy
        self._slots = [_Slot() for _ in range(num_slots)]
        self._slot_of: dict[int, int] = {}
        self._waiting: deque[int] = deque()
        # The ready and the loading experts, which are asked for far more often than they change; None after a change.
        self._known: tuple[list[int], list[int]] | None = None

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        """Missing experts of the current event that have no slot yet."""
        return len(self._waiting)

    def state_of(self, expert: int) -> SlotState:
        """EMPTY for an expert that has no slot."""
        slot = self._slot_of.get(expert)
        return SlotState.EMPTY if slot is None else self._slots[slot].state

    def slot_of(self, expert: int) -> int | None:
        """The slot that holds the expert or is being filled with it."""
        return self._slot_of.get(expert)

    def contents(self) -> list[int]:
        """The expert that is ready in each slot, -1 for none."""
        return [slot.expert if slot.state is SlotState.READY else -1 for slot in self._slots]

    def resident(self) -> list[int]:
        """The experts that are ready, in ascending order."""
        return list(self._numbers()[0])

    def loading(self) -> list[int]:
        """The experts that are on their way into a slot, in ascending order."""
        return list(self._numbers()[1])

    def access(self, experts: Iterable[int]) -> Access:
        """Decides one event at once: what is there, what is missing, who makes room. Members are never victims.

        ValueError while an earlier event holds references.
        """
        members = sorted(set(experts))
        if not members or members[0] < 0 or members[-1] >= self._num_experts:
            raise ValueError(f"an event of experts {members} of {self._num_experts}")
        if self._waiting or any(slot.references for slot in self._slots):
            raise ValueError("the layer's earlier event is not over")
        self._policy.touch(members)
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
        return Access(tuple(ready), tuple(loading), tuple(missing), self._place_waiting(), tuple(used_prefetches))

    def release(self, experts: Sequence[int]) -> tuple[Load, ...]:
        """Members of the event are computed and may be evicted; returns the loads for which there is room now."""
        for expert in experts:
            slot = self._slots[self._slot_of[expert]]
            if slot.references == 0 or slot.state is not SlotState.READY:
                raise ValueError(f"expert {expert} is {slot.state.value} with {slot.references} references")
            slot.references -= 1
        return self._place_waiting()

    def finish(self, expert: int, *, prefetched: bool) -> tuple[Load, ...]:
        """The expert's bytes are in its slot. prefetched: nobody has asked for it yet, so it may make room at once."""
        slot = self._slots[self._slot_of[expert]]
        if slot.state is not SlotState.LOADING:
            raise ValueError(f"expert {expert} is {slot.state.value}, not loading")
        slot.state = SlotState.READY
        self._known = None
        slot.unused = slot.awaited = prefetched
        return self._place_waiting()

    def abandon(self, expert: int) -> tuple[Load, ...]:
        """A load that nobody waits for ends half-way; returns the loads for which there is room now."""
        number = self._slot_of[expert]
        slot = self._slots[number]
        if slot.state is not SlotState.LOADING or slot.references:
            raise ValueError(f"expert {expert} is {slot.state.value} with {slot.references} references")
        del self._slot_of[expert]
        self._slots[number] = _Slot()
        self._known = None
        return self._place_waiting()

    def reserve(self, expert: int, keep: Collection[int] = ()) -> Load | None:
        """Room for a prefetch; None if the expert has a slot or only such experts could make room that should stay.

        These are the event's own, those in `keep`, and earlier prefetches for the layer's next event.
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
        """keep: None for a demand, which may evict what a prefetch may not."""
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
        """The ready and the loading experts, each in ascending order."""
        if self._known is None:
            ready = sorted([slot.expert for slot in self._slots if slot.state is SlotState.READY])
            loading = sorted([slot.expert for slot in self._slots if slot.state is SlotState.LOADING])
            self._known = ready, loading
        return self._known

    def _expert(self, number: int) -> int:
        return self._slots[number].expert
