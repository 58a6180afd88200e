"""Reading the experts of one layer from any of the layouts in which checkpoints store them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.moe_gemm import PackedExperts, pack_experts
from moeserve.models.spec import DecoderSpec, MoeSpec
from moeserve.models.tensor_reader import TensorReader
from moeserve.models.weight_plan import ExpertsPlan


def load_experts(spec: DecoderSpec, plan: ExpertsPlan, reader: TensorReader, dtype: torch.dtype) -> PackedExperts:
    """Read and pack the owned experts of a layer, in the order of ``plan.owned``. Nothing else is read."""
    moe = spec.moe
    assert moe is not None
    count, hidden, width = len(plan.owned), spec.hidden_size, moe.intermediate_size
    gate_up = torch.empty((count, 2 * width, hidden), dtype=dtype)
    down = torch.empty((count, hidden, width), dtype=dtype)
    if plan.storage == "split":
        _fill_split(plan, reader, gate_up, down)
        return pack_experts(gate_up, down)
    if plan.storage == "fused":
        _fill_fused(moe, plan, reader, gate_up, down)
    else:
        _fill_mxfp4(plan, reader, gate_up, down)
    if not moe.expert_bias:
        return pack_experts(gate_up, down)
    return pack_experts(gate_up, down, *_read_biases(moe, plan, reader, gate_up, down))


def _fill_split(plan: ExpertsPlan, reader: TensorReader, gate_up: Tensor, down: Tensor) -> None:
    width = down.shape[2]
    for slot, tensors in enumerate(plan.tensors):
        reader.read_into(tensors["gate"], gate_up[slot, :width])
        reader.read_into(tensors["up"], gate_up[slot, width:])
        reader.read_into(tensors["down"], down[slot])


def _fill_fused(moe: MoeSpec, plan: ExpertsPlan, reader: TensorReader, gate_up: Tensor, down: Tensor) -> None:
    (tensors,) = plan.tensors
    for slot, expert in enumerate(plan.owned):
        if moe.transposed_experts:
            # The file holds [H, I, (gate, up)] and [I, H].
            reader.read_expert_into(tensors["gate_up"], expert, _halves(gate_up[slot]).permute(2, 1, 0))
            reader.read_expert_into(tensors["down"], expert, down[slot].T)
        else:
            reader.read_expert_into(tensors["gate_up"], expert, gate_up[slot])
            reader.read_expert_into(tensors["down"], expert, down[slot])


def _fill_mxfp4(plan: ExpertsPlan, reader: TensorReader, gate_up: Tensor, down: Tensor) -> None:
    (tensors,) = plan.tensors
    for slot, expert in enumerate(plan.owned):
        # The file holds [I, (gate, up), H] and [H, I].
        for key, out in (("gate_up", _halves(gate_up[slot]).transpose(0, 1)), ("down", down[slot])):
            reader.read_mxfp4_expert_into(tensors[f"{key}.blocks"], tensors[f"{key}.scales"], expert, out)


def _read_biases(
    moe: MoeSpec, plan: ExpertsPlan, reader: TensorReader, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    (tensors,) = plan.tensors
    gate_up_bias, down_bias = gate_up.new_empty(gate_up.shape[:2]), down.new_empty(down.shape[:2])
    for slot, expert in enumerate(plan.owned):
        row = gate_up_bias[slot]
        reader.read_expert_into(tensors["gate_up.bias"], expert, _halves(row).T if moe.transposed_experts else row)
        reader.read_expert_into(tensors["down.bias"], expert, down_bias[slot])
    return gate_up_bias, down_bias


def _halves(rows: Tensor) -> Tensor:
    """[2I, ...] as [2, I, ...]: the gate half and the up half."""
    return rows.view(2, -1, *rows.shape[1:])
