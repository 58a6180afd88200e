"""Configurations of the attention kernels: plain tables, rules for shapes that are not in them, and measured ones.

A bad choice runs out of shared memory, so a configuration is shrunk until its pipeline fits. Measured configurations
lie in files like the experts' (`kernels.gpu.moe_config`): a file holds the tiles of decodes, of short extends and of
long prompts, and the limit of short extends, for one GPU, one shape and one minor version of Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch

from kernels.gpu.moe_config import Platform, TuningError, first_file, read_entries, write_entries

# Shared memory of a thread block at compute capability 9.0, less room for reductions; 8.0 has 163 KiB.
SHARED_MEMORY_BYTES = 200 * 1024
SHARED_MEMORY_PER_SM = 227 * 1024
MIN_ROWS = 16
# Prompts up to this length use smaller tiles.
SHORT_QUERIES = 64
# The tokens of a short extend's tile, if so many rows fit into registers.
EXTEND_TOKENS = 16
MAX_CANDIDATES = 24
# (head size up to, KV bytes per element) -> tile, warps, stages of the split kernel. Not tuned on a GPU yet. Compiled
# for compute capability 9.0 none spills registers in 16 bits. A tile of 64 x 128 keys and values in bf16 has 32 KiB;
# each of three programs per SM has two tiles in flight.
_SPLIT_TABLE = {
    (64, 4): (64, 4, 3),
    (64, 2): (64, 4, 4),
    (64, 1): (64, 4, 5),
    (112, 1): (32, 4, 6),
    (128, 4): (32, 4, 3),
    (128, 2): (64, 4, 3),
    (128, 1): (64, 4, 4),
    (256, 4): (16, 4, 3),
    (256, 2): (32, 4, 3),
    (256, 1): (32, 4, 4),
    (1024, 4): (16, 8, 2),
    (1024, 2): (32, 8, 3),
    (1024, 1): (32, 8, 3),
}
# head size up to -> rows, tile, warps, stages of the prefill kernel for 16-bit queries: rows for the tensor cores.
_PREFILL_TABLE = {
    64: (128, 64, 4, 4),
    128: (128, 64, 8, 3),
    256: (128, 32, 8, 3),
    1024: (32, 32, 8, 2),
}
# The same for fp32, which has no tensor cores at full precision: sizes that fit into registers.
_PREFILL_TABLE_FP32 = {
    64: (32, 16, 4, 2),
    128: (32, 16, 8, 2),
    256: (16, 16, 8, 2),
    1024: (16, 16, 8, 2),
}


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """A configuration of the split kernel: `rows` of one KV head (a power of two >= 16), `tile` positions at a time.

    A chunk is at least `min_chunk` positions. The chunk length is chosen for `programs_per_sm` resident programs.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    min_chunk: int = 128
    programs_per_sm: int = 2


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """A configuration of the split kernel for sequences of at most `max_query_len` new tokens (0: for none).

    Rows of a tile are tokens times the query heads of a KV head.
    """

    split: SplitConfig
    max_query_len: int

    def tokens_per_tile(self, heads_per_kv: int) -> int:
        """Return the tokens whose heads fit the rows; 1 if even one token's heads need several programs."""
        return max(1, self.split.rows // heads_per_kv)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """A configuration of the prefill kernel: `rows` tokens of one head (a power of two >= 16), `tile` keys per step."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


AnyConfig = SplitConfig | ExtendConfig | PrefillConfig
Config = TypeVar("Config", SplitConfig, PrefillConfig)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Numbers of query and KV heads, sizes of a head's keys and values, block size, dtypes of queries and pools."""

    num_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def group(self) -> int:
        """The number of query heads of a KV head."""
        return self.num_heads // self.kv_heads

    def name(self) -> str:
        """Return the shape's name in tuned files."""
        dtypes = "-".join(str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.kv_dtype))
        heads = f"h{self.num_heads}-kv{self.kv_heads}-k{self.key_dim}-v{self.value_dim}"
        return f"attention-{heads}-b{self.block_size}-{dtypes}"

    def split(self) -> SplitConfig:
        """Return the table's configuration for sequences with one new token."""
        return split_config(self.key_dim, self.value_dim, self.group, self.block_size, self.dtype, self.kv_dtype)

    def extend(self) -> ExtendConfig:
        """Return the table's configuration for sequences with few new tokens, with the limit of these tokens."""
        return extend_config(self.key_dim, self.value_dim, self.group, self.block_size, self.dtype, self.kv_dtype)

    def prefill(self, max_query_len: int) -> PrefillConfig:
        """Return the table's configuration for sequences of up to `max_query_len` new tokens."""
        return prefill_config(self.key_dim, self.value_dim, self.block_size, self.dtype, self.kv_dtype, max_query_len)

    def fits(self, config: SplitConfig | PrefillConfig) -> bool:
        """Return True if a configuration fits shared memory and its sizes are powers of two from 16 on."""
        sizes = (config.rows, config.tile)
        if any(size < 16 or size != power_of_two(size) for size in sizes) or config.num_warps not in (1, 2, 4, 8):
            return False
        needed = shared_memory(config, self.key_dim, self.value_dim, self.dtype, self.kv_dtype)
        return needed <= SHARED_MEMORY_BYTES


