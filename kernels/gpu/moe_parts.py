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
def nibbles(packed, DTYPE: tl.constexpr):
    """The two int4 values of each byte: low and high nibble less 8."""
    low = ((packed & 0xF).to(tl.int32) - 8).to(tl.float32).to(DTYPE)
    high = ((packed >> 4).to(tl.int32) - 8).to(tl.float32).to(DTYPE)
    return low, high


@triton.jit
def _int4_step(acc, low_a, high_a, packed, scale):
    low, high = nibbles(packed, low_a.dtype)
    return acc + (tl.dot(low_a, low, input_precision="ieee") + tl.dot(high_a, high, input_precision="ieee")) * scale


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
def row_products(
    a_row,
    w_rows,
    w_scale,
    stride_scale,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row of a times rows of w, without tensor cores: fp32 [BLOCK_N]. Arguments as in `products`."""
    acc = tl.zeros([BLOCK_N], tl.float32)
    if FORMAT == "int4":
        HALF: tl.constexpr = BLOCK_K // 2
        half = tl.arange(0, HALF)
        for step in tl.range(0, K // BLOCK_K, num_stages=STAGES):
            low_a = tl.load(a_row + step * BLOCK_K + half).to(tl.float32)
            high_a = tl.load(a_row + step * BLOCK_K + HALF + half).to(tl.float32)
            low, high = nibbles(tl.load(w_rows[:, None] + (step * HALF + half)[None, :]), tl.float32)
            product = tl.sum(low * low_a[None, :] + high * high_a[None, :], 1)
            acc += product * tl.load(w_scale + step * stride_scale)
    else:
        EVEN: tl.constexpr = K % BLOCK_K == 0
        for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            k = first + tl.arange(0, BLOCK_K)
            if EVEN:
                a = tl.load(a_row + k)
                w = tl.load(w_rows[:, None] + k[None, :])
            else:
                a = tl.load(a_row + k, mask=k < K, other=0.0)
                w = tl.load(w_rows[:, None] + k[None, :], mask=k[None, :] < K, other=0.0)
            acc += tl.sum(w.to(tl.float32) * a.to(tl.float32)[None, :], 1)
    return acc
