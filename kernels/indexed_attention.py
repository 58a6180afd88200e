"""Attention over positions that an indexer chooses for each token (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).

A token with at most `top_k` positions sees all of them. On a CPU a token's choice and its result are the same bits in
any batch and any chunking.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention import native_computes, numbers_of_row, paged_attention
from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.cpu.library import native_kernels
from kernels.cpu.panels import LANES
from kernels.kv_rows import KINDS, unpack_rows

# Positions that torch scores at once: the shape of a product is the same for every context, and so are its bits.
_SEGMENT = 512


def has_choice(plan: AttentionPlan, top_k: int) -> bool:
    """Return whether a token of the step has more than `top_k` positions."""
    return any(chunk.start + chunk.num_tokens > top_k for chunk in plan.chunks)


def choose_positions(q: Tensor, weights: Tensor, keys_pool: Tensor, plan: AttentionPlan, top_k: int) -> Tensor:
    """Choose positions for queries q [T, H, D] over the indexer's keys [1, num_slots, D]; return [T, top_k] int32.

    weights: [T, H] float32, scales included. A position's score is the sum over heads of weight * max(0, q . key), in
    float32. A token with more than `top_k` positions gets those with the largest scores, in order; of equal scores the
    earlier position. Rows of other tokens mean nothing.
    """
    kernels, dim = native_kernels(), q.shape[2]
    chosen = torch.empty((len(q), top_k), dtype=torch.int32)
    if kernels is None or q.dtype != torch.float32 or keys_pool.dtype not in KINDS or dim % LANES:
        _choose_in_torch(q, weights, keys_pool, plan, chosen)
        return chosen
    q, weights, arrays = q.contiguous(), weights.contiguous(), plan.arrays()
    kernels.choose_positions(
        q.data_ptr(),
        weights.data_ptr(),
        q.shape[1],
        dim,
        keys_pool.data_ptr(),
        KINDS[keys_pool.dtype],
        plan.block_size,
        len(plan.chunks),
        arrays.first_rows.data_ptr(),
        arrays.starts.data_ptr(),
        arrays.table_offsets.data_ptr(),
        arrays.block_tables.data_ptr(),
        top_k,
        chosen.data_ptr(),
    )
    return chosen


def _choose_in_torch(q: Tensor, weights: Tensor, keys_pool: Tensor, plan: AttentionPlan, chosen: Tensor) -> None:
    top_k, row = chosen.shape[1], 0
    for chunk in plan.chunks:
        end = chunk.start + chunk.num_tokens
        first = max(chunk.start, top_k)
        if first < end:
            keys = unpack_rows(keys_pool[0][_slots(chunk, plan.block_size)[:end]], torch.float32)
            keys = functional.pad(keys, (0, 0, 0, -end % _SEGMENT)).split(_SEGMENT)
        for position in range(first, end):
            own = row + position - chunk.start
            parts = keys[: position // _SEGMENT + 1]
            scores = torch.cat([weights[own : own + 1] @ (q[own].float() @ part.T).relu() for part in parts], 1)
            best = scores[0, : position + 1].sort(descending=True, stable=True).indices[:top_k]
            chosen[own] = best.sort().values
        row += chunk.num_tokens


def indexed_attention(q: Tensor, keys_pool: Tensor, plan: AttentionPlan, chosen: Tensor, *, scale: float) -> Tensor:
    """Compute attention of q [T, H, D] over the pool [1, num_slots, D] of keys that are their own values; [T, H, D].

    chosen: [T, top_k] int32, as `choose_positions` returns it. See `kernels.attention.paged_attention`.
    """
    kernels, (num_rows, num_heads, dim) = native_kernels(), q.shape
    if kernels is None or not native_computes(q, keys_pool, keys_pool):
        return _attend_in_torch(q, keys_pool, plan, chosen, scale)
    arrays, width = plan.arrays(), numbers_of_row(keys_pool)
    out = q.new_empty((num_rows, num_heads, width))
    kernels.indexed_attention(
        q.data_ptr(),
        q.stride(0),
        num_heads,
        1,
        dim,
        width,
        keys_pool.data_ptr(),
        keys_pool.data_ptr(),
        KINDS[keys_pool.dtype],
        keys_pool.shape[1],
        plan.block_size,
        len(plan.chunks),
        arrays.first_rows.data_ptr(),
        arrays.starts.data_ptr(),
        arrays.table_offsets.data_ptr(),
        arrays.block_tables.data_ptr(),
        scale,
        chosen.data_ptr(),
        chosen.shape[1],
        out.data_ptr(),
    )
    return out


def _attend_in_torch(q: Tensor, keys_pool: Tensor, plan: AttentionPlan, chosen: Tensor, scale: float) -> Tensor:
    """Compute tokens that see all positions as `paged_attention` does, and each other token by itself."""
    out, top_k = q.new_empty((*q.shape[:2], numbers_of_row(keys_pool))), chosen.shape[1]
    rows, spans, row = list[Tensor](), list[ChunkSpan](), 0
    for chunk in plan.chunks:
        seeing_all = min(max(top_k - chunk.start, 0), chunk.num_tokens)
        if seeing_all:
            rows.append(torch.arange(row, row + seeing_all))
            spans.append(replace(chunk, num_tokens=seeing_all))
        slots = _slots(chunk, plan.block_size)
        for own in range(row + seeing_all, row + chunk.num_tokens):
            keys = unpack_rows(keys_pool[:, slots[chosen[own].long()]], q.dtype)[None]
            out[own] = functional.scaled_dot_product_attention(q[own][None, None], keys, keys, scale=scale)[0, 0]
        row += chunk.num_tokens
    if rows:
        places = torch.cat(rows)
        dense = AttentionPlan(spans, plan.block_size)
        out[places] = paged_attention(q[places], keys_pool, keys_pool, dense, scale=scale)
    return out


def _slots(chunk: ChunkSpan, block_size: int) -> Tensor:
    """Return the slots of the positions of a chunk's context, up to the end of its last block."""
    blocks = torch.tensor(chunk.block_ids.tolist())
    return (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
