"""Benchmark cases of the kernels that only move bytes: norms, rotation with KV write, sampling, block copies."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu.block_copy import copy_blocks
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.rope_kv import norm_rope_write_kv
from kernels.gpu.sampling import greedy, sample
from moeserve.bench.kernel_case import KernelCase, PlannedCase

_COLD_BYTES = 512 * 2**20
_MAX_SETS = 8
_WIDTH, _HEADS, _KV_HEADS, _DIM, _VOCAB = 2048, 32, 4, 128, 151936


def small_cases(device: torch.device) -> list[PlannedCase]:
    """At the sizes of Qwen3-30B-A3B in bfloat16."""
    planned = []
    for tokens in (64, 4096):
        planned += [
            PlannedCase(f"RMS norm, {tokens} x {_WIDTH}", partial(_norm_case, tokens, device)),
            PlannedCase(f"residual and RMS norm, {tokens} x {_WIDTH}", partial(_add_norm_case, tokens, device)),
            PlannedCase(f"norms, rotation, KV write, {tokens} tokens", partial(_rope_case, tokens, device)),
        ]
    makers = {"greedy": _greedy_case, "temperature": _draw_case, "top-k 50 and top-p 0.9": _filter_case}
    for rows in (1, 64, 256):
        for name, make in makers.items():
            planned.append(PlannedCase(f"{name}, {rows} x {_VOCAB}", partial(make, rows, device)))
    planned.append(PlannedCase("gather 1024 blocks of 16", partial(_copy_case, 1024, 16, device)))
    return planned


def _sets(num_bytes: int) -> int:
    return max(1, min(_MAX_SETS, -(-_COLD_BYTES // num_bytes)))


def _random(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _norm_case(tokens: int, device: torch.device) -> KernelCase:
    weight = _random(_WIDTH, device=device)
    num_bytes = 4 * tokens * _WIDTH
    rows = [_random(tokens, _WIDTH, device=device) for _ in range(_sets(num_bytes))]
    return KernelCase(
        [partial(rms_norm, x, weight, 1e-6) for x in rows],
        {"torch": [partial(functional.rms_norm, x, (_WIDTH,), weight, 1e-6) for x in rows]},
        num_bytes,
        4 * tokens * _WIDTH,
    )


def _add_norm_case(tokens: int, device: torch.device) -> KernelCase:
    weight = _random(_WIDTH, device=device)
    num_bytes = 8 * tokens * _WIDTH
    pairs = [
        (_random(tokens, _WIDTH, device=device), _random(tokens, _WIDTH, device=device))
        for _ in range(_sets(num_bytes))
    ]

    def by_torch(x: Tensor, residual: Tensor) -> Tensor:
        return functional.rms_norm(residual.add_(x), (_WIDTH,), weight, 1e-6)

    return KernelCase(
        [partial(add_rms_norm, x, residual, weight, 1e-6) for x, residual in pairs],
        {"torch": [partial(by_torch, x, residual) for x, residual in pairs]},
        num_bytes,
        5 * tokens * _WIDTH,
    )


def _rope_case(tokens: int, device: torch.device) -> KernelCase:
    heads = _HEADS + 2 * _KV_HEADS
    num_bytes = 4 * tokens * heads * _DIM
    weight, angles = _random(_DIM, device=device), torch.randn((tokens, _DIM // 2), device=device)
    cos, sin = angles.cos(), angles.sin()
    keys, values = (_random(_KV_HEADS, 2 * tokens, _DIM, device=device) for _ in range(2))
    slots = torch.randperm(2 * tokens, device=device)[:tokens]
    calls = []
    for _ in range(_sets(num_bytes)):
        q, k, v = torch.split(_random(tokens, heads, _DIM, device=device), [_HEADS, _KV_HEADS, _KV_HEADS], 1)
        calls.append(
            partial(
                norm_rope_write_kv,
                q,
                k,
                v,
                cos,
                sin,
                slots,
                keys,
                values,
                interleaved=False,
                q_weight=weight,
                k_weight=weight,
                eps=1e-6,
            )
        )
    return KernelCase(calls, {}, num_bytes, 0)


def _logits(rows: int, device: torch.device) -> list[Tensor]:
    return [_random(rows, _VOCAB, device=device, dtype=torch.float32) for _ in range(_sets(_logit_bytes(rows)))]


def _logit_bytes(rows: int) -> int:
    return 4 * rows * _VOCAB


def _greedy_case(rows: int, device: torch.device) -> KernelCase:
    sets = _logits(rows, device)
    return KernelCase(
        [lambda x=x: greedy(x)[0] for x in sets],  # type: ignore[misc]
        {"torch.argmax": [partial(torch.argmax, x, -1) for x in sets]},
        _logit_bytes(rows),
        0,
    )


def _draw_case(rows: int, device: torch.device) -> KernelCase:
    ones, seeds = torch.ones(rows, device=device), torch.arange(rows, device=device)
    sets = _logits(rows, device)
    return KernelCase([lambda x=x: sample(x, ones, seeds, seeds)[0] for x in sets], {}, _logit_bytes(rows), 0)  # type: ignore[misc]


def _filter_case(rows: int, device: torch.device) -> KernelCase:
    ones, seeds = torch.ones(rows, device=device), torch.arange(rows, device=device)
    filters = {
        "top_k": torch.full((rows,), 50, dtype=torch.int32, device=device),
        "top_p": ones * 0.9,
        "min_p": 0 * ones,
    }

    def by_sorting(logits: Tensor) -> Tensor:
        values, places = logits.sort(dim=-1, descending=True)
        probabilities = values.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities > 0.9
        outside[:, 50:] = True
        drawn = probabilities.masked_fill(outside, 0.0).multinomial(1)
        return places.gather(1, drawn)

    sets = _logits(rows, device)
    return KernelCase(
        [lambda x=x: sample(x, ones, seeds, seeds, **filters)[0] for x in sets],  # type: ignore[misc]
        {"torch.sort": [partial(by_sorting, x) for x in sets]},
        _logit_bytes(rows),
        0,
    )


def _copy_case(blocks: int, block_size: int, device: torch.device) -> KernelCase:
    pool = _random(_KV_HEADS, 4 * blocks * block_size, _DIM, device=device)
    staging = _random(_KV_HEADS, blocks * block_size, _DIM, device=device)
    num_bytes = 2 * staging.numel() * staging.element_size()

    def gather(ids: Tensor) -> Tensor:
        copy_blocks(pool, staging, ids, None, block_size=block_size)
        return staging

    def by_torch(ids: Tensor) -> Tensor:
        return pool.view(_KV_HEADS, -1, block_size * _DIM).index_select(1, ids)

    sets = [torch.randperm(4 * blocks, device=device)[:blocks] for _ in range(_MAX_SETS)]
    return KernelCase(
        [partial(gather, ids) for ids in sets],
        {"index_select": [partial(by_torch, ids) for ids in sets]},
        num_bytes,
        0,
    )
