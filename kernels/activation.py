"""Activations of feed-forward blocks.

torch's vectorised and scalar exponentials differ in the last bit, and an element's place in the tensor selects one of
the two. Here only its place in the row selects: gates are read as strided rows, never merged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.library import native_kernels
from kernels.specs import Activation as Activation


def activate(merged: Tensor, activation: Activation) -> Tensor:
    """Apply the activation to the gate channels and multiply by the up channels, or apply it to up channels alone.

    merged: [M, 2I], gate channels first, or [M, I] without a gate. Its contents are undefined afterwards (it may be
    used as scratch). Returns a new contiguous [M, I] of the same dtype.
    """
    kind, limit = activation.kind, activation.limit
    if kind == "relu2":
        return F.relu(merged).square_()
    width = merged.shape[-1] // 2
    gate, up = merged[..., :width], merged[..., width:]
    if limit:
        up.clamp_(-limit, limit)
    if kind == "clamped_silu":
        return F.silu(gate).clamp_(max=limit).mul_(up)
    if limit:
        gate.clamp_(max=limit)
    if kind == "silu":
        return F.silu(gate).mul_(up)
    if kind == "gelu":
        # Contiguous input goes to oneDNN. Without the copy a single row would go there, but several would not.
        return F.gelu(gate.contiguous()).mul_(up)
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    if kind == "relu":
        return F.relu(gate).mul_(up)
    if kind == "swigluoai":
        # gate * sigmoid(alpha * gate) is silu(alpha * gate) / alpha.
        return F.silu(gate.mul_(activation.alpha)).mul_(up.add_(1.0)).div_(activation.alpha)
    raise ValueError(f"unknown activation {kind!r}")


def softcap(x: Tensor, cap: float) -> Tensor:
    """Replace the numbers of x by cap * tanh(x / cap), in place, and return it. Bits do not depend on places."""
    kernels = native_kernels()
    if kernels is None or x.device.type != "cpu" or x.dtype is not torch.float32 or not x.is_contiguous():
        # Through fp64, as `sigmoid`.
        return x.copy_(x.double().div_(cap).tanh_().mul_(cap))
    kernels.softcap(x.data_ptr(), x.numel(), cap)
    return x


def sigmoid(x: Tensor) -> Tensor:
    """Return the logistic function, in x's shape and dtype. Through fp64: rounded from there, an element has the same
    bits at any place in the tensor."""
    return torch.sigmoid(x.double()).to(x.dtype)
