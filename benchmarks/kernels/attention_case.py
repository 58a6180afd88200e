"""Attention of one shape over random keys and values that can be timed and checked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from benchmarks.kernels.measure import cold_sets, relative_error, run_guarded
from kernels.attention import paged_attention_reference
from kernels.gpu.attention import PagedContext, Partials, Scoring, prefill_attention, split_attention
from kernels.gpu.attention_config import AttentionShape, ExtendConfig, PrefillConfig, SplitConfig
from kernels.gpu.attention_kernels import SplitWork
from kernels.gpu.device import multiprocessor_of

# Prompts are bound by their products, so that they need not be quite so cold.
_MAX_PREFILL_SETS = 8
# The kernel: a decode has one new token per sequence, an extend few, packed into tiles with the query heads of a
# KV head, and a prefill as many as fill tiles of one head.
AnyConfig = SplitConfig | ExtendConfig | PrefillConfig
# X
Kind = Literal["decode", "extend", "prefill"]


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Sequence s has seq_lens[s] positions, the last query_lens[s] of them new. `latent`: values are the keys' first
    elements (one KV head, as in latent attention)."""

    name: str
    kind: Kind
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_heads: int = 32
    kv_heads: int = 4
    key_dim: int = 128
    value_dim: int = 128
    block_size: int = 64
    kv_dtype: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.bfloat16
    latent: bool = False

    @property
    def group(self) -> int:
        """The number of query heads of a KV head."""
        return self.num_heads // self.kv_heads

    def shape_on(self, device: torch.device) -> AttentionShape:
        """Return the key by which configurations are chosen."""
        dims = (self.key_dim, self.value_dim, self.block_size)
        kinds = (self.dtype, self.kv_dtype)
        return AttentionShape(self.num_heads, self.kv_heads, *dims, *kinds, multiprocessor_of(device))

    @property
    def kv_bytes(self) -> int:
        """Bytes of all positions, each read once."""
        width = self.key_dim + (0 if self.latent else self.value_dim)
        return sum(self.seq_lens) * self.kv_heads * width * self.kv_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """The fewest bytes to move: keys, values and queries read once, outputs written once."""
        rows = sum(self.query_lens) * self.num_heads
        return self.kv_bytes + rows * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def num_flops(self) -> int:
        """Operations of the two products over the pairs that the causal mask leaves."""
        pairs = sum(
            count * length - count * (count - 1) // 2
            for length, count in zip(self.seq_lens, self.query_lens, strict=True)
        )
        return 2 * pairs * self.num_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """q [T, H, Dk], pools [KV, num_slots, D], one block table [S, blocks] per set of keys and values, out [T, H, Dv].

    Blocks lie in random order. Slots behind the end of a sequence are NaN, as is block 0, which no sequence owns.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    tables: list[Tensor]
    seq_lens: Tensor
    query_starts: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class PreparedAttention:
    """A case that can be run. plan: makes the work list of a split kernel; serving does so once per step, so a layer's
    time excludes it. attend: computes `out` from a block table and the current list."""

    case: AttentionCase
    tensors: AttentionTensors
    config: AnyConfig
    plan: Callable[[], None]
    attend: Callable[[Tensor, Tensor], Tensor]

    @property
    def num_sets(self) -> int:
        return len(self.tensors.tables)

    def run(self, index: int) -> Tensor:
        """Compute the whole attention over set `index % num_sets`; return `out` [T, H, Dv]."""
        return self.attend(self.tensors.tables[index % self.num_sets], self.tensors.out)

    def relative_error(self, index: int, num_tokens: int = 8) -> float:
        """Run the kernel and compare some tokens with the reference in fp32; NaN if any token was not written.

        Raise WrongResultError, see `run_guarded`.
        """
        self.plan()
        tensors = self.tensors
        table = tensors.tables[index % self.num_sets]
        out = run_guarded(partial(self.attend, table), tensors.out)
        if not bool(out.isfinite().all()):
            return math.nan
        starts = list(itertools.accumulate(self.case.query_lens, initial=0))
        places = sorted({round(i * (starts[-1] - 1) / max(1, num_tokens - 1)) for i in range(num_tokens)})
        expected = []
        for token in places:
            seq = next(s for s in range(len(starts) - 1) if token < starts[s + 1])
            visible = self.case.seq_lens[seq] - starts[seq + 1] + token + 1
            expected.append(
                paged_attention_reference(
                    tensors.q[token : token + 1].float(),
                    tensors.keys,
                    tensors.values,
                    table[seq : seq + 1],
                    torch.tensor([visible], device=table.device),
                    block_size=self.case.block_size,
                    scale=scale_of(self.case),
                )
            )
        return relative_error(out[places], torch.cat(expected))


def scale_of(case: AttentionCase) -> float:
    """Return the factor of the scores."""
    return 1.0 / math.sqrt(case.key_dim)


def prepare(
    case: AttentionCase,
    device: torch.device,
    num_sms: int,
    *,
    config: AnyConfig | None = None,
    tensors: AttentionTensors | None = None,
) -> PreparedAttention:
    """Prepare a case on random tensors unless `tensors` are given.

    config: of the case's kind; by default the table's.
    """
    tensors = tensors or random_tensors(case, device)
    chosen = config or _chosen(case, device)
    if isinstance(chosen, PrefillConfig):
        return _prefill(case, tensors, chosen)
    return _split(case, tensors, chosen, num_sms)


def _chosen(case: AttentionCase, device: torch.device) -> AnyConfig:
    shape = case.shape_on(device)
    if case.kind == "decode":
        return shape.split()
    return shape.extend() if case.kind == "extend" else shape.prefill(max(case.query_lens))


def _prefill(case: AttentionCase, tensors: AttentionTensors, config: PrefillConfig) -> PreparedAttention:
    def attend(table: Tensor, out: Tensor) -> Tensor:
        return prefill_attention(
            tensors.q,
            _context(case, tensors, table),
            tensors.query_starts,
            Scoring(scale_of(case)),
            config,
            out=out,
        )

    return PreparedAttention(case, tensors, config, lambda: None, attend)


def _split(
    case: AttentionCase, tensors: AttentionTensors, config: SplitConfig | ExtendConfig, num_sms: int
) -> PreparedAttention:
    """Prepare a decode, or an extend if the configuration is an ExtendConfig."""
    if isinstance(config, ExtendConfig):
        split, tokens = config.split, config.tokens_per_tile(case.group)
    else:
        split, tokens = config, 1
    starts = tensors.query_starts if case.kind == "extend" else None
    work = SplitWork(
        len(case.seq_lens),
        sum(-(-count // tokens) for count in case.query_lens),
        max(case.seq_lens),
        case.kv_heads * -(-case.group // split.rows),
        split,
        tensors.q.device,
        num_sms=num_sms,
        max_query_len=max(case.query_lens),
        tokens_per_tile=tokens,
    )
    partials = Partials.allocate(work, case.num_heads, case.value_dim)

    def attend(table: Tensor, out: Tensor) -> Tensor:
        context, scoring = _context(case, tensors, table), Scoring(scale_of(case))
        return split_attention(tensors.q, context, work, partials, scoring, query_starts=starts, out=out)

    prepared = PreparedAttention(case, tensors, config, lambda: work.update(tensors.seq_lens, starts), attend)
    prepared.plan()
    return prepared


def _context(case: AttentionCase, tensors: AttentionTensors, table: Tensor) -> PagedContext:
    return PagedContext(tensors.keys, tensors.values, table, tensors.seq_lens, case.block_size)


def random_tensors(case: AttentionCase, device: torch.device) -> AttentionTensors:
    """Make as many sets of keys and values as keep the cache cold. Equal cases get equal tensors."""
    generator = torch.Generator(device).manual_seed(0)
    num_sets = cold_sets(case.kv_bytes)
    if case.kind == "prefill":
        num_sets = min(num_sets, _MAX_PREFILL_SETS)
    counts = [-(-length // case.block_size) for length in case.seq_lens]
    num_blocks = 1 + num_sets * sum(counts)
    ids = 1 + torch.randperm(num_blocks - 1, device=device, generator=generator).to(torch.int32)
    tables = []
    for part in ids.view(num_sets, -1):
        table = torch.zeros((len(counts), max(counts)), dtype=torch.int32, device=device)
        for seq, own in enumerate(torch.split(part, counts)):
            table[seq, : len(own)] = own
        tables.append(table)
    keys = _pool(case, num_blocks, case.key_dim, tables, generator)
    num_tokens = sum(case.query_lens)
    q = torch.randn((num_tokens, case.num_heads, case.key_dim), device=device, generator=generator)
    return AttentionTensors(
        q.to(case.dtype),
        keys,
        keys[..., : case.value_dim] if case.latent else _pool(case, num_blocks, case.value_dim, tables, generator),
        tables,
        torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        torch.tensor([0, *case.query_lens], device=device).cumsum(0).to(torch.int32),
        torch.empty((num_tokens, case.num_heads, case.value_dim), dtype=case.dtype, device=device),
    )


def _pool(case: AttentionCase, num_blocks: int, dim: int, tables: list[Tensor], generator: torch.Generator) -> Tensor:
    """Return random numbers [KV, num_slots, dim], NaN where no sequence has a position."""
    slots = num_blocks * case.block_size
    pool = torch.empty((case.kv_heads, slots, dim), dtype=case.kv_dtype, device=generator.device)
    for head in pool:
        # In parts: fp32 numbers of a large pool would not fit beside it.
        for part in torch.split(head, 1 << 20):
            part.copy_(torch.randn(part.shape, device=generator.device, generator=generator))
    pool[:, : case.block_size] = math.nan
    for table in tables:
        for seq, length in enumerate(case.seq_lens):
            used = length % case.block_size
            if used:
                last = int(table[seq, length // case.block_size]) * case.block_size
                pool[:, last + used : last + case.block_size] = math.nan
    return pool
