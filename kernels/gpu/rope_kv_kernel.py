"""The kernel of `kernels.gpu.rope_kv`: norms, rotates and stores a token's heads, all arithmetic in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _narrow(values, scales, HAS_SCALE: tl.constexpr, target: tl.constexpr):
    if HAS_SCALE:
        values = values / scales[:, None]
    if target == tl.float8e4nv:
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
def rope_kv_kernel(
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
