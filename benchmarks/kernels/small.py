"""Benchmark cases of kernels that only move bytes: norms, rotation with KV write, gates, copies of KV blocks.

At the sizes of Qwen3-30B-A3B in bfloat16.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.torch_peers import compiled
from kernels.gpu.block_copy import copy_blocks
from kernels.gpu.moe_gate import select_experts
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.rope_kv import norm_rope_write_kv
from kernels.specs import GateSpec
from moeserve.tune.guard import relative_error, run_guarded
from moeserve.tune.kernel_case import Call, KernelCase, PlannedCase, cold_sets

_WIDTH, _HEADS, _KV_HEADS, _DIM = 2048, 32, 4, 128
_EXPERTS, _TOP_K, _EPS = 128, 8, 1e-6
# A pool has room for so many times the blocks that are copied at once.
_BLOCKS, _BLOCK_SIZE, _POOL = 1024, 16, 16


def norm_cases(device: torch.device) -> list[PlannedCase]:
    """RMS norms and the kernel between projection and attention."""
    planned = []
    for tokens in (64, 4096):
        planned += [
            PlannedCase(f"RMS norm, {tokens} x {_WIDTH}", partial(_norm_case, tokens, device)),
            PlannedCase(f"residual and RMS norm, {tokens} x {_WIDTH}", partial(_add_norm_case, tokens, device)),
            PlannedCase(f"norms, rotation, KV write, {tokens} tokens", partial(_rope_case, tokens, device)),
        ]
    return planned


def gate_cases(device: torch.device) -> list[PlannedCase]:
    """From a gate's logits to experts and weights."""
    return [PlannedCase(f"gate, {tokens} x {_EXPERTS}", partial(_gate_case, tokens, device)) for tokens in (64, 4096)]


def copy_cases(device: torch.device) -> list[PlannedCase]:
    """Between the pool and dense staging memory, and between that and page-locked memory of the host."""
    blocks = f"{_BLOCKS} blocks of {_BLOCK_SIZE}"
    return [
        PlannedCase(f"gather {blocks}", partial(_copy_case, device, gather=True)),
        PlannedCase(f"scatter {blocks}", partial(_copy_case, device, gather=False)),
        PlannedCase(f"{blocks} to the host", partial(_host_case, device, to_host=True)),
        PlannedCase(f"{blocks} from the host", partial(_host_case, device, to_host=False)),
    ]


