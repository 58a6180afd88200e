"""Benchmark cases of the experts' kernels: two models' layers, many numbers of tokens, even and skewed routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu.moe_config import MoeConfig, MoeShape
from kernels.gpu.moe_tiled import combine
from kernels.gpu.moe_weights import GpuExperts
from moeserve.bench.kernel_case import Call, KernelCase, Peers, PlannedCase
from moeserve.bench.kernel_peers_servers import server_experts
from moeserve.bench.moe_case import MoeCase, Routing, make_case, random_experts, route

SHAPES = {
    "Qwen3-30B-A3B": MoeShape(128, 768, 2048, 8, "bfloat16"),
    "Mixtral-8x7B": MoeShape(8, 14336, 4096, 2, "bfloat16"),
}
NUM_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
ROUTINGS: tuple[Routing, ...] = ("uniform", "zipf")
# Each set chooses other experts, so that few tokens do not find theirs in the cache.
NUM_SETS = 8
_LOOPED_NUM_TOKENS = 1024

Configs = Callable[[MoeShape], Callable[[int], MoeConfig]]


def moe_cases(
    name: str,
    device: torch.device,
    configs: Configs,
    *,
    shape: MoeShape | None = None,
    all_num_tokens: Sequence[int] = NUM_TOKENS,
    routings: Sequence[Routing] = ROUTINGS,
) -> list[PlannedCase]:
    """The whole operation after the gate, of the model `name`, one of `SHAPES` unless `shape` is given.

    configs: what serving would choose, see `kernels.gpu.tuning.MoeConfigs`. Weights of one layer are made with the
    first case and kept. Peers multiply what this format can be multiplied with as it is: quantised shapes have none.
    """
    shape = SHAPES[name] if shape is None else shape

    @cache
    def experts() -> GpuExperts:
        return random_experts(shape, torch.Generator(device=device).manual_seed(0))

    @cache
    def choose() -> Callable[[int], MoeConfig]:
        return configs(shape)

    def make(num_tokens: int, routing: Routing) -> KernelCase:
        first = make_case(shape, num_tokens, device, routing=routing, experts=experts())
        return _moe_case(routing, first, choose()(num_tokens))

    return [
        PlannedCase(f"{name} {shape.weights}, {num_tokens} tokens, {routing}", partial(make, num_tokens, routing))
        for num_tokens in all_num_tokens
        for routing in routings
    ]


def _moe_case(routing: Routing, first: MoeCase, config: MoeConfig) -> KernelCase:
    random = torch.Generator(device=first.x.device).manual_seed(1)
    shape = first.shape
    sets = [first]
    for _ in range(NUM_SETS - 1):
        ids = route(first.num_tokens, shape.num_experts, shape.top_k, routing, random)
        sets.append(replace(first, expert_ids=ids))
    peers: dict[str, list[Call]] = {}
    servers = Peers()
    if first.experts.gate_up.scale is None:
        peers["grouped_mm"] = [partial(grouped_mm_experts, case) for case in sets]
        if first.num_tokens <= _LOOPED_NUM_TOKENS:
            peers["loop over experts"] = [partial(looped_experts, case) for case in sets]
        servers = server_experts(sets)
    distinct = [case.num_distinct_experts for case in sets]
    return KernelCase(
        calls=[partial(case.run, config) for case in sets],
        peers=peers | servers.calls,
        absent=servers.absent,
        num_bytes=sum(case.num_bytes for case in sets) // len(sets),
        num_flops=first.num_flops,
        notes={
            "distinct experts": f"{min(distinct)} to {max(distinct)}",
            "most rows of one expert": str(max(case.max_load for case in sets)),
            "config": str(config),
        },
        relative_error=partial(first.relative_error, config),
    )


def grouped_mm_experts(case: MoeCase) -> Tensor:
    """The same by torch's grouped product, without a word to the host: sort, two products, back in order, sum."""
    num_tokens, top_k = case.expert_ids.shape
    flat = case.expert_ids.flatten()
    order = flat.sort(stable=True).indices
    ends = torch.bincount(flat, minlength=case.shape.num_experts).cumsum(0).to(torch.int32)
    rows = case.x.index_select(0, order // top_k)
    merged = functional.grouped_mm(rows, case.experts.gate_up.values.transpose(1, 2), offs=ends)
    gate, up = merged.chunk(2, dim=-1)
    results = functional.grouped_mm(functional.silu(gate) * up, case.experts.down.values.transpose(1, 2), offs=ends)
    products = torch.empty_like(results).index_copy_(0, order, results).view(num_tokens, top_k, -1)
    return (products * case.expert_weights[..., None]).sum(1).to(case.x.dtype)


def looped_experts(case: MoeCase) -> Tensor:
    """The same expert by expert, with the host waiting to learn which rows each has."""
    out = torch.zeros(case.x.shape, dtype=torch.float32, device=case.x.device)
    for expert in sorted(set(case.expert_ids.flatten().tolist())):
        tokens, places = (case.expert_ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(case.x[tokens], case.experts.gate_up.values[expert]).chunk(2, dim=-1)
        result = functional.linear(functional.silu(gate) * up, case.experts.down.values[expert])
        out.index_add_(0, tokens, result * case.expert_weights[tokens, places, None])
    return out.to(case.x.dtype)


def combine_cases(device: torch.device, all_num_tokens: Sequence[int] = (256, 4096)) -> list[PlannedCase]:
    """The last step alone, which only moves bytes, at the sizes of Qwen3-30B-A3B."""
    return [PlannedCase(f"combine, {count} tokens", partial(_combine_case, count, device)) for count in all_num_tokens]


def _combine_case(num_tokens: int, device: torch.device) -> KernelCase:
    top_k, hidden_size = 8, 2048
    sets = []
    for seed in range(NUM_SETS):
        random = torch.Generator(device=device).manual_seed(seed)
        products = torch.randn((num_tokens * top_k, hidden_size), generator=random, device=device)
        weights = torch.rand((num_tokens, top_k), generator=random, device=device)
        sets.append((products.to(torch.bfloat16), weights))
    return KernelCase(
        calls=[partial(_combined, *data) for data in sets],
        peers={"torch": [partial(_combined_by_torch, *data) for data in sets]},
        num_bytes=2 * num_tokens * hidden_size * (top_k + 1) + 4 * num_tokens * top_k,
        num_flops=2 * num_tokens * top_k * hidden_size,
    )


def _combined(products: Tensor, weights: Tensor) -> Tensor:
    out = products.new_empty((weights.shape[0], products.shape[1]))
    combine(products, weights, out)
    return out


def _combined_by_torch(products: Tensor, weights: Tensor) -> Tensor:
    return (products.view(*weights.shape, -1) * weights[..., None]).sum(1).to(products.dtype)
