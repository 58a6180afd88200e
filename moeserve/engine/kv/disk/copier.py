"""The threads that copy KV blocks between memory and disk, beside the engine's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from moeserve.engine.kv.disk.files import BlockError, BlockFiles
from moeserve.forever import repeat
from moeserve.scheduling.arrivals import Result
from moeserve.scheduling.lower_tier import GONE, CopyJob, Hosted
from radix_cache import BlockCopy, Chores, Kind, StoredBlock

NUM_READERS = 2  # threads that read files; one more writes
# A thread that copies gently pauses this number of times as long as it has computed: two of them take a tenth of a core
# from the steps beside them.
PAUSES = 19.0
_READ_AT_ONCE = 8  # blocks that a thread reads before another one may have a turn

T = TypeVar("T")

log = structlog.get_logger(__name__)

# The memory of blocks, [rows, blocks, bytes]: a block is the bytes of all arrays at its number.
BlockMemory = Sequence[NDArray[np.uint8]]
# The memory of KV blocks, of window blocks and of recurrent states.
Memories = Mapping[Kind, BlockMemory]


class Buffer(Protocol):
    """Bytes of one block, in a row, for one thread: `content`."""

    content: memoryview

    def aim(self, block: int) -> None:
        """Let `content` be the bytes that `store` will write to a block of memory."""

    def load(self, block: int) -> None:
        """Take the bytes of a block of memory."""

    def store(self, block: int) -> None:
        """Write the bytes to a block of memory."""


class BlockCopier:
    """Copies blocks as jobs say, on threads of its own: a `moeserve.engine.kv.moves.Mover`.

    A thread reads or fills only blocks of its job. Until the job's result is taken, no other part of the engine writes,
    frees or reassigns them.
    """

    def __init__(
        self, files: BlockFiles, buffers: Callable[[], Mapping[Kind, Buffer]], hosted: Hosted | None = None
    ) -> None:
        """buffers: makes the buffers of one thread, one for each kind of memory; it may raise an error. hosted: None if
        no block is kept in the host's memory as well."""
        self._files = files
        self._hosted = hosted
        self._writes: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._reads: SimpleQueue[_Part | _Search | None] = SimpleQueue()
        self._results: SimpleQueue[Result[CopyJob]] = SimpleQueue()
        self._num_open = 0
        _start_thread("kv-writer", self._write_next, buffers())
        for number in range(NUM_READERS):
            _start_thread(f"kv-reader-{number}", self._read_next, buffers())

    @property
    def is_busy(self) -> bool:
        return self._num_open > 0

    def start(self, job: CopyJob) -> None:
        self._num_open += 1
        if job.is_write:
            self._writes.put(job)
            return
        if job.sought is not None:
            self._reads.put(_Search(job))
            return
        read = _Read(job, -(-len(job.copies) // _READ_AT_ONCE))
        for start in range(0, len(job.copies), _READ_AT_ONCE):
            self._reads.put(_Part(read, start, min(start + _READ_AT_ONCE, len(job.copies))))

    def take(self, seconds: float = 0.0) -> list[Result[CopyJob]]:
        results = take_all(self._results, seconds)
        self._num_open -= len(results)
        return results

    def close(self) -> None:
        self._writes.put(None)
        for _ in range(NUM_READERS):
            self._reads.put(None)

    def _write_next(self, buffers: Mapping[Kind, Buffer]) -> bool:
        """Do the next job that writes; return False where there will be none."""
        if (job := self._writes.get()) is None:
            return False
        begun, sizes, error = time.monotonic(), list[int](), None
        try:
            self._do_chores(job.chores)
            for copy in job.copies:
                with _giving_way(job):
                    buffer = buffers[copy.kind]
                    buffer.load(copy.block)
                    sizes.append(self._files.write(copy, buffer.content))
                    if self._hosted is not None:
                        self._hosted.keep(copy.path, buffer.content)
        except OSError as failure:
            error = str(failure)
            log.warning("kv_disk_not_written", error=error, consequence="these prefixes stay in memory alone")
        except Exception as failure:
            error = type(failure).__name__
            log.error("kv_disk_fault", exc_info=failure)
        self._results.put(Result(job, sizes, time.monotonic() - begun, error))
        return True

    def _do_chores(self, chores: Chores | None) -> None:
        if chores is not None:
            for path in chores.removals:
                if self._hosted is not None:
                    self._hosted.free(path)
                self._files.remove(path)
            for path, seconds in chores.stamps:
                self._files.stamp(path, seconds)

    def _read_next(self, buffers: Mapping[Kind, Buffer]) -> bool:
        """Do the next part of a job that reads; return False where there will be none."""
        if (part := self._reads.get()) is None:
            return False
        if isinstance(part, _Search):
            self._results.put(self._search(part.job))
            return True
        read = part.read
        read.begin()
        for index in range(part.start, part.stop):
            if not read.wants(index):
                break
            with _giving_way(read.job):
                outcome, is_hosted = self._read(read.job.copies[index], buffers)
                read.record(index, outcome, is_hosted=is_hosted)
        if (result := read.end_part()) is not None:
            self._results.put(result)
        return True

    def _search(self, job: CopyJob) -> Result[CopyJob]:
        begun, found = time.monotonic(), list[StoredBlock]()
        try:
            with suppress(OSError):
                for block, *beside in job.sought or ():
                    if job.is_cancelled:
                        break
                    found.append(self._files.status(block))
                    for other in beside:
                        with suppress(FileNotFoundError):
                            found.append(self._files.status(other))
        except Exception as failure:
            log.error("kv_disk_fault", exc_info=failure)
        return Result(job, (), time.monotonic() - begun, found=found)

    def _read(self, copy: BlockCopy, buffers: Mapping[Kind, Buffer]) -> tuple[int | str, bool]:
        """Fill a block. Return the size of its file, or the error, and whether it was in the host's memory."""
        buffer = buffers[copy.kind]
        try:
            buffer.aim(copy.block)
            if self._hosted is not None and self._hosted.find(copy.path, buffer.content):
                buffer.store(copy.block)
                return len(buffer.content), True
            size = self._files.read(copy, buffer.content)
            if self._hosted is not None:
                self._hosted.keep(copy.path, buffer.content)
            buffer.store(copy.block)
        except FileNotFoundError:
            return GONE, False
        except (OSError, BlockError) as failure:
            log.warning("kv_disk_block_unusable", file=copy.path, reason=str(failure), consequence="it is computed")
            return str(failure), False
        except Exception as failure:
            log.error("kv_disk_fault", exc_info=failure)
            return type(failure).__name__, False
        return size, False


def _start_thread(name: str, turn: Callable[[Mapping[Kind, Buffer]], bool], buffers: Mapping[Kind, Buffer]) -> None:
    threading.Thread(target=repeat, args=(name, partial(turn, buffers)), name=name, daemon=True).start()


def take_all(queue: SimpleQueue[T], seconds: float) -> list[T]:
    """Return all that is in a queue. Wait up to `seconds` for the first."""
    taken = list[T]()
    with suppress(Empty):
        taken.append(queue.get(timeout=seconds) if seconds else queue.get_nowait())
        while True:
            taken.append(queue.get_nowait())
    return taken


@contextmanager
def _giving_way(job: CopyJob) -> Iterator[None]:
    """Pause after a piece of a gentle job, in proportion to the processor time that it took.

    A low priority would not do: a thread that does not run may hold the interpreter's lock.
    """
    begun = time.thread_time()
    yield
    if job.is_gentle:
        time.sleep(PAUSES * (time.thread_time() - begun))


class _Read:
    """A job that several threads read in parts."""

    def __init__(self, job: CopyJob, num_parts: int) -> None:
        self.job = job
        self._num_parts = num_parts
        self._lock = threading.Lock()
        # By the number of the block.
        self._sizes: dict[int, int] = {}
        self._hosted: set[int] = set()
        self._first_bad = len(job.copies)
        self._error: str | None = None
        self._begun: float | None = None

    def begin(self) -> None:
        """Record that a thread begins the job; the seconds before that belong to other jobs."""
        with self._lock:
            self._begun = self._begun or time.monotonic()

    def wants(self, index: int) -> bool:
        """Return whether a block is still of use: no block before it has failed."""
        return not self.job.is_cancelled and index < self._first_bad

    def record(self, index: int, outcome: int | str, *, is_hosted: bool) -> None:
        """Record the size of a block's file, or the error, and whether the host's memory had it."""
        with self._lock:
            if is_hosted:
                self._hosted.add(index)
            if isinstance(outcome, int):
                self._sizes[index] = outcome
            elif index < self._first_bad:
                self._first_bad, self._error = index, outcome

    def end_part(self) -> Result[CopyJob] | None:
        """Record the end of a part. Return the result once all parts have ended."""
        with self._lock:
            self._num_parts -= 1
            if self._num_parts:
                return None
            sizes: list[int] = []
            while len(sizes) in self._sizes and len(sizes) < self._first_bad:
                sizes.append(self._sizes[len(sizes)])
            error = None if self.job.is_cancelled else self._error
            assert self._begun is not None
            hosted = [index in self._hosted for index in range(len(sizes))]
            return Result(self.job, sizes, time.monotonic() - self._begun, error, hosted=hosted)


class _Part:
    """The blocks number `start` to `stop` of a job."""

    def __init__(self, read: _Read, start: int, stop: int) -> None:
        self.read, self.start, self.stop = read, start, stop


@dataclass(frozen=True, slots=True)
class _Search:
    """A job that looks for files."""

    job: CopyJob


class BlockBuffer:
    """A `Buffer` for memory of the host."""

    def __init__(self, memory: BlockMemory, *, in_place: bool = False) -> None:
        """in_place: blocks are rows of one array, large ones, and need no copy of their own."""
        self._rows = memory[0][0] if in_place else None
        self._memory = () if in_place else memory
        bytes_ = np.empty(block_bytes(self._memory), np.uint8)
        self.content = memoryview(bytes_)  # type: ignore[arg-type]
        self._parts: list[NDArray[np.uint8]] = []
        start = 0
        for array in self._memory:
            stop = start + array.shape[0] * array.shape[2]
            self._parts.append(bytes_[start:stop].reshape(array.shape[0], array.shape[2]))
            start = stop

    def aim(self, block: int) -> None:
        if self._rows is not None:
            self.content = memoryview(self._rows[block])

    def load(self, block: int) -> None:
        self.aim(block)
        for part, array in zip(self._parts, self._memory, strict=True):
            np.copyto(part, array[:, block])

    def store(self, block: int) -> None:
        for part, array in zip(self._parts, self._memory, strict=True):
            np.copyto(array[:, block], part)


def make_buffers(memories: Memories) -> dict[Kind, Buffer]:
    """Return the buffers of one thread. Of a kind without memory, as of layers of other ranks, a block has no bytes."""
    return {
        kind: BlockBuffer(memories.get(kind, ()), in_place=kind is Kind.STATE and kind in memories) for kind in Kind
    }


def block_bytes(memory: Sequence[Any]) -> int:
    return sum(int(array.shape[0] * array.shape[2]) for array in memory)


def as_block_memory(tensors: Sequence[Any]) -> BlockMemory:
    """Return the memory of a KV pool (`KVPool.block_bytes`, tensors on a CPU), without a copy."""
    return [tensor.numpy() for tensor in tensors]
