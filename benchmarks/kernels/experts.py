"""Experts: two models' layers, many numbers of tokens, even and skewed routing; torch's grouped products as peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.cases import VARIANT, KernelCase, Peers, PlannedCase, compiled
from benchmarks.kernels.experts_case import (
    ACTIVATION,
    MoeCase,
    Routing,
    make_case,
    projection_call,
    random_experts,
    route,
    sorted_pairs,
)
from benchmarks.kernels.measure import Call, cold_sets, relative_error, run_guarded
from benchmarks.kernels.variants.few_experts import few_rows_experts
from kernels.gpu.moe import moe_experts_reference
from kernels.gpu.moe_config import MoeConfig, MoeShape
from kernels.gpu.moe_kernels import combine
from kernels.gpu.moe_weights import GpuExperts
from kernels.specs import GateSpec

SHAPES = {
    "Qwen3-30B-A3B": MoeShape(128, 768, 2048, 8, "bfloat16"),
    "Mixtral-8x7B": MoeShape(8, 14336, 4096, 2, "bfloat16"),
}
NUM_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
ROUTINGS: tuple[Routing, ...] = ("uniform", "zipf")
# Each set chooses other experts, so that few tokens do not find theirs in the cache.
NUM_SETS = 8
# Where the products alone are measured too, and where quantised weights are.
ALONE_NUM_TOKENS = (1024, 8192)
QUANTISED_NUM_TOKENS = (1, 64, 256, 4096)
_GROUP_SIZE = 128

Configs = Callable[[MoeShape], Callable[[int], MoeConfig]]
_LOOPED_NUM_TOKENS = 1024
_FEW_ROWS = 8
_FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = 448.0


def moe_cases(
    name: str,
    device: torch.device,
    configs: Configs,
    *,
    shape: MoeShape | None = None,
    all_num_tokens: Sequence[int] = NUM_TOKENS,
    routings: Sequence[Routing] = ROUTINGS,
    num_tokens_alone: Sequence[int] = (),
) -> list[PlannedCase]:
    """Plan the whole operation after the gate, of the model `name`, one of `SHAPES` unless `shape` is given; and for
    `num_tokens_alone` its two products, with the activation between them, over rows that are sorted already.

    configs: what serving would choose, see `kernels.gpu.moe_config.MoeConfigs`. Weights of one layer are made with the
    first case and kept.
    """
    shape = SHAPES[name] if shape is None else shape
    plain = replace(shape, weights="bfloat16", group_size=0)

    @cache
    def experts(shape: MoeShape) -> GpuExperts:
        return random_experts(shape, torch.Generator(device=device).manual_seed(0))

    @cache
    def choose() -> Callable[[int], MoeConfig]:
        return configs(shape)

    def make(num_tokens: int, routing: Routing) -> KernelCase:
        first = make_case(shape, num_tokens, device, routing=routing, experts=experts(shape))
        sets = _rotated(first, routing)
        peers = moe_peers(sets) if shape == plain else quantised_peers(sets, experts(plain))
        return _moe_case(sets, choose()(num_tokens), peers)

    def make_alone(num_tokens: int) -> KernelCase:
        return _products_case(make_case(shape, num_tokens, device, experts=experts(shape)), choose()(num_tokens))

    start = f"{name} {shape.weights}"
    return [
        PlannedCase(f"{start}, {num_tokens} tokens, {routing}", partial(make, num_tokens, routing))
        for num_tokens in all_num_tokens
        for routing in routings
    ] + [
        PlannedCase(f"{start}, {num_tokens} tokens, uniform, products alone", partial(make_alone, num_tokens))
        for num_tokens in num_tokens_alone
    ]


def quantised_cases(name: str, device: torch.device, configs: Configs) -> list[PlannedCase]:
    """Plan the whole operation over weights in int8 and fp8 with a scale per channel, and int4 in groups."""
    shapes = [replace(SHAPES[name], weights="int8"), replace(SHAPES[name], weights="fp8")]
    shapes.append(replace(SHAPES[name], weights="int4", group_size=_GROUP_SIZE))
    return [
        case
        for shape in shapes
        for case in moe_cases(
            name, device, configs, shape=shape, all_num_tokens=QUANTISED_NUM_TOKENS, routings=("uniform",)
        )
    ]


def _rotated(first: MoeCase, routing: Routing) -> list[MoeCase]:
    """Return the case, and others with the same weights, activations and scratch that choose other experts."""
    random = torch.Generator(device=first.x.device).manual_seed(1)
    shape = first.shape
    others = (route(first.num_tokens, shape.num_experts, shape.top_k, routing, random) for _ in range(NUM_SETS - 1))
    return [first, *(replace(first, expert_ids=ids) for ids in others)]


def _moe_case(sets: list[MoeCase], config: MoeConfig, peers: Peers) -> KernelCase:
    first = sets[0]
    distinct = [case.num_distinct_experts for case in sets]
    variants: dict[str, list[Call]] = {}
    if first.num_tokens <= _FEW_ROWS and first.shape.weights != "int4":
        variants[f"{VARIANT}in two launches, with the choice"] = [_few_rows_call(case) for case in sets]
        if first.x.is_cuda and torch.cuda.get_device_capability(first.x.device) >= (9, 0):
            variants[f"{VARIANT}in two that overlap"] = [_few_rows_call(case, overlaps=True) for case in sets]
    return KernelCase(
        calls=[partial(case.run, config) for case in sets],
        peers={**peers.calls, **variants},
        absent=peers.absent,
        num_bytes=sum(case.num_bytes for case in sets) // len(sets),
        num_flops=first.num_flops,
        notes={
            "distinct experts": f"{min(distinct)} to {max(distinct)}",
            "most rows of one expert": str(max(case.max_load for case in sets)),
            "config": str(config),
        },
        relative_error=lambda: max(first.relative_error(config), *([_few_rows_error(first)] if variants else ())),
    )


def _few_rows_call(case: MoeCase, *, overlaps: bool = False) -> Call:
    """Return a call of the variant for few rows, from logits that give the case's experts and weights."""
    shape, spec = case.shape, GateSpec(case.shape.top_k, renormalise=True)
    logits = torch.full((case.num_tokens, shape.num_experts), -30.0, device=case.x.device)
    logits.scatter_(1, case.expert_ids, case.expert_weights.log())
    run = partial(few_rows_experts, case.x, logits.to(case.x.dtype), spec, case.experts, ACTIVATION, overlaps=overlaps)
    return lambda: run()[0]


