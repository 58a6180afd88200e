"""The shapes by which attention is compared, and what each has to move and compute. Plain numbers, no tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kernels.gpu.attention_tuning import AttentionShape

# What computes it: a decode has one new token per sequence, an extend few, packed into tiles with the query heads of a
# KV head, and a prefill as many as fill tiles of one head.
Kind = Literal["decode", "extend", "prefill"]

MAX_KV_BYTES = 20 * 10**9
_FP8 = torch.float8_e4m3fn
_LATENT: dict[str, Any] = {"num_heads": 128, "kv_heads": 1, "key_dim": 576, "value_dim": 512, "latent": True}


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
    def shape(self) -> AttentionShape:
        """What configurations are chosen by."""
        dims = (self.key_dim, self.value_dim)
        return AttentionShape(self.num_heads, self.kv_heads, *dims, self.block_size, self.dtype, self.kv_dtype)

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
    """Decodes at several batch sizes and lengths, ragged, over fp8 and latent; short extends; prefills. At most 20 GB
    of keys and values each."""
    cases = []
    for kv_heads in (4, 8):
        for batch in (1, 8, 64, 256):
            for length in (512, 4096, 32768):
                cases.append(_decode(f"{batch} x {length}", [length] * batch, kv_heads=kv_heads))
        cases.append(_decode("64 ragged", ragged_lengths(64), kv_heads=kv_heads))
        cases.append(_decode("64 x 4096 fp8", [4096] * 64, kv_heads=kv_heads, kv_dtype=_FP8))
        for count in (4, 16):
            cases.append(_extend(f"64 x {count} over 4096", [4096] * 64, [count] * 64, kv_heads=kv_heads))
        cases += _prefills(kv_heads)
    cases.append(_decode("1 x 32768 fp8", [32768], kv_dtype=_FP8))
    cases.append(_decode("256 x 4096 fp8", [4096] * 256, kv_dtype=_FP8))
    cases.append(_decode("64 x 4096 blocks of 16", [4096] * 64, block_size=16))
    cases.append(_decode("64 x 4096 latent", [4096] * 64, **_LATENT))
    cases.append(_decode("64 x 4096 latent fp8", [4096] * 64, **_LATENT, kv_dtype=_FP8))
    cases.append(_extend("64 ragged", ragged_lengths(64), few_tokens(64)))
    cases.append(_extend("64 x 8 over 4096 fp8", [4096] * 64, [8] * 64, kv_dtype=_FP8))
    cases.append(_case("prefill", "1 x 4096 fp8", [4096], [4096], kv_dtype=_FP8))
    return [case for case in cases if case.kv_bytes <= MAX_KV_BYTES]


def ragged_lengths(batch: int, seed: int = 0) -> list[int]:
    """Log-normal lengths between 128 and 32768 with a median of 2048."""
    draw = random.Random(seed)
    return [min(32768, max(128, round(2048 * math.exp(draw.gauss(0, 1.2))))) for _ in range(batch)]


def few_tokens(batch: int, seed: int = 0) -> list[int]:
    """Numbers of new tokens of short extends, 1 to 16, all as likely."""
    draw = random.Random(seed)
    return [draw.randint(1, 16) for _ in range(batch)]


def _decode(name: str, lengths: Sequence[int], **shape: Any) -> AttentionCase:
    return _case("decode", name, lengths, [1] * len(lengths), **shape)


def _extend(name: str, prefixes: Sequence[int], counts: Sequence[int], **shape: Any) -> AttentionCase:
    lengths = [prefix + count for prefix, count in zip(prefixes, counts, strict=True)]
    return _case("extend", name, lengths, counts, **shape)


def _case(kind: Kind, name: str, lengths: Sequence[int], counts: Sequence[int], **shape: Any) -> AttentionCase:
    heads = f"{shape.get('num_heads', 32)}/{shape.get('kv_heads', 4)} heads"
    return AttentionCase(f"{kind} {name}, {heads}", kind, tuple(lengths), tuple(counts), **shape)


def _prefills(kv_heads: int) -> list[AttentionCase]:
    """The last continues a prompt: too many new tokens for an extend."""
    shapes = {
        "1 x 1024": ([1024], [1024]),
        "1 x 4096": ([4096], [4096]),
        "1 x 16384": ([16384], [16384]),
        "8 x 1024": ([1024] * 8, [1024] * 8),
        "512 over 8192": ([8192 + 512], [512]),
    }
    return [_case("prefill", name, *lengths, kv_heads=kv_heads) for name, lengths in shapes.items()]
