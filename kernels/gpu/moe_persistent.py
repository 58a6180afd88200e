"""Both projections of the experts for many rows: as many programs as multiprocessors, weights through descriptors.

The same tiles as in `kernels.gpu.moe_tiled`, but each program runs through a share of those there really are, whose
number only the device knows, and the copy engine fetches weights (and, in the down projection, rows) in whole boxes.
A box may reach past its expert's rows: what it brings from there ends in rows and columns that are not stored.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.moe_align import SortedPairs
from kernels.gpu.moe_config import Tile
from kernels.gpu.moe_parts import finished, gated
from kernels.gpu.moe_tiled import tile_and_block
from kernels.gpu.moe_weights import StoredMatrix
from kernels.specs import Activation


@triton.jit
def _gate_up_kernel(
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
    tiles = tl.load(num_tiles)
    for program in tl.range(tl.program_id(0), tiles * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        tile, block = tile_and_block(program, tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
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
            if K % BLOCK_K == 0:
                a = tl.load(x_rows[:, None] + k[None, :])
            else:
                a = tl.load(x_rows[:, None] + k[None, :], mask=k[None, :] < K, other=0.0)
            w_gate = w_box.load([slot, first_row, first]).reshape(BLOCK_N, BLOCK_K).to(a.dtype)
            gate = tl.dot(a, w_gate.T, gate, input_precision="ieee")
            w_up = w_box.load([slot, first_row + N, first]).reshape(BLOCK_N, BLOCK_K).to(a.dtype)
            up = tl.dot(a, w_up.T, up, input_precision="ieee")
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        gate_row = tl.minimum(column, N - 1)[None, :]
        scales = scale + slot.to(tl.int64) * stride_se
        biases = bias + slot.to(tl.int64) * stride_be
        gate = finished(gate, scales, biases, gate_row, HAS_SCALE, HAS_BIAS)
        up = finished(up, scales, biases, gate_row + N, HAS_SCALE, HAS_BIAS)
        hidden = gated(gate, up, KIND, ALPHA, LIMIT).to(h.dtype.element_ty)
        stored = (row[:, None] < rows) & (column[None, :] < N)
        tl.store(h + place.to(tl.int64)[:, None] * N + column[None, :], hidden, mask=stored)


@triton.jit
def _down_kernel(
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
        tile, block = tile_and_block(program, tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
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
        acc = finished(acc, scales, bias + slot.to(tl.int64) * stride_be, weight_row, HAS_SCALE, HAS_BIAS)
        pair = tl.load(pairs + first_place + tl.minimum(row, rows - 1))
        stored = (row[:, None] < rows) & (column[None, :] < N)
        rounded = acc.to(h_box.dtype).to(y.dtype.element_ty)
        tl.store(y + pair.to(tl.int64)[:, None] * N + column[None, :], rounded, mask=stored)


def has_descriptors(device: torch.device) -> bool:
    """Whether this Triton takes tensor descriptors from the host and the device has a copy engine for them."""
    if find_spec("triton.tools.tensor_descriptor") is None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def persistent_runs(matrix: StoredMatrix) -> bool:
    """Whether the copy engine can fetch these weights: not int4, and slots and rows at multiples of 16 bytes."""
    size = matrix.values.element_size()
    aligned = all(stride * size % 16 == 0 for stride in matrix.values.stride()[:2])
    return matrix.format != "int4" and aligned and matrix.values.data_ptr() % 16 == 0


def _box(tensor: Tensor, *block: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


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
    """As `kernels.gpu.moe_tiled.gate_up_tiled`, for weights that `persistent_runs`."""
    _, scale, bias = matrix.pointers()
    _, _, stride_scale, _, stride_bias = matrix.strides()
    width = matrix.num_rows // 2
    _gate_up_kernel[(min(num_programs, tiles.max_tiles * triton.cdiv(width, tile.block_n)),)](
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
    """As `kernels.gpu.moe_tiled.down_tiled`, for weights that `persistent_runs`.

    Runs twice `num_programs`: one computes while the other begins or ends its short tiles, where two fit.
    """
    _, scale, bias = matrix.pointers()
    _, _, stride_scale, _, stride_bias = matrix.strides()
    _down_kernel[(min(2 * num_programs, tiles.max_tiles * triton.cdiv(matrix.num_rows, tile.block_n)),)](
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
