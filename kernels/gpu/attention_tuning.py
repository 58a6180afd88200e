"""Measured configurations of attention, in files as those of the experts (`kernels.gpu.tuning`).

A file holds the tiles of decodes, of short extends and of long prompts, and which extends are short, for one GPU, one
shape and one minor version of Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from kernels.gpu.attention_config import (
    SHARED_MEMORY_BYTES,
    SHORT_QUERIES,
    ExtendConfig,
    PrefillConfig,
    SplitConfig,
    extend_config,
    power_of_two,
    prefill_config,
    shared_memory,
    split_config,
)
from kernels.gpu.tuning import Platform, TuningError, first_file, read_entries, write_entries

MAX_CANDIDATES = 24
AnyConfig = SplitConfig | ExtendConfig | PrefillConfig


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """H query heads over KV heads, sizes of a head's keys and values, block size, dtypes of queries and pools."""

    num_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.kv_heads

    def name(self) -> str:
        """How tuned files call it."""
        dtypes = "-".join(str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.kv_dtype))
        heads = f"h{self.num_heads}-kv{self.kv_heads}-k{self.key_dim}-v{self.value_dim}"
        return f"attention-{heads}-b{self.block_size}-{dtypes}"

    def split(self) -> SplitConfig:
        """Of the table, for sequences with one new token."""
        return split_config(self.key_dim, self.value_dim, self.group, self.block_size, self.dtype, self.kv_dtype)

    def extend(self) -> ExtendConfig:
        """Of the table, for sequences with few new tokens; says how few."""
        return extend_config(self.key_dim, self.value_dim, self.group, self.block_size, self.dtype, self.kv_dtype)

    def prefill(self, max_query_len: int) -> PrefillConfig:
        """Of the table, for sequences of up to `max_query_len` new tokens."""
        return prefill_config(self.key_dim, self.value_dim, self.block_size, self.dtype, self.kv_dtype, max_query_len)

    def fits(self, config: SplitConfig | PrefillConfig) -> bool:
        """Whether shared memory holds it and its sizes are powers of two from 16 on."""
        sizes = (config.rows, config.tile)
        if any(size < 16 or size != power_of_two(size) for size in sizes) or config.num_warps not in (1, 2, 4, 8):
            return False
        needed = shared_memory(config, self.key_dim, self.value_dim, self.dtype, self.kv_dtype)
        return needed <= SHARED_MEMORY_BYTES


class AttentionConfigs:
    """Chooses configurations of one shape: measured ones if there are any, else those of the table."""

    def __init__(self, shape: AttentionShape, tuned: dict[str, AnyConfig] | None = None) -> None:
        """tuned: "decode", "extend" and "prefill", any may be missing."""
        self.shape = shape
        self._tuned = tuned or {}

    @staticmethod
    def find(shape: AttentionShape, platform: Platform, folders: Sequence[Path]) -> AttentionConfigs:
        """Those of the first file that fits, and the log says which."""
        return AttentionConfigs(
            shape, first_file(folders, shape, platform, lambda path: read_attention(path, shape, platform))
        )

    def split(self) -> SplitConfig:
        tuned = self._tuned.get("decode")
        return tuned if isinstance(tuned, SplitConfig) else self.shape.split()

    def extend(self) -> ExtendConfig:
        tuned = self._tuned.get("extend")
        return tuned if isinstance(tuned, ExtendConfig) else self.shape.extend()

    def prefill(self, max_query_len: int) -> PrefillConfig:
        """Only prompts beyond `SHORT_QUERIES` tokens were measured."""
        tuned = self._tuned.get("prefill")
        if isinstance(tuned, PrefillConfig) and max_query_len > SHORT_QUERIES:
            return tuned
        return self.shape.prefill(max_query_len)


def write_attention(
    path: Path, shape: AttentionShape, platform: Platform, found: dict[str, tuple[AnyConfig, float]]
) -> None:
    """Writes the fastest configurations and their microseconds. Raises OSError."""
    entries = {name: {"microseconds": round(time, 1), **asdict(config)} for name, (config, time) in found.items()}
    write_entries(path, shape, platform, entries)


def read_attention(path: Path, shape: AttentionShape, platform: Platform) -> dict[str, AnyConfig]:
    """Raises TuningError for a broken file, one for others, or one whose configurations cannot run here."""
    configs = read_entries(path, shape, platform, _parse)
    if not all(_runs(config, shape) for config in configs.values()):
        raise TuningError(f"{path} has configurations that cannot run here")
    if not configs:
        raise TuningError(f"{path} has no configuration")
    return configs


def _parse(name: str, fields: dict[str, Any]) -> tuple[str, AnyConfig]:
    if name == "extend":
        return name, ExtendConfig(SplitConfig(**fields["split"]), int(fields["max_query_len"]))
    kinds: dict[str, type[SplitConfig] | type[PrefillConfig]] = {"decode": SplitConfig, "prefill": PrefillConfig}
    return name, kinds[name](**fields)


def _runs(config: AnyConfig, shape: AttentionShape) -> bool:
    if isinstance(config, ExtendConfig):
        return shape.fits(config.split) and 0 <= config.max_query_len <= SHORT_QUERIES
    # Rows of a decode are query heads: another number would leave some out.
    return shape.fits(config) and (isinstance(config, PrefillConfig) or config.rows == shape.split().rows)


def split_candidates(shape: AttentionShape) -> list[SplitConfig]:
    """At most `MAX_CANDIDATES` worth timing for decodes, the table's first."""
    own = shape.split()
    others = [
        replace(own, tile=tile, num_warps=num_warps, num_stages=num_stages)
        for tile, num_stages, num_warps in product((64, 32, 128), (2, 3, 4), (4, 8))
        if tile <= max(shape.block_size, 64)
    ]
    others += [replace(own, programs_per_sm=programs) for programs in (1, 2, 3, 4)]
    return [own, *(config for config in others if config != own and shape.fits(config))][:MAX_CANDIDATES]


def extend_candidates(shape: AttentionShape) -> list[ExtendConfig]:
    """The same for short extends; none where the table packs none."""
    own = shape.extend()
    if not own.max_query_len:
        return []
    others = [
        replace(own.split, rows=rows, tile=tile, num_warps=num_warps, num_stages=num_stages)
        for tile, num_stages, num_warps, rows in product(
            (64, 32, 128), (3, 2, 4), (4, 8), (own.split.rows, own.split.rows // 2)
        )
        if tile <= max(shape.block_size, 64)
    ]
    fitting = [own.split, *(split for split in others if split != own.split and shape.fits(split))]
    return [replace(own, split=split) for split in fitting[:MAX_CANDIDATES]]


def prefill_candidates(shape: AttentionShape) -> list[PrefillConfig]:
    """The same for long prompts."""
    own = shape.prefill(SHORT_QUERIES + 1)
    others = [
        PrefillConfig(rows, tile, num_warps, num_stages)
        for rows, tile, num_stages, num_warps in product((128, 64, 32), (64, 32, 128), (2, 3, 4), (4, 8))
    ]
    return [own, *(config for config in others if config != own and shape.fits(config))][:MAX_CANDIDATES]
