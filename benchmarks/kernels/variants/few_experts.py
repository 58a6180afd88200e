"""The experts of a few rows in two launches: a variant of `kernels.gpu.moe_gate` and `kernels.gpu.moe` that serves
nothing yet.

Every program of the first launch chooses its token's experts anew from the gate's logits and computes a block of one
expert's hidden channels; pairs are not sorted. A program of the second launch goes through a token's experts in the
order of its choice, so it contains the sum over them. Rows are vectors: products are sums in registers, without tensor
cores, for weights of 16 or 32 bits and of 8 bits with a scale of each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.moe_gate import choice_constants, choice_of, takes_bias
from kernels.gpu.moe_kernels import activated, finished
from kernels.gpu.moe_weights import GpuExperts
from kernels.specs import Activation, GateSpec

_WARPS = 4
# Rows of a weight matrix that a program has at a time, and columns of a step: 16 KiB of 16 bits in flight.
_BLOCK_N, _BLOCK_K = 32, 256


def few_rows_experts(
    x: Tensor,
    logits: Tensor,
    spec: GateSpec,
    experts: GpuExperts,
    activation: Activation,
    correction_bias: Tensor | None = None,
    *,
    overlaps: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of weight * expert(x) over a token's experts [T, H], their ids and their weights [T, k].

    x [T, H] and logits [T, E]: rows contiguous. overlaps: the second launch begins while the first one still runs
    (programmatic dependent launch, compute capability 9). Absent experts (without a slot) add nothing. Raise ValueError
    for weights of 4 bits and packed ones.
    """
    num_tokens, up, down = len(x), experts.gate_up, experts.down
    if up.format in ("int4", "packed") or down.format in ("int4", "packed"):
        raise ValueError(f"few rows do not multiply {up.format} and {down.format}")
    width = up.num_rows // 2 if activation.is_gated else up.num_rows
    hidden = torch.empty((num_tokens, spec.top_k, width), dtype=x.dtype, device=x.device)
    ids = torch.empty((num_tokens, spec.top_k), dtype=torch.int64, device=x.device)
    weights, out = torch.empty(ids.shape, dtype=torch.float32, device=x.device), torch.empty_like(x)
    if not num_tokens:
        return out, ids, weights
    has_bias, slots = takes_bias(spec, correction_bias), experts.expert_slot
    sizes = {"HAS_MAP": slots is not None, "BLOCK_N": _BLOCK_N, "BLOCK_K": _BLOCK_K, "num_warps": _WARPS}
    sizes |= {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}
    _few_up_kernel[(num_tokens * spec.top_k, triton.cdiv(width, _BLOCK_N))](
        x,
        logits,
        correction_bias if has_bias else logits,
        ids if slots is None else slots,
        *up.pointers(),
        hidden,
        ids,
        weights,
        x.stride(0),
        logits.stride(0),
        *up.strides(),
        K=up.depth,
        N=width,
        **choice_constants(spec, experts.num_experts, has_bias),
        HAS_SCALE=up.scale is not None,
        HAS_ROW_BIAS=up.bias is not None,
        KIND=activation.kind,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        **sizes,
    )
    _few_down_kernel[(num_tokens, triton.cdiv(down.num_rows, _BLOCK_N))](
        hidden,
        ids if slots is None else slots,
        *down.pointers(),
        ids,
        weights,
        out,
        *down.strides(),
        K=width,
        N=down.num_rows,
        TOP_K=spec.top_k,
        HAS_SCALE=down.scale is not None,
        HAS_ROW_BIAS=down.bias is not None,
        **sizes,
    )
    return out, ids, weights


