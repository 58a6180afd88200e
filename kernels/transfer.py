"""Copy between host and device in the order of the stream, without waiting."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

_TYPES = {"q": torch.int64, "i": torch.int32, "f": torch.float32}


def to_device(values: array[int] | array[float], device: torch.device) -> Tensor:
    """Copy an array's numbers to a tensor; the array may change afterwards."""
    dtype = _TYPES[values.typecode]
    tensor = torch.frombuffer(values, dtype=dtype) if len(values) else torch.empty(0, dtype=dtype)
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


def copied(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device, where it does not follow later changes; return the same tensor on a CPU."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """Copy to the host, to be read after an event behind the copy; return the same tensor if it is there already."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
