"""Tile sizes of the attention kernels: plain tables, rules for shapes that are not in them, and bounds for all.

Shared memory is what a bad choice runs out of, so a configuration is shrunk until its pipeline fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch

# What one thread block may use on an SM of compute capability 9.0, less room for reductions; 8.0 has 163 KiB.
SHARED_MEMORY_BYTES = 200 * 1024
SHARED_MEMORY_PER_SM = 227 * 1024
MIN_ROWS = 16
# Prompts up to here take smaller tiles.
SHORT_QUERIES = 64
# Tokens that a tile of a short extend is made for, where so many rows fit into registers.
EXTEND_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """Of the kernel for few query rows: `rows` of one KV head (a power of two >= 16), `tile` positions at a time.

    A chunk is at least `min_chunk` positions. `programs_per_sm` is how many are expected to be resident at once: the
    chunk length is chosen for that.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    min_chunk: int = 128
    programs_per_sm: int = 2


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """Of the split kernel for sequences with a few new tokens, `max_query_len` at most (0: for none).

    Rows of a tile are tokens times the query heads of a KV head.
    """

    split: SplitConfig
    max_query_len: int

    def tokens_per_tile(self, heads_per_kv: int) -> int:
        """Tokens whose heads fit the rows; 1 where even one token's need several programs."""
        return max(1, self.split.rows // heads_per_kv)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Of the kernel for many query rows: `rows` tokens of one head (a power of two >= 16), `tile` keys at a time."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class HeadBlocks:
    """How a head's elements are cut: keys into `key` + `tail` (0: none), values into `value`. Powers of two."""

    key: int
    tail: int
    value: int


Config = TypeVar("Config", SplitConfig, PrefillConfig)


def power_of_two(number: int) -> int:
    """The least power of two that is at least `number` >= 1."""
    return 1 << (number - 1).bit_length()


def head_blocks(key_dim: int, value_dim: int) -> HeadBlocks:
    """The cut with the fewest padded elements that needs at most two parts, each at least 16 as tl.dot demands."""
    whole = max(16, power_of_two(key_dim))
    key, tail = whole, 0
    if key_dim < whole:
        first = whole // 2
        rest = max(16, power_of_two(key_dim - first)) if key_dim > first else 0
        if first >= 16 and first + rest < whole:
            key, tail = first, rest
    return HeadBlocks(key, tail, max(16, power_of_two(value_dim)))


# (head size up to, KV bytes per element) -> tile, warps, stages of the split kernel. Not tuned on a GPU yet. Compiled
# for compute capability 9.0 none spills registers in 16 bits; 64 x 128 keys and values in bf16 are 32 KiB, of which two
# are in flight for each of three programs per SM.
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
# The same for fp32, which has no tensor cores at full precision: what fits into registers.
_PREFILL_TABLE_FP32 = {
    64: (32, 16, 4, 2),
    128: (32, 16, 8, 2),
    256: (16, 16, 8, 2),
    1024: (16, 16, 8, 2),
}


def split_config(
    key_dim: int,
    value_dim: int,
    heads_per_kv: int,
    block_size: int,
    query_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    tokens_per_tile: int = 1,
) -> SplitConfig:
    """For `tokens_per_tile` tokens of `heads_per_kv` heads that share a KV head."""
    size = max(key_dim, value_dim)
    tile, num_warps, num_stages = next(
        entry for (limit, width), entry in _SPLIT_TABLE.items() if size <= limit and kv_dtype.itemsize == width
    )
    # More rows of large heads, or of fp32, no longer fit into registers.
    in_registers = {2: 64 if size <= 256 else 32, 4: 32 if size <= 64 else MIN_ROWS}[query_dtype.itemsize]
    rows = min(in_registers, max(MIN_ROWS, power_of_two(heads_per_kv * tokens_per_tile)))
    if rows > 32 or (rows > MIN_ROWS and query_dtype.itemsize == 4):
        num_warps = 8
    # One look-up per tile where blocks are large enough.
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
    """For sequences of up to `max_query_len` new tokens."""
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
    """For up to so many new tokens as take at most half the rows that a prefill would compute.

    A prefill of few tokens computes a whole tile per query head, most of it padding, and reads keys and values once per
    head; packed, the heads of a KV head share tiles, and contexts are split besides. A half, since the split kernel
    masks every tile and needs a second kernel: an estimate, not measured.
    """
    split = split_config(key_dim, value_dim, heads_per_kv, block_size, query_dtype, kv_dtype, EXTEND_TOKENS)
    prefill = prefill_config(key_dim, value_dim, block_size, query_dtype, kv_dtype, 1)
    packed_rows = split.rows * -(-heads_per_kv // split.rows)
    tiles = heads_per_kv * prefill.rows // (2 * packed_rows)
    config = ExtendConfig(split, 0)
    return replace(config, max_query_len=min(tiles * config.tokens_per_tile(heads_per_kv), prefill.rows))


def fitting(config: Config, key_dim: int, value_dim: int, query_dtype: torch.dtype, kv_dtype: torch.dtype) -> Config:
    """The configuration with stages, then tile, cut down until queries and pipeline fit into shared memory."""
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
    """Bytes of the queries, the weights and the keys and values in flight, as Triton 3.6 and 3.9 lay them out.

    From 64 rows on the tensor cores read asynchronously and one more tile is held.
    """
    blocks = head_blocks(key_dim, value_dim)
    width = blocks.key + blocks.tail
    tiles = config.num_stages if config.rows >= 64 else config.num_stages - 1
    in_flight = tiles * config.tile * (width + blocks.value) * kv_dtype.itemsize
    return in_flight + config.rows * (width + config.tile) * query_dtype.itemsize
