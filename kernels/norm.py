"""Normalisations over the last dimension."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of x [..., D] times weight [D]; statistics in fp32 for half-precision input."""
    if x.dtype == weight.dtype and x.element_size() == 4:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)
    normed = functional.rms_norm(x.float(), (x.shape[-1],), None, eps)
    return weight * normed.to(weight.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Mean-and-variance norm of x [..., D] with weight and bias [D]."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)