@triton.jit
def _few_up_kernel(
    x,
    logits,
    gate_bias,
    expert_slot,
    w,
    scale,
    bias,
    hidden,
    ids,
    weights,
    stride_x: tl.int64,
    stride_logits: tl.int64,
    stride_we: tl.int64,
    stride_wn: tl.int64,
    stride_se: tl.int64,
    stride_sg: tl.int64,
    stride_be: tl.int64,
    K: tl.constexpr,
    N: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    NORM_MIN: tl.constexpr,
    SCALE: tl.constexpr,
    JITTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ROW_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Store the hidden channels of a pair, and by its first program the pair's expert and weight."""
    if OVERLAPS:
        # x and logits may come from the kernel before; the next one may begin, and waits for this one's end.
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(0)
    token, rank = (pair // TOP_K).to(tl.int64), pair % TOP_K
    chosen, chosen_weights = choice_of(
        logits + token * stride_logits,
        gate_bias,
        NUM_EXPERTS,
        GROUPS,
        TOP_GROUPS,
        TOP2,
        TOP_K,
        SCORE,
        OF_CHOSEN,
        RENORMALISE,
        NORM_MIN,
        SCALE,
        JITTER,
        HAS_BIAS,
        ROWS,
        COLUMNS,
        SLOTS,
    )
    own = tl.arange(0, SLOTS) == rank
    expert = tl.sum(tl.where(own, chosen, 0), 0)
    first = tl.program_id(1) == 0
    tl.store(ids + pair, expert.to(tl.int64), mask=first)
    tl.store(weights + pair, tl.sum(tl.where(own, chosen_weights, 0.0), 0), mask=first)
    slot = tl.load(expert_slot + expert).to(tl.int64) if HAS_MAP else expert.to(tl.int64)
    if slot < 0:
        return
    GATED: tl.constexpr = KIND != "relu2"
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_row = tl.minimum(column, N - 1)
    matrix, scales, biases = w + slot * stride_we, scale + slot * stride_se, bias + slot * stride_be
    rows = matrix + gate_row.to(tl.int64) * stride_wn
    gate = _vector_product(x + token * stride_x, rows, K, BLOCK_N, BLOCK_K)
    gate = finished(gate, scales, biases, gate_row, HAS_SCALE, HAS_ROW_BIAS)
    up = gate
    if GATED:
        up = _vector_product(x + token * stride_x, rows + N * stride_wn, K, BLOCK_N, BLOCK_K)
        up = finished(up, scales, biases, gate_row + N, HAS_SCALE, HAS_ROW_BIAS)
    value = activated(gate, up, KIND, ALPHA, LIMIT).to(hidden.dtype.element_ty)
    tl.store(hidden + pair.to(tl.int64) * N + column, value, mask=column < N)


@triton.jit
def _few_down_kernel(
    hidden,
    expert_slot,
    w,
    scale,
    bias,
    ids,
    weights,
    out,
    stride_we: tl.int64,
    stride_wn: tl.int64,
    stride_se: tl.int64,
    stride_sg: tl.int64,
    stride_be: tl.int64,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ROW_BIAS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(column, N - 1)
    total = tl.zeros([BLOCK_N], tl.float32)
    for rank in range(TOP_K):
        pair = token * TOP_K + rank
        expert = tl.load(ids + pair)
        slot = tl.load(expert_slot + expert).to(tl.int64) if HAS_MAP else expert
        if slot >= 0:
            rows = w + slot * stride_we + row.to(tl.int64) * stride_wn
            acc = _vector_product(hidden + pair * K, rows, K, BLOCK_N, BLOCK_K)
            acc = finished(acc, scale + slot * stride_se, bias + slot * stride_be, row, HAS_SCALE, HAS_ROW_BIAS)
            # Rounded as products of other kernels are before they are summed.
            total += acc.to(hidden.dtype.element_ty).to(tl.float32) * tl.load(weights + pair)
    tl.store(out + token * N + column, total.to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _vector_product(a, rows, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Multiply a row a [K] with rows [BLOCK_N] of weights, pointers to each: fp32 [BLOCK_N]."""
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        values = tl.load(a + k, mask=k < K, other=0.0).to(tl.float32)
        weights = tl.load(rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0).to(tl.float32)
        acc += weights * values[None, :]
    return tl.sum(acc, 1)
