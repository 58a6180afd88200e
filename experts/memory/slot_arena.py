"""The memory of the fast tier: for each layer some slots, each of whole pages. On a CPU, and what any device offers."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from experts.memory.expert_file import round_to_page
from experts.memory.store import ExpertTier


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
