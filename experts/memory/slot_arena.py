"""The memory of the fast tier on a CPU: for each layer some slots, each of whole pages."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from experts.memory.expert_file import round_to_page


class SlotArena:
    """Gives out views of one piece of memory."""

    def __init__(self, num_slots: Sequence[int], expert_bytes: int, memory: Tensor | None = None) -> None:
        """num_slots: of each layer. memory: uint8 of all slots from the start of a page on; by default
        memory is taken page by page when a slot is first filled."""
        self.slot_bytes = round_to_page(expert_bytes)
        self._expert_bytes = expert_bytes
        self._first = [0, *accumulate(num_slots)]
        self._memory = _fresh_memory(self._first[-1] * self.slot_bytes) if memory is None else memory
        self._view = self._memory.numpy().data

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
