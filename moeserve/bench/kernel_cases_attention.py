"""Attention at the shapes by which kernels are compared, with random keys and values on the device that measures it.

Case and bounds are plain numbers; `prepare` makes the tensors. Several sets of keys and values keep the L2 cache cold:
successive runs are to take successive sets.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.gpu.attention import Partials, prefill_attention, split_attention
from kernels.gpu.attention_config import PrefillConfig, SplitConfig, split_config
from kernels.gpu.attention_reference import paged_attention_reference
from kernels.gpu.attention_work import SplitWork

Kind = Literal["decode", "prefill"]

MAX_KV_BYTES = 20 * 10**9
# Several times the L2 cache of today's GPUs.
_COLD_BYTES = 512 * 2**20
_MAX_SETS = 8


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
    def kv_bytes(self) -> int:
        """Of all positions, each read once."""
        width = self.key_dim + (0 if self.latent else self.value_dim)
        return sum(self.seq_lens) * self.kv_heads * width * self.kv_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """The fewest bytes to move: keys, values and queries read once, outputs written once."""
        rows = sum(self.query_lens) * self.num_heads
        return self.kv_bytes + rows * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def num_flops(self) -> int:
        """Of the two products over the pairs that the causal mask leaves."""
        pairs = sum(
            count * length - count * (count - 1) // 2
            for length, count in zip(self.seq_lens, self.query_lens, strict=True)
        )
        return 2 * pairs * self.num_heads * (self.key_dim + self.value_dim)


def attention_cases() -> list[AttentionCase]:
    """Decode at several batch sizes and lengths, ragged, in fp8 and latent; prefill and extend. At most 20 GB of KV."""
    cases = []
    for kv_heads in (4, 8):
        for batch in (1, 8, 64, 256):
            for length in (512, 4096, 32768):
                cases.append(_decode(f"decode {batch} x {length}", [length] * batch, kv_heads=kv_heads))
        cases.append(_decode("decode 64 ragged", ragged_lengths(64), kv_heads=kv_heads))
        cases += _prefills(kv_heads)
    cases.append(_decode("decode 64 x 4096 fp8", [4096] * 64, kv_dtype=torch.float8_e4m3fn))
    cases.append(_decode("decode 64 x 4096 blocks of 16", [4096] * 64, block_size=16))
    cases.append(
        _decode(
            "decode 64 x 4096 latent",
            [4096] * 64,
            num_heads=128,
            kv_heads=1,
            key_dim=576,
            value_dim=512,
            latent=True,
        )
    )
    return [case for case in cases if case.kv_bytes <= MAX_KV_BYTES]


def ragged_lengths(batch: int, seed: int = 0) -> list[int]:
    """Log-normal lengths between 128 and 32768 with a median of 2048."""
    draw = random.Random(seed)
    return [min(32768, max(128, round(2048 * math.exp(draw.gauss(0, 1.2))))) for _ in range(batch)]


def _decode(name: str, lengths: Sequence[int], **shape: object) -> AttentionCase:
    heads = f"{shape.get('num_heads', 32)}/{shape.get('kv_heads', 4)} heads"
    return AttentionCase(f"{name}, {heads}", "decode", tuple(lengths), (1,) * len(lengths), **shape)  # type: ignore[arg-type]


def _prefills(kv_heads: int) -> list[AttentionCase]:
    shapes = {
        "prefill 1 x 1024": ([1024], [1024]),
        "prefill 1 x 4096": ([4096], [4096]),
        "prefill 1 x 16384": ([16384], [16384]),
        "prefill 8 x 1024": ([1024] * 8, [1024] * 8),
        "extend 512 over 8192": ([8192 + 512], [512]),
    }
    return [
        AttentionCase(f"{name}, 32/{kv_heads} heads", "prefill", tuple(lengths), tuple(counts), kv_heads=kv_heads)
        for name, (lengths, counts) in shapes.items()
    ]


@dataclass(frozen=True, slots=True)
class PreparedAttention:
    """A case's tensors: q [T, H, Dk], pools [KV, num_slots, D], one block table [S, blocks] per set of keys and values.

    Blocks lie in random order. Slots behind the end of a sequence are NaN, as is block 0, which no sequence owns.
    """

    case: AttentionCase
    q: Tensor
    keys: Tensor
    values: Tensor
    tables: list[Tensor]
    seq_lens: Tensor
    query_starts: Tensor
    work: SplitWork
    partials: Partials
    out: Tensor
    prefill_config: PrefillConfig | None = None

    @property
    def num_sets(self) -> int:
        return len(self.tables)

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.case.key_dim)

    def run(self, index: int) -> Tensor:
        """The whole attention over set `index % num_sets`, its work list as it stands; returns `out` [T, H, Dv]."""
        where = (self.q, self.keys, self.values, self.tables[index % self.num_sets], self.seq_lens)
        if self.case.kind == "decode":
            return split_attention(
                *where, self.work, self.partials, block_size=self.case.block_size, scale=self.scale, out=self.out
            )
        return prefill_attention(
            *where,
            self.query_starts,
            block_size=self.case.block_size,
            max_query_len=max(self.case.query_lens),
            scale=self.scale,
            out=self.out,
            config=self.prefill_config,
        )

    def plan(self) -> None:
        """Makes the work list of a decode: once per step, so outside of what a layer costs."""
        if self.case.kind == "decode":
            self.work.update(self.seq_lens)

    def relative_error(self, index: int, num_tokens: int = 8) -> float:
        """Of some tokens' outputs against the reference in fp32; NaN if one was not written. Runs the kernel."""
        self.plan()
        self.out.fill_(math.nan)
        out = self.run(index)
        table = self.tables[index % self.num_sets]
        starts = self.query_starts.tolist()
        places = sorted({round(i * (starts[-1] - 1) / max(1, num_tokens - 1)) for i in range(num_tokens)})
        expected = []
        for token in places:
            seq = next(s for s in range(len(starts) - 1) if token < starts[s + 1])
            visible = self.case.seq_lens[seq] - starts[seq + 1] + token + 1
            expected.append(
                paged_attention_reference(
                    self.q[token : token + 1].float(),
                    self.keys,
                    self.values,
                    table[seq : seq + 1],
                    torch.tensor([visible]),
                    block_size=self.case.block_size,
                    scale=self.scale,
                )
            )
        wanted = torch.cat(expected)
        return float((out[places].float() - wanted).norm() / wanted.norm())


