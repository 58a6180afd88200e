"""The memory of the fast tier: slots of whole pages for each layer, in main memory or in a GPU's memory."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from experts.memory.file import round_to_page
from experts.memory.tiers import ExpertTier, page_locked

# The most copies queued on a device. With two, a piece starts when the last one ends, and demand loads wait little.
_MAX_QUEUED = 2


class Slots(Protocol):
    """Slots that one thread fills and another one computes with.

    slot_bytes: the size of one slot. piece_bytes: the bytes copied at a time; a demand load waits for at most one piece
    of a prefetch.
    """

    slot_bytes: int
    piece_bytes: int

    def fill(self, tier: ExpertTier, layer: int, expert: int, slot: int, start: int, end: int) -> tuple[int, float]:
        """Copy bytes `start` to `end` of an expert into a slot, or queue the copy. For the copying thread.

        Return the bytes of the copies that this call found to be over, and the seconds that they took.
        """

    def before_use(self, layer: int, slots: Sequence[int]) -> None:
        """Order the computing thread's further work after everything copied or queued into these slots."""

    def after_use(self, layer: int) -> None:
        """Order further copies into the layer's slots after the computing thread's work so far."""


class SlotArena:
    """Slots in one piece of main memory. Copies are done when `fill` returns; several threads may call it at once."""

    def __init__(self, num_slots: Sequence[int], expert_bytes: int, *, in_pieces: bool = True) -> None:
        """num_slots: the slots of each layer. Pages are allocated when a slot is first filled. in_pieces: False to fill
        a slot at once."""
        self.slot_bytes = round_to_page(expert_bytes)
        self.piece_bytes = 2**20 if in_pieces else self.slot_bytes
        self._expert_bytes = expert_bytes
        self._first = [0, *accumulate(num_slots)]
        self._memory = _fresh_memory(self._first[-1] * self.slot_bytes)
        self._view = self._memory.numpy().data

    def fill(self, tier: ExpertTier, layer: int, expert: int, slot: int, start: int, end: int) -> tuple[int, float]:
        started = time.perf_counter()
        tier.read(layer, expert, start, self.bytes_of(layer, slot)[start:end])
        return end - start, time.perf_counter() - started

    def before_use(self, layer: int, slots: Sequence[int]) -> None:
        """Do nothing: all copies are done."""

    def after_use(self, layer: int) -> None:
        """Do nothing: all work is done."""

    def bytes_of(self, layer: int, slot: int) -> memoryview:
        """[slot_bytes]: the slot, to write to."""
        start = self._start(layer, slot)
        return self._view[start : start + self.slot_bytes]

    def tensor_of(self, layer: int, slot: int) -> Tensor:
        """uint8 [expert_bytes], a view of the slot."""
        start = self._start(layer, slot)
        return self._memory[start : start + self._expert_bytes]

    def _start(self, layer: int, slot: int) -> int:
        return (self._first[layer] + slot) * self.slot_bytes


