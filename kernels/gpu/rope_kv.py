"""Per-head norms of queries and keys, rotary embedding and the write of keys and values into their slots, in one pass.

Each program takes one token and a few of its heads. It reads the projection's output once, and writes queries for
attention and keys and values into the cache. All arithmetic is fp32, rounded once at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rope_kv import apply_rotary

_HEADS_PER_PROGRAM = 8
_FP8_MAX = tl.constexpr(448.0)


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
    """Return the rotated queries [T, H, D] (in `out` if given); write keys and values into the pools, which it mutates.

    q [T, H, D], k [T, KV, D], v [T, KV, Dv] or None (values are a prefix of the keys, or elsewhere): views whose last
    dimension is contiguous. cos, sin [T, R/2] contiguous: the first R <= D channels are rotated, in pairs (i, i + R/2),
    or (2i, 2i + 1) when interleaved. slots [T] int64, a token with slot -1 is not written. Pools [KV, num_slots, D] in
    any layout with contiguous channels.

    In this order: clip to [-clip, clip] (q, k and v), per-head RMS norm with q_weight and k_weight [D], rotation. With
    k_scale and v_scale [KV] fp32 pools hold values divided by the scale. Pools of fp8 e4m3 hold them clamped to the
    largest fp8.
    """
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if not q.shape[0]:
        return q_out
    if v is None or values_pool is None:
        tensors, value_dim = (q, k, k, q_out, keys_pool, keys_pool), 0
    else:
        tensors, value_dim = (q, k, v, q_out, keys_pool, values_pool), v.shape[2]
    sizes = _sizes(q, k, cos.shape[1], value_dim)
    heads = sizes["BLOCK_HEADS"]
    grid = (q.shape[0], triton.cdiv(q.shape[1], heads) + triton.cdiv(k.shape[1], heads))
    _rope_kv_kernel[grid](
        *tensors[:3],
        cos,
        sin,
        slots,
        # Any tensor stands in for an absent argument and is not read.
        *(cos if each is None else each for each in (q_weight, k_weight, k_scale, v_scale)),
        *tensors[3:],
        *(stride for tensor in tensors for stride in tensor.stride()[:2]),
        0.0 if clip is None else clip,
        eps,
        **sizes,
        INTERLEAVED=interleaved,
        NORM=q_weight is not None,
        CLIP=clip is not None,
        HAS_SCALE=k_scale is not None,
        # Few threads with much work each: angles and weights, which heads share, are loaded and unpacked per thread.
        num_warps=1 if q.shape[2] <= 128 else 2,
    )
    return q_out


def _sizes(q: Tensor, k: Tensor, half: int, value_dim: int) -> dict[str, int]:
    """Return constants of the kernel; `half` is half the number of rotated channels."""
    num_heads, head_dim, num_kv_heads = q.shape[1], q.shape[2], k.shape[1]
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "HALF": half,
        "BLOCK_HEADS": min(_HEADS_PER_PROGRAM, triton.next_power_of_2(max(num_heads, num_kv_heads))),
        "BLOCK_HALF": triton.next_power_of_2(half),
        "BLOCK_REST": triton.next_power_of_2(max(1, head_dim - 2 * half)),
        "BLOCK_VALUE": triton.next_power_of_2(max(1, value_dim)),
    }


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
    """Norm and rotate heads [N, HEAD_DIM] from `source_rows` to `target_rows`; `inside` [N]: True if a head exists."""
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
def _narrow(values, scales, HAS_SCALE: tl.constexpr, target: tl.constexpr):
    if HAS_SCALE:
        values = values / scales[:, None]
    if target == tl.float8e4nv:
        # A cast beyond e4m3's range would give NaN.
        values = tl.minimum(tl.maximum(values, -_FP8_MAX), _FP8_MAX)
    return values.to(target)


def norm_rope_write_kv_reference(
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
    """`norm_rope_write_kv` in plain torch, through fp64."""
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    wide = [x.double() if clip is None else x.double().clamp(-clip, clip) for x in (q, k)]
    wide = [
        x if weight is None else x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
        for x, weight in zip(wide, (q_weight, k_weight), strict=True)
    ]
    q_rotated, k_rotated = (apply_rotary(x, cos.double(), sin.double(), interleaved=interleaved) for x in wide)
    q_out.copy_(q_rotated)
    kept = slots >= 0
    writes = [(k_rotated, keys_pool, k_scale)]
    if v is not None and values_pool is not None:
        writes.append((v.double() if clip is None else v.double().clamp(-clip, clip), values_pool, v_scale))
    for new, pool, scale in writes:
        stored = new if scale is None else new / scale.double()[:, None]
        if pool.dtype == torch.float8_e4m3fn:
            stored = stored.clamp(-448.0, 448.0)
        pool[:, slots[kept]] = stored[kept].transpose(0, 1).float().to(pool.dtype)
    return q_out
