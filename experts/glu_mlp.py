"""A dense gated feed-forward block: the shared expert of a sparse layer, or the whole of a dense one."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activation import Activation
from kernels.moe_gemm import moe_experts, pack_experts


class GluMlp:
    """``down(act(gate(x)) * up(x))``: an expert that every token chooses, with weight one."""

    __slots__ = ("_activation", "_expert")

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        activation: Activation,
        *,
        biases: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """gate_up [2I, H] (gate rows first), down [H, I], biases [2I + H]; it computes in `dtype`, by default the
        weights'."""
        of_each = (None, None) if biases is None else biases[None].split([gate_up.shape[0], down.shape[0]], 1)
        self._expert = pack_experts(gate_up[None], down[None], *of_each, dtype=dtype)
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        ids = torch.zeros((len(x), 1), dtype=torch.int64, device=x.device)
        weights = torch.ones((len(x), 1), device=x.device)
        return moe_experts(x, ids, weights, self._expert, self._activation)
