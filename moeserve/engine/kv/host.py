"""KV of a GPU on its way to pages of the host's memory, copied by a thread beside the engine's, or to a disk."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from queue import SimpleQueue

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from experts.memory.tiers import page_locked
from kernels.transfer import copied
from moeserve.config import ConfigError, ServeConfig
from moeserve.device import RESERVE_BYTES, KvBudget, available_bytes, step_budget
from moeserve.engine.kv.disk.copier import BlockBuffer, BlockCopier, Buffer, make_buffers, take_all
from moeserve.engine.kv.disk.files import BlockFiles
from moeserve.engine.kv.disk.opening import memories_of
from moeserve.engine.rank import Rank
from moeserve.forever import repeat
from moeserve.scheduling.arrivals import Result
from moeserve.scheduling.lower_tier import GONE, STORED_AT_ONCE, CopyJob, Hosted, num_kept_free
from moeserve.settings.quantities import show_size
from radix_cache import NAME_BYTES, BlockCopy, Kind, StoredBlocks, Tier

# Blocks go through memory of the device that holds some of them, in a row each, in at most this number of bytes: one
# operation per pool and one transfer per page, rather than one per pool and block.
_STAGED_BYTES = 32 << 20
_STAGED_BLOCKS = 16

log = structlog.get_logger(__name__)

# The memory of blocks on the device, [rows, blocks, bytes]: a block is the bytes of all tensors at its number.
DeviceMemory = Sequence[Tensor]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class KvHost:
    """The blocks in the host's memory, their pages, and the device's memories that they are copied from and to.

    read_s: see `KvDisk`; nothing is known before the first copy.
    """

    stored: StoredBlocks
    pages: HostPages
    memories: Mapping[Kind, DeviceMemory]
    read_s: Mapping[bool, float]


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The pages of `--kv-host-memory`. num_job_pages: of these, the pages that are kept for blocks in copy."""

    num_pages: int
    page_bytes: int
    num_job_pages: int

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes


