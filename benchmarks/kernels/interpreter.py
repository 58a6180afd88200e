"""A mended Triton interpreter, in which kernels with bf16 and fp8 can be tested without a GPU.

The interpreter keeps bf16 as uint16 and computes with the bit patterns: dots and sums of bf16 are garbage, and casts
from fp32 truncate. After `mend_interpreter` casts round to nearest as on a GPU, dots widen their bf16 operands first,
and bf16 arithmetic outside a dot, which no kernel should do, is an error instead of noise. Casts to and from fp8 e4m3
go through torch. A scalar comparison may be part of a mask, and a scalar may be a bound of a loop whatever numpy is
installed.

The patched names are Triton's own: `mend_interpreter` refuses a Triton that lacks them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

PATCHED = ("cast_impl", "create_dot", "create_fp_to_fp", "binary_op")
_MEND = "_moeserve_mended"


def mend_interpreter() -> None:
    """Patch `triton.runtime.interpreter` in this process; a second call changes nothing.

    Raise RuntimeError if the installed Triton is built otherwise.
    """
    missing = [name for name in PATCHED if not hasattr(InterpreterBuilder, name)]
    missing += [name for name in ("TensorHandle", "_patch_lang_tensor") if not hasattr(interpreter, name)]
    if missing:
        raise RuntimeError(f"this Triton's interpreter lacks {missing}; it cannot be mended")
    if hasattr(InterpreterBuilder, _MEND):
        return
    setattr(InterpreterBuilder, _MEND, True)
    plain_cast, plain_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    plain_fp_to_fp, plain_binary = InterpreterBuilder.create_fp_to_fp, InterpreterBuilder.binary_op

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        mended = _cast(src, dst_type)
        return plain_cast(self, src, dst_type) if mended is None else mended

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        mended = _cast(src, dst_type)
        return plain_fp_to_fp(self, src, dst_type, rounding_mode) if mended is None else mended

    def create_dot(self: Any, a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        return plain_dot(self, _widened(a), _widened(b), *rest, **named)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if tl.bfloat16 in (lhs.dtype.scalar, rhs.dtype.scalar):
            raise TypeError("bf16 arithmetic outside a dot: convert to fp32 first")
        result = plain_binary(self, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            result.dtype = tl.int1  # A comparison keeps its operands' dtype, and a scalar one broadcasts as integers.
        return result

    plain_tensor = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        plain_tensor(tensor, scope)
        # Triton 3.6 makes an int of an array of one element, which numpy refuses from 2.4 on.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.binary_op = binary_op


def _cast(src: Any, dst_type: Any) -> Any:
    """Return the mended cast, or None if the interpreter's own is right."""
    source, target = src.dtype.scalar, dst_type.scalar
    if source == target:
        return None
    if source in _TORCH_OF and target in _TORCH_OF and {source, target} & {tl.bfloat16, tl.float8e4nv}:
        values = _to_torch(src.data, source).to(torch.float32).to(_TORCH_OF[target])
        return TensorHandle(_to_numpy(values).reshape(np.shape(src.data)), target)
    if target == tl.bfloat16 and source.is_int():
        return TensorHandle(_to_numpy(torch.from_numpy(np.array(src.data)).to(torch.bfloat16)), target)
    if source == tl.bfloat16:
        widened = _widened(src)
        return TensorHandle(widened.data.astype(interpreter._get_np_dtype(target)), target)
    return None


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle(_to_numpy(_to_torch(handle.data, tl.bfloat16).float()).reshape(handle.data.shape), tl.float32)


_TORCH_OF = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}


def _to_torch(data: Any, dtype: Any) -> torch.Tensor:
    torch_dtype = _TORCH_OF[dtype]
    array = np.array(data)
    if torch_dtype.itemsize == 1:
        return torch.from_numpy(array.astype(np.uint8)).view(torch_dtype)
    if dtype == tl.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch_dtype)
    return torch.from_numpy(array)


def _to_numpy(values: torch.Tensor) -> Any:
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(np.uint16)
    if values.dtype == torch.float8_e4m3fn:
        return values.view(torch.uint8).numpy()
    return values.numpy()
