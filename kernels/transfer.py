"""Copies between host and device that wait for nothing, in the order of the stream."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

_TYPES = {"q": torch.int64, "i": torch.int32, "f": torch.float32}


def to_device(values: array[int] | array[float], device: torch.device) -> Tensor:
    """A tensor of an array's numbers, which may change afterwards."""
    dtype = _TYPES[values.typecode]
    tensor = torch.frombuffer(values, dtype=dtype) if len(values) else torch.empty(0, dtype=dtype)
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


def copied(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, which does not follow later changes there; the same tensor on a CPU."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """A copy on the host, to be read after an event behind it; the same tensor if it is there already."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
