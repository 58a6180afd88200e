"""Experts in page-locked host memory, from which a GPU copies them by itself."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from experts.errors import ExpertStoreError
from experts.memory.expert_file import round_to_page


class HostTier:
    """A tier (`experts.memory.store.ExpertTier`) that a device reads where it lies. `put` every expert before use.

    experts: (layer, expert) of all that it has, layer after layer.
    """

    def __init__(self, held: Sequence[Sequence[int]], expert_bytes: int, device: torch.device) -> None:
        """Takes the memory, locked for `device`, of the experts held[layer]. Raises ExpertStoreError."""
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
        """The memory stays locked until the process ends."""

    def _of(self, layer: int, expert: int) -> Tensor:
        return self._memory[layer, expert]


def page_locked(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] from the start of a page, locked in memory if `device` is a GPU, until the process ends.

    torch's own pinned memory is rounded up to a power of two, which for all experts of a model may be twice as much.
    Raises ExpertStoreError.
    """
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    if device.type == "cuda":
        runtime = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        if error:
            raise ExpertStoreError(f"{num_bytes / 2**30:.1f} GiB of host memory cannot be locked (CUDA error {error}).")
    return memory
