"""Triton kernels of the experts' two projections, and their launches.

gate_up writes activation(x W_gate^T) * (x W_up^T) to a scratch buffer h, down writes h W_down^T, and combine sums a
token's products by the gate's weights. The projections come in three variants:

- tiled: (token, choice) pairs are sorted by expert (`kernels.gpu.moe_align`), and a program computes one row tile of
  one expert and one block of columns. h is in sorted order; down stores each row at the place of its pair.
- gemv: pairs are not sorted. Few tokens rarely choose the same expert, so each pair multiplies its row with its
  expert's matrices. h is in the order of pairs. Down runs a token's choices in their order within one program and
  writes the sum, or gives each choice a program and leaves the sum to combine: choices one after the other may wait too
  long for memory.
- persistent: the tiles of the tiled variant. There is one program per multiprocessor, and each runs through a share of
  the existing tiles, whose number only the device knows. The copy engine fetches weights, and in down also rows, in
  whole boxes through tensor descriptors. A box may reach past its expert's rows; the excess ends in rows and columns
  that are not stored.

Weights are [rows, K] with K contiguous, stored as FORMAT "plain" (multiplied as they are, widened where they are 8 bits
wide) or "int4" (see `kernels.gpu.moe_weights`). Scales of 8-bit weights belong to rows and multiply the accumulator
once, at the end; scales of int4 groups multiply the product of their group. Rows and columns beyond the end repeat the
last one, so that loads need no masks; they are not stored.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.moe_align import SortedPairs, slot_of
from kernels.gpu.moe_config import Tile
from kernels.gpu.moe_weights import StoredMatrix
from kernels.specs import Activation

_COMBINE_BLOCK = 1024


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
    """Write activation(x W_gate^T) * (x W_up^T) to h [pairs, I] in sorted order. x [T, H], rows contiguous.

    An activation without a gate takes x W_up^T alone.
    """
    width = matrix.num_rows // 2 if activation.is_gated else matrix.num_rows
    _gate_up_tiled_kernel[(tiles.max_tiles * triton.cdiv(width, tile.block_n),)](
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
    """Write h W_down^T to y [pairs, H] in the order of pairs, rounded to h's dtype; leave rows of absent experts."""
    _down_tiled_kernel[(tiles.max_tiles * triton.cdiv(matrix.num_rows, tile.block_n),)](
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


@triton.jit(do_not_specialize=["max_tiles"])
def _gate_up_tiled_kernel(
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
    tile, block = _tile_and_block(tl.program_id(0), max_tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
    slot = tl.load(tile_slot + tile).to(tl.int64)
    if slot < 0:
        return
    rows = tl.load(tile_rows + tile)
    row = tl.arange(0, BLOCK_M)
    place = tl.load(tile_first + tile) + tl.minimum(row, rows - 1)
    token = tl.load(pairs + place).to(tl.int64) // TOP_K
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    GATED: tl.constexpr = KIND != "relu2"
    gate_row = tl.minimum(column, N - 1)
    up_row = gate_row + N if GATED else gate_row
    expert = w + slot * stride_we
    scales = scale + slot * stride_se
    gate, up = _products(
        x + token * stride_x,
        expert + gate_row.to(tl.int64) * stride_wn,
        expert + up_row.to(tl.int64) * stride_wn,
        scales + gate_row,
        scales + up_row,
        stride_sg,
        K,
        FORMAT,
        GATED,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    biases = bias + slot * stride_be
    gate = _finished(gate, scales, biases, gate_row[None, :], HAS_SCALE, HAS_BIAS)
    if GATED:
        up = _finished(up, scales, biases, up_row[None, :], HAS_SCALE, HAS_BIAS)
    hidden = _activated(gate, up, KIND, ALPHA, LIMIT).to(h.dtype.element_ty)
    stored = (row[:, None] < rows) & (column[None, :] < N)
    tl.store(h + place.to(tl.int64)[:, None] * N + column[None, :], hidden, mask=stored)


@triton.jit(do_not_specialize=["max_tiles"])
def _down_tiled_kernel(
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
    tile, block = _tile_and_block(tl.program_id(0), max_tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
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
    acc, _ = _products(
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
    acc = _finished(acc, scales, bias + slot * stride_be, weight_row[None, :], HAS_SCALE, HAS_BIAS)
    pair = tl.load(pairs + place)
    stored = (row[:, None] < rows) & (column[None, :] < N)
    # Rounded to h's dtype whatever y's dtype is, so that products made in parts have the bits of products made at once.
    rounded = acc.to(h.dtype.element_ty).to(y.dtype.element_ty)
    tl.store(y + pair.to(tl.int64)[:, None] * N + column[None, :], rounded, mask=stored)


@triton.jit
def _tile_and_block(program, num_tiles, BLOCKS: tl.constexpr, GROUP_M: tl.constexpr):
    """Return a program's row tile and column block. GROUP_M row tiles share each block while it is in the cache."""
    group = program // (GROUP_M * BLOCKS)
    first = group * GROUP_M
    size = tl.minimum(num_tiles - first, GROUP_M)
    within = program % (GROUP_M * BLOCKS)
    return first + within % size, within // size


def gate_up_gemv(
    x: Tensor,
    matrix: StoredMatrix,
    activation: Activation,
    expert_ids: Tensor,
    expert_slot: Tensor | None,
    tile: Tile,
    h: Tensor,
) -> None:
    """Write activation(x W_gate^T) * (x W_up^T) to h [T * k, I] in the order of pairs; not for absent experts."""
    width = matrix.num_rows // 2 if activation.is_gated else matrix.num_rows
    _gate_up_gemv_kernel[(triton.cdiv(width, tile.block_n), expert_ids.numel())](
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
    """Write the sum over a token's choices of weight * (h W_down^T) to out [T, H]; absent experts add nothing."""
    _launch_down_gemv(h, matrix, expert_ids, expert_weights, expert_slot, tile, out, out)


def down_products_gemv(
    h: Tensor, matrix: StoredMatrix, expert_ids: Tensor, expert_slot: Tensor | None, tile: Tile, products: Tensor
) -> None:
    """Write h W_down^T to products [T * k, H], rounded to h's dtype; leave rows of absent experts."""
    _launch_down_gemv(h, matrix, expert_ids, None, expert_slot, tile, products, products)


def _launch_down_gemv(
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
    _down_gemv_kernel[(triton.cdiv(matrix.num_rows, tile.block_n), expert_ids.numel() // choices)](
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


@triton.jit(do_not_specialize_on_alignment=["ids", "expert_slot"])
def _gate_up_gemv_kernel(
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
    GATED: tl.constexpr = KIND != "relu2"
    gate_row = tl.minimum(column, N - 1)
    up_row = gate_row + N if GATED else gate_row
    token = x + (pair // TOP_K) * stride_x
    expert = w + slot * stride_we
    scales = scale + slot * stride_se
    biases = bias + slot * stride_be
    gate, up = _row_products(
        token,
        expert + gate_row.to(tl.int64) * stride_wn,
        expert + up_row.to(tl.int64) * stride_wn,
        scales + gate_row,
        scales + up_row,
        stride_sg,
        K,
        FORMAT,
        GROUP,
        GATED,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    gate = _finished(gate, scales, biases, gate_row, HAS_SCALE, HAS_BIAS)
    if GATED:
        up = _finished(up, scales, biases, up_row, HAS_SCALE, HAS_BIAS)
    hidden = _activated(gate, up, KIND, ALPHA, LIMIT).to(h.dtype.element_ty)
    tl.store(h + pair * N + column, hidden, mask=column < N)


@triton.jit(do_not_specialize_on_alignment=["ids", "expert_slot", "expert_weights"])
def _down_gemv_kernel(
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
            acc, _ = _row_products(
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
            acc = _finished(acc, scales, bias + slot * stride_be, weight_row, HAS_SCALE, HAS_BIAS)
            # Rounded like products that pass through memory.
            rounded = acc.to(h.dtype.element_ty).to(tl.float32)
            if SUM:
                total += rounded * tl.load(expert_weights + pair)
            else:
                tl.store(products + pair * N + column, rounded, mask=column < N)
    if SUM:
        tl.store(out + row * stride_out + column, total.to(out.dtype.element_ty), mask=column < N)


def gate_up_persistent(
    x: Tensor,
    matrix: StoredMatrix,
    activation: Activation,
    top_k: int,
    tiles: SortedPairs,
    block_m: int,
    tile: Tile,
    h: Tensor,
    num_programs: int,
) -> None:
    """Do the work of `gate_up_tiled`, for weights that `persistent_runs` accepts."""
    _, scale, bias = matrix.pointers()
    _, _, stride_scale, _, stride_bias = matrix.strides()
    width = matrix.num_rows // 2 if activation.is_gated else matrix.num_rows
    _gate_up_persistent_kernel[(min(num_programs, tiles.max_tiles * triton.cdiv(width, tile.block_n)),)](
        x,
        _box(matrix.values, 1, tile.block_n, tile.block_k),
        scale,
        bias,
        h,
        tiles.pairs,
        tiles.slot,
        tiles.first,
        tiles.rows,
        tiles.num_tiles,
        x.stride(0),
        stride_scale,
        stride_bias,
        K=matrix.depth,
        N=width,
        TOP_K=top_k,
        HAS_SCALE=matrix.scale is not None,
        HAS_BIAS=matrix.bias is not None,
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


def down_persistent(
    h: Tensor,
    matrix: StoredMatrix,
    tiles: SortedPairs,
    block_m: int,
    tile: Tile,
    y: Tensor,
    num_programs: int,
) -> None:
    """Do the work of `down_tiled`, for weights that `persistent_runs` accepts.

    Launches twice `num_programs`: if two fit a multiprocessor, one computes while the other begins or ends its short
    tiles.
    """
    _, scale, bias = matrix.pointers()
    _, _, stride_scale, _, stride_bias = matrix.strides()
    _down_persistent_kernel[(min(2 * num_programs, tiles.max_tiles * triton.cdiv(matrix.num_rows, tile.block_n)),)](
        _box(h, block_m, tile.block_k),
        _box(matrix.values, 1, tile.block_n, tile.block_k),
        scale,
        bias,
        y,
        tiles.pairs,
        tiles.slot,
        tiles.first,
        tiles.rows,
        tiles.num_tiles,
        stride_scale,
        stride_bias,
        K=matrix.depth,
        N=matrix.num_rows,
        HAS_SCALE=matrix.scale is not None,
        HAS_BIAS=matrix.bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def has_descriptors(device: torch.device) -> bool:
    """Return True if this Triton takes tensor descriptors from the host and the device has a copy engine for them."""
    if find_spec("triton.tools.tensor_descriptor") is None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def persistent_runs(matrix: StoredMatrix) -> bool:
    """Return True if the copy engine can fetch these weights: not int4, slots and rows at multiples of 16 bytes."""
    size = matrix.values.element_size()
    aligned = all(stride * size % 16 == 0 for stride in matrix.values.stride()[:2])
    return matrix.format != "int4" and aligned and matrix.values.data_ptr() % 16 == 0


def _box(tensor: Tensor, *block: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


@triton.jit
def _gate_up_persistent_kernel(
    x,
    w_box,
    scale,
    bias,
    h,
    pairs,
    tile_slot,
    tile_first,
    tile_rows,
    num_tiles,
    stride_x: tl.int64,
    stride_se: tl.int64,
    stride_be: tl.int64,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
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
    GATED: tl.constexpr = KIND != "relu2"
    tiles = tl.load(num_tiles)
    for program in tl.range(tl.program_id(0), tiles * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        tile, block = _tile_and_block(program, tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
        slot = tl.load(tile_slot + tile)
        rows = tl.load(tile_rows + tile)
        row = tl.arange(0, BLOCK_M)
        place = tl.load(tile_first + tile) + tl.minimum(row, rows - 1)
        token = tl.load(pairs + place).to(tl.int64) // TOP_K
        x_rows = x + token * stride_x
        first_row = block * BLOCK_N
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            a = _load_step(x_rows[:, None] + k[None, :], k[None, :], K, BLOCK_K)
            w_gate = w_box.load([slot, first_row, first]).reshape(BLOCK_N, BLOCK_K).to(a.dtype)
            gate = tl.dot(a, w_gate.T, gate, input_precision="ieee")
            if GATED:
                w_up = w_box.load([slot, first_row + N, first]).reshape(BLOCK_N, BLOCK_K).to(a.dtype)
                up = tl.dot(a, w_up.T, up, input_precision="ieee")
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        gate_row = tl.minimum(column, N - 1)[None, :]
        scales = scale + slot.to(tl.int64) * stride_se
        biases = bias + slot.to(tl.int64) * stride_be
        gate = _finished(gate, scales, biases, gate_row, HAS_SCALE, HAS_BIAS)
        if GATED:
            up = _finished(up, scales, biases, gate_row + N, HAS_SCALE, HAS_BIAS)
        hidden = _activated(gate, up, KIND, ALPHA, LIMIT).to(h.dtype.element_ty)
        stored = (row[:, None] < rows) & (column[None, :] < N)
        tl.store(h + place.to(tl.int64)[:, None] * N + column[None, :], hidden, mask=stored)


@triton.jit
def _down_persistent_kernel(
    h_box,
    w_box,
    scale,
    bias,
    y,
    pairs,
    tile_slot,
    tile_first,
    tile_rows,
    num_tiles,
    stride_se: tl.int64,
    stride_be: tl.int64,
    K: tl.constexpr,
    N: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tiles = tl.load(num_tiles)
    for program in tl.range(tl.program_id(0), tiles * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        tile, block = _tile_and_block(program, tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
        slot = tl.load(tile_slot + tile)
        rows = tl.load(tile_rows + tile)
        first_place = tl.load(tile_first + tile)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, K, BLOCK_K):
            a = h_box.load([first_place, first])
            w = w_box.load([slot, block * BLOCK_N, first]).reshape(BLOCK_N, BLOCK_K).to(a.dtype)
            acc = tl.dot(a, w.T, acc, input_precision="ieee")
        row = tl.arange(0, BLOCK_M)
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        weight_row = tl.minimum(column, N - 1)[None, :]
        scales = scale + slot.to(tl.int64) * stride_se
        acc = _finished(acc, scales, bias + slot.to(tl.int64) * stride_be, weight_row, HAS_SCALE, HAS_BIAS)
        pair = tl.load(pairs + first_place + tl.minimum(row, rows - 1))
        stored = (row[:, None] < rows) & (column[None, :] < N)
        rounded = acc.to(h_box.dtype).to(y.dtype.element_ty)
        tl.store(y + pair.to(tl.int64)[:, None] * N + column[None, :], rounded, mask=stored)


def combine(
    y: Tensor,
    expert_weights: Tensor,
    out: Tensor,
    expert_ids: Tensor | None = None,
    expert_slot: Tensor | None = None,
    num_experts: int = 0,
) -> None:
    """Write the sum over a token's choices of weight * y [T * k, H], in their order and in fp32, to out [T, H].

    expert_ids: rows of absent experts are skipped; without it all rows are read.
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
            # Rows of absent experts were never written.
            columns = tl.where(slot_of(ids, expert_slot, pair, pair >= 0, NUM_EXPERTS, HAS_MAP) >= 0, N, 0)
        product = tl.load(y + pair * N + column, mask=column < columns, other=0.0).to(tl.float32)
        acc += product * tl.load(expert_weights + pair)
    tl.store(out + token * stride_out + column, acc.to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _products(
    a_rows,
    w_rows,
    v_rows,
    w_scale,
    v_scale,
    stride_scale,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    TWO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply rows of a with rows of w, and of v if TWO: fp32 [BLOCK_M, BLOCK_N] each.

    a_rows [BLOCK_M], w_rows and v_rows [BLOCK_N]: pointers to rows. w_scale and v_scale [BLOCK_N]: pointers to the
    scales of the first int4 group, stride_scale apart from the next group's; K is then a multiple of BLOCK_K, which is
    the group size.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_v = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if FORMAT == "int4":
        HALF: tl.constexpr = BLOCK_K // 2
        half = tl.arange(0, HALF)
        for step in range(0, K // BLOCK_K):
            low_a = tl.load(a_rows[:, None] + (step * BLOCK_K + half)[None, :])
            high_a = tl.load(a_rows[:, None] + (step * BLOCK_K + HALF + half)[None, :])
            w = tl.load(w_rows[None, :] + (step * HALF + half)[:, None])
            acc = _group_step(acc, low_a, high_a, w, tl.load(w_scale + step * stride_scale)[None, :])
            if TWO:
                v = tl.load(v_rows[None, :] + (step * HALF + half)[:, None])
                acc_v = _group_step(acc_v, low_a, high_a, v, tl.load(v_scale + step * stride_scale)[None, :])
    else:
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            a = _load_step(a_rows[:, None] + k[None, :], k[None, :], K, BLOCK_K)
            w = _load_step(w_rows[None, :] + k[:, None], k[:, None], K, BLOCK_K)
            acc = tl.dot(a, w.to(a.dtype), acc, input_precision="ieee")
            if TWO:
                v = _load_step(v_rows[None, :] + k[:, None], k[:, None], K, BLOCK_K)
                acc_v = tl.dot(a, v.to(a.dtype), acc_v, input_precision="ieee")
    return acc, acc_v


@triton.jit
def _group_step(acc, low_a, high_a, packed, scale):
    """Add the scaled product of one int4 group; `low_a` and `high_a` multiply the nibbles, which hold values plus 8.

    Nibbles are masked in place and widened as whole bytes, four at a time: shifting a nibble, or converting it to an
    integer or float first, would cost several instructions. So values count sixteenfold. The compiler does the exact
    sums and products of `low` two at a time in 16 bits.
    """
    dtype: tl.constexpr = low_a.dtype
    low = (packed & 0xF).to(tl.int8, bitcast=True).to(dtype)
    low = ((low.to(tl.float32) - 8.0).to(dtype).to(tl.float32) * 16.0).to(dtype)
    high = ((packed & 0xF0) ^ 0x80).to(tl.int8, bitcast=True).to(dtype)
    product = tl.dot(high_a, high, tl.dot(low_a, low, input_precision="ieee"), input_precision="ieee")
    return acc + product * (scale * 0.0625)


@triton.jit
def _row_products(
    a_row,
    w_rows,
    v_rows,
    w_scale,
    v_scale,
    stride_scale,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    TWO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply one row of a with rows of w, and of v if TWO, without tensor cores: fp32 [BLOCK_N] each.

    Arguments as in `_products`, except that BLOCK_K may be several int4 groups of GROUP values. Threads keep their own
    sums until the end, so that steps wait only for memory and not for each other.
    """
    if FORMAT == "int4":
        GROUPS: tl.constexpr = BLOCK_K // GROUP
        HALF: tl.constexpr = GROUP // 2
        byte = tl.arange(0, BLOCK_K // 2)
        low_place = byte // HALF * GROUP + byte % HALF
        group = tl.arange(0, GROUPS)
        acc = tl.zeros([BLOCK_N, GROUPS], tl.float32)
        acc_v = tl.zeros([BLOCK_N, GROUPS], tl.float32)
        for step in tl.range(0, K // BLOCK_K, num_stages=STAGES):
            w = tl.load(w_rows[:, None] + (step * (BLOCK_K // 2) + byte)[None, :])
            scales = ((step * GROUPS + group) * stride_scale)[None, :]
            scale = tl.load(w_scale[:, None] + scales)
            if TWO:
                v = tl.load(v_rows[:, None] + (step * (BLOCK_K // 2) + byte)[None, :])
                scale_v = tl.load(v_scale[:, None] + scales)
            low_a = tl.load(a_row + step * BLOCK_K + low_place).to(tl.float32)
            high_a = tl.load(a_row + step * BLOCK_K + HALF + low_place).to(tl.float32)
            of_byte = high_a * 0.0625
            of_low = low_a - of_byte
            offset = 8.0 * (low_a + high_a)
            acc = _row_group_step(acc, of_low, of_byte, offset, w, scale, GROUPS)
            if TWO:
                acc_v = _row_group_step(acc_v, of_low, of_byte, offset, v, scale_v, GROUPS)
    else:
        EVEN: tl.constexpr = K % BLOCK_K == 0
        # One thread loads 16 bytes at once.
        WIDTH: tl.constexpr = min(BLOCK_K, 128 // w_rows.dtype.element_ty.primitive_bitwidth)
        acc = tl.zeros([BLOCK_N, BLOCK_K // WIDTH], tl.float32)
        acc_v = tl.zeros([BLOCK_N, BLOCK_K // WIDTH], tl.float32)
        for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            k = first + tl.arange(0, BLOCK_K)
            if EVEN:
                w = tl.load(w_rows[:, None] + k[None, :])
                if TWO:
                    v = tl.load(v_rows[:, None] + k[None, :])
                a = tl.load(a_row + k).to(tl.float32)
            else:
                w = tl.load(w_rows[:, None] + k[None, :], mask=k[None, :] < K, other=0.0)
                if TWO:
                    v = tl.load(v_rows[:, None] + k[None, :], mask=k[None, :] < K, other=0.0)
                a = tl.load(a_row + k, mask=k < K, other=0.0).to(tl.float32)
            acc = _row_step(acc, a, w, WIDTH)
            if TWO:
                acc_v = _row_step(acc_v, a, v, WIDTH)
    return tl.sum(acc, 1), tl.sum(acc_v, 1)


@triton.jit
def _row_step(acc, a, w, WIDTH: tl.constexpr):
    """Add w [N, K] * a [K] to acc [N, K / WIDTH]; one thread sums the products of WIDTH neighbours."""
    product = w.to(tl.float32) * a[None, :]
    return acc + tl.sum(product.reshape(w.shape[0], w.shape[1] // WIDTH, WIDTH), 2)


@triton.jit
def _row_group_step(acc, of_low, of_byte, offset, packed, scale, GROUPS: tl.constexpr):
    """Add the scaled products of GROUPS int4 groups to acc [N, GROUPS].

    With l and h the nibbles of a byte b, (l - 8) x + (h - 8) y = l (x - y / 16) + b y / 16 - 8 (x + y): the factors of
    l and b and the subtrahend are computed once for all rows.
    """
    low = (packed & 0xF).to(tl.float32)
    product = packed.to(tl.float32) * of_byte[None, :] + (low * of_low[None, :] - offset[None, :])
    return acc + tl.sum(product.reshape(packed.shape[0], GROUPS, packed.shape[1] // GROUPS), 2) * scale


@triton.jit
def _load_step(places, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the elements at `places`, 0 where `k`, which broadcasts to their shape, is not below K."""
    if K % BLOCK_K == 0:
        return tl.load(places)
    else:
        return tl.load(places, mask=k < K, other=0.0)


@triton.jit
def _finished(acc, scale, bias, rows, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Multiply the accumulator [.., N] by the scales of its weight rows and add their biases."""
    if HAS_SCALE:
        acc *= tl.load(scale + rows)
    if HAS_BIAS:
        acc += tl.load(bias + rows).to(tl.float32)
    return acc


@triton.jit
def _activated(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return activation(gate) * up in fp32; for the kinds see `kernels.specs.Activation`.

    Without a gate `gate` holds the up channels, and `up` is not read.
    """
    if LIMIT > 0.0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if KIND == "silu":
        act = gate / (1.0 + tl.exp(-gate))
    elif KIND == "gelu":
        act = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) is the logistic function of 2z; z is sqrt(2 / pi) * (x + 0.044715 x^3).
        act = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    elif KIND == "relu":
        act = tl.maximum(gate, 0.0)
    elif KIND == "relu2":
        act = tl.maximum(gate, 0.0)
        up = act
    else:
        tl.static_assert(KIND == "swigluoai", "unknown activation")
        act = gate / (1.0 + tl.exp(-ALPHA * gate))
        up = up + 1.0
    return act * up
