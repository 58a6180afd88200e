"""Causal attention of new tokens over paged keys and values: the CPU's bodies and the reference of all bodies.

On a CPU a token's result is the same bits in any batch and any chunking.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_plan import AttentionPlan
from kernels.cpu.attention import AttentionTiles, torch_attention
from kernels.cpu.library import NativeKernels, native_kernels
from kernels.cpu.panels import LANES
from kernels.kv_rows import KINDS, SCALE_BYTES, unpack_rows


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
    """Compute attention of q [T, H, Dk] over the pools [KV, num_slots, D]; return [T, H, Dv].

    The new tokens' own keys and values are in the pools already. A `window` counts the token itself. `sinks` [H] are
    logits of a key without value (gpt-oss). If values are a prefix of the keys, the caller passes the keys twice and
    cuts the result. Pools may keep rounded rows (`kernels.kv_rows`): over rows of bfloat16
    the compiled kernel rounds queries and weights to bfloat16 where the machine multiplies its pairs; over rows of int8
    it multiplies integers, to which it rounds queries and weights of 16 bits.
    """
    kernels = native_kernels()
    if kernels is not None and native_computes(q, keys_pool, values_pool):
        return _native_attention(kernels, q, keys_pool, values_pool, plan, scale, window or 0, sinks)
    tiling = plan.prepared.get("tiles")
    if not isinstance(tiling, AttentionTiles):
        tiling = plan.prepared["tiles"] = AttentionTiles(plan.chunks, plan.block_size)
    return torch_attention(q, keys_pool, values_pool, tiling, scale=scale, window=window, sinks=sinks)


def native_computes(q: Tensor, keys_pool: Tensor, values_pool: Tensor) -> bool:
    """Return whether the compiled kernels, if there are any, compute attention over pools of this form."""
    return (
        q.device.type == "cpu"
        and q.dtype == torch.float32
        and keys_pool.dtype in KINDS
        and q.shape[2] % LANES == numbers_of_row(values_pool) % LANES == 0
    )


def numbers_of_row(pool: Tensor) -> int:
    """Return the channels of a pool's rows."""
    return pool.shape[2] - (SCALE_BYTES if pool.dtype == torch.int8 else 0)


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
    num_kv_heads, num_slots, _ = values_pool.shape
    value_dim = numbers_of_row(values_pool)
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
        KINDS[keys_pool.dtype],
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


def paged_attention_reference(
    q: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor | None = None,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Compute the reference of every body: one token at a time, in fp32 (fp64 for fp64 queries).

    Causal attention of q [T, H, Dk] over pools [KV, num_slots, D]; returns [T, H, Dv], zeros where nothing is seen.
    Position p of sequence s lies in block `block_table[s, p // block_size]`. Without `query_starts` [S + 1] each of the
    `seq_lens` [S] has one new token. Results of tokens of no sequence are 0. Rounded rows of the pools are widened.
    """
    accurate = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // keys_pool.shape[0]
    starts = list(range(len(seq_lens) + 1)) if query_starts is None else query_starts.tolist()
    if keys_pool.dtype == torch.int8:
        keys_pool, values_pool = unpack_rows(keys_pool, accurate), unpack_rows(values_pool, accurate)
    out = q.new_zeros((*q.shape[:2], values_pool.shape[2]))
    for seq, length in enumerate(seq_lens.tolist()):
        count = starts[seq + 1] - starts[seq]
        for token in range(starts[seq], starts[seq + 1]):
            end = length - count + token - starts[seq] + 1
            begin = 0 if window is None else max(0, end - window)
            if end <= begin:
                continue
            positions = torch.arange(begin, end, device=q.device)
            slots = block_table[seq].long()[positions // block_size] * block_size + positions % block_size
            keys = keys_pool[:, slots].to(accurate).repeat_interleave(group, 0) * key_scale
            values = values_pool[:, slots].to(accurate).repeat_interleave(group, 0) * value_scale
            scores = torch.einsum("hd,hsd->hs", q[token].to(accurate), keys) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.to(accurate)[:, None]], -1)
            weights = scores.softmax(-1)[:, : len(slots)]
            out[token] = torch.einsum("hs,hsd->hd", weights, values).to(q.dtype)
    return out