def _fresh_memory(num_bytes: int) -> Tensor:
    # Private: a forked copy of the process fills its own slots. Shared memory would also have no huge pages by default.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class DeviceSlots:
    """Slots in a device's memory, filled on a side stream while layers are computed on another one.

    A layer's kernels come after the copies into the slots they read, and a copy into a slot after the kernels that read
    its old content; no thread waits for the whole device. The copying thread waits for a copy only to keep few of them
    queued, so that a demand load overtakes pieces that are not queued yet. From tiers that are not page-locked, pieces
    go through staging memory.
    """

    # Large enough for the full speed of a link.
    piece_bytes = 4 * 2**20

    def __init__(
        self, num_slots: Sequence[int], expert_bytes: int, device: torch.device, copies: CopyStream | None = None
    ) -> None:
        """Allocate the memory. num_slots: the slots of each layer."""
        self.slot_bytes = round_to_page(expert_bytes)
        self._device = device
        self._copies = copies or copy_stream(device)
        self._layers = [torch.empty((count, self.slot_bytes), dtype=torch.uint8, device=device) for count in num_slots]
        # By layer: a mark behind the last use of its slots, and by slot the last copy since the slot was used.
        self._used = [self._copies.mark()] * len(num_slots)
        self._filled: list[dict[int, QueuedCopy]] = [{} for _ in num_slots]
        self._queued: deque[_Piece] = deque()
        self._staging: list[Tensor] = []
        self._num_staged = 0

    def of_layer(self, layer: int) -> Tensor:
        """uint8 [num_slots, slot_bytes]."""
        return self._layers[layer]

    def fill(self, tier: ExpertTier, layer: int, expert: int, slot: int, start: int, end: int) -> tuple[int, float]:
        over = (0, 0.0)
        if len(self._queued) == _MAX_QUEUED:
            piece = self._queued.popleft()
            over = (piece.num_bytes, piece.read_seconds + piece.copy.wait())
        started = time.perf_counter()
        source = tier.view(layer, expert, start, end) if isinstance(tier, LockedTier) else None
        if source is None:
            source = self._staging_memory()[: end - start]
            tier.read(layer, expert, start, source.numpy().data)
        seconds = time.perf_counter() - started
        copy = self._copies.copy(source, self._layers[layer][slot, start:end], self._used[layer])
        self._queued.append(_Piece(copy, end - start, seconds))
        self._filled[layer][slot] = copy
        return over

    def before_use(self, layer: int, slots: Sequence[int]) -> None:
        for slot in slots:
            # The computation has to follow a copy only once.
            copy = self._filled[layer].pop(slot, None)
            if copy is not None:
                self._copies.follow(copy)

    def after_use(self, layer: int) -> None:
        self._used[layer] = self._copies.mark()

    def _staging_memory(self) -> Tensor:
        """Return the next buffer in turn. There are as many buffers as queued copies, so its last copy is over."""
        if not self._staging:
            size = min(self.piece_bytes, self.slot_bytes)
            self._staging = [page_locked(size, self._device) for _ in range(_MAX_QUEUED)]
        self._num_staged += 1
        return self._staging[self._num_staged % _MAX_QUEUED]


class _Piece(NamedTuple):
    copy: QueuedCopy
    num_bytes: int
    read_seconds: float


class QueuedCopy(Protocol):
    def wait(self) -> float:
        """Wait on the host until the copy is done; return the seconds it took."""


class CopyStream(Protocol):
    """A queue of copies into device memory. A mark is a point in the order of the computation."""

    def copy(self, source: Tensor, target: Tensor, after: Any) -> QueuedCopy:
        """Queue a copy that comes after a mark. `source` must not change until the copy is done."""

    def mark(self) -> Any:
        """Return a point after everything that the calling thread's computation has queued so far."""

    def follow(self, copy: QueuedCopy) -> None:
        """Order the calling thread's computation after the copy; the host does not wait."""


@runtime_checkable
class LockedTier(Protocol):
    """A tier in page-locked memory, from which a device copies directly."""

    def view(self, layer: int, expert: int, start: int, end: int) -> Tensor:
        """Return a view of the bytes `start` to `end` of an expert."""


def copy_stream(device: torch.device) -> CopyStream:
    return CudaCopies(device) if device.type == "cuda" else PlainCopies()


class _CudaCopy:
    def __init__(self, started: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._started = started
        self.ended = ended

    def wait(self) -> float:
        self.ended.synchronize()
        return self._started.elapsed_time(self.ended) / 1000


class CudaCopies:
    """A side stream of a GPU. Any thread may queue."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, source: Tensor, target: Tensor, after: torch.cuda.Event) -> _CudaCopy:
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            started.record()
            target.copy_(source, non_blocking=True)
            ended.record()
        return _CudaCopy(started, ended)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, copy: QueuedCopy) -> None:
        assert isinstance(copy, _CudaCopy)
        torch.cuda.current_stream(self._device).wait_event(copy.ended)


class _PlainCopy:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wait(self) -> float:
        return self._seconds


class PlainCopies:
    """Copies on a CPU under Triton's interpreter: a call returns when its copy is done."""

    def copy(self, source: Tensor, target: Tensor, after: None) -> _PlainCopy:
        started = time.perf_counter()
        target.copy_(source)
        return _PlainCopy(time.perf_counter() - started)

    def mark(self) -> None:
        """Do nothing: nothing is queued."""

    def follow(self, copy: QueuedCopy) -> None:
        """Do nothing: the copy is done."""
