"""Memory that ranks of one machine lend each other for experts: a tier between the slots and the disk. No torch.

A lender fills a piece of anonymous shared memory once and seals it; the others map it and copy from it. It belongs to
no folder, so it is gone when the last rank that has it ends, however it ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.errors import ExpertStoreError
from experts.memory.expert_file import ExpertFileHeader
from experts.memory.store import ExpertTier, PieceChecksums

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class LentMemory:
    """What a rank lends; `pid` and `descriptor` tell the others where it is. The lender keeps it open."""

    pid: int
    descriptor: int

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"


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
