"""`kernels.gpu.rope_kv` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """The same in plain torch, through fp64."""
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    wide = [x.double() if clip is None else x.double().clamp(-clip, clip) for x in (q, k)]
    wide = [
        x if weight is None else x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
        for x, weight in zip(wide, (q_weight, k_weight), strict=True)
    ]
    q_rotated, k_rotated = (_rotate(x, cos.double(), sin.double(), interleaved) for x in wide)
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


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    size = 2 * cos.shape[1]
    firsts = slice(0, size, 2) if interleaved else slice(0, size // 2)
    seconds = slice(1, size, 2) if interleaved else slice(size // 2, size)
    out = x.clone()
    first, second = x[..., firsts], x[..., seconds]
    out[..., firsts] = first * cos[:, None] - second * sin[:, None]
    out[..., seconds] = second * cos[:, None] + first * sin[:, None]
    return out
