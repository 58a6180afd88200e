"""What lies between the projection to queries, keys and values and attention: norms of heads, rotation, storing.

Fused because each part alone is little more than the cost of starting it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.library import NativeKernels, native_kernels
from kernels.kv_write import write_kv
from kernels.norm import rms_norm_reference
from kernels.rotary import apply_rotary


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor,
    *,
    interleaved: bool,
    head_norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Stores the keys and values of qkv [T, H + 2 KV, D] in the slots [T] (int64) of pools [KV, num_slots, D].

    Queries and keys are first normalised by `head_norms` (weights [D] of either), then rotated by cos, sin [T, R/2] as
    `apply_rotary` does. Returns the queries [T, H, D], which may be a view of qkv. Mutates the pools and qkv.
    """
    kernels = native_kernels()
    if kernels is not None and qkv.device.type == "cpu" and qkv.dtype == cos.dtype == keys_pool.dtype == torch.float32:
        return _rotate_and_store_native(
            kernels, qkv, cos, sin, slots, keys_pool, values_pool, interleaved, head_norms, eps
        )
    return rotate_and_store_reference(
        qkv, cos, sin, slots, keys_pool, values_pool, interleaved=interleaved, head_norms=head_norms, eps=eps
    )


def rotate_and_store_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor,
    *,
    interleaved: bool,
    head_norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """The same by plain torch, one part after another."""
    num_kv_heads = keys_pool.shape[0]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, keys, values = qkv.split([num_heads, num_kv_heads, num_kv_heads], 1)
    if head_norms is not None:
        q, keys = (rms_norm_reference(part, norm, eps) for part, norm in zip((q, keys), head_norms, strict=True))
    rotated = apply_rotary(torch.cat([q, keys], 1), cos, sin, interleaved=interleaved)
    write_kv(keys_pool, values_pool, slots, rotated[:, num_heads:], values)
    return rotated[:, :num_heads]


def _rotate_and_store_native(
    kernels: NativeKernels,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor,
    interleaved: bool,
    head_norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    num_kv_heads, num_slots, dim = keys_pool.shape
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q_norm, k_norm = (None, None) if head_norms is None else (norm.data_ptr() for norm in head_norms)
    kernels.rotate_and_store(
        qkv.data_ptr(),
        qkv.stride(0),
        qkv.shape[0],
        num_heads,
        num_kv_heads,
        dim,
        q_norm,
        k_norm,
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        interleaved,
        slots.data_ptr(),
        keys_pool.data_ptr(),
        values_pool.data_ptr(),
        num_slots,
    )
    return qkv[:, :num_heads]
