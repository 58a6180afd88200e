"""Configurations of the attention kernels: plain tables, and rules for shapes that are not in them.

A configuration is shrunk until its pipeline fits the device's shared memory. Of the tables the entries for heads of 128
in 16 bits were compared with others on an NVIDIA H200; no other entry was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from kernels.gpu.device import Multiprocessor

# Bytes of shared memory that a multiprocessor takes for each program beside the program's own: so much more than a
# program may have is what a multiprocessor has, from compute capability 8.0 on.
_RESERVED_BYTES = 1024
MIN_ROWS = 16
# Prompts up to this length use tiles of fewer tokens, which fill more multiprocessors: on an H200 four prompts of 1,024
# tokens take 111 us with 64 rows and 134 with 128, one of 16,384 tokens 4.88 and 4.75 ms.
SHORT_QUERIES = 2048
_SHORT_ROWS = 64
# The tokens of a short extend's tile, if their rows fit into registers.
EXTEND_TOKENS = 16
# (head size up to, KV bytes per element) -> tile, warps, stages of the split kernel. Compiled for
# compute capability 9.0 none spills registers in 16 bits. A tile of 64 x 128 keys and values in bf16 has 32 KiB;
# each of two programs per SM has three tiles in flight: 64 sequences of 4,096 positions take 130 us on an H200, 146
# with two tiles in flight.
_SPLIT_TABLE = {
    (64, 4): (64, 4, 3),
    (64, 2): (64, 4, 4),
    (64, 1): (64, 4, 5),
    (112, 1): (32, 4, 6),
    (128, 4): (32, 4, 3),
    (128, 2): (64, 4, 4),
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


Config = TypeVar("Config", SplitConfig, PrefillConfig)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Numbers of query and KV heads, sizes of a head's keys and values, block size, dtypes of queries and pools, and
    the multiprocessor that computes."""

    num_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    multiprocessor: Multiprocessor

    @property
    def group(self) -> int:
        """The number of query heads of a KV head."""
        return self.num_heads // self.kv_heads

    @property
    def _size(self) -> int:
        return max(self.key_dim, self.value_dim)

    def split(self, tokens_per_tile: int = 1) -> SplitConfig:
        """Return the table's configuration for tiles of `tokens_per_tile` tokens. Raise ValueError if none fits."""
        tile, num_warps, num_stages = next(
            entry
            for (limit, width), entry in _SPLIT_TABLE.items()
            if self._size <= limit and self.kv_dtype.itemsize == width
        )
        # More rows of large heads, or of fp32, no longer fit into registers.
        width = self.dtype.itemsize
        in_registers = {2: 64 if self._size <= 256 else 32, 4: 32 if self._size <= 64 else MIN_ROWS}[width]
        rows = min(in_registers, max(MIN_ROWS, power_of_two(self.group * tokens_per_tile)))
        if rows > 32 or (rows > MIN_ROWS and width == 4):
            num_warps = 8
        config = self._fitting(SplitConfig(rows, self._in_block(tile), num_warps, num_stages))
        allowed = self.multiprocessor.shared_bytes
        resident = (allowed + _RESERVED_BYTES) // (self.shared_memory(config) + _RESERVED_BYTES)
        return replace(config, programs_per_sm=max(1, min(resident, 12 // num_warps)))

    def extend(self) -> ExtendConfig:
        """Return the table's configuration for sequences with few new tokens. Raise ValueError if none fits.

        Its limit is the new tokens that take half the rows that a prefill would take. A prefill of few tokens computes
        a whole tile per query head, most of it padding, and reads keys and values once per head. Packed, the heads of a
        KV head share tiles, and contexts are also split. The limit is at a half because the split kernel masks every
        tile and needs a second kernel: an estimate, not measured.
        """
        split, prefill = self.split(EXTEND_TOKENS), self.prefill(1)
        packed_rows = split.rows * -(-self.group // split.rows)
        tiles = self.group * prefill.rows // (2 * packed_rows)
        config = ExtendConfig(split, 0)
        return replace(config, max_query_len=min(tiles * config.tokens_per_tile(self.group), prefill.rows))

    def prefill(self, max_query_len: int) -> PrefillConfig:
        """Return the table's configuration for sequences of up to `max_query_len` new tokens.

        Raise ValueError if none fits.
        """
        table = _PREFILL_TABLE if self.dtype.itemsize == 2 else _PREFILL_TABLE_FP32
        rows, tile, num_warps, num_stages = next(entry for limit, entry in table.items() if self._size <= limit)
        if max_query_len <= SHORT_QUERIES and rows > _SHORT_ROWS:
            rows, num_warps = _SHORT_ROWS, 4 if self._size <= 128 else 8
        if not self.multiprocessor.reads_tiles and rows >= _SHORT_ROWS:
            # Operands take registers too: of more rows, or of large heads in fewer threads, the compiler spills some.
            rows, num_warps = _SHORT_ROWS, 4 if self._size <= 64 else 8
        return self._fitting(PrefillConfig(rows, self._in_block(tile), num_warps, num_stages))

    def _in_block(self, tile: int) -> int:
        """Cut a tile to a block, so that it takes one look-up, where blocks are large enough."""
        return min(tile, self.block_size) if self.block_size >= 32 else tile

    def _fitting(self, config: Config) -> Config:
        """Reduce the stages, then the tile, then the rows, until queries and pipeline fit into shared memory."""
        while self.shared_memory(config) > self.multiprocessor.shared_bytes:
            if config.num_stages > 2:
                config = replace(config, num_stages=config.num_stages - 1)
            elif config.tile > 16:
                config = replace(config, tile=config.tile // 2)
            elif config.rows > MIN_ROWS:
                config = replace(config, rows=config.rows // 2)
            else:
                kind = str(self.dtype).removeprefix("torch.")
                raise ValueError(
                    f"attention with heads of {self.key_dim} elements in {kind} needs {self.shared_memory(config)} "
                    f"bytes of shared memory, and the GPU allows {self.multiprocessor.shared_bytes}"
                )
        return config

    def shared_memory(self, config: SplitConfig | PrefillConfig) -> int:
        """Return the bytes of queries, weights, and keys and values in flight, as Triton 3.6 and 3.9 lay them out.

        Where the tensor cores read tiles themselves, asynchronously, one more tile is held.
        """
        blocks = head_blocks(self.key_dim, self.value_dim)
        width = blocks.key + blocks.tail
        reads_tiles = self.multiprocessor.reads_tiles and config.rows >= 64
        tiles = config.num_stages if reads_tiles else config.num_stages - 1
        in_flight = tiles * config.tile * (width + blocks.value) * self.kv_dtype.itemsize
        return in_flight + config.rows * (width + config.tile) * self.dtype.itemsize


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