def _few_rows_error(case: MoeCase) -> float:
    wanted = moe_experts_reference(case.x, case.expert_ids, case.expert_weights, case.experts, ACTIVATION)
    return relative_error(_few_rows_call(case)(), wanted)


def _products_case(case: MoeCase, config: MoeConfig) -> KernelCase:
    """Make one set: all weights are read, which are too many for the cache."""
    shape, pairs = case.shape, sorted_pairs(case, config.block_m)
    gate_up = projection_call(case, pairs, config.block_m, "gate_up", config.gate_up)
    down = projection_call(case, pairs, config.block_m, "down", config.down)

    def products() -> Tensor:
        gate_up()
        down()
        return case.workspace.results

    width = 2 * shape.intermediate_size + shape.hidden_size
    return KernelCase(
        [products],
        {"grouped_mm": [grouped_products(case)]},
        case.num_bytes + case.expert_ids.numel() * width * case.x.element_size(),
        case.num_flops,
        {"config": str(config)},
    )


def combine_cases(device: torch.device, all_num_tokens: Sequence[int] = (256, 4096)) -> list[PlannedCase]:
    """Plan the weighted sum alone, which only moves bytes, at the sizes of Qwen3-30B-A3B."""
    return [PlannedCase(f"combine, {count} tokens", partial(_combine_case, count, device)) for count in all_num_tokens]


