"""Calls of the attention kernels on CPU tensors that hold nothing, for compiling only."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.attention import PagedContext, Partials, Scoring, prefill_attention, split_attention
from kernels.gpu.attention_config import split_config
from kernels.gpu.attention_kernels import SplitWork

KV_HEADS = 2
Shape = tuple[int, int, int, int, torch.dtype, torch.dtype]


def shape(
    key_dim: int,
    value_dim: int,
    group: int,
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> Shape:
    return key_dim, value_dim, group, block_size, dtype, kv_dtype


def pools(of: Shape) -> tuple[Tensor, Tensor]:
    """Values are a view of the keys where keys are as large as those of latent attention."""
    key_dim, value_dim, _, block_size, _, kv_dtype = of
    keys = torch.empty((KV_HEADS, 4 * block_size, key_dim), dtype=kv_dtype)
    if key_dim > 256:
        return keys, keys[..., :value_dim]
    return keys, torch.empty((KV_HEADS, 4 * block_size, value_dim), dtype=kv_dtype)


def metadata(num_seqs: int, max_blocks: int, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Block table, lengths and starts; with an `offset` they lie within larger tensors, aligned to nothing."""
    whole = torch.zeros((num_seqs + offset, max_blocks), dtype=torch.int32)
    lengths = torch.zeros(num_seqs + offset, dtype=torch.int32)
    starts = torch.zeros(num_seqs + offset + 1, dtype=torch.int32)
    return whole[offset:], lengths[offset:], starts[offset:]


def scoring(num_heads: int, flags: bool) -> Scoring:
    """With `flags`, sinks and a soft cap."""
    return Scoring(0.1, soft_cap=30.0, sinks=torch.empty(num_heads)) if flags else Scoring(0.1)


def launch_split(
    of: Shape,
    *,
    num_seqs: int = 3,
    max_blocks: int = 5,
    offset: int = 0,
    window: int | None = None,
    tokens: int = 1,
    flags: bool = False,
) -> None:
    """A work list and the decode, or with `tokens` > 1 the short extend, that follows it."""
    key_dim, value_dim, group, block_size, dtype, _ = of
    config = split_config(*of, tokens)
    tokens = max(1, min(tokens, config.rows // group))
    work = SplitWork(
        64, 64, 4096, KV_HEADS, config, "cpu", num_sms=132, window=window, tokens_per_tile=tokens, max_query_len=8
    )
    table, lengths, starts = metadata(num_seqs, max_blocks, offset)
    query_starts = None if tokens == 1 else starts
    work.update(lengths, query_starts)
    split_attention(
        torch.empty((num_seqs, KV_HEADS * group, key_dim), dtype=dtype),
        PagedContext(*pools(of), table, lengths, block_size),
        work,
        Partials.allocate(work, KV_HEADS * group, value_dim),
        scoring(KV_HEADS * group, flags),
        query_starts=query_starts,
    )


def launch_prefill(
    of: Shape,
    *,
    num_tokens: int = 100,
    num_seqs: int = 3,
    max_blocks: int = 5,
    offset: int = 0,
    window: int | None = None,
    max_query_len: int = 1000,
    flags: bool = False,
) -> None:
    key_dim, _, group, block_size, dtype, _ = of
    table, lengths, starts = metadata(num_seqs, max_blocks, offset)
    prefill_attention(
        torch.empty((num_tokens, KV_HEADS * group, key_dim), dtype=dtype),
        PagedContext(*pools(of), table, lengths, block_size),
        starts,
        scoring(KV_HEADS * group, flags),
        max_query_len=max_query_len,
        window=window,
    )
