"""Triton kernels of the experts' two projections, and their launches.

gate_up writes activation(x W_gate^T) * (x W_up^T) to a scratch buffer h, down writes h W_down^T, and combine sums a
token's products by the gate's weights. (token, choice) pairs are sorted by expert (`kernels.gpu.moe_align`); a program
computes one row tile of one expert and one block of columns. h is in sorted order; down stores each row at the place of
its pair.

Weights are [rows, K] with K contiguous, stored as FORMAT "plain" (multiplied as they are, widened where they are 8 bits
wide), "int4" (see `kernels.gpu.moe_weights`) or "packed", in the form FORM of `kernels.gpu.packed_rows`. Scales of
8-bit weights belong to rows and multiply the accumulator once, at the end; scales of int4 groups multiply the product
of their group. Rows and columns beyond the end repeat the last one, so that loads need no masks; they are not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.moe_align import SortedPairs, slot_of
from kernels.gpu.moe_config import Tile
from kernels.gpu.moe_weights import StoredMatrix
from kernels.gpu.packed_rows import multiply_packed
from kernels.specs import Activation

_COMBINE_BLOCK = 1024


def gate_up(
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


def down(h: Tensor, matrix: StoredMatrix, tiles: SortedPairs, block_m: int, tile: Tile, y: Tensor) -> None:
    """Write h W_down^T to y [pairs, H] in the order of pairs, rounded to h's dtype; leave rows of absent experts."""
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
    FORM: tl.constexpr,
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
        FORM,
        GATED,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    biases = bias + slot * stride_be
    gate = finished(gate, scales, biases, gate_row[None, :], HAS_SCALE, HAS_BIAS)
    if GATED:
        up = finished(up, scales, biases, up_row[None, :], HAS_SCALE, HAS_BIAS)
    hidden = activated(gate, up, KIND, ALPHA, LIMIT).to(h.dtype.element_ty)
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
    FORM: tl.constexpr,
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
    acc, _ = _products(
        h + place.to(tl.int64) * K,
        matrix,
        matrix,
        scales + weight_row,
        scales + weight_row,
        stride_sg,
        K,
        FORMAT,
        FORM,
        False,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    acc = finished(acc, scales, bias + slot * stride_be, weight_row[None, :], HAS_SCALE, HAS_BIAS)
    pair = tl.load(pairs + place)
    stored = (row[:, None] < rows) & (column[None, :] < N)
    # Rounded to h's dtype whatever y's dtype is, so that products made in parts have the bits of products made at once.
    rounded = acc.to(h.dtype.element_ty).to(y.dtype.element_ty)
    tl.store(y + pair.to(tl.int64)[:, None] * N + column[None, :], rounded, mask=stored)


@triton.jit
def tile_and_block(program, num_tiles, BLOCKS: tl.constexpr, GROUP_M: tl.constexpr):
    """Return a program's row tile and column block. GROUP_M row tiles share each block while it is in the cache."""
    group = program // (GROUP_M * BLOCKS)
    first = group * GROUP_M
    size = tl.minimum(num_tiles - first, GROUP_M)
    within = program % (GROUP_M * BLOCKS)
    return first + within % size, within // size


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
    FORM: tl.constexpr,
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
    if FORMAT == "packed":
        acc, acc_v = multiply_packed(a_rows, w_rows, v_rows, FORM, TWO, BLOCK_M, BLOCK_N)
    elif FORMAT == "int4":
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
def _load_step(places, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the elements at `places`, 0 where `k`, which broadcasts to their shape, is not below K."""
    if K % BLOCK_K == 0:
        return tl.load(places)
    else:
        return tl.load(places, mask=k < K, other=0.0)


@triton.jit
def finished(acc, scale, bias, rows, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Multiply the accumulator [.., N] by the scales of its weight rows and add their biases."""
    if HAS_SCALE:
        acc *= tl.load(scale + rows)
    if HAS_BIAS:
        acc += tl.load(bias + rows).to(tl.float32)
    return acc


@triton.jit
def activated(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return activation(gate) * up in fp32; for the kinds see `kernels.specs.Activation`.

    Without a gate `gate` holds the up channels, and `up` is not read.
    """
    if LIMIT > 0.0:
        if KIND != "clamped_silu":
            gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if KIND == "silu":
        act = gate / (1.0 + tl.exp(-gate))
    elif KIND == "clamped_silu":
        act = tl.minimum(gate / (1.0 + tl.exp(-gate)), LIMIT)
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
