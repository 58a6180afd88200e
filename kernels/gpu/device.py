"""The facts about a GPU from which kernels choose their configurations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Under Triton's interpreter: few enough multiprocessors that small batches make several waves.
_INTERPRETED_COUNT = 4
# Major numbers of the compute capabilities whose tensor cores take whole tiles from shared memory.
_READS_TILES = (9, 10)


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """The limits of a program on one multiprocessor of a GPU.

    shared_bytes: the most shared memory. reads_tiles: its tensor cores take products of 64 rows or more from shared
    memory (wgmma, tcgen05); others take all operands from registers.
    """

    shared_bytes: int
    reads_tiles: bool

    @classmethod
    def of(cls, capability: tuple[int, int], shared_bytes: int) -> Multiprocessor:
        return cls(shared_bytes, capability[0] in _READS_TILES)


HOPPER = Multiprocessor(227 << 10, reads_tiles=True)


def multiprocessor_of(device: torch.device) -> Multiprocessor:
    """Return what a CUDA device has; under Triton's interpreter, what an H200 has."""
    if device.type != "cuda":
        return HOPPER
    return Multiprocessor.of(torch.cuda.get_device_capability(device), shared_memory_of(device))


def shared_memory_of(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have on a CUDA device, or under Triton's interpreter."""
    if device.type != "cuda":
        return HOPPER.shared_bytes
    properties = torch.cuda.get_device_properties(device)
    # The most that a program may opt into, if torch reports it; else the default limit.
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def multiprocessors_of(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device, or under Triton's interpreter."""
    if device.type != "cuda":
        return _INTERPRETED_COUNT
    return torch.cuda.get_device_properties(device).multi_processor_count
