"""Per-head norms of queries and keys, rotary embedding and the write of keys and values into their slots, in one pass.

Each program takes one token and a few of its heads: it reads what the projection wrote and writes queries where
attention reads them and keys and values where the cache keeps them, so that nothing is read twice. All arithmetic is
fp32, rounded once at the end.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.gpu.rope_kv_kernel import rope_kv_kernel

_HEADS_PER_PROGRAM = 8


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
    k_scale and v_scale [KV] fp32 pools hold values divided by the scale. Pools of fp8 e4m3 hold them clamped to the
    largest fp8.
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
    rope_kv_kernel[grid](
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
