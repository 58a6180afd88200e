"""The experts of a mixture-of-experts layer applied to the rows that chose them.

Only chosen experts are computed and their weights are never gathered: rows are sorted by expert, each expert multiplies
its rows, and every token sums its k products in the gate's order, so that its bits do not depend on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activation import Activation, activate
from kernels.cpu.experts import PanelLayout, RowLayout
from kernels.cpu.library import native_kernels
from kernels.packed_experts import ExpertLayout, ExpertShape, PackedExperts


def expert_layout(shape: ExpertShape) -> ExpertLayout:
    """Return the layout of the body that computes this shape on this machine."""
    # The kernels are asked for last: who computes elsewhere, as a GPU's service, does not wait for their compiler.
    if shape.dtype == torch.float32 and (kernels := native_kernels()) is not None:
        return PanelLayout(shape, kernels)
    return RowLayout(shape)


def pack_experts(
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> PackedExperts:
    """Pack gate_up [E, 2I, H] and down [E, H, I] with optional biases [E, 2I] and [E, H]; no expert is absent.

    Experts without a gate have gate_up [E, I, H] and biases [E, I] and [E, H].
    """
    num_experts, hidden_size, intermediate_size = down.shape
    shape = ExpertShape(
        hidden_size,
        intermediate_size,
        dtype or down.dtype,
        down.dtype,
        has_bias=gate_up_bias is not None,
        is_gated=gate_up.shape[1] != intermediate_size,
    )
    layout = expert_layout(shape)
    experts = layout.experts(num_experts)
    for e in range(num_experts):
        biases = [None if bias is None else bias[e] for bias in (gate_up_bias, down_bias)]
        experts.put(e, layout.pack((gate_up[e], down[e], biases[0], biases[1])))
    return experts


def moe_experts(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, experts: PackedExperts, activation: Activation
) -> Tensor:
    """Sum over k of weight * expert(x): x [T, H], expert_ids [T, k] int64, expert_weights [T, k] fp32 -> [T, H]."""
    return experts(x, expert_ids, expert_weights, activation).to(x.dtype)


def moe_experts_partial(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, experts: PackedExperts, activation: Activation
) -> Tensor:
    """Compute the sum of `moe_experts` over the local experts, in fp32 whatever x is; id -1 is a remote expert.

    x [T, H], expert_ids [T, k] int64, expert_weights [T, k] fp32 -> [T, H] fp32, zeros for a row without any expert.
    """
    return experts(x, expert_ids, expert_weights, activation)


def moe_experts_reference(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Compute the reference of every body: token by token, in fp32, from unpacked weights; ids of -1 add nothing.

    x [T, H], gate_up [E, 2I, H], down [E, H, I], biases [E, 2I] and [E, H], all of any float dtype -> [T, H] fp32.
    Without a gate I replaces 2I.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for t in range(x.shape[0]):
        for e, weight in zip(expert_ids[t].tolist(), expert_weights[t], strict=True):
            if e < 0:
                continue
            merged = x[t].float() @ gate_up[e].float().T
            if gate_up_bias is not None:
                merged = merged + gate_up_bias[e].float()
            product = activate(merged[None], activation)[0] @ down[e].float().T
            if down_bias is not None:
                product = product + down_bias[e].float()
            out[t] += product * weight
    return out
