"""The memory of the fast tier on a CPU: for each layer some slots, each of whole pages."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from experts.expert_file import round_to_page


class SlotArena:
    """Memory is taken page by page when a slot is first filled."""

    def __init__(self, num_slots: Sequence[int], expert_bytes: int) -> None:
        """num_slots: of each layer."""
        self.slot_bytes = round_to_page(expert_bytes)
        self._expert_bytes = expert_bytes
        self._first = [0, *accumulate(num_slots)]
        self._memory = mmap.mmap(-1, self._first[-1] * self.slot_bytes)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._memory)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    def bytes_of(self, layer: int, slot: int) -> memoryview:
        """The slot to write to: [slot_bytes]."""
        start = self._start(layer, slot)
        return self._view[start : start + self.slot_bytes]

    def tensor_of(self, layer: int, slot: int) -> Tensor:
        """The expert in the slot, whatever is written there: uint8 [expert_bytes], a view."""
        start = self._start(layer, slot)
        return self._tensor[start : start + self._expert_bytes]

    def _start(self, layer: int, slot: int) -> int:
        return (self._first[layer] + slot) * self.slot_bytes