class AttentionConfigs:
    """Chooses configurations of one shape: measured ones if there are any, else the table's."""

    def __init__(self, shape: AttentionShape, tuned: dict[str, AnyConfig] | None = None) -> None:
        """tuned: measured configurations by "decode", "extend" and "prefill"; any may be missing."""
        self.shape = shape
        self._tuned = tuned or {}

    @staticmethod
    def find(shape: AttentionShape, platform: Platform, folders: Sequence[Path]) -> AttentionConfigs:
        """Read the first file that fits, and log its name."""
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
        """Return the configuration; only prompts beyond `SHORT_QUERIES` tokens have measured ones."""
        tuned = self._tuned.get("prefill")
        if isinstance(tuned, PrefillConfig) and max_query_len > SHORT_QUERIES:
            return tuned
        return self.shape.prefill(max_query_len)


def split_config(
    key_dim: int,
    value_dim: int,
    heads_per_kv: int,
    block_size: int,
    query_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    tokens_per_tile: int = 1,
) -> SplitConfig:
    """Return the table's configuration for `tokens_per_tile` tokens of `heads_per_kv` heads that share a KV head."""
    size = max(key_dim, value_dim)
    tile, num_warps, num_stages = next(
        entry for (limit, width), entry in _SPLIT_TABLE.items() if size <= limit and kv_dtype.itemsize == width
    )
    # More rows of large heads, or of fp32, no longer fit into registers.
    in_registers = {2: 64 if size <= 256 else 32, 4: 32 if size <= 64 else MIN_ROWS}[query_dtype.itemsize]
    rows = min(in_registers, max(MIN_ROWS, power_of_two(heads_per_kv * tokens_per_tile)))
    if rows > 32 or (rows > MIN_ROWS and query_dtype.itemsize == 4):
        num_warps = 8
    # One look-up per tile if blocks are large enough.
    if block_size >= 32:
        tile = min(tile, block_size)
    config = fitting(SplitConfig(rows, tile, num_warps, num_stages), key_dim, value_dim, query_dtype, kv_dtype)
    resident = SHARED_MEMORY_PER_SM // shared_memory(config, key_dim, value_dim, query_dtype, kv_dtype)
    return replace(config, programs_per_sm=max(1, min(resident, 12 // num_warps)))


def prefill_config(
    key_dim: int,
    value_dim: int,
    block_size: int,
    query_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    max_query_len: int,
) -> PrefillConfig:
    """Return the table's configuration for sequences of up to `max_query_len` new tokens."""
    size = max(key_dim, value_dim)
    table = _PREFILL_TABLE if query_dtype.itemsize == 2 else _PREFILL_TABLE_FP32
    rows, tile, num_warps, num_stages = next(entry for limit, entry in table.items() if size <= limit)
    if max_query_len <= SHORT_QUERIES < rows:
        rows, num_warps = SHORT_QUERIES, 4
    if block_size >= 32:
        tile = min(tile, block_size)
    return fitting(PrefillConfig(rows, tile, num_warps, num_stages), key_dim, value_dim, query_dtype, kv_dtype)


def extend_config(
    key_dim: int,
    value_dim: int,
    heads_per_kv: int,
    block_size: int,
    query_dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> ExtendConfig:
    """Return the table's configuration. Its limit is the new tokens that take half the rows that a prefill would take.

    A prefill of few tokens computes a whole tile per query head, most of it padding, and reads keys and values once per
    head. Packed, the heads of a KV head share tiles, and contexts are also split. The limit is at a half because the
    split kernel masks every tile and needs a second kernel: an estimate, not measured.
    """
    split = split_config(key_dim, value_dim, heads_per_kv, block_size, query_dtype, kv_dtype, EXTEND_TOKENS)
    prefill = prefill_config(key_dim, value_dim, block_size, query_dtype, kv_dtype, 1)
    packed_rows = split.rows * -(-heads_per_kv // split.rows)
    tiles = heads_per_kv * prefill.rows // (2 * packed_rows)
    config = ExtendConfig(split, 0)
    return replace(config, max_query_len=min(tiles * config.tokens_per_tile(heads_per_kv), prefill.rows))


def fitting(config: Config, key_dim: int, value_dim: int, query_dtype: torch.dtype, kv_dtype: torch.dtype) -> Config:
    """Reduce the stages, then the tile, until queries and pipeline fit into shared memory."""
    while shared_memory(config, key_dim, value_dim, query_dtype, kv_dtype) > SHARED_MEMORY_BYTES:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.tile > 16:
            config = replace(config, tile=config.tile // 2)
        elif config.rows > MIN_ROWS:
            config = replace(config, rows=config.rows // 2)
        else:
            break
    return config


def shared_memory(
    config: SplitConfig | PrefillConfig, key_dim: int, value_dim: int, query_dtype: torch.dtype, kv_dtype: torch.dtype
) -> int:
    """Return the bytes of queries, weights, and keys and values in flight, as Triton 3.6 and 3.9 lay them out.

    From 64 rows on the tensor cores read asynchronously, and one more tile is held.
    """
    blocks = head_blocks(key_dim, value_dim)
    width = blocks.key + blocks.tail
    tiles = config.num_stages if config.rows >= 64 else config.num_stages - 1
    in_flight = tiles * config.tile * (width + blocks.value) * kv_dtype.itemsize
    return in_flight + config.rows * (width + config.tile) * query_dtype.itemsize


@dataclass(frozen=True, slots=True)
class HeadBlocks:
    """The cut of a head's elements: keys into `key` + `tail` (0: none), values into `value`. Powers of two."""

    key: int
    tail: int
    value: int


def head_blocks(key_dim: int, value_dim: int) -> HeadBlocks:
    """Return the cut with the fewest padded elements in at most two parts, each at least 16 as tl.dot demands."""
    whole = max(16, power_of_two(key_dim))
    key, tail = whole, 0
    if key_dim < whole:
        first = whole // 2
        rest = max(16, power_of_two(key_dim - first)) if key_dim > first else 0
        if first >= 16 and first + rest < whole:
            key, tail = first, rest
    return HeadBlocks(key, tail, max(16, power_of_two(value_dim)))


def power_of_two(number: int) -> int:
    """Return the least power of two that is at least `number` >= 1."""
    return 1 << (number - 1).bit_length()


def split_candidates(shape: AttentionShape) -> list[SplitConfig]:
    """Return at most `MAX_CANDIDATES` configurations worth timing for decodes, the table's first."""
    own = shape.split()
    others = [
        replace(own, tile=tile, num_warps=num_warps, num_stages=num_stages)
        for tile, num_stages, num_warps in product((64, 32, 128), (2, 3, 4), (4, 8))
        if tile <= max(shape.block_size, 64)
    ]
    others += [replace(own, programs_per_sm=programs) for programs in (1, 2, 3, 4)]
    return [own, *(config for config in others if config != own and shape.fits(config))][:MAX_CANDIDATES]


def extend_candidates(shape: AttentionShape) -> list[ExtendConfig]:
    """Return at most `MAX_CANDIDATES` configurations for short extends; none if the table has none for them."""
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
    """Return at most `MAX_CANDIDATES` configurations for long prompts."""
    own = shape.prefill(SHORT_QUERIES + 1)
    others = [
        PrefillConfig(rows, tile, num_warps, num_stages)
        for rows, tile, num_stages, num_warps in product((128, 64, 32), (64, 32, 128), (2, 3, 4), (4, 8))
    ]
    return [own, *(config for config in others if config != own and shape.fits(config))][:MAX_CANDIDATES]


def write_attention(
    path: Path, shape: AttentionShape, platform: Platform, found: dict[str, tuple[AnyConfig, float]]
) -> None:
    """Write the fastest configurations and their microseconds. Raises OSError."""
    entries = {name: {"microseconds": round(time, 1), **asdict(config)} for name, (config, time) in found.items()}
    write_entries(path, shape, platform, entries)


def read_attention(path: Path, shape: AttentionShape, platform: Platform) -> dict[str, AnyConfig]:
    """Read a tuned file. Raises TuningError for a broken file, another key, or configurations that cannot run here."""
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
    # Rows of a decode are query heads: with another number some heads would be left out.
    return shape.fits(config) and (isinstance(config, PrefillConfig) or config.rows == shape.split().rows)