def _combine_case(num_tokens: int, device: torch.device) -> KernelCase:
    top_k, hidden_size = 8, 2048
    num_bytes = 2 * num_tokens * hidden_size * (top_k + 1) + 4 * num_tokens * top_k
    sets = []
    for seed in range(cold_sets(num_bytes)):
        random = torch.Generator(device=device).manual_seed(seed)
        products = torch.randn((num_tokens * top_k, hidden_size), generator=random, device=device)
        weights = torch.rand((num_tokens, top_k), generator=random, device=device)
        sets.append((products.to(torch.bfloat16), weights))

    def error() -> float:
        products, weights = sets[0]
        out = run_guarded(partial(combine, products, weights), products[:num_tokens])
        return relative_error(out, (products.double().view(*weights.shape, -1) * weights[..., None]).sum(1))

    by_torch = {"torch": _combined_by_torch, "torch.compile": compiled(_combined_by_torch)}
    return KernelCase(
        calls=[partial(_combined, *data) for data in sets],
        peers={name: [partial(run, *data) for data in sets] for name, run in by_torch.items()},
        num_bytes=num_bytes,
        num_flops=2 * num_tokens * top_k * hidden_size,
        relative_error=error,
    )


def _combined(products: Tensor, weights: Tensor) -> Tensor:
    out = products.new_empty((weights.shape[0], products.shape[1]))
    combine(products, weights, out)
    return out


def _combined_by_torch(products: Tensor, weights: Tensor) -> Tensor:
    return (products.view(*weights.shape, -1) * weights[..., None]).sum(1).to(products.dtype)


def moe_peers(sets: list[MoeCase]) -> Peers:
    """Return the peers over unquantised weights."""
    calls: dict[str, list[Call]] = {"grouped_mm": [partial(grouped_mm_experts, case) for case in sets]}
    if sets[0].num_tokens <= _LOOPED_NUM_TOKENS:
        calls["loop over experts"] = [partial(looped_experts, case) for case in sets]
    return Peers(calls)


def quantised_peers(sets: list[MoeCase], plain: GpuExperts) -> Peers:
    """Return what runs without weight-only kernels: bf16 weights, or for fp8 weights fp8 activations as well."""
    calls: dict[str, list[Call]] = {"grouped_mm over bf16": [partial(grouped_mm_experts, case, plain) for case in sets]}
    if sets[0].shape.weights == "fp8":
        calls["scaled_grouped_mm, activations in fp8"] = [partial(fp8_experts, case) for case in sets]
    return Peers(calls)


def grouped_mm_experts(case: MoeCase, experts: GpuExperts | None = None) -> Tensor:
    """Compute the case by torch's grouped product without synchronising: sort, two products, unsort, sum."""
    order, ends = _sorted(case)
    rows = case.x.index_select(0, order // case.shape.top_k)
    return _summed(case, order, _grouped(rows, experts or case.experts, ends))


def grouped_products(case: MoeCase) -> Call:
    """Return a call of the two products over sorted rows, with the activation between them."""
    order, ends = _sorted(case)
    rows = case.x.index_select(0, order // case.shape.top_k)
    return partial(_grouped, rows, case.experts, ends)


def fp8_experts(case: MoeCase) -> Tensor:
    """Compute the case over fp8 weights by fp8 products, with activations rounded to fp8 by row."""
    order, ends = _sorted(case)
    rows = case.x.index_select(0, order // case.shape.top_k)
    gate, up = _scaled_grouped(rows, case.experts.gate_up.values, case.experts.gate_up.scale, ends).chunk(2, dim=-1)
    hidden = functional.silu(gate) * up
    return _summed(case, order, _scaled_grouped(hidden, case.experts.down.values, case.experts.down.scale, ends))


def looped_experts(case: MoeCase) -> Tensor:
    """Compute the case expert by expert; the host waits to learn the rows of each."""
    out = torch.zeros(case.x.shape, dtype=torch.float32, device=case.x.device)
    for expert in sorted(set(case.expert_ids.flatten().tolist())):
        tokens, places = (case.expert_ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(case.x[tokens], case.experts.gate_up.values[expert]).chunk(2, dim=-1)
        result = functional.linear(functional.silu(gate) * up, case.experts.down.values[expert])
        out.index_add_(0, tokens, result * case.expert_weights[tokens, places, None])
    return out.to(case.x.dtype)


def _sorted(case: MoeCase) -> tuple[Tensor, Tensor]:
    """Return the (token, choice) pairs by expert, and each expert's end, int32.

    Counting would synchronise with the device, searching does not.
    """
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
