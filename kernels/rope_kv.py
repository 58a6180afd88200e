"""The steps between the projection to queries, keys and values and attention: norms of heads, rotation, storing.

They are fused, because each part alone costs little more than its start.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.library import NativeKernels, native_kernels
from kernels.kv_rows import KINDS, pack_rows
from kernels.norm import rms_norm_reference


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor,
    *,
    interleaved: bool,
    head_norms: tuple[Tensor, ...] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Store the keys and values of qkv [T, H + 2 KV, D] in the slots [T] (int64) of pools [KV, num_slots, D].

    Pools of other dtypes than qkv keep rounded rows (`kernels.kv_rows`).

    Queries and keys, and values if there are three, are first normalised by `head_norms` (weights [D] for each). Then
    queries and keys are rotated by cos, sin [T, R/2] as `apply_rotary` does. Returns the queries [T, H, D], which may
    be a view of qkv. Mutates the pools and qkv.
    """
    kernels = native_kernels()
    if (
        kernels is not None
        and qkv.device.type == "cpu"
        and qkv.dtype == cos.dtype == torch.float32
        and keys_pool.dtype in KINDS
    ):
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
    head_norms: tuple[Tensor, ...] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Do the work of `rotate_and_store` in plain torch, one part after another."""
    num_kv_heads = keys_pool.shape[0]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    parts = list(qkv.split([num_heads, num_kv_heads, num_kv_heads], 1))
    for number, norm in enumerate(head_norms or ()):
        parts[number] = rms_norm_reference(parts[number], norm, eps)
    q, keys, values = parts
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
    head_norms: tuple[Tensor, ...] | None,
    eps: float,
) -> Tensor:
    num_kv_heads, num_slots, _ = keys_pool.shape
    num_heads, dim = qkv.shape[1] - 2 * num_kv_heads, qkv.shape[2]
    norms = [norm.data_ptr() for norm in head_norms or ()]
    kernels.rotate_and_store(
        qkv.data_ptr(),
        qkv.stride(0),
        qkv.shape[0],
        num_heads,
        num_kv_heads,
        dim,
        *norms,
        *[None] * (3 - len(norms)),
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        interleaved,
        slots.data_ptr(),
        keys_pool.data_ptr(),
        values_pool.data_ptr(),
        num_slots,
        KINDS[keys_pool.dtype],
    )
    return qkv[:, :num_heads]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first R channels of x [T, H, D] by angles cos, sin [T, R/2] (Su et al., 2021); a new tensor.

    Channel pairs are (i, i + R/2), or (2i, 2i + 1) when interleaved. Angles of a wider dtype make the products wider
    too; the result has x's dtype.
    """
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    out = torch.empty_like(x)
    first_channels = slice(0, rotary_dim, 2) if interleaved else slice(0, rotary_dim // 2)
    second_channels = slice(1, rotary_dim, 2) if interleaved else slice(rotary_dim // 2, rotary_dim)
    first, second = x[..., first_channels], x[..., second_channels]
    if x.dtype == cos.dtype:
        torch.mul(first, cos, out=out[..., first_channels]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out[..., second_channels]).addcmul_(first, sin)
    else:
        out[..., first_channels] = first * cos - second * sin
        out[..., second_channels] = second * cos + first * sin
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:] = x[..., rotary_dim:]
    return out


def write_kv(keys_pool: Tensor, values_pool: Tensor | None, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
    """Store keys [T, KV, Dk] and values [T, KV, Dv] in the slots [T] (int64) of pools [KV, num_slots, D].

    Rows are rounded to the pools' dtype (`kernels.kv_rows`).

    Mutates the pools. With `values_pool` None (values are a prefix of the keys) only keys are stored.
    """
    keys_pool.index_copy_(1, slots, pack_rows(keys, keys_pool.dtype).transpose(0, 1))
    if values_pool is not None and values is not None:
        values_pool.index_copy_(1, slots, pack_rows(values, values_pool.dtype).transpose(0, 1))
