"""Pieces that the kernels of a mixture-of-experts layer share: products with stored weights, and the activation.

Weights are [rows, K] with K contiguous, stored as FORMAT "plain" (multiplied as they are, widened where they are 8 bits
wide) or "int4" (see `kernels.gpu.moe_weights`). Scales of 8-bit weights belong to rows, so they meet the accumulator
once, at the end; scales of int4 groups meet the product of their group.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """activation(gate) * up in fp32; the kinds are those of `kernels.specs.Activation`."""
    if KIND == "silu":
        act = gate / (1.0 + tl.exp(-gate))
    elif KIND == "gelu":
        act = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) is the logistic function of 2z; z is sqrt(2 / pi) * (x + 0.044715 x^3).
        act = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    elif KIND == "relu":
        act = tl.maximum(gate, 0.0)
    else:
        tl.static_assert(KIND == "swigluoai", "unknown activation")
        gate = tl.minimum(gate, LIMIT)
        act = gate / (1.0 + tl.exp(-ALPHA * gate))
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
    return act * up


@triton.jit
def finished(acc, scale, bias, rows, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The accumulator [.., N] times the scale of its weight rows, plus their bias."""
    if HAS_SCALE:
        acc *= tl.load(scale + rows)
    if HAS_BIAS:
        acc += tl.load(bias + rows).to(tl.float32)
    return acc


@triton.jit
def _int4_step(acc, low_a, high_a, packed, scale):
    """acc plus the scaled products of one group; `low_a` and `high_a` meet the nibbles, which hold values plus 8.

    Nibbles are masked where they lie and widened as whole bytes, four at a time: to shift one, or to make an integer or
    a float of it first, would cost several instructions. So values count sixteenfold. The compiler does the exact sums
    and products of `low` two at a time in 16 bits.
    """
    dtype: tl.constexpr = low_a.dtype
    low = (packed & 0xF).to(tl.int8, bitcast=True).to(dtype)
    low = ((low.to(tl.float32) - 8.0).to(dtype).to(tl.float32) * 16.0).to(dtype)
    high = ((packed & 0xF0) ^ 0x80).to(tl.int8, bitcast=True).to(dtype)
    product = tl.dot(high_a, high, tl.dot(low_a, low, input_precision="ieee"), input_precision="ieee")
    return acc + product * (scale * 0.0625)


@triton.jit
def products(
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
    """Rows of a times rows of w, and of v if TWO: fp32 [BLOCK_M, BLOCK_N] each.

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
            acc = _int4_step(acc, low_a, high_a, w, tl.load(w_scale + step * stride_scale)[None, :])
            if TWO:
                v = tl.load(v_rows[None, :] + (step * HALF + half)[:, None])
                acc_v = _int4_step(acc_v, low_a, high_a, v, tl.load(v_scale + step * stride_scale)[None, :])
    else:
        EVEN: tl.constexpr = K % BLOCK_K == 0
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            if EVEN:
                a = tl.load(a_rows[:, None] + k[None, :])
                w = tl.load(w_rows[None, :] + k[:, None])
            else:
                a = tl.load(a_rows[:, None] + k[None, :], mask=k[None, :] < K, other=0.0)
                w = tl.load(w_rows[None, :] + k[:, None], mask=k[:, None] < K, other=0.0)
            acc = tl.dot(a, w.to(a.dtype), acc, input_precision="ieee")
            if TWO:
                if EVEN:
                    v = tl.load(v_rows[None, :] + k[:, None])
                else:
                    v = tl.load(v_rows[None, :] + k[:, None], mask=k[:, None] < K, other=0.0)
                acc_v = tl.dot(a, v.to(a.dtype), acc_v, input_precision="ieee")
    return acc, acc_v


@triton.jit
def _row_step(acc, a, w, WIDTH: tl.constexpr):
    """acc [N, K / WIDTH] plus the products of w [N, K] and a [K], those of WIDTH neighbours summed: by one thread."""
    product = w.to(tl.float32) * a[None, :]
    return acc + tl.sum(product.reshape(w.shape[0], w.shape[1] // WIDTH, WIDTH), 2)


@triton.jit
def _row_int4_step(acc, of_low, of_byte, offset, packed, scale, GROUPS: tl.constexpr):
    """acc [N, GROUPS] plus the scaled products of as many groups.

    With l and h the nibbles of a byte b, (l - 8) x + (h - 8) y = l (x - y / 16) + b y / 16 - 8 (x + y): what is
    multiplied by l, by b and subtracted is made once for all rows.
    """
    low = (packed & 0xF).to(tl.float32)
    product = packed.to(tl.float32) * of_byte[None, :] + (low * of_low[None, :] - offset[None, :])
    return acc + tl.sum(product.reshape(packed.shape[0], GROUPS, packed.shape[1] // GROUPS), 2) * scale


@triton.jit
def row_products(
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
    """One row of a times rows of w, and of v if TWO, without tensor cores: fp32 [BLOCK_N] each.

    Arguments as in `products`, but that BLOCK_K may be several int4 groups of GROUP values. Threads keep their own
    sums until the end, so that steps wait for memory alone and not for each other.
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
            acc = _row_int4_step(acc, of_low, of_byte, offset, w, scale, GROUPS)
            if TWO:
                acc_v = _row_int4_step(acc_v, of_low, of_byte, offset, v, scale_v, GROUPS)
    else:
        EVEN: tl.constexpr = K % BLOCK_K == 0
        # What one thread loads at once: 16 bytes.
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
