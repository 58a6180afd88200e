"""Copy between host and device in the order of the stream, without waiting."""

from __future__ import annotations

from array import array
from typing import Any, Protocol

import torch
from torch import Tensor

_UPLOAD_BYTES = 32 << 20  # of each of the two buffers
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


class Queue(Protocol):
    """A device's queue of copies."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy from page-locked memory."""

    def mark(self) -> Any:
        """Return a mark behind all that is queued."""

    def wait(self, mark: Any) -> None:
        """Wait until the device has passed a mark."""


class StreamQueue:
    """The current stream of a CUDA device."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()


class Upload:
    """Copies tensors to a device through two buffers of page-locked memory: one is filled while the other is copied.

    queue: None for the current stream; the buffers are then page-locked. One thread calls it.
    """

    def __init__(self, device: torch.device, queue: Queue | None = None, num_bytes: int = _UPLOAD_BYTES) -> None:
        self._device, self._queue = device, queue or StreamQueue()
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=queue is None) for _ in range(2)]
        # The marks behind the last copies out of the buffers, in their order.
        self._marks: list[Any] = [None, None]

    def __call__(self, values: Tensor) -> Tensor:
        """Return a tensor on the device, a copy unless the values are there already."""
        if values.device.type != "cpu":
            return values
        out = torch.empty(values.shape, dtype=values.dtype, device=self._device)
        source, target = (tensor.view(-1).view(torch.uint8) for tensor in (values.contiguous(), out))
        for part, place in zip(source.split(len(self._buffers[0])), target.split(len(self._buffers[0])), strict=True):
            if part.numel():
                self._copy(part, place)
        return out

    def _copy(self, part: Tensor, place: Tensor) -> None:
        if self._marks[0] is not None:
            self._queue.wait(self._marks[0])
        filled = self._buffers[0][: len(part)]
        filled.copy_(part)
        self._queue.copy(filled, place)
        self._buffers.reverse()
        self._marks = [self._marks[1], self._queue.mark()]
