"""Parts of a decode step that serve as several kernels, beside variants of fewer, at the sizes of Qwen3-30B-A3B."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.attention_case import AttentionCase, random_tensors, scale_of
from benchmarks.kernels.cases import VARIANT, KernelCase, PlannedCase
from benchmarks.kernels.measure import cold_sets, relative_error
from benchmarks.kernels.small import Numbers
from benchmarks.kernels.variants.fused_decode import NewHeads, rotate_store_and_attend
from benchmarks.kernels.variants.split_linear import add_norm_linear
from kernels.gpu.attention import PagedContext, Partials, Scoring, split_attention
from kernels.gpu.attention_kernels import SplitWork
from kernels.gpu.norm import add_rms_norm
from kernels.gpu.rope_kv import norm_rope_write_kv

_WIDTH, _HEADS, _KV_HEADS, _DIM, _EPS = 2048, 32, 4, 128, 1e-6


def fused_cases(device: torch.device, num_sms: int) -> list[PlannedCase]:
    """Plan the two parts, for few rows."""
    return [
        PlannedCase(f"residual, norm and projection, {tokens} tokens", partial(_norm_linear_case, tokens, device))
        for tokens in (1, 16)
    ] + [
        PlannedCase(f"norms, rotation, KV write and decode, {shown}", partial(_decode_case, lengths, device, num_sms))
        for shown, lengths in (("1 x 1024", (1024,)), ("64 x 1024", (1024,) * 64))
    ]


def _norm_linear_case(tokens: int, device: torch.device) -> KernelCase:
    """The sum, its norm, and the projection to queries, keys and values."""
    numbers, width = Numbers(device), (_HEADS + 2 * _KV_HEADS) * _DIM
    num_bytes = 2 * width * _WIDTH + 2 * tokens * (4 * _WIDTH + width)
    norm_weight = numbers.normal(_WIDTH)
    x, residual = numbers.normal(tokens, _WIDTH), numbers.normal(tokens, _WIDTH)
    weights = [numbers.normal(width, _WIDTH) * _WIDTH**-0.5 for _ in range(cold_sets(num_bytes))]

    def ours(weight: Tensor) -> Tensor:
        return functional.linear(add_rms_norm(x, residual, norm_weight, _EPS), weight)

    def split(weight: Tensor) -> Tensor:
        return add_norm_linear(x, residual, norm_weight, _EPS, weight)[1]

    def error() -> float:
        normed = functional.rms_norm((x + residual).double(), (_WIDTH,), norm_weight.double(), _EPS)
        found, wanted = split(weights[0]), normed @ weights[0].double().T
        return max(relative_error(found, wanted), relative_error(ours(weights[0]), wanted))

    return KernelCase(
        [partial(ours, weight) for weight in weights],
        {f"{VARIANT}split": [partial(split, weight) for weight in weights]},
        num_bytes,
        2 * tokens * width * _WIDTH,
        relative_error=error,
    )


def _decode_case(lengths: tuple[int, ...], device: torch.device, num_sms: int) -> KernelCase:
    """Every sequence has one new token, whose key and value are stored before, or while, they are attended."""
    case = AttentionCase("", "decode", lengths, (1,) * len(lengths), _HEADS, _KV_HEADS, _DIM, _DIM)
    tensors, numbers, count = random_tensors(case, device), Numbers(device), len(lengths)
    config = case.shape_on(device).split()
    programs = _KV_HEADS * -(-case.group // config.rows)
    work = SplitWork(count, count, max(lengths), programs, config, device, num_sms=num_sms)
    work.update(tensors.seq_lens)
    partials = Partials.allocate(work, _HEADS, _DIM)
    merged = numbers.normal(count, _HEADS + 2 * _KV_HEADS, _DIM)
    q, k, v = torch.split(merged, [_HEADS, _KV_HEADS, _KV_HEADS], 1)
    angles, weight = numbers.normal(count, _DIM // 2, dtype=torch.float32), numbers.normal(_DIM)
    last = tensors.seq_lens.long() - 1

    def new_of(table: Tensor) -> NewHeads:
        blocks = table.gather(1, (last // case.block_size)[:, None])[:, 0].long()
        slots = blocks * case.block_size + last % case.block_size
        return NewHeads(q, k, v, angles.cos(), angles.sin(), slots, weight, weight, _EPS)

    def context_of(table: Tensor) -> PagedContext:
        return PagedContext(tensors.keys, tensors.values, table, tensors.seq_lens, case.block_size)

    def ours(table: Tensor, new: NewHeads) -> Tensor:
        rotation, pools = (new.cos, new.sin), (tensors.keys, tensors.values)
        rotated = norm_rope_write_kv(
            q, k, v, *rotation, new.slots, *pools, interleaved=False, q_weight=weight, k_weight=weight, eps=_EPS
        )
        return split_attention(rotated, context_of(table), work, partials, Scoring(scale_of(case)))

    def fused(table: Tensor, new: NewHeads) -> Tensor:
        return rotate_store_and_attend(new, context_of(table), work, partials, scale_of(case))

    sets = [(table, new_of(table)) for table in tensors.tables]
    return KernelCase(
        [partial(ours, *each) for each in sets],
        {f"{VARIANT}fused": [partial(fused, *each) for each in sets]},
        case.num_bytes,
        case.num_flops,
        relative_error=lambda: relative_error(fused(*sets[0]), ours(*sets[0])),
    )
