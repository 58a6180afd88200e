"""Batches over paged keys and values in which everything that must not be read is NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention import paged_attention_reference
from kernels.gpu.attention import PagedContext, Partials, Scoring, prefill_attention, split_attention
from kernels.gpu.attention_config import PrefillConfig, SplitConfig
from kernels.gpu.attention_kernels import SplitWork

CANARY = 123.0


@dataclass(frozen=True)
class Batch:
    """Queries, pools, block table and lengths; `query_starts` is None where each sequence has one new token."""

    q: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    seq_lens: Tensor
    query_starts: Tensor | None
    block_size: int

    @property
    def where(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.keys, self.values, self.table, self.seq_lens

    @property
    def context(self) -> PagedContext:
        return PagedContext(self.keys, self.values, self.table, self.seq_lens, self.block_size)

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.q.shape[2])

    def reference(self, **flags: Any) -> Tensor:
        return paged_attention_reference(
            *self.where, self.query_starts, block_size=self.block_size, scale=self.scale, **flags
        )


def make_batch(
    lengths: list[int],
    query_lens: list[int] | None = None,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    key_dim: int = 32,
    value_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    values_in_keys: bool = False,
    visible: int | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Batch:
    """A batch whose sequences own random blocks in random order. Slots that no sequence owns, slots behind its end and,
    with `visible`, slots before its last `visible` positions are NaN; table entries behind the end name a block of NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    kv_dtype = kv_dtype or dtype
    value_dim = value_dim or key_dim
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 2
    ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    table = torch.zeros((len(lengths), max(counts) + 2), dtype=torch.int32)
    shape = (kv_heads, num_blocks * block_size)
    nan = torch.full((*shape, key_dim), math.nan), torch.full((*shape, value_dim), math.nan)
    keys, values = nan
    for seq, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = [ids.pop() for _ in range(count)]
        table[seq, :count] = torch.tensor(own, dtype=torch.int32)
        positions = torch.arange(max(0, length - (visible or length)), length)
        slots = torch.tensor(own, dtype=torch.int64)[positions // block_size] * block_size + positions % block_size
        keys[:, slots] = torch.randn((kv_heads, len(slots), key_dim), generator=generator)
        values[:, slots] = torch.randn((kv_heads, len(slots), value_dim), generator=generator)
    starts = None
    num_tokens = len(lengths)
    if query_lens is not None:
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        num_tokens = sum(query_lens)
    q = torch.randn((num_tokens, heads, key_dim), generator=generator)
    keys = keys.to(kv_dtype).to(device)
    return Batch(
        q.to(dtype).to(device),
        keys,
        keys[..., :value_dim] if values_in_keys else values.to(kv_dtype).to(device),
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        starts if starts is None else starts.to(device),
        block_size,
    )


def guarded(call: Callable[[Tensor], object], batch: Batch) -> Tensor:
    """The values that `call` writes into an output of NaN, having written nothing before and behind it."""
    shape = (batch.q.shape[0] + 2, batch.q.shape[1], batch.values.shape[2])
    outer = torch.full(shape, CANARY, dtype=batch.q.dtype, device=batch.q.device)
    outer[1:-1] = math.nan
    call(outer[1:-1])
    assert bool((outer[[0, -1]] == CANARY).all())
    return outer[1:-1]


def run_split(
    batch: Batch,
    *,
    tile: int = 16,
    rows: int = 16,
    tokens_per_tile: int = 1,
    fixed_chunk: int | None = None,
    window: int | None = None,
    num_sms: int = 4,
    max_len: int | None = None,
    **flags: Any,
) -> Tensor:
    """Split attention through its work list; both launches are guarded."""
    config = SplitConfig(rows, tile, 4, 2, min_chunk=tile, programs_per_sm=1)
    query_lens = [1] if batch.query_starts is None else batch.query_starts.diff().tolist()
    tiles = len(batch.seq_lens) if batch.query_starts is None else sum(-(-n // tokens_per_tile) for n in query_lens)
    work = SplitWork(
        len(batch.seq_lens),
        tiles,
        max_len or int(batch.seq_lens.max()),
        batch.keys.shape[0],
        config,
        batch.q.device,
        num_sms=num_sms,
        max_query_len=max(query_lens),
        tokens_per_tile=tokens_per_tile,
        window=window,
        fixed_chunk=fixed_chunk,
    )
    work.update(batch.seq_lens, batch.query_starts)
    assert int(work.offsets[-1]) <= work.capacity
    partials = Partials.allocate(work, batch.q.shape[1], batch.values.shape[2])
    partials.parts.fill_(math.nan)
    partials.logsumexps.fill_(math.nan)
    return guarded(
        lambda out: split_attention(
            batch.q,
            batch.context,
            work,
            partials,
            Scoring(batch.scale, **flags),
            query_starts=batch.query_starts,
            out=out,
        ),
        batch,
    )


def run_prefill(batch: Batch, *, rows: int = 16, tile: int = 16, window: int | None = None, **flags: Any) -> Tensor:
    """Prefill attention, guarded."""
    assert batch.query_starts is not None
    starts = batch.query_starts
    return guarded(
        lambda out: prefill_attention(
            batch.q,
            batch.context,
            starts,
            Scoring(batch.scale, **flags),
            PrefillConfig(rows, tile, 4, 2),
            window=window,
            out=out,
        ),
        batch,
    )


def assert_close(out: Tensor, expected: Tensor) -> None:
    """Relative L2 error within what the outputs' precision allows; never NaN."""
    limit = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[out.dtype]
    error = (out.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert error < limit, f"relative error {error:.2e}"
