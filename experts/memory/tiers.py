"""Tiers that experts are loaded from, piece by piece: an expert file, a checkpoint, and page-locked host memory."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from experts.errors import ExpertStoreError
from experts.memory.file import PAGE_BYTES, REMEDY, ExpertFileHeader, read_header, round_to_page


class ExpertTier(Protocol):
    """Holds all experts. Several threads may read, each another expert."""

    def read(self, layer: int, expert: int, offset: int, out: memoryview) -> None:
        """Fill `out` with the expert's bytes from `offset` on. Pieces are whole pages, except the expert's last one.

        An expert is read piece by piece from its start, with other experts in between. Raise ExpertStoreError; a wrong
        checksum is found at the last piece.
        """

    def close(self) -> None: ...


class PositionedReads:
    """Reads with preadv, past the page cache if the file system allows that. description: for the log.

    Otherwise the kernel is told to drop the pages, so that slots and page cache do not hold the same bytes twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            self._is_direct = True
            self.description = "preadv past the page cache"
        except OSError:
            self._file = os.open(path, os.O_RDONLY)
            self._is_direct = False
            self.description = "preadv through the page cache"

    def read(self, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on. Raise ExpertStoreError."""
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._file, [out[done:]], offset + done)
            except OSError as error:
                raise ExpertStoreError(f"{self._path} cannot be read ({error.strerror}).") from error
            # Past the page cache only a read at the end of the file ends within a page.
            if count == 0 or (self._is_direct and count % PAGE_BYTES):
                raise ExpertStoreError(f"{self._path} was cut off while it was in use.")
            done += count
        if not self._is_direct:
            os.posix_fadvise(self._file, offset, len(out), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._file)


class PieceChecksums:
    """Checks every expert when it is first read; later reads are not checked."""

    def __init__(self, header: ExpertFileHeader, path: Path) -> None:
        self._header = header
        self._path = path
        self._checked: set[tuple[int, int]] = set()
        # By expert that is being read for the first time: the bytes read so far, and their checksum.
        self._sums: dict[tuple[int, int], tuple[int, int]] = {}

    def follow(self, layer: int, expert: int, offset: int, piece: memoryview) -> None:
        """Add a piece that was read. Raise ExpertStoreError at the last piece if the expert's checksum is wrong."""
        key, size = (layer, expert), self._header.expert_bytes
        if key in self._checked:
            return
        done, checksum = (0, 0) if offset == 0 else self._sums.get(key, (-1, 0))
        if done != offset:
            raise ValueError(f"a piece from byte {offset} on follows one that ended at {done}")
        done, checksum = offset + len(piece), zlib.crc32(piece[: size - offset], checksum)
        if done < size:
            self._sums[key] = (done, checksum)
            return
        self._sums.pop(key, None)
        if checksum != self._header.checksum(layer, expert):
            raise ExpertStoreError(
                f"{self._path} is damaged, expert {expert} of layer {layer} lost its checksum: {REMEDY}."
            )
        self._checked.add(key)


class DiskTier:
    """Reads an expert file (`experts.memory.file`)."""

    def __init__(self, path: Path, source: bytes) -> None:
        """Raise ExpertStoreError as `read_header` does."""
        self.header = read_header(path, source)
        self.reads = PositionedReads(path)
        self._checksums = PieceChecksums(self.header, path)

    def read(self, layer: int, expert: int, offset: int, out: memoryview) -> None:
        self.reads.read(self.header.offset(layer, expert) + offset, out)
        self._checksums.follow(layer, expert, offset, out)

    def close(self) -> None:
        self.reads.close()


class PackingTier:
    """Packs an expert out of a checkpoint whenever it is read: nothing is stored a second time."""

    def __init__(self, pack: Callable[[int, int, Tensor], None], expert_bytes: int) -> None:
        """pack(layer, expert, out): writes the expert to `out`, uint8 [expert_bytes]; raises ExpertStoreError."""
        self._pack, self._expert_bytes = pack, expert_bytes

    def read(self, layer: int, expert: int, offset: int, out: memoryview) -> None:
        """Fill `out`, which holds a whole expert: `offset` is 0."""
        self._pack(layer, expert, torch.frombuffer(out, dtype=torch.uint8)[: self._expert_bytes])

    def close(self) -> None:
        """Do nothing: no file is open between two reads."""


class HostTier:
    """Experts in page-locked host memory, from which a GPU copies directly. `put` every expert before use.

    experts: (layer, expert) of every expert held, layer after layer.
    """

    def __init__(self, held: Sequence[Sequence[int]], expert_bytes: int, device: torch.device) -> None:
        """Allocate memory, locked for `device`, for the experts held[layer]. Raise ExpertStoreError."""
        size = round_to_page(expert_bytes)
        self.experts = [(layer, expert) for layer, experts in enumerate(held) for expert in experts]
        self._expert_bytes = expert_bytes
        memory = page_locked(len(self.experts) * size, device).view(-1, size)
        self._memory = dict(zip(self.experts, memory, strict=True))

    def put(self, layer: int, expert: int, packed: Tensor) -> None:
        """packed: uint8 [expert_bytes]."""
        self._of(layer, expert)[: self._expert_bytes].copy_(packed)

    def view(self, layer: int, expert: int, start: int, end: int) -> Tensor:
        return self._of(layer, expert)[start:end]

    def read(self, layer: int, expert: int, offset: int, out: memoryview) -> None:
        out[:] = self._of(layer, expert)[offset : offset + len(out)].numpy().data

    def close(self) -> None:
        """Do nothing: the memory stays locked until the process ends."""

    def _of(self, layer: int, expert: int) -> Tensor:
        return self._memory[layer, expert]


def page_locked(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] from the start of a page, locked in memory if `device` is a GPU, until the process ends.

    torch's own pinned memory is rounded up to a power of two, which for all experts of a model may be twice as much.
    Huge pages, which only private memory has, leave few of them to be locked. Raise ExpertStoreError.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda":
        # Another thread's current GPU is the first one, where CUDA would take memory for a context.
        with torch.cuda.device(device):
            error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        if error:
            raise ExpertStoreError(f"{num_bytes / 2**30:.1f} GiB of host memory cannot be locked (CUDA error {error}).")
    return memory
