"""Causal attention of new tokens over paged keys and values.

On a CPU a token's result is the same bits in any batch and any chunking.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_plan import AttentionPlan
from kernels.cpu.attention import AttentionTiles, torch_attention
from kernels.cpu.library import NativeKernels, native_kernels
from kernels.cpu.panels import LANES


def paged_attention(
    q: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, H, Dk] over the pools [KV, num_slots, D]; returns [T, H, Dv].

    The new tokens' own keys and values are in the pools already. A `window` counts the token itself. `sinks` [H] are
    logits of a key without value (gpt-oss). Where values are a prefix of the keys the caller passes the keys twice and
    cuts the result.
    """
    kernels = native_kernels()
    if kernels is not None and _native_computes(q, keys_pool, values_pool):
        return _native_attention(kernels, q, keys_pool, values_pool, plan, scale, window or 0, sinks)
    tiling = plan.prepared.get("tiles")
    if not isinstance(tiling, AttentionTiles):
        tiling = plan.prepared["tiles"] = AttentionTiles(plan.chunks, plan.block_size)
    return torch_attention(q, keys_pool, values_pool, tiling, scale=scale, window=window, sinks=sinks)


def paged_attention_reference(
    q: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same, one token at a time in fp32."""
    group = q.shape[1] // keys_pool.shape[0]
    rows: list[Tensor] = []
    for chunk in plan.chunks:
        block_ids = torch.tensor(chunk.block_ids.tolist())
        slots = (block_ids[:, None] * plan.block_size + torch.arange(plan.block_size)).flatten()
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            first = 0 if window is None else max(0, position - window + 1)
            seen = slots[first : position + 1]
            keys = keys_pool[:, seen].float().repeat_interleave(group, 0)
            values = values_pool[:, seen].float().repeat_interleave(group, 0)
            scores = torch.einsum("hd,hsd->hs", q[len(rows)].float(), keys) * scale
            if sinks is not None:
                scores = torch.cat([scores, sinks.float()[:, None]], -1)
            weights = scores.softmax(-1)[:, : len(seen)]
            rows.append(torch.einsum("hs,hsd->hd", weights, values).to(q.dtype))
    return torch.stack(rows)


def _native_computes(q: Tensor, keys_pool: Tensor, values_pool: Tensor) -> bool:
    return (
        q.device.type == "cpu"
        and q.dtype == keys_pool.dtype == torch.float32
        and keys_pool.shape[2] % LANES == values_pool.shape[2] % LANES == 0
    )


def _native_attention(
    kernels: NativeKernels,
    q: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    num_rows, num_heads, key_dim = q.shape
    num_kv_heads, num_slots, value_dim = values_pool.shape
    arrays = plan.arrays()
    out = q.new_empty((num_rows, num_heads, value_dim))
    kernels.attention(
        q.data_ptr(),
        q.stride(0),
        num_heads,
        num_kv_heads,
        key_dim,
        value_dim,
        keys_pool.data_ptr(),
        values_pool.data_ptr(),
        num_slots,
        plan.block_size,
        len(plan.chunks),
        arrays.first_rows.data_ptr(),
        arrays.starts.data_ptr(),
        arrays.table_offsets.data_ptr(),
        arrays.block_tables.data_ptr(),
        scale,
        window,
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
    )
    return out
