"""Experts by the compiled kernel: panels of weights that it reads where they lie, all chosen experts in one call."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from kernels.cpu.library import NativeKernels
from kernels.cpu.panels import LANES, gate_beside_up, pack_panels, panel_elements
from kernels.packed_experts import ExpertLayout, ExpertShape, SplitExperts
from kernels.specs import Activation, ActivationKind

# The order of `Activation` in activation.h.
_KINDS = {kind: number for number, kind in enumerate(get_args(ActivationKind))}


class PanelLayout(ExpertLayout):
    """Panels of gate and up, panels of down, then float32 biases; weights are bfloat16 or float32."""

    def __init__(self, shape: ExpertShape, kernels: NativeKernels) -> None:
        self.shape = shape
        self._kernels = kernels
        self.weight_dtype = torch.bfloat16 if shape.weight_dtype == torch.bfloat16 else torch.float32
        self.padded_intermediate = -(-shape.intermediate_size // LANES) * LANES
        self.name = f"panels of {str(self.weight_dtype).removeprefix('torch.')}"
        weights = panel_elements(2 * self.padded_intermediate, shape.hidden_size) + panel_elements(
            shape.hidden_size, shape.intermediate_size
        )
        biases = 2 * self.padded_intermediate + shape.hidden_size if shape.has_bias else 0
        self.num_bytes = weights * self.weight_dtype.itemsize + 4 * biases

    def pack(
        self, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None
    ) -> Tensor:
        parts = [
            pack_panels(gate_beside_up(gate_up.to(self.weight_dtype))),
            pack_panels(down.to(self.weight_dtype)),
        ]
        if gate_up_bias is not None and down_bias is not None:
            parts += [bias.float().view(torch.uint8) for bias in (gate_beside_up(gate_up_bias), down_bias)]
        return torch.cat(parts)

    def experts(self, num_experts: int) -> SplitExperts:
        return _NativeExperts(self, self._kernels, num_experts)


class _NativeExperts(SplitExperts):
    def __init__(self, layout: PanelLayout, kernels: NativeKernels, num_experts: int) -> None:
        self._layout = layout
        self._run = kernels.experts
        self._combine = kernels.combine
        self._packed: list[Tensor | None] = [None] * num_experts
        self._addresses = torch.zeros(num_experts, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._packed)

    def put(self, expert: int, packed: Tensor) -> None:
        self._packed[expert] = packed
        self._addresses[expert] = packed.data_ptr()

    def drop(self, expert: int) -> None:
        self._packed[expert] = None
        self._addresses[expert] = 0

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, activation: Activation) -> Tensor:
        out = x.new_empty((expert_ids.shape[0], self._layout.shape.hidden_size))
        self._run_all(x, expert_ids, expert_weights.contiguous(), activation, out)
        return out

    def multiply(self, x: Tensor, expert_ids: Tensor, activation: Activation, products: Tensor) -> None:
        self._run_all(x, expert_ids, None, activation, products)

    def combine(self, products: Tensor, expert_weights: Tensor) -> Tensor:
        num_tokens, top_k, hidden_size = products.shape
        out = products.new_empty((num_tokens, hidden_size))
        expert_weights = expert_weights.contiguous()
        self._combine(
            products.data_ptr(), num_tokens, top_k, hidden_size, expert_weights.data_ptr(), out.data_ptr(), hidden_size
        )
        return out

    def _run_all(
        self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor | None, activation: Activation, out: Tensor
    ) -> None:
        """Without weights the products are not summed: out is [T, k, H]."""
        num_tokens, top_k = expert_ids.shape
        shape = self._layout.shape
        if not num_tokens:
            return
        # A contiguous copy must outlive the call.
        expert_ids = expert_ids.contiguous()
        missing = self._run(
            x.data_ptr(),
            x.stride(0),
            num_tokens,
            expert_ids.data_ptr(),
            None if expert_weights is None else expert_weights.data_ptr(),
            top_k,
            self._addresses.data_ptr(),
            len(self._packed),
            self._layout.weight_dtype == torch.bfloat16,
            shape.hidden_size,
            shape.intermediate_size,
            shape.has_bias,
            _KINDS[activation.kind],
            activation.alpha,
            activation.limit,
            out.data_ptr(),
            shape.hidden_size,
        )
        if missing >= 0:
            raise ValueError(f"expert {missing} is not here")