class HostPages:
    """Pages of the host's memory, page-locked if there is a GPU. A block fills one or several, anywhere."""

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device) -> None:
        """Raise ExpertStoreError if the memory cannot be locked."""
        self.num_pages, self.page_bytes = num_pages, page_bytes
        self._memory = page_locked(num_pages * page_bytes, device).view(num_pages, page_bytes)
        self._free = list(reversed(range(num_pages)))
        self._of: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, key: str, num_bytes: int) -> list[Tensor] | None:
        """Return the pages for a block of `num_bytes`; None if too few are free."""
        self.free(key)
        count = -(-num_bytes // self.page_bytes)
        if count > len(self._free):
            return None
        self._of[key] = [self._free.pop() for _ in range(count)]
        return self.find(key)

    def find(self, key: str) -> list[Tensor] | None:
        """Return the pages of a block; None if it has none."""
        numbers = self._of.get(key)
        return None if numbers is None else [self._memory[number] for number in numbers]

    def free(self, key: str) -> None:
        """Free the pages of a block, if it has some."""
        self._free += self._of.pop(key, ())


class HostedBlocks:
    """A `Hosted` in pages of the host's memory: the blocks of a disk that were written or read last."""

    def __init__(self, pages: HostPages, clock: Callable[[], float] = time.monotonic) -> None:
        self._pages, self._clock = pages, clock
        self._lock = threading.Lock()
        # Bytes and the time of the last use by path; the block that was used longest ago comes first.
        self._kept: OrderedDict[str, tuple[int, float]] = OrderedDict()
        # KV blocks, and bytes of all.
        self._of_folder: dict[str, tuple[int, int]] = {}

    def keep(self, path: str, content: memoryview) -> None:
        with self._lock:
            self._free(path)
            while (pages := self._pages.take(path, len(content))) is None:
                if not self._kept:
                    return
                self._free(next(iter(self._kept)))
            for page, part in self._parts(pages, content):
                page[:] = part
            self._kept[path] = len(content), self._clock()
            self._count(path, 1, len(content))

    def find(self, path: str, content: memoryview) -> bool:
        with self._lock:
            if path not in self._kept or self._kept[path][0] != len(content):
                return False
            self._kept[path] = len(content), self._clock()
            self._kept.move_to_end(path)
            for page, part in self._parts(self._pages.find(path) or (), content):
                part[:] = page
            return True

    def free(self, path: str) -> None:
        with self._lock:
            self._free(path)

    def resident(self, folders: Collection[str] | None = None) -> tuple[int, int]:
        with self._lock:
            of_folders = self._of_folder if folders is None else folders
            found = [self._of_folder[folder] for folder in of_folders if folder in self._of_folder]
        return sum(num_blocks for num_blocks, _ in found), sum(num_bytes for _, num_bytes in found)

    @property
    def oldest_age(self) -> float:
        with self._lock:
            return self._clock() - next(iter(self._kept.values()))[1] if self._kept else 0.0

    def _parts(self, pages: Sequence[Tensor], content: memoryview) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield the used part of each page with the bytes of `content` that belong there."""
        size = self._pages.page_bytes
        for page, start in zip(pages, range(0, len(content), size), strict=True):
            part = np.frombuffer(content[start : start + size], np.uint8)
            yield page.numpy()[: len(part)], part

    def _free(self, path: str) -> None:
        kept = self._kept.pop(path, None)
        self._pages.free(path)
        if kept is not None:
            self._count(path, -1, -kept[0])

    def _count(self, path: str, number: int, num_bytes: int) -> None:
        folder, _, name = path.rpartition("/")
        before = self._of_folder.pop(folder, (0, 0))
        is_kv = len(name) == 2 * NAME_BYTES
        if num_bytes := before[1] + num_bytes:
            self._of_folder[folder] = before[0] + number * is_kv, num_bytes


class StagedBlocks:
    """A few blocks of one kind on the device, in a row each, on their way to pages or from there."""

    def __init__(self, memory: DeviceMemory, most: int = _STAGED_BLOCKS) -> None:
        self._memory, self._device = memory, memory[0].device
        sizes = [int(tensor.shape[0] * tensor.shape[2]) for tensor in memory]
        self.block_bytes = sum(sizes)
        self.most = max(1, min(most, _STAGED_BYTES // max(1, self.block_bytes)))
        self._rows = torch.empty(self.most, self.block_bytes, dtype=torch.uint8, device=self._device)
        # Of each row, the part that belongs to a tensor of the memory, [rows of this, heads, bytes].
        parts = zip(torch.split(self._rows, sizes, 1), memory, strict=True)
        self._parts = [part.unflatten(1, (tensor.shape[0], tensor.shape[2])) for part, tensor in parts]

    def load(self, blocks: Sequence[int]) -> None:
        """Take blocks of the device's memory."""
        ids = self._ids(blocks)
        for part, tensor in zip(self._parts, self._memory, strict=True):
            part[: len(blocks)].copy_(tensor.index_select(1, ids).transpose(0, 1))

    def store(self, blocks: Sequence[int]) -> None:
        """Write the rows to blocks of the device's memory."""
        ids = self._ids(blocks)
        for part, tensor in zip(self._parts, self._memory, strict=True):
            tensor.index_copy_(1, ids, part[: len(blocks)].transpose(0, 1))

    def to_pages(self, row: int, pages: Sequence[Tensor]) -> None:
        for piece, page in self._pieces(row, pages):
            page[: len(piece)].copy_(piece, non_blocking=True)

    def from_pages(self, row: int, pages: Sequence[Tensor]) -> None:
        for piece, page in self._pieces(row, pages):
            piece.copy_(page[: len(piece)], non_blocking=True)

    def _pieces(self, row: int, pages: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        # A block may have no bytes, where all layers have window blocks of their own.
        return zip(torch.split(self._rows[row], len(pages[0])) if pages else (), pages, strict=True)

    def _ids(self, blocks: Sequence[int]) -> Tensor:
        return copied(torch.tensor(blocks, dtype=torch.int64), self._device)


class CopyStream:
    """A stream of one thread beside that of the steps; none without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def used(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Wait until the device has made all copies so far."""
        if self._stream is not None:
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
            event.synchronize()


class DeviceBuffer:
    """A `Buffer` for a GPU's memory: a block's bytes in page-locked memory, between the device and a file."""

    def __init__(self, memory: DeviceMemory) -> None:
        """Raise ExpertStoreError if memory cannot be locked."""
        self._staged = StagedBlocks(memory, most=1)
        self._stream = CopyStream(memory[0].device)
        self._row = page_locked(self._staged.block_bytes, memory[0].device)
        self.content = memoryview(self._row.numpy())  # type: ignore[arg-type]

    def aim(self, block: int) -> None:
        """Do nothing: `content` is the same for all blocks."""

    @torch.inference_mode()
    def load(self, block: int) -> None:
        with self._stream.used():
            self._staged.load([block])
            self._staged.to_pages(0, [self._row])
            self._stream.wait()

    @torch.inference_mode()
    def store(self, block: int) -> None:
        with self._stream.used():
            self._staged.from_pages(0, [self._row])
            self._staged.store([block])
            self._stream.wait()


def device_buffers(memories: Mapping[Kind, DeviceMemory]) -> dict[Kind, Buffer]:
    """Return the buffers of one thread. A block has no bytes where all layers have window blocks of their own."""
    return {kind: DeviceBuffer(memory) if memory else BlockBuffer(()) for kind, memory in memories.items()}


def disk_copier(rank: Rank, files: BlockFiles, hosted: Hosted | None = None) -> BlockCopier:
    """Return the copier between a rank's memory, of a CPU or of a GPU, and files. hosted: see `BlockCopier`."""
    if rank.model.device == "cpu":
        arrays = memories_of(rank)
        return BlockCopier(files, lambda: make_buffers(arrays), hosted)
    tensors = rank.block_tensors()
    return BlockCopier(files, lambda: device_buffers(tensors), hosted)


class HostCopier:
    """Copies blocks as jobs say, one job after another, on a thread and a stream of its own: a `Mover`.

    It reads or fills only blocks of its job. Until the job's result is taken, no other part of the engine writes, frees
    or reassigns them. It does not pause for steps as copies of a disk do: the device copies beside them.
    """

    def __init__(self, pages: HostPages, memories: Mapping[Kind, DeviceMemory]) -> None:
        self._pages = pages
        self._staged = {kind: StagedBlocks(memory) for kind, memory in memories.items() if memory}
        device = memories[Kind.KV][0].device if memories[Kind.KV] else memories[Kind.WINDOW][0].device
        self._stream = CopyStream(device)
        self._jobs: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._results: SimpleQueue[Result[CopyJob]] = SimpleQueue()
        self._num_open = 0
        threading.Thread(target=self._run, name="kv-host", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        return self._num_open > 0

    def start(self, job: CopyJob) -> None:
        self._num_open += 1
        self._jobs.put(job)

    def take(self, seconds: float = 0.0) -> list[Result[CopyJob]]:
        results = take_all(self._results, seconds)
        self._num_open -= len(results)
        return results

    def close(self) -> None:
        self._jobs.put(None)

    @torch.inference_mode()
    def _run(self) -> None:
        with self._stream.used():
            repeat("kv-host", self._do_next)

    def _do_next(self) -> bool:
        """Do the next job; return False where there will be none."""
        if (job := self._jobs.get()) is None:
            return False
        begun, sizes, error = time.monotonic(), list[int](), None
        try:
            sizes, error = self._write(job) if job.is_write else self._read(job)
            self._stream.wait()
        except Exception as failure:
            sizes, error = [], type(failure).__name__
            log.error("kv_host_fault", exc_info=failure)
            for copy in job.copies if job.is_write else ():
                self._pages.free(copy.path)
        self._results.put(Result(job, sizes, time.monotonic() - begun, error))
        return True

    def _write(self, job: CopyJob) -> tuple[list[int], str | None]:
        """Return the bytes that each block has in pages, 0 for a block that found no room."""
        for key in () if job.chores is None else job.chores.removals:
            self._pages.free(key)
        sizes: list[int] = []
        for kind, copies in self._batches(job.copies):
            staged = self._staged.get(kind)
            if staged is not None:
                staged.load([copy.block for copy in copies])
            for row, copy in enumerate(copies):
                pages = self._pages.take(copy.path, 0 if staged is None else staged.block_bytes)
                if staged is not None and pages is not None:
                    staged.to_pages(row, pages)
                sizes.append(0 if pages is None else max(1, len(pages)) * self._pages.page_bytes)
        return sizes, None

    def _read(self, job: CopyJob) -> tuple[list[int], str | None]:
        """Return the bytes of the first blocks that are there, and why the next one is not filled."""
        sizes: list[int] = []
        for kind, copies in self._batches(job.copies):
            if job.is_cancelled:
                break
            found = [self._pages.find(copy.path) for copy in copies]
            count = found.index(None) if None in found else len(found)
            staged = self._staged.get(kind)
            for row, pages in enumerate(found[:count]):
                assert pages is not None
                if staged is not None:
                    staged.from_pages(row, pages)
                sizes.append(len(pages) * self._pages.page_bytes)
            if staged is not None and count:
                staged.store([copy.block for copy in copies[:count]])
            if count < len(found):
                return sizes, GONE
        return sizes, None

    def _batches(self, copies: Iterable[BlockCopy]) -> Iterator[tuple[Kind, list[BlockCopy]]]:
        for kind, of_kind in groupby(copies, lambda copy: copy.kind):
            staged, run = self._staged.get(kind), list(of_kind)
            size = len(run) if staged is None else staged.most
            for start in range(0, len(run), size):
                yield kind, run[start : start + size]


def plan_kv_host(
    config: ServeConfig, kv: KvBudget, kv_bytes: int, sizes: Mapping[Kind, int], free_bytes: int
) -> HostPlan:
    """Divide `--kv-host-memory` into pages. Raise ConfigError if it is too little or too much.

    kv, kv_bytes: of the GPU. sizes: the bytes of one block of each kind that there is. free_bytes: of the host.
    """
    size = config.kv_host_memory
    assert size is not None
    if Kind.STATE in sizes and not kv.num_snapshots:
        raise ConfigError(
            "--kv-host-memory keeps cached prefixes, and this model caches none without room for snapshots of its "
            "states."
        )
    page_bytes = sizes[Kind.KV] or sizes[Kind.WINDOW]
    # A job needs room before the blocks that leave for it are reported.
    num_pages = size // page_bytes
    num_job_pages = num_kept_free(kv.num_blocks, step_budget(config, "cuda"), config.block_size)
    if len(sizes) > 1:
        of_kind = {kind: -(-num_bytes // page_bytes) for kind, num_bytes in sizes.items()}
        num_job_pages = STORED_AT_ONCE * max(1, of_kind.get(Kind.WINDOW, 0)) + of_kind.get(Kind.STATE, 0)
    if num_pages < 2 * num_job_pages:
        least = show_size(2 * num_job_pages * page_bytes, up=True)
        raise ConfigError(
            f"--kv-host-memory {show_size(size)} is too little beside {show_size(kv_bytes)} of KV on the "
            f"GPU: give it {least} or more."
        )
    free = max(0, free_bytes - RESERVE_BYTES)
    if size > free:
        raise ConfigError(
            f"--kv-host-memory asks for {show_size(size, up=True)}; only {show_size(free)} of the host's memory are "
            "free."
        )
    return HostPlan(num_pages, page_bytes, num_job_pages)


def open_kv_host(config: ServeConfig, rank: Rank) -> KvHost:
    """Take the host's memory for a rank's blocks. For errors see `plan_kv_host`."""
    memories, plan = rank.block_tensors(), _plan_of(config, rank)
    device = next(iter(memories[Kind.KV] or memories[Kind.WINDOW])).device
    pages = HostPages(plan.num_pages, plan.page_bytes, device)
    num_kept = plan.num_pages - plan.num_job_pages
    stored = StoredBlocks(secrets.token_bytes(32), "0" * 32, num_kept * plan.page_bytes, tier=Tier.HOST)
    log.info("kv_host", size=show_size(plan.num_bytes), blocks=num_kept)
    return KvHost(stored, pages, memories, {})


def open_hosted(config: ServeConfig, rank: Rank) -> HostedBlocks:
    """Take the host's memory for blocks that are on disk as well. For errors see `plan_kv_host`."""
    plan = _plan_of(config, rank)
    # Blocks pass through page-locked rows anyway, so that the pages need not be locked.
    return HostedBlocks(HostPages(plan.num_pages, plan.page_bytes, torch.device("cpu")))


def _plan_of(config: ServeConfig, rank: Rank) -> HostPlan:
    sizes = {
        kind: sum(int(one.shape[0] * one.shape[2]) for one in memory) for kind, memory in rank.block_tensors().items()
    }
    return plan_kv_host(config, rank.model.kv, rank.model.kv_bytes, sizes, available_bytes())
