"""Both projections of the experts for a few tokens: weights are read once and rows are not sorted.

With few tokens hardly two choose one expert, so each (token, choice) pair multiplies its expert's matrices as vectors.
The down projection runs a token's choices in their order within one program and writes the sum, two launches in all, or
gives each choice a program and leaves the sum to another launch: one after the other would wait too long for memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.moe_align import slot_of
from kernels.gpu.moe_config import Tile
from kernels.gpu.moe_parts import finished, gated, row_products
from kernels.gpu.moe_weights import StoredMatrix
from kernels.specs import Activation


@triton.jit(do_not_specialize_on_alignment=["ids", "expert_slot"])
def _gate_up_kernel(
    x,
    w,
    scale,
    bias,
    h,
    ids,
    expert_slot,
    stride_x: tl.int64,
    stride_we: tl.int64,
    stride_wn: tl.int64,
    stride_se: tl.int64,
    stride_sg: tl.int64,
    stride_be: tl.int64,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    pair = tl.program_id(1).to(tl.int64)
    slot = slot_of(ids, expert_slot, pair, pair >= 0, NUM_EXPERTS, HAS_MAP).to(tl.int64)
    if slot < 0:
        return
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_row = tl.minimum(column, N - 1)
    up_row = gate_row + N
    token = x + (pair // TOP_K) * stride_x
    expert = w + slot * stride_we
    scales = scale + slot * stride_se
    biases = bias + slot * stride_be
    gate, up = row_products(
        token,
        expert + gate_row.to(tl.int64) * stride_wn,
        expert + up_row.to(tl.int64) * stride_wn,
        scales + gate_row,
        scales + up_row,
        stride_sg,
        K,
        FORMAT,
        GROUP,
        True,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    gate = finished(gate, scales, biases, gate_row, HAS_SCALE, HAS_BIAS)
    up = finished(up, scales, biases, up_row, HAS_SCALE, HAS_BIAS)
    hidden = gated(gate, up, KIND, ALPHA, LIMIT).to(h.dtype.element_ty)
    tl.store(h + pair * N + column, hidden, mask=column < N)


@triton.jit(do_not_specialize_on_alignment=["ids", "expert_slot", "expert_weights"])
def _down_kernel(
    h,
    w,
    scale,
    bias,
    ids,
    expert_slot,
    expert_weights,
    products,
    out,
    stride_out: tl.int64,
    stride_we: tl.int64,
    stride_wn: tl.int64,
    stride_se: tl.int64,
    stride_sg: tl.int64,
    stride_be: tl.int64,
    K: tl.constexpr,
    N: tl.constexpr,
    CHOICES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(column, N - 1)
    total = tl.zeros([BLOCK_N], tl.float32)
    for j in range(0, CHOICES):
        pair = row * CHOICES + j
        slot = slot_of(ids, expert_slot, pair, pair >= 0, NUM_EXPERTS, HAS_MAP).to(tl.int64)
        if slot >= 0:
            scales = scale + slot * stride_se
            rows = w + slot * stride_we + weight_row.to(tl.int64) * stride_wn
            acc, _ = row_products(
                h + pair * K,
                rows,
                rows,
                scales + weight_row,
                scales + weight_row,
                stride_sg,
                K,
                FORMAT,
                GROUP,
                False,
                BLOCK_N,
                BLOCK_K,
                STAGES,
            )
            acc = finished(acc, scales, bias + slot * stride_be, weight_row, HAS_SCALE, HAS_BIAS)
            # Rounded as where products pass through memory.
            rounded = acc.to(h.dtype.element_ty).to(tl.float32)
            if SUM:
                total += rounded * tl.load(expert_weights + pair)
            else:
                tl.store(products + pair * N + column, rounded, mask=column < N)
    if SUM:
        tl.store(out + row * stride_out + column, total.to(out.dtype.element_ty), mask=column < N)


def gate_up_gemv(
    x: Tensor,
    matrix: StoredMatrix,
    activation: Activation,
    expert_ids: Tensor,
    expert_slot: Tensor | None,
    tile: Tile,
    h: Tensor,
) -> None:
    """Writes activation(x W_gate^T) * (x W_up^T) to h [T * k, I] in the order of pairs; not for absent experts."""
    width = matrix.num_rows // 2
    _gate_up_kernel[(triton.cdiv(width, tile.block_n), expert_ids.numel())](
        x,
        *matrix.pointers(),
        h,
        expert_ids,
        expert_ids if expert_slot is None else expert_slot,
        x.stride(0),
        *matrix.strides(),
        K=matrix.depth,
        N=width,
        TOP_K=expert_ids.shape[1],
        NUM_EXPERTS=matrix.num_slots if expert_slot is None else expert_slot.shape[0],
        HAS_MAP=expert_slot is not None,
        **matrix.flags(),
        GROUP=matrix.group_size,
        KIND=activation.kind,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )


def down_gemv(
    h: Tensor,
    matrix: StoredMatrix,
    expert_ids: Tensor,
    expert_weights: Tensor,
    expert_slot: Tensor | None,
    tile: Tile,
    out: Tensor,
) -> None:
    """Writes the sum over a token's choices of weight * (h W_down^T) to out [T, H]; absent experts add nothing."""
    _down(h, matrix, expert_ids, expert_weights, expert_slot, tile, out, out)


def down_products_gemv(
    h: Tensor, matrix: StoredMatrix, expert_ids: Tensor, expert_slot: Tensor | None, tile: Tile, products: Tensor
) -> None:
    """Writes h W_down^T to products [T * k, H], rounded to h's dtype; rows of absent experts stay as they are."""
    _down(h, matrix, expert_ids, None, expert_slot, tile, products, products)


def _down(
    h: Tensor,
    matrix: StoredMatrix,
    expert_ids: Tensor,
    expert_weights: Tensor | None,
    expert_slot: Tensor | None,
    tile: Tile,
    products: Tensor,
    out: Tensor,
) -> None:
    choices = 1 if expert_weights is None else expert_ids.shape[1]
    _down_kernel[(triton.cdiv(matrix.num_rows, tile.block_n), expert_ids.numel() // choices)](
        h,
        *matrix.pointers(),
        expert_ids,
        expert_ids if expert_slot is None else expert_slot,
        h if expert_weights is None else expert_weights,
        products,
        out,
        out.stride(0),
        *matrix.strides(),
        K=matrix.depth,
        N=matrix.num_rows,
        CHOICES=choices,
        NUM_EXPERTS=matrix.num_slots if expert_slot is None else expert_slot.shape[0],
        HAS_MAP=expert_slot is not None,
        **matrix.flags(),
        GROUP=matrix.group_size,
        SUM=expert_weights is not None,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
