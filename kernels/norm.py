"""Normalisations over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import sigmoid
from kernels.cpu.library import native_kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root-mean-square norm of x [..., D] times weight [D], in x's dtype; statistics in fp32 for fp16, bf16.

    A weight in fp32 multiplies before the result is rounded to x's dtype.
    """
    if x.dtype == weight.dtype == torch.float32:
        kernels = native_kernels()
        if kernels is None or x.dim() != 2 or x.device.type != "cpu" or x.stride(1) != 1:
            return functional.rms_norm(x, (x.shape[-1],), weight, eps)
        num_rows, width = x.shape
        out = x.new_empty((num_rows, width))
        kernels.rms_norm(x.data_ptr(), x.stride(0), num_rows, width, weight.data_ptr(), eps, out.data_ptr(), width)
        return out
    return rms_norm_reference(x, weight, eps)


def rms_norm_of_sum(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, multiplier: float = 1.0, scale: float = 1.0
) -> Tensor:
    """Add x [T, D] times `multiplier` to `residual`, multiply that by `scale`, both in place, and return its norm.

    x is overwritten.
    """
    kernels = native_kernels()
    if (
        kernels is None
        or x.device.type != "cpu"
        or not x.dtype == residual.dtype == weight.dtype == torch.float32
        or not (x.is_contiguous() and residual.is_contiguous())
    ):
        if multiplier != 1.0:
            x.mul_(multiplier)
        residual.add_(x)
        if scale != 1.0:
            residual.mul_(scale)
        return rms_norm(residual, weight, eps)
    out = torch.empty_like(x)
    num_rows, width = x.shape
    kernels.norm_of_sum(
        x.data_ptr(), residual.data_ptr(), num_rows, width, multiplier, scale, weight.data_ptr(), eps, out.data_ptr()
    )
    return out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm` in plain torch."""
    normed = functional.rms_norm(x.float(), (x.shape[-1],), None, eps)
    return (weight * normed.to(weight.dtype)).to(x.dtype)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of the heads of x [T, H, D] times weight [D] and SiLU of gate [T, H * D]: [T, H * D]."""
    kernels = native_kernels()
    if kernels is None or x.device.type != "cpu" or not x.dtype == gate.dtype == weight.dtype == torch.float32:
        return gated_norm_reference(x, gate, weight, eps)
    num_rows, num_heads, width = x.shape
    out = x.new_empty((num_rows, num_heads * width))
    kernels.gated_norm(
        x.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        num_rows,
        num_heads,
        width,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
    )
    return out


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `gated_norm` in plain torch."""
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    normed = rms_norm_reference(x, weight, eps).flatten(1)
    return (normed * (wide * sigmoid(wide))).to(x.dtype)


def norm_of_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
    """Return x times SiLU of gate, both [T, C], behind an RMS norm of each of equally wide groups, times weight [C]."""
    kernels = native_kernels()
    is_float = x.dtype == gate.dtype == weight.dtype == torch.float32
    if kernels is None or x.device.type != "cpu" or not is_float or not x.is_contiguous() or gate.stride(1) != 1:
        return norm_of_gated_reference(x, gate, weight, eps, num_groups)
    out = torch.empty_like(x)
    kernels.norm_of_gated(
        x.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        x.shape[0],
        num_groups,
        x.shape[1] // num_groups,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
    )
    return out


def norm_of_gated_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
    """Compute `norm_of_gated` in plain torch."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    opened = gate.to(wide) * sigmoid(gate.to(wide))
    groups = (x.to(wide) * opened).unflatten(1, (num_groups, -1))
    normed = functional.rms_norm(groups, (groups.shape[-1],), None, eps).flatten(1)
    return (weight.to(wide) * normed).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the mean-and-variance norm of x [..., D] with weight and bias [D]."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)
