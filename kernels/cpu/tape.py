"""Tapes: a sequence of calls of the compiled kernels that one call repeats, without Python between them.

What is recorded computes with torch's memory, but with no operation of torch: an allocation comes from a `TapeMemory`,
a view needs nothing, and any other operation makes a sequence that cannot be repeated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu.library import NativeKernels

ResultT = TypeVar("ResultT")

_ALIGNMENT = 64


class Tape(Generic[ResultT]):
    """A recorded sequence. `result` is what the recorded function returned; its tensors are written anew by each run.

    Tensors that existed before the recording must live as long as the tape, at the same addresses.
    """

    def __init__(self, kernels: NativeKernels, handle: int, result: ResultT) -> None:
        self.result = result
        self._run, self._handle = kernels.tape_run, handle
        weakref.finalize(self, kernels.tape_free, handle)

    def run(self) -> None:
        """Make the recorded calls again, with what now lies at their addresses."""
        self._run(self._handle)


class TapeMemory:
    """Memory for the tensors of recorded sequences. All tapes share it: each overwrites what others have left.

    A tensor's memory serves others of its size from the moment that no tensor uses it.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}

    def take(self, num_bytes: int) -> Tensor:
        """Return uint8 [num_bytes], aligned to a cache line, of any contents."""
        size = max(_ALIGNMENT, 1 << (num_bytes - 1).bit_length()) if num_bytes else _ALIGNMENT
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else _aligned(size)
        # The tensor's storage holds this view, which nothing else does.
        lent = memory[:num_bytes]
        weakref.finalize(lent, free.append, memory)
        return torch.from_numpy(lent)


def _aligned(size: int) -> np.ndarray[Any, Any]:
    memory = np.empty(size + _ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size]


def record(
    kernels: NativeKernels, memory: TapeMemory, compute: Callable[[], ResultT]
) -> tuple[ResultT, Tape[ResultT] | None]:
    """Compute, and return the result with a tape that repeats it; None where torch computed anything itself."""
    handle = kernels.tape_begin()
    watch = _Watch(kernels, memory)
    try:
        with watch:
            result = compute()
    except BaseException:
        kernels.tape_end()
        kernels.tape_free(handle)
        raise
    kernels.tape_end()
    if watch.foreign:
        kernels.tape_free(handle)
        return result, None
    return result, Tape(kernels, handle, result)


class _Watch(TorchDispatchMode):
    """Gives memory to new tensors, and notes operations that a tape does not repeat."""

    def __init__(self, kernels: NativeKernels, memory: TapeMemory) -> None:
        super().__init__()
        self.foreign: list[str] = []
        self._kernels, self._memory = kernels, memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.new_empty.default:
            return self._new(args[0], args[1], **(kwargs or {}))
        if func is torch.ops.aten.add_.Tensor and not kwargs and _adds_whole(*args):
            self._kernels.add(args[0].data_ptr(), args[1].data_ptr(), args[0].numel())
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or not _is_view(result, args):
            self.foreign.append(str(func))
        return result

    def _new(self, like: Tensor, size: list[int], dtype: torch.dtype | None = None, **others: object) -> Tensor:
        dtype = dtype or like.dtype
        return self._memory.take(torch.Size(size).numel() * dtype.itemsize).view(dtype).view(size)


def _adds_whole(to: Tensor, x: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and to.dtype == x.dtype == torch.float32
        and to.shape == x.shape
        and to.is_contiguous()
        and x.is_contiguous()
    )


def _is_view(result: Any, args: tuple[Any, ...]) -> bool:
    """Return whether all results lie in the memory of the arguments."""
    results = result if isinstance(result, tuple | list) else [result]
    whole = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
    return all(isinstance(part, Tensor) and part.untyped_storage().data_ptr() in whole for part in results)
