"""The experts of a layer by other means: torch's grouped products and a loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu.moe_weights import GpuExperts
from moeserve.tune.kernel_case import Call, Peers
from moeserve.tune.moe_case import MoeCase

_LOOPED_NUM_TOKENS = 1024
_FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = 448.0


def moe_peers(sets: list[MoeCase]) -> Peers:
    """Of unquantised weights."""
    calls: dict[str, list[Call]] = {"grouped_mm": [partial(grouped_mm_experts, case) for case in sets]}
    if sets[0].num_tokens <= _LOOPED_NUM_TOKENS:
        calls["loop over experts"] = [partial(looped_experts, case) for case in sets]
    return Peers(calls)


def quantised_peers(sets: list[MoeCase], plain: GpuExperts) -> Peers:
    """What one would run without weight-only kernels: plain weights, or, of fp8, activations in fp8 as well."""
    calls: dict[str, list[Call]] = {"grouped_mm over bf16": [partial(grouped_mm_experts, case, plain) for case in sets]}
    if sets[0].shape.weights == "fp8":
        calls["scaled_grouped_mm, activations in fp8"] = [partial(fp8_experts, case) for case in sets]
    return Peers(calls)


def grouped_mm_experts(case: MoeCase, experts: GpuExperts | None = None) -> Tensor:
    """The same by torch's grouped product, without a word to the host: sort, two products, back in order, sum."""
    order, ends = _sorted(case)
    rows = case.x.index_select(0, order // case.shape.top_k)
    return _summed(case, order, _grouped(rows, experts or case.experts, ends))


def grouped_products(case: MoeCase) -> Call:
    """The two products alone over sorted rows, with the activation between them."""
    order, ends = _sorted(case)
    rows = case.x.index_select(0, order // case.shape.top_k)
    return partial(_grouped, rows, case.experts, ends)


def fp8_experts(case: MoeCase) -> Tensor:
    """The same over fp8 weights by the tensor cores' fp8 products, activations rounded to fp8 by row on the way."""
    order, ends = _sorted(case)
    rows = case.x.index_select(0, order // case.shape.top_k)
    gate, up = _scaled_grouped(rows, case.experts.gate_up.values, case.experts.gate_up.scale, ends).chunk(2, dim=-1)
    hidden = functional.silu(gate) * up
    return _summed(case, order, _scaled_grouped(hidden, case.experts.down.values, case.experts.down.scale, ends))


def looped_experts(case: MoeCase) -> Tensor:
    """The same expert by expert, with the host waiting to learn which rows each has."""
    out = torch.zeros(case.x.shape, dtype=torch.float32, device=case.x.device)
    for expert in sorted(set(case.expert_ids.flatten().tolist())):
        tokens, places = (case.expert_ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(case.x[tokens], case.experts.gate_up.values[expert]).chunk(2, dim=-1)
        result = functional.linear(functional.silu(gate) * up, case.experts.down.values[expert])
        out.index_add_(0, tokens, result * case.expert_weights[tokens, places, None])
    return out.to(case.x.dtype)


def _sorted(case: MoeCase) -> tuple[Tensor, Tensor]:
    """The (token, choice) pairs by expert, and where each expert's end, int32. Counting them would wait for the
    device, searching does not."""
    experts, order = case.expert_ids.flatten().sort(stable=True)
    all_experts = torch.arange(case.shape.num_experts, device=experts.device)
    return order, torch.searchsorted(experts, all_experts, right=True, out_int32=True)


def _grouped(rows: Tensor, experts: GpuExperts, ends: Tensor) -> Tensor:
    gate, up = functional.grouped_mm(rows, experts.gate_up.values.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    return functional.grouped_mm(functional.silu(gate) * up, experts.down.values.transpose(1, 2), offs=ends)


def _scaled_grouped(rows: Tensor, values: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
    row_scale = (rows.abs().amax(-1).float() / _LARGEST_FP8).clamp(min=1e-12)
    narrow = (rows / row_scale[:, None]).to(_FP8)
    # Untyped in torch.
    torch_functions: Any = functional
    by_row = torch_functions.ScalingType.RowWise
    result: Tensor = torch_functions.scaled_grouped_mm(
        narrow, values.transpose(1, 2), row_scale, by_row, scale, by_row, offs=ends, output_dtype=torch.bfloat16
    )
    return result


def _summed(case: MoeCase, order: Tensor, results: Tensor) -> Tensor:
    products = torch.empty_like(results).index_copy_(0, order, results).view(*case.expert_ids.shape, -1)
    return (products * case.expert_weights[..., None]).sum(1).to(case.x.dtype)
