"""Matrix product with a weight that is packed once.

On a CPU oneDNN's blocked layout makes a row of the result the same bits whatever other rows are in the batch, which
plain `torch.nn.functional.linear` does not; requests then get the same logits in any batch and any chunking.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """`x [M, in_features] -> [M, out_features]` in the dtype of the weight. Build one with `pack_linear`."""

    __slots__ = ("_bias", "_packed", "_run", "_weight", "in_features", "num_bytes", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.numel() * weight.element_size()
        self._bias = bias
        self._packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
            self._run = torch.ops.mkldnn._linear_pointwise.default
        else:
            self._weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            return self._run(x, self._weight, self._bias, "none", [], "")
        return functional.linear(x, self._weight, self._bias)


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A `Linear` over weight [N, K] and bias [N]; it keeps a packed copy, so the caller may drop the weight."""
    return Linear(weight, bias)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same product by plain torch."""
    return functional.linear(x, weight, bias)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
