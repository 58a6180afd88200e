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
    rope_kv_kernel[grid](
        *tensors[:3],
        cos,
        sin,
        slots,
        # Where something is absent, any tensor stands in for it and is not read.
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
        # Few threads with much each: what heads share, angles and weights, is loaded and unpacked once per thread.
        num_warps=1 if q.shape[2] <= 128 else 2,
    )
    return q_out


def _sizes(q: Tensor, k: Tensor, half: int, value_dim: int) -> dict[str, int]:
    """Constants of the kernel; `half` of the rotated channels."""
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
