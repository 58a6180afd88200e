"""The kernels that a service launches most, in bfloat16, compared with their references on the same device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.activation import Activation
from kernels.attention import paged_attention_reference
from kernels.gpu.attention import PagedContext, Partials, Scoring, prefill_attention, split_attention
from kernels.gpu.attention_config import SHORT_QUERIES, AttentionShape
from kernels.gpu.attention_kernels import SplitWork
from kernels.gpu.device import multiprocessor_of, multiprocessors_of
from kernels.gpu.moe import MoeWorkspace, moe_experts, moe_experts_reference
from kernels.gpu.moe_config import MoeConfigs, MoeShape
from kernels.gpu.moe_gate import select_experts
from kernels.gpu.moe_weights import GpuExperts, StoredMatrix
from kernels.gpu.norm import rms_norm
from kernels.gpu.packed_linear import PackedLinear
from kernels.gpu.packed_rows import rounded_to_fp8
from kernels.gpu.sampling import greedy
from kernels.norm import rms_norm_reference
from kernels.specs import GateSpec
from kernels.weight_formats import rows_of_fp8
from moeserve.device import multiplies_fp8

# The relative error that rounding to bfloat16 explains.
TOLERANCE = 2e-2
_BF16 = torch.bfloat16
_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK = 8, 1, 128, 64
_EXPERTS, _WIDTH, _HIDDEN, _TOP_K = 8, 64, 128, 2

Compare = Callable[[], float]


def comparisons(device: torch.device) -> Iterator[tuple[str, Compare]]:
    """Yield names, and functions that return the relative error of a kernel. All numbers are of one seed."""
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device).to(_BF16)

    yield "decode attention", partial(_split, normal, (70, 3), (1, 1))
    yield "short extends", partial(_split, normal, (70, 9), (5, 2))
    yield "prompts", partial(_prefill, normal, (70, 9), 1)
    yield "long prompts", partial(_prefill, normal, (70, 9), SHORT_QUERIES + 1)
    for num_tokens in (1, 48):
        yield f"experts, {num_tokens} tokens", partial(_experts, normal, num_tokens)
    if multiplies_fp8(device):
        yield "products of FP8", partial(_in_fp8, normal)
    yield "norms", partial(_norm, normal)
    yield "greedy tokens", partial(_greedy, normal)


Normal = Callable[..., Tensor]


def _error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error, inf where something is not finite."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(error) if bool(error.isfinite()) else float("inf")


def _paged(
    normal: Normal, seq_lens: tuple[int, ...], query_lens: tuple[int, ...]
) -> tuple[Tensor, PagedContext, Tensor]:
    """Return queries, their context in blocks that lie in reverse order, and the starts of the sequences' queries."""
    counts = [-(-length // _BLOCK) for length in seq_lens]
    slots = _BLOCK * sum(counts)
    q, keys, values = (
        normal(*shape)
        for shape in (
            (sum(query_lens), _HEADS, _HEAD_DIM),
            (_KV_HEADS, slots, _HEAD_DIM),
            (_KV_HEADS, slots, _HEAD_DIM),
        )
    )
    table, last = torch.zeros((len(counts), max(counts)), dtype=torch.int32), sum(counts)
    for sequence, count in enumerate(counts):
        table[sequence, :count] = torch.arange(last - 1, last - 1 - count, -1)
        last -= count
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=q.device)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(q.device)
    return q, PagedContext(keys, values, table.to(q.device), lengths, _BLOCK), starts


def _shape(device: torch.device) -> AttentionShape:
    multiprocessor = multiprocessor_of(device)
    return AttentionShape(_HEADS, _KV_HEADS, _HEAD_DIM, _HEAD_DIM, _BLOCK, _BF16, _BF16, multiprocessor)


def _expected(q: Tensor, context: PagedContext, starts: Tensor) -> Tensor:
    scale = _HEAD_DIM**-0.5
    return paged_attention_reference(q.float(), *context.tensors, starts, block_size=_BLOCK, scale=scale)


def _split(normal: Normal, seq_lens: tuple[int, ...], query_lens: tuple[int, ...]) -> float:
    q, context, starts = _paged(normal, seq_lens, query_lens)
    shape, longest = _shape(q.device), max(query_lens)
    extend = shape.extend()
    config = shape.split() if longest == 1 else extend.split
    tokens = 1 if longest == 1 else extend.tokens_per_tile(shape.group)
    tiles = sum(-(-count // tokens) for count in query_lens)
    programs, num_sms = _KV_HEADS * -(-shape.group // config.rows), multiprocessors_of(q.device)
    work = SplitWork(
        len(seq_lens),
        tiles,
        max(seq_lens),
        programs,
        config,
        q.device,
        num_sms=num_sms,
        max_query_len=longest,
        tokens_per_tile=tokens,
    )
    of_extends = None if longest == 1 else starts
    work.update(context.seq_lens, of_extends)
    partials = Partials.allocate(work, _HEADS, _HEAD_DIM)
    found = split_attention(q, context, work, partials, Scoring(_HEAD_DIM**-0.5), query_starts=of_extends)
    return _error(found, _expected(q, context, starts))


def _prefill(normal: Normal, query_lens: tuple[int, ...], max_query_len: int) -> float:
    """max_query_len: for which the tile is chosen; the queries are fewer."""
    q, context, starts = _paged(normal, query_lens, query_lens)
    config = _shape(q.device).prefill(max_query_len)
    found = prefill_attention(q, context, starts, Scoring(_HEAD_DIM**-0.5), config)
    return _error(found, _expected(q, context, starts))


def _experts(normal: Normal, num_tokens: int) -> float:
    x, logits = normal(num_tokens, _HIDDEN), normal(num_tokens, _EXPERTS)
    matrices = normal(_EXPERTS, 2 * _WIDTH, _HIDDEN), normal(_EXPERTS, _HIDDEN, _WIDTH)
    gate_up, down = (StoredMatrix(matrix * matrix.shape[-1] ** -0.5) for matrix in matrices)
    experts = GpuExperts(gate_up, down)
    ids, weights = select_experts(logits, GateSpec(_TOP_K, renormalise=True))
    configs = MoeConfigs(
        MoeShape(_EXPERTS, _WIDTH, _HIDDEN, _TOP_K, "bfloat16"), multiprocessor_of(x.device).shared_bytes
    )
    space = MoeWorkspace.allocate(num_tokens, _TOP_K, _EXPERTS, _HIDDEN, _WIDTH, _BF16, x.device)
    found = moe_experts(x, ids, weights, experts, Activation(), configs(num_tokens), space)
    return _error(found, moe_experts_reference(x, ids, weights, experts, Activation()))


def _in_fp8(normal: Normal) -> float:
    x, weight = normal(3, _HIDDEN), normal(_WIDTH, _HIDDEN)
    rows = rows_of_fp8(weight.cpu().to(torch.float8_e4m3fn), torch.full((_WIDTH, 1), 0.5))
    found = PackedLinear(rows, None, _BF16, x.device, fp8_products=True)(x)
    return _error(found, rounded_to_fp8(x) @ rows.dequantise().T.to(x.device))


def _norm(normal: Normal) -> float:
    x, weight = normal(3, _HIDDEN), normal(_HIDDEN)
    return _error(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))


def _greedy(normal: Normal) -> float:
    """Return the share of rows whose token is another one than the likeliest."""
    logits = normal(4, 1000).float()
    return float((greedy(logits)[0] != logits.argmax(-1)).float().mean())
