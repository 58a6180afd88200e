"""The memory of the fast tier: for each layer some slots, each of whole pages. On a CPU, and what any device offers."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from experts.expert_file import round_to_page
from experts.tiers import ExpertTier, page_locked


class Slots(Protocol):
    """Slots that one thread fills and another one computes with. slot_bytes: of one. piece_bytes: copied at a time."""

    slot_bytes: int
    piece_bytes: int

    def fill(self, tier: ExpertTier, layer: int, expert: int, slot: int, start: int, end: int) -> tuple[int, float]:
        """Copies bytes `start` to `end` of an expert into a slot, or queues that. For the copying thread.

        Returns what of all copies is newly known to be over: bytes, and the seconds these took.
        """

    def before_use(self, layer: int, slots: Sequence[int]) -> None:
        """What the computing thread does from now on finds in these slots all that was copied or queued."""

    def after_use(self, layer: int) -> None:
        """Copies into the layer's slots from now on come after what the computing thread has done so far."""


class SlotArena:
    """Gives out views of one piece of memory. Copies are done when `fill` returns."""

    # A demand load waits for at most one piece of a prefetch.
    piece_bytes = 2**20

    def __init__(self, num_slots: Sequence[int], expert_bytes: int, memory: Tensor | None = None) -> None:
        """num_slots: of each layer. memory: uint8 of all slots from the start of a page on; by default
        memory is taken page by page when a slot is first filled."""
        self.slot_bytes = round_to_page(expert_bytes)
        self._expert_bytes = expert_bytes
        self._first = [0, *accumulate(num_slots)]
        self._memory = _fresh_memory(self._first[-1] * self.slot_bytes) if memory is None else memory
        self._view = self._memory.numpy().data

    def fill(self, tier: ExpertTier, layer: int, expert: int, slot: int, start: int, end: int) -> tuple[int, float]:
        started = time.perf_counter()
        tier.read(layer, expert, start, self.bytes_of(layer, slot)[start:end])
        return end - start, time.perf_counter() - started

    def before_use(self, layer: int, slots: Sequence[int]) -> None:
        """Everything is in its place."""

    def after_use(self, layer: int) -> None:
        """What was called is done."""

    def bytes_of(self, layer: int, slot: int) -> memoryview:
        """The slot to write to: [slot_bytes]."""
        start = self._start(layer, slot)
        return self._view[start : start + self.slot_bytes]

    def tensor_of(self, layer: int, slot: int) -> Tensor:
        """The expert in the slot, whatever is written there: uint8 [expert_bytes], a view."""
        start = self._start(layer, slot)
        return self._memory[start : start + self._expert_bytes]

    def _start(self, layer: int, slot: int) -> int:
        return (self._first[layer] + slot) * self.slot_bytes


def _fresh_memory(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, num_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


# Slots in a device's memory, filled on a side stream while layers are computed on another one. Nobody waits for the
# whole device. A layer's kernels come after the copies into the slots they read, and a copy into a slot after the
# kernels that read what was there; the copying thread waits for a copy only to keep few of them queued, so that a
# demand load overtakes what has not been queued yet.


# Two: the next piece starts when the one before ends, and a demand load waits for no more than these.
_MAX_QUEUED = 2


class QueuedCopy(Protocol):
    def wait(self) -> float:
        """Waits on the host until the copy is done; the seconds it took."""


class CopyStream(Protocol):
    """Where copies into device memory are queued, one after the other. A mark is a point in the computation's order."""

    def copy(self, source: Tensor, target: Tensor, after: Any) -> QueuedCopy:
        """Queues a copy that comes after a mark. `source` stays as it is until the copy is done."""

    def mark(self) -> Any:
        """What the calling thread's computation has queued so far."""

    def follow(self, copy: QueuedCopy) -> None:
        """The calling thread's computation goes on after the copy; the host does not wait."""


@runtime_checkable
class LockedTier(Protocol):
    """A tier in page-locked memory, from which a device copies by itself."""

    def view(self, layer: int, expert: int, start: int, end: int) -> Tensor:
        """Bytes `start` to `end` of an expert where they lie."""


class _Piece(NamedTuple):
    copy: QueuedCopy
    num_bytes: int
    read_seconds: float


class DeviceSlots:
    """See `experts.slots.Slots`. From tiers that are not page-locked, pieces go through staging memory."""

    # Large enough for the full speed of a link, small enough that a demand load does not wait long.
    piece_bytes = 4 * 2**20

    def __init__(
        self, num_slots: Sequence[int], expert_bytes: int, device: torch.device, copies: CopyStream | None = None
    ) -> None:
        """num_slots: of each layer. Takes their memory."""
        self.slot_bytes = round_to_page(expert_bytes)
        self._device = device
        self._copies = copies or copy_stream(device)
        self._layers = [torch.empty((count, self.slot_bytes), dtype=torch.uint8, device=device) for count in num_slots]
        # Of each layer: where the computation last used its slots, and the last copy into each since it was used.
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
            # Once the computation is behind a copy it stays so.
            copy = self._filled[layer].pop(slot, None)
            if copy is not None:
                self._copies.follow(copy)

    def after_use(self, layer: int) -> None:
        self._used[layer] = self._copies.mark()

    def _staging_memory(self) -> Tensor:
        """The next buffer in turn; as many as can be queued, so the copy out of it is over."""
        if not self._staging:
            size = min(self.piece_bytes, self.slot_bytes)
            self._staging = [page_locked(size, self._device) for _ in range(_MAX_QUEUED)]
        self._num_staged += 1
        return self._staging[self._num_staged % _MAX_QUEUED]


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
    """Where the device is the CPU under Triton's interpreter: what is called is done."""

    def copy(self, source: Tensor, target: Tensor, after: None) -> _PlainCopy:
        started = time.perf_counter()
        target.copy_(source)
        return _PlainCopy(time.perf_counter() - started)

    def mark(self) -> None:
        """Nothing is ever queued."""

    def follow(self, copy: QueuedCopy) -> None:
        """It is done."""
