"""Both projections of the experts over rows sorted by expert, one program per tile.

gate_up: gathers rows of x, multiplies them with the gate and the up half of its expert at once, and stores the
activation to a compact buffer in sorted order. down: reads that buffer as plain tiles and writes each row where its
(token, choice) pair belongs. combine: adds up a token's choices by the gate's weights, in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.moe_align import SortedPairs, slot_of
from kernels.gpu.moe_config import Tile
from kernels.gpu.moe_parts import finished, gated, products
from kernels.gpu.moe_weights import StoredMatrix
from kernels.specs import Activation

_COMBINE_BLOCK = 1024


@triton.jit
def tile_and_block(program, num_tiles, BLOCKS: tl.constexpr, GROUP_M: tl.constexpr):
    """Launch order: GROUP_M row tiles share each block of weight columns while it is in the cache."""
    group = program // (GROUP_M * BLOCKS)
    first = group * GROUP_M
    size = tl.minimum(num_tiles - first, GROUP_M)
    within = program % (GROUP_M * BLOCKS)
    return first + within % size, within // size


@triton.jit(do_not_specialize=["max_tiles"])
def _gate_up_kernel(
    x,
    w,
    scale,
    bias,
    h,
    pairs,
    tile_slot,
    tile_first,
    tile_rows,
    max_tiles,
    stride_x: tl.int64,
    stride_we: tl.int64,
    stride_wn: tl.int64,
    stride_se: tl.int64,
    stride_sg: tl.int64,
    stride_be: tl.int64,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile, block = tile_and_block(tl.program_id(0), max_tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
    slot = tl.load(tile_slot + tile).to(tl.int64)
    if slot < 0:
        return
    rows = tl.load(tile_rows + tile)
    row = tl.arange(0, BLOCK_M)
    # Rows and columns beyond the end repeat the last one, so that loads need no masks; they are not stored.
    place = tl.load(tile_first + tile) + tl.minimum(row, rows - 1)
    token = tl.load(pairs + place).to(tl.int64) // TOP_K
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_row = tl.minimum(column, N - 1)
    up_row = gate_row + N
    expert = w + slot * stride_we
    scales = scale + slot * stride_se
    gate, up = products(
        x + token * stride_x,
        expert + gate_row.to(tl.int64) * stride_wn,
        expert + up_row.to(tl.int64) * stride_wn,
        scales + gate_row,
        scales + up_row,
        stride_sg,
        K,
        FORMAT,
        True,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    biases = bias + slot * stride_be
    gate = finished(gate, scales, biases, gate_row[None, :], HAS_SCALE, HAS_BIAS)
    up = finished(up, scales, biases, up_row[None, :], HAS_SCALE, HAS_BIAS)
    hidden = gated(gate, up, KIND, ALPHA, LIMIT).to(h.dtype.element_ty)
    stored = (row[:, None] < rows) & (column[None, :] < N)
    tl.store(h + place.to(tl.int64)[:, None] * N + column[None, :], hidden, mask=stored)


@triton.jit(do_not_specialize=["max_tiles"])
def _down_kernel(
    h,
    w,
    scale,
    bias,
    y,
    pairs,
    tile_slot,
    tile_first,
    tile_rows,
    max_tiles,
    stride_we: tl.int64,
    stride_wn: tl.int64,
    stride_se: tl.int64,
    stride_sg: tl.int64,
    stride_be: tl.int64,
    K: tl.constexpr,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile, block = tile_and_block(tl.program_id(0), max_tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
    slot = tl.load(tile_slot + tile).to(tl.int64)
    if slot < 0:
        return
    rows = tl.load(tile_rows + tile)
    row = tl.arange(0, BLOCK_M)
    place = tl.load(tile_first + tile) + tl.minimum(row, rows - 1)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(column, N - 1)
    matrix = w + slot * stride_we + weight_row.to(tl.int64) * stride_wn
    scales = scale + slot * stride_se
    acc, _ = products(
        h + place.to(tl.int64) * K,
        matrix,
        matrix,
        scales + weight_row,
        scales + weight_row,
        stride_sg,
        K,
        FORMAT,
        False,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    acc = finished(acc, scales, bias + slot * stride_be, weight_row[None, :], HAS_SCALE, HAS_BIAS)
    pair = tl.load(pairs + place)
    stored = (row[:, None] < rows) & (column[None, :] < N)
    # Rounded as the scratch is, wherever it goes: products made in parts have the bits of those made at once.
    rounded = acc.to(h.dtype.element_ty).to(y.dtype.element_ty)
    tl.store(y + pair.to(tl.int64)[:, None] * N + column[None, :], rounded, mask=stored)


@triton.jit(do_not_specialize_on_alignment=["ids", "expert_slot", "expert_weights"])
def _combine_kernel(
    y,
    expert_weights,
    ids,
    expert_slot,
    out,
    stride_out: tl.int64,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        columns = N
        if HAS_IDS:
            # Nobody wrote the rows of absent experts: they are not read either.
            columns = tl.where(slot_of(ids, expert_slot, pair, pair >= 0, NUM_EXPERTS, HAS_MAP) >= 0, N, 0)
        product = tl.load(y + pair * N + column, mask=column < columns, other=0.0).to(tl.float32)
        acc += product * tl.load(expert_weights + pair)
    tl.store(out + token * stride_out + column, acc.to(out.dtype.element_ty), mask=column < N)


def gate_up_tiled(
    x: Tensor,
    matrix: StoredMatrix,
    activation: Activation,
    top_k: int,
    tiles: SortedPairs,
    block_m: int,
    tile: Tile,
    h: Tensor,
) -> None:
    """Writes activation(x W_gate^T) * (x W_up^T) to h [pairs, I] in sorted order. x [T, H], rows contiguous."""
    width = matrix.num_rows // 2
    _gate_up_kernel[(tiles.max_tiles * triton.cdiv(width, tile.block_n),)](
        x,
        *matrix.pointers(),
        h,
        tiles.pairs,
        tiles.slot,
        tiles.first,
        tiles.rows,
        tiles.max_tiles,
        x.stride(0),
        *matrix.strides(),
        K=matrix.depth,
        N=width,
        TOP_K=top_k,
        **matrix.flags(),
        KIND=activation.kind,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def down_tiled(h: Tensor, matrix: StoredMatrix, tiles: SortedPairs, block_m: int, tile: Tile, y: Tensor) -> None:
    """Writes h W_down^T to y [pairs, H] in the order of pairs, rounded to h's dtype; rows of absent experts stay as
    they are."""
    _down_kernel[(tiles.max_tiles * triton.cdiv(matrix.num_rows, tile.block_n),)](
        h,
        *matrix.pointers(),
        y,
        tiles.pairs,
        tiles.slot,
        tiles.first,
        tiles.rows,
        tiles.max_tiles,
        *matrix.strides(),
        K=matrix.depth,
        N=matrix.num_rows,
        **matrix.flags(),
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def combine(
    y: Tensor,
    expert_weights: Tensor,
    out: Tensor,
    expert_ids: Tensor | None = None,
    expert_slot: Tensor | None = None,
    num_experts: int = 0,
) -> None:
    """out [T, H] = the sum over a token's choices of weight * y [T * k, H], in their order and in fp32.

    expert_ids: skips the rows of absent experts; without them all rows are read.
    """
    num_tokens, hidden_size = out.shape
    block = min(_COMBINE_BLOCK, triton.next_power_of_2(hidden_size))
    _combine_kernel[(num_tokens, triton.cdiv(hidden_size, block))](
        y,
        expert_weights,
        y if expert_ids is None else expert_ids,
        y if expert_slot is None else expert_slot,
        out,
        out.stride(0),
        N=hidden_size,
        TOP_K=expert_weights.shape[1],
        NUM_EXPERTS=num_experts,
        HAS_IDS=expert_ids is not None,
        HAS_MAP=expert_slot is not None,
        BLOCK=block,
        num_warps=4,
    )
