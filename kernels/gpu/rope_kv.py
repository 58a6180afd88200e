"""Per-head norms of queries and keys, rotary embedding and the write of keys and values into their slots, in one pass.

Each program takes one token and a few of its heads: it reads what the projection wrote and writes queries where
attention reads them and keys and values where the cache keeps them, so that nothing is read twice. All arithmetic is
fp32, rounded once at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS_PER_PROGRAM = 8
_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _narrow(values, scales, HAS_SCALE: tl.constexpr, target: tl.constexpr):
    if HAS_SCALE:
        values = values / scales[:, None]
        # A cast beyond e4m3's range would give NaN.
        values = tl.minimum(tl.maximum(values, -_FP8_MAX), _FP8_MAX)
    return values.to(target)


@triton.jit
def _norm_rotate_store(
    source,
    source_rows,
    target,
    target_rows,
    inside,
    weight,
    scales,
    cos,
    sin,
    clip,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    CLIP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Heads [N, HEAD_DIM] at `source_rows` of source go to `target_rows` of target; `inside` [N] says which exist."""
    pair = tl.arange(0, BLOCK_HALF)
    in_pair = inside[:, None] & (pair < HALF)[None, :]
    if INTERLEAVED:
        first_place, second_place = 2 * pair, 2 * pair + 1
    else:
        first_place, second_place = pair, pair + HALF
    first = tl.load(source + source_rows[:, None] + first_place[None, :], mask=in_pair, other=0.0).to(tl.float32)
    second = tl.load(source + source_rows[:, None] + second_place[None, :], mask=in_pair, other=0.0).to(tl.float32)
    if CLIP:
        first = tl.minimum(tl.maximum(first, -clip), clip)
        second = tl.minimum(tl.maximum(second, -clip), clip)
    if NORM:
        total = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if HEAD_DIM > 2 * HALF:
        place = 2 * HALF + tl.arange(0, BLOCK_REST)
        in_rest = inside[:, None] & (place < HEAD_DIM)[None, :]
        rest = tl.load(source + source_rows[:, None] + place[None, :], mask=in_rest, other=0.0).to(tl.float32)
        if CLIP:
            rest = tl.minimum(tl.maximum(rest, -clip), clip)
        if NORM:
            total += tl.sum(rest * rest, 1)
    if NORM:
        scale = (1.0 / tl.sqrt(total / HEAD_DIM + eps))[:, None]
        first *= scale * tl.load(weight + first_place, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        second *= scale * tl.load(weight + second_place, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        if HEAD_DIM > 2 * HALF:
            rest *= scale * tl.load(weight + place, mask=place < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    cosine = tl.load(cos + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    kind: tl.constexpr = target.dtype.element_ty
    rotated = _narrow(first * cosine - second * sine, scales, HAS_SCALE, kind)
    tl.store(target + target_rows[:, None] + first_place[None, :], rotated, mask=in_pair)
    rotated = _narrow(second * cosine + first * sine, scales, HAS_SCALE, kind)
    tl.store(target + target_rows[:, None] + second_place[None, :], rotated, mask=in_pair)
    if HEAD_DIM > 2 * HALF:
        kept = _narrow(rest, scales, HAS_SCALE, kind)
        tl.store(target + target_rows[:, None] + place[None, :], kept, mask=in_rest)


@triton.jit
def _copy_heads(
    source,
    source_rows,
    target,
    target_rows,
    inside,
    scales,
    clip,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    CLIP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    place = tl.arange(0, BLOCK)
    mask = inside[:, None] & (place < DIM)[None, :]
    values = tl.load(source + source_rows[:, None] + place[None, :], mask=mask, other=0.0).to(tl.float32)
    if CLIP:
        values = tl.minimum(tl.maximum(values, -clip), clip)
    narrowed = _narrow(values, scales, HAS_SCALE, target.dtype.element_ty)
    tl.store(target + target_rows[:, None] + place[None, :], narrowed, mask=mask)


@triton.jit
def _rope_kv_kernel(
    q,
    k,
    v,
    cos,
    sin,
    slots,
    q_weight,
    k_weight,
    k_scale,
    v_scale,
    q_out,
    keys,
    values,
    q_token: tl.int64,
    q_head: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    out_token: tl.int64,
    out_head: tl.int64,
    keys_head: tl.int64,
    keys_slot: tl.int64,
    values_head: tl.int64,
    values_slot: tl.int64,
    clip,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    CLIP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cos += token * HALF
    sin += token * HALF
    num_q_parts: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if part < num_q_parts:
        heads = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        _norm_rotate_store(
            q,
            token * q_token + heads * q_head,
            q_out,
            token * out_token + heads * out_head,
            heads < NUM_HEADS,
            q_weight,
            heads,
            cos,
            sin,
            clip,
            eps,
            HEAD_DIM,
            HALF,
            BLOCK_HALF,
            BLOCK_REST,
            INTERLEAVED,
            NORM,
            CLIP,
            False,
        )
    else:
        slot = tl.load(slots + token)
        heads = (part - num_q_parts) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        inside = (heads < NUM_KV_HEADS) & (slot >= 0)
        scales = tl.full([BLOCK_HEADS], 1.0, tl.float32)
        if HAS_SCALE:
            scales = tl.load(k_scale + heads, mask=inside, other=1.0)
        _norm_rotate_store(
            k,
            token * k_token + heads * k_head,
            keys,
            slot * keys_slot + heads * keys_head,
            inside,
            k_weight,
            scales,
            cos,
            sin,
            clip,
            eps,
            HEAD_DIM,
            HALF,
            BLOCK_HALF,
            BLOCK_REST,
            INTERLEAVED,
            NORM,
            CLIP,
            HAS_SCALE,
        )
        if VALUE_DIM > 0:
            if HAS_SCALE:
                scales = tl.load(v_scale + heads, mask=inside, other=1.0)
            _copy_heads(
                v,
                token * v_token + heads * v_head,
                values,
                slot * values_slot + heads * values_head,
                inside,
                scales,
                clip,
                VALUE_DIM,
                BLOCK_VALUE,
                CLIP,
                HAS_SCALE,
            )


def norm_rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor | None,
    *,
    interleaved: bool,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    clip: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rotated queries [T, H, D] (into `out` if given); mutates the pools, where keys and values are written.

    q [T, H, D], k [T, KV, D], v [T, KV, Dv] or None (values are a prefix of the keys, or elsewhere): views whose last
    dimension is contiguous. cos, sin [T, R/2] contiguous: the first R <= D channels are rotated, in pairs (i, i + R/2),
    or (2i, 2i + 1) when interleaved. slots [T] int64, a token with slot -1 is not written. Pools [KV, num_slots, D] in
    any layout with contiguous channels.

    In this order: clip to [-clip, clip] (q, k and v), per-head RMS norm with q_weight and k_weight [D], rotation. With
    k_scale and v_scale [KV] fp32 pools are fp8 e4m3 and hold values divided by the scale, clamped to the largest fp8.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, half = k.shape[1], cos.shape[1]
    q_out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    if not num_tokens:
        return q_out
    has_scale = k_scale is not None
    value, value_pool = (k, keys_pool) if v is None or values_pool is None else (v, values_pool)
    value_dim = 0 if v is None or values_pool is None else v.shape[2]
    block_heads = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(max(num_heads, num_kv_heads)))
    grid = (num_tokens, triton.cdiv(num_heads, block_heads) + triton.cdiv(num_kv_heads, block_heads))
    _rope_kv_kernel[grid](
        q,
        k,
        value,
        cos,
        sin,
        slots,
        cos if q_weight is None else q_weight,
        cos if k_weight is None else k_weight,
        cos if k_scale is None else k_scale,
        cos if v_scale is None else v_scale,
        q_out,
        keys_pool,
        value_pool,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        value.stride(0),
        value.stride(1),
        q_out.stride(0),
        q_out.stride(1),
        keys_pool.stride(0),
        keys_pool.stride(1),
        value_pool.stride(0),
        value_pool.stride(1),
        0.0 if clip is None else clip,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        HALF=half,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        BLOCK_VALUE=triton.next_power_of_2(max(1, value_dim)),
        INTERLEAVED=interleaved,
        NORM=q_weight is not None,
        CLIP=clip is not None,
        HAS_SCALE=has_scale,
        num_warps=4,
    )
    return q_out