class Numbers:
    """Random ones, drawn without torch's global generator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator).to(dtype)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, device=self.device, generator=self.generator)


def _norm_case(tokens: int, device: torch.device) -> KernelCase:
    numbers, num_bytes = Numbers(device), 4 * tokens * _WIDTH
    weight = numbers.normal(_WIDTH)
    rows = [numbers.normal(tokens, _WIDTH) for _ in range(cold_sets(num_bytes))]

    def error() -> float:
        out = run_guarded(lambda out: rms_norm(rows[0], weight, _EPS, out), rows[0])
        return relative_error(out, functional.rms_norm(rows[0].double(), (_WIDTH,), weight.double(), _EPS))

    return KernelCase(
        [partial(rms_norm, x, weight, _EPS) for x in rows],
        {"torch": [partial(functional.rms_norm, x, (_WIDTH,), weight, _EPS) for x in rows]},
        num_bytes,
        4 * tokens * _WIDTH,
        relative_error=error,
    )


def _add_norm_case(tokens: int, device: torch.device) -> KernelCase:
    numbers, num_bytes = Numbers(device), 8 * tokens * _WIDTH
    weight = numbers.normal(_WIDTH)
    pairs = [(numbers.normal(tokens, _WIDTH), numbers.normal(tokens, _WIDTH)) for _ in range(cold_sets(num_bytes))]

    def by_torch(x: Tensor, residual: Tensor) -> Tensor:
        return functional.rms_norm(residual.add_(x), (_WIDTH,), weight, _EPS)

    def error() -> float:
        x, residual = pairs[0]
        total = (residual + x).double()
        out = add_rms_norm(x, residual.clone(), weight, _EPS)
        return relative_error(out, functional.rms_norm(total, (_WIDTH,), weight.double(), _EPS))

    peers = {"torch": by_torch, "torch.compile": compiled(by_torch)}
    # Residuals grow from call to call until, in bf16, what is added no longer counts: they stay finite.
    return KernelCase(
        [partial(add_rms_norm, x, residual, weight, _EPS) for x, residual in pairs],
        {name: [partial(run, x, residual) for x, residual in pairs] for name, run in peers.items()},
        num_bytes,
        5 * tokens * _WIDTH,
        relative_error=error,
    )


def _rope_case(tokens: int, device: torch.device) -> KernelCase:
    numbers, heads = Numbers(device), _HEADS + 2 * _KV_HEADS
    num_bytes = 4 * tokens * heads * _DIM
    weight, angles = numbers.normal(_DIM), numbers.normal(tokens, _DIM // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    keys, values = (numbers.normal(_KV_HEADS, 2 * tokens, _DIM) for _ in range(2))
    slots = numbers.permutation(2 * tokens)[:tokens]
    merged = [numbers.normal(tokens, heads, _DIM) for _ in range(cold_sets(num_bytes))]
    parts = [torch.split(each, [_HEADS, _KV_HEADS, _KV_HEADS], 1) for each in merged]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rotation, pools = (cos, sin), (keys, values)
        return norm_rope_write_kv(
            q, k, v, *rotation, slots, *pools, interleaved=False, q_weight=weight, k_weight=weight, eps=_EPS
        )

    def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        normed = [functional.rms_norm(x.float(), (_DIM,), weight.float(), _EPS) for x in (q, k)]
        q_out, k_out = (_rotated(x, cos, sin) for x in normed)
        keys.index_copy_(1, slots, k_out.to(keys.dtype).transpose(0, 1))
        values.index_copy_(1, slots, v.transpose(0, 1))
        return q_out.to(q.dtype)

    def error() -> float:
        found = [ours(*parts[0]), keys[:, slots].clone(), values[:, slots].clone()]
        expected = [by_torch(*parts[0]), keys[:, slots], values[:, slots]]
        return max(relative_error(*pair) for pair in zip(found, expected, strict=True))

    return KernelCase(
        [partial(ours, *each) for each in parts],
        {
            "torch": [partial(by_torch, *each) for each in parts],
            "torch.compile": [partial(compiled(by_torch), *each) for each in parts],
        },
        num_bytes,
        0,
        relative_error=error,
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _gate_case(tokens: int, device: torch.device) -> KernelCase:
    numbers, spec = Numbers(device), GateSpec(_TOP_K, renormalise=True)
    num_bytes = tokens * (2 * _EXPERTS + 12 * _TOP_K)
    logits = [numbers.normal(tokens, _EXPERTS) for _ in range(cold_sets(num_bytes))]

    def by_torch(logits: Tensor) -> Tensor:
        weights, _ = logits.float().softmax(-1).topk(_TOP_K, -1)
        return weights / weights.sum(-1, keepdim=True)

    return KernelCase(
        [lambda x=x: select_experts(x, spec)[1] for x in logits],  # type: ignore[misc]
        {"torch": [partial(by_torch, x) for x in logits]},
        num_bytes,
        0,
        relative_error=lambda: relative_error(select_experts(logits[0], spec)[1], by_torch(logits[0])),
    )


def _copy_case(device: torch.device, *, gather: bool) -> KernelCase:
    numbers = Numbers(device)
    pool = numbers.normal(_KV_HEADS, _POOL * _BLOCKS * _BLOCK_SIZE, _DIM)
    staging = numbers.normal(_KV_HEADS, _BLOCKS * _BLOCK_SIZE, _DIM)
    whole = [tensor.view(_KV_HEADS, -1, _BLOCK_SIZE * _DIM) for tensor in (pool, staging)]

    def ours(ids: Tensor) -> Tensor:
        if gather:
            copy_blocks(pool, staging, ids, None, block_size=_BLOCK_SIZE)
            return staging
        copy_blocks(staging, pool, None, ids, block_size=_BLOCK_SIZE)
        return pool

    def by_torch(ids: Tensor) -> Tensor:
        return whole[0].index_select(1, ids) if gather else whole[0].index_copy_(1, ids, whole[1])

    def error() -> float:
        ours(sets[0])
        return relative_error(staging, pool.view(_KV_HEADS, -1, _BLOCK_SIZE, _DIM)[:, sets[0]].view_as(staging))

    # Each is of blocks that no other has.
    sets = numbers.permutation(_POOL * _BLOCKS).view(_POOL, _BLOCKS).unbind(0)
    return KernelCase(
        [partial(ours, ids) for ids in sets],
        {"index_select" if gather else "index_copy_": [partial(by_torch, ids) for ids in sets]},
        2 * staging.numel() * staging.element_size(),
        0,
        relative_error=error,
    )


def _host_case(device: torch.device, *, to_host: bool) -> KernelCase:
    """One transfer of dense memory, as the bus between host and GPU allows it; it has no peers."""
    staging = Numbers(device).normal(_KV_HEADS, _BLOCKS * _BLOCK_SIZE, _DIM)
    host = torch.empty(staging.shape, dtype=staging.dtype, pin_memory=device.type == "cuda")
    source, target = (staging, host) if to_host else (host, staging)
    call: Call = partial(target.copy_, source, non_blocking=True)
    return KernelCase([call], {}, staging.numel() * staging.element_size(), 0, {"limit": "the bus, not the memory"})
