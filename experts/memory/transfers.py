"""The order in which experts are copied into slots: demand loads, then the next layer, then speculation. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum


class Priority(IntEnum):
    """Smaller goes first."""

    DEMAND = 0
    NEXT_LAYER = 1
    SPECULATIVE = 2


@dataclass(slots=True, eq=False)
class Transfer:
    """One expert on its way into a slot.

    due, rank: among equal priorities the smaller go first: the event that will want it, then its place in the
    prediction. slot: None until there is room for it. num_moved: bytes copied so far; a paused transfer goes on there.
    prefetched: it began as a prefetch, even if it is wanted now. active: somebody copies. cancelled: nobody wants it;
    whoever copies stops.
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
    """All transfers that are not finished, at most one per expert of a layer. The caller binds slots and counts."""

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
        """Those that somebody should copy, in order."""
        idle = [transfer for transfer in self._transfers.values() if not transfer.active]
        return iter(sorted(idle, key=lambda transfer: (transfer.priority, transfer.due, transfer.rank)))

    @property
    def has_waiting(self) -> bool:
        """Whether somebody should copy."""
        return any(not transfer.active for transfer in self._transfers.values())

    def has_waiting_before(self, priority: Priority) -> bool:
        """Whether one of higher priority waits."""
        return any(transfer.priority < priority and not transfer.active for transfer in self._transfers.values())