def prepare(
    case: AttentionCase,
    device: torch.device,
    num_sms: int,
    *,
    split: SplitConfig | None = None,
    prefill: PrefillConfig | None = None,
    fixed_chunk: int | None = None,
    seed: int = 0,
) -> PreparedAttention:
    """Random tensors of a case and its work list. Without a configuration the table's is taken."""
    generator = torch.Generator(device).manual_seed(seed)
    num_sets = max(1, min(_MAX_SETS, -(-_COLD_BYTES // case.kv_bytes)))
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
    values = keys[..., : case.value_dim] if case.latent else _pool(case, num_blocks, case.value_dim, tables, generator)
    num_seqs, num_tokens = len(case.seq_lens), sum(case.query_lens)
    config = split or split_config(
        case.key_dim, case.value_dim, case.num_heads // case.kv_heads, case.block_size, case.dtype, case.kv_dtype
    )
    head_groups = -(-case.num_heads // case.kv_heads // config.rows)
    work = SplitWork(
        num_seqs,
        num_seqs,
        max(case.seq_lens),
        case.kv_heads * head_groups,
        config,
        device,
        num_sms=num_sms,
        fixed_chunk=fixed_chunk,
    )
    q = torch.randn((num_tokens, case.num_heads, case.key_dim), device=device, generator=generator).to(case.dtype)
    prepared = PreparedAttention(
        case,
        q,
        keys,
        values,
        tables,
        torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        torch.tensor([0, *case.query_lens], device=device).cumsum(0).to(torch.int32),
        work,
        Partials.allocate(work, case.num_heads, case.value_dim),
        torch.empty((num_tokens, case.num_heads, case.value_dim), dtype=case.dtype, device=device),
        prefill,
    )
    prepared.plan()
    return prepared


def _pool(case: AttentionCase, num_blocks: int, dim: int, tables: list[Tensor], generator: torch.Generator) -> Tensor:
    """[KV, num_slots, dim] of random numbers, NaN where no sequence has a position."""
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
