"""Gated activations of feed-forward blocks."""

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
        return F.gelu(gate).mul_(up)
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    if kind == "relu":
        return F.relu(gate).mul_(up)
    if kind == "swigluoai":
        limit = activation.limit
        gate.clamp_(max=limit)
        up.clamp_(-limit, limit).add_(1.0)
        return torch.mul(gate, activation.alpha).sigmoid_().mul_(gate).mul_(up)
    raise ValueError(f"unknown activation {kind!r}")
