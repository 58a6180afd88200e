"""Memory that ranks of one machine lend each other for experts: a tier between the slots and the disk. No torch.

A lender fills a piece of anonymous shared memory once and seals it; the others map it and copy from it. It belongs to
no folder, so it is gone when the last rank that has it ends, however it ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from experts.errors import ExpertStoreError
from experts.expert_file import ExpertFileHeader
from experts.placement import Placement
from experts.residency import LentMemory
from experts.tiers import ExpertTier, PieceChecksums

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def lend(experts: Sequence[tuple[int, int]], tier: ExpertTier, record_bytes: int) -> LentMemory:
    """Takes shared memory for these experts (layer, expert) and reads them into it, one record after the other.

    Raises ExpertStoreError where they cannot be read, or the memory cannot be had.
    """
    descriptor = os.memfd_create("moeserve-experts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    num_bytes = len(experts) * record_bytes
    try:
        if num_bytes:
            os.posix_fallocate(descriptor, 0, num_bytes)
            with mmap.mmap(descriptor, num_bytes) as memory, memoryview(memory) as view:
                for place, (layer, expert) in enumerate(experts):
                    with view[place * record_bytes : (place + 1) * record_bytes] as record:
                        tier.read(layer, expert, 0, record)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise ExpertStoreError(f"{num_bytes} bytes of memory cannot be lent to peers ({error.strerror}).") from error
    except ExpertStoreError:
        os.close(descriptor)
        raise
    return LentMemory(os.getpid(), descriptor)


class PeerTier:
    """Reads what is lent from there, and everything else from the tier behind."""

    def __init__(self, lent: Sequence[Sequence[tuple[int, int]]], header: ExpertFileHeader, behind: ExpertTier) -> None:
        """lent[rank]: the experts (layer, expert) that the rank lends, in order. header: of the expert file."""
        self._record_bytes = header.record_bytes
        self._behind = behind
        self._checksums = PieceChecksums(header, "Memory lent by a rank", "restart the service")
        self._place: Mapping[tuple[int, int], tuple[int, int]] = {
            expert: (rank, place) for rank, of_rank in enumerate(lent) for place, expert in enumerate(of_rank)
        }
        self._memories: list[NDArray[np.uint8]] = []

    def attach(self, memories: Sequence[LentMemory]) -> None:
        """Maps what every rank lends, in the order of ranks; before anything is read. Raises ExpertStoreError."""
        mapped = []
        for rank, memory in enumerate(memories):
            try:
                descriptor = os.open(memory.path, os.O_RDONLY)
                try:
                    mapped.append(_map(descriptor))
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise ExpertStoreError(
                    f"The memory that rank {rank} lends cannot be read ({error.strerror})."
                ) from error
        self._memories = mapped

    def tier_of(self, layer: int, expert: int) -> str:
        """The name under which misses of the expert are counted."""
        return "peer" if (layer, expert) in self._place else "disk"

    def read(self, layer: int, expert: int, offset: int, out: memoryview) -> None:
        found = self._place.get((layer, expert))
        if found is None:
            self._behind.read(layer, expert, offset, out)
            return
        rank, place = found
        start = place * self._record_bytes + offset
        # Without the interpreter's lock, so that the computing thread goes on.
        np.copyto(np.frombuffer(out, np.uint8), self._memories[rank][start : start + len(out)])
        self._checksums.follow(layer, expert, offset, out)

    def close(self) -> None:
        self._memories = []
        self._behind.close()


def _map(descriptor: int) -> NDArray[np.uint8]:
    size = os.fstat(descriptor).st_size
    if not size:
        return np.empty(0, np.uint8)
    return np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)


# Which experts the ranks keep for each other in the memory that they lend. Pure.


LentExperts = tuple[tuple[int, int], ...]
"""(layer, expert) of each record that a rank lends, in the order of its memory."""


def lend_experts(
    placement: Placement, num_slots: Sequence[int], load: NDArray[np.floating], capacity: int
) -> tuple[LentExperts, ...]:
    """What each rank lends: experts that no fast tier holds at first, the busiest of all layers first.

    num_slots: of each layer in a rank's fast tier, where its busiest experts are taken to be. load: [L, E]. capacity:
    experts that a rank has room for. An expert goes to the rank that lends least so far, if there is room to one that
    does not serve it: who serves it has memory of its own for it.
    """
    lent: list[list[tuple[int, int]]] = [[] for _ in range(placement.num_ranks)]
    for layer, expert in _in_turn([_lacking(placement, num_slots, load, layer) for layer in range(len(num_slots))]):
        open_ranks = [rank for rank, of_rank in enumerate(lent) if len(of_rank) < capacity]
        if not open_ranks:
            break
        serving = placement.ranks[layer][expert]
        lender = min(open_ranks, key=lambda rank: (rank in serving, len(lent[rank]), rank))
        lent[lender].append((layer, expert))
    return tuple(map(tuple, lent))


def _lacking(
    placement: Placement, num_slots: Sequence[int], load: NDArray[np.floating], layer: int
) -> list[tuple[int, int]]:
    """(layer, expert) of those that are in no fast tier at first, the busiest first."""
    order = np.argsort(-load[layer], kind="stable").tolist()
    fast: set[int] = set()
    for rank in range(placement.num_ranks):
        held = [expert for expert in order if rank in placement.ranks[layer][expert]]
        fast.update(held[: num_slots[layer]])
    return [(layer, expert) for expert in order if expert not in fast]


def _in_turn(of_layers: Sequence[list[tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    """The first of every layer, then the second of every layer, and so on."""
    for place in range(max(map(len, of_layers), default=0)):
        yield from (of_layer[place] for of_layer in of_layers if place < len(of_layer))
