"""Gated activations of feed-forward blocks.

torch's vectorised and scalar exponentials differ in the last bit, and an element's place in the tensor decides which of
the two it gets. Here only its place in the row does: gates are read as strided rows, never merged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.specs import Activation as Activation


def glu(gate_up: Tensor, activation: Activation) -> Tensor:
    """Apply the activation to the gate half and multiply by the up half.

    gate_up: [M, 2I], gate channels first. Its contents are undefined afterwards (it may be used as scratch).
    Returns a new contiguous [M, I] of the same dtype.
    """
    width = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :width], gate_up[..., width:]
    kind = activation.kind
    if kind == "silu":
        return F.silu(gate).mul_(up)
    if kind == "gelu":
        # Contiguous input goes to oneDNN, which a single row would do and several would not.
        return F.gelu(gate.contiguous()).mul_(up)
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    if kind == "relu":
        return F.relu(gate).mul_(up)
    if kind == "swigluoai":
        # gate * sigmoid(alpha * gate) is silu(alpha * gate) / alpha.
        limit, alpha = activation.limit, activation.alpha
        gate.clamp_(max=limit).mul_(alpha)
        up.clamp_(-limit, limit).add_(1.0)
        return F.silu(gate).mul_(up).div_(alpha)
    raise ValueError(f"unknown activation {kind!r}")


def sigmoid(x: Tensor) -> Tensor:
    """The logistic function, of x's shape and dtype. Through fp64: rounded from there, an element has the same bits
    at any place in the tensor."""
    return torch.sigmoid(x.double()).to(x.dtype)
