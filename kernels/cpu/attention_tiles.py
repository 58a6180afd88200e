"""How the torch body of attention cuts a step: which rows see which keys, made once and used by every layer.

Rows are cut into tiles and long contexts into segments, both by absolute position and never by what else is in the
batch. A tile is the part of a chunk that lies in one block; it sees the keys from the start of its segment to the end
of its block, under a mask. Segments before that are seen whole and without a mask, and requests that share a prefix
read it together, once.
Layers with a sliding window have tiles alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention_plan import ChunkSpan

SEGMENT_TOKENS = 512
# Rows are padded to a multiple of this: below it the matrix library changes its path, and with it the last bits.
ROW_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows [first_row, first_row + num_rows) of the batch, all in one block of positions, and the keys they see.

    `keys` is a slot range read in place, or the block ids [n] (int64) to gather. `offset` is the first row's place in
    its block; the keys end with the last slot of that block.
    """

    first_row: int
    num_rows: int
    offset: int
    num_keys: int
    keys: slice | Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Keys that the rows of `row_ranges` (first, count), of one or more requests, see whole.

    `index` counts segments from the start of the context. `keys` as in `Tile`.
    """

    index: int
    row_ranges: list[tuple[int, int]]
    num_keys: int
    keys: slice | Tensor


@dataclass(frozen=True, slots=True)
class SegmentRows:
    """A segment's rows once query heads are folded in: [first, first + count), or `places` [count] if they lie apart.

    `padded_places` are as many as the padded rows.
    """

    first: int
    count: int
    places: Tensor | None = None
    padded_places: Tensor | None = None


class AttentionTiles:
    """Tiles of each window length (None: everything before is seen) and the segments of layers without a window.

    Tiles, masks and folded rows are made on first use, the latter two per number of query heads per KV head (`group`).
    """

    def __init__(self, chunks: Sequence[ChunkSpan], block_size: int, segment_tokens: int = SEGMENT_TOKENS) -> None:
        self.num_rows = sum(chunk.num_tokens for chunk in chunks)
        self.block_size = block_size
        self._chunks = chunks
        self._segment_blocks = max(1, segment_tokens // block_size)
        self._tiles: dict[int | None, list[Tile]] = {}
        self._segments: list[Segment] | None = None
        self._masks: dict[tuple[int, int | None], list[Tensor]] = {}
        self._segment_rows: dict[int, list[SegmentRows]] = {}

    def tiles(self, window: int | None) -> list[Tile]:
        """The tiles of layers with a window length, which counts the token itself."""
        tiles = self._tiles.get(window)
        if tiles is None:
            tiles = self._tiles[window] = self._cut(window)
        return tiles

    @property
    def segments(self) -> list[Segment]:
        """What layers without a window see before their tiles."""
        if self._segments is None:
            length = self._segment_blocks * self.block_size
            shared: dict[tuple[int, bytes], list[tuple[int, int]]] = {}
            row = 0
            for chunk in self._chunks:
                _note_segments(chunk, row, length, self.block_size, shared)
                row += chunk.num_tokens
            self._segments = [
                Segment(index, row_ranges, length, _locate(array("i", blocks), self.block_size))
                for (index, blocks), row_ranges in shared.items()
            ]
        return self._segments

    def masks(self, group: int, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """One additive mask [padded rows, num_keys] per tile.

        Row (offset, head) may see a key if it is at most its own position and, with a window, within it. All masks are
        views of one: a tile takes the rows from its offset and the last columns.
        """
        key = (group, window)
        masks = self._masks.get(key)
        if masks is None:
            tiles = self.tiles(window)
            whole = self._whole_mask(group, window, dtype, max((tile.num_keys for tile in tiles), default=0))
            masks = self._masks[key] = [
                whole[tile.offset * group :, whole.shape[1] - tile.num_keys :][: padded(tile.num_rows * group)]
                for tile in tiles
            ]
        return masks

    def segment_rows(self, group: int) -> list[SegmentRows]:
        """The folded rows of every segment."""
        rows = self._segment_rows.get(group)
        if rows is None:
            rows = self._segment_rows[group] = [_fold(segment.row_ranges, group) for segment in self.segments]
        return rows

    def _cut(self, window: int | None) -> list[Tile]:
        block_size, segment_blocks = self.block_size, self._segment_blocks
        tiles: list[Tile] = []
        row = 0
        for chunk in self._chunks:
            end = chunk.start + chunk.num_tokens
            for position in range(chunk.start - chunk.start % block_size, end, block_size):
                first = max(position, chunk.start)
                count = min(position + block_size, end) - first
                last_block = position // block_size
                if window is None:
                    first_block = last_block - last_block % segment_blocks
                else:
                    first_block = max(0, (position - window + 1) // block_size)
                block_ids = chunk.block_ids[first_block : last_block + 1]
                num_keys = len(block_ids) * block_size
                tiles.append(Tile(row, count, first - position, num_keys, _locate(block_ids, block_size)))
                row += count
        return tiles

    def _whole_mask(self, group: int, window: int | None, dtype: torch.dtype, longest: int) -> Tensor:
        offsets = torch.arange(self.block_size).repeat_interleave(group)
        offsets = torch.cat([offsets, offsets.new_full((ROW_MULTIPLE,), self.block_size - 1)])[:, None]
        position = torch.arange(longest)[None] - (longest - self.block_size)
        hidden = position > offsets
        if window is not None:
            hidden |= position <= offsets - window
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def padded(num_rows: int) -> int:
    """`num_rows` rounded up to a multiple of `ROW_MULTIPLE`."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _note_segments(
    chunk: ChunkSpan, row: int, length: int, block_size: int, shared: dict[tuple[int, bytes], list[tuple[int, int]]]
) -> None:
    """Adds the chunk's rows to every segment that lies before them."""
    end = chunk.start + chunk.num_tokens
    for index in range((end - 1) // length):
        first = max(chunk.start, (index + 1) * length)
        blocks = chunk.block_ids[index * length // block_size : (index + 1) * length // block_size]
        shared.setdefault((index, blocks.tobytes()), []).append((row + first - chunk.start, end - first))


def _fold(row_ranges: list[tuple[int, int]], group: int) -> SegmentRows:
    count = group * sum(count for _, count in row_ranges)
    if len(row_ranges) == 1:
        return SegmentRows(row_ranges[0][0] * group, count)
    places = torch.cat([torch.arange(first * group, (first + rows) * group) for first, rows in row_ranges])
    return SegmentRows(0, count, places, torch.cat([places, places.new_zeros(padded(count) - count)]))


def _locate(block_ids: array[int], block_size: int) -> slice | Tensor:
    first, count = block_ids[0], len(block_ids)
    if block_ids[-1] - first == count - 1 and block_ids == array("i", range(first, first + count)):
        return slice(first * block_size, (first + count) * block_size)
    return torch.tensor(block_ids, dtype=torch.int64)
