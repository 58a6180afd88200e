"""The torch body of paged attention: torch's flash attention, once per tile and segment.

Rows are cut into tiles and long contexts into segments, both by absolute position and independently of the rest of the
batch. A tile is the part of a chunk that lies in one block; it sees the keys from the start of its segment to the end
of its block, under a mask. Earlier segments are seen whole and without a mask, and requests that share a prefix read it
together, once. Layers with a sliding window have only tiles. The cut is made once and used by every layer.

Query heads of a KV head are folded into the query length. If a context has segments, the parts are combined by their
log-sum-exp, in the order of the context (as in split-KV decoding; Dao et al., 2023). If the blocks of a tile or segment
are one run, keys and values are read in place. Rows of other dtypes than the queries' are widened after reading.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention_plan import ChunkSpan
from kernels.kv_rows import SCALE_BYTES, unpack_rows

SEGMENT_TOKENS = 512
# Rows are padded to a multiple of this: with fewer rows the matrix library takes another path with other last bits.
ROW_MULTIPLE = 8

_flash: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def torch_attention(
    q: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor,
    tiling: AttentionTiles,
    *,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `kernels.attention.paged_attention`."""
    num_rows, num_heads, key_dim = q.shape
    kv_heads = keys_pool.shape[0]
    group = num_heads // kv_heads
    folded = q.new_empty((1, kv_heads, num_rows * group + ROW_MULTIPLE, key_dim))
    folded[0, :, : num_rows * group].view(kv_heads, num_rows, group, key_dim).copy_(
        q.view(num_rows, kv_heads, group, key_dim).transpose(0, 1)
    )
    folded[:, :, num_rows * group :] = 0
    reader = _Reader(keys_pool, values_pool, tiling.block_size, q.dtype)
    if sinks is None and (window is not None or not tiling.segments):
        out = _attend_tiles(folded, reader, tiling, group, window, scale)
    else:
        out = _attend_parts(folded, reader, tiling, group, window, scale, sinks)
    return out.view(kv_heads, num_rows, group, -1).transpose(0, 1).contiguous().view(num_rows, num_heads, -1)


def _attend_tiles(
    folded: Tensor, reader: _Reader, tiling: AttentionTiles, group: int, window: int | None, scale: float
) -> Tensor:
    """Return [KV, rows, D] where the tiles see every visible key."""
    results = []
    for tile, mask in zip(tiling.tiles(window), tiling.masks(group, window, folded.dtype), strict=True):
        count = tile.num_rows * group
        rows = folded.narrow(2, tile.first_row * group, padded(count))
        keys, values = reader(tile)
        result = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
        results.append(result.narrow(2, 0, count))
    return results[0].contiguous() if len(results) == 1 else torch.cat(results, 2)


def _attend_parts(
    folded: Tensor,
    reader: _Reader,
    tiling: AttentionTiles,
    group: int,
    window: int | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Combine [KV, rows, D] from segments and tiles, the tiles last; parts that a row lacks have weight 0."""
    kv_heads, num_rows = folded.shape[1], tiling.num_rows * group
    segments = tiling.segments if window is None else []
    num_parts = 1 + max((segment.index + 1 for segment in segments), default=0)
    parts = folded.new_zeros((num_parts, kv_heads, num_rows, reader.value_dim))
    logsumexps = torch.full((num_parts, kv_heads, num_rows), -torch.inf)
    for tile, mask in zip(tiling.tiles(window), tiling.masks(group, window, folded.dtype), strict=True):
        first, count = tile.first_row * group, tile.num_rows * group
        keys, values = reader(tile)
        part, logsumexp = _flash(
            folded.narrow(2, first, padded(count)), keys, values, 0.0, False, attn_mask=mask[None, None], scale=scale
        )
        parts[-1, :, first : first + count] = part[0, :, :count]
        logsumexps[-1, :, first : first + count] = logsumexp.view(kv_heads, -1)[:, :count]
    for segment, rows in zip(segments, tiling.segment_rows(group), strict=False):
        keys, values = reader(segment)
        part, logsumexp = _flash(_take_rows(folded, rows), keys, values, 0.0, False, scale=scale)
        _put_rows(parts[segment.index], rows, part[0])
        _put_rows(logsumexps[segment.index], rows, logsumexp.view(kv_heads, -1))
    return _combine(parts, logsumexps, None if sinks is None else sinks.view(kv_heads, group))


def _combine(parts: Tensor, logsumexps: Tensor, sinks: Tensor | None) -> Tensor:
    """Weight parts [P, KV, R, D] by their log-sum-exps [P, KV, R]; sinks [KV, group] take their share of the weight.

    Through fp64: rounded from there, a weight has the same bits at any place in a tensor.
    """
    wide = logsumexps.double()
    total = wide.logsumexp(0)
    weights = (wide - total).exp_()
    if sinks is not None:
        weights.mul_(torch.sigmoid(total - sinks.double().repeat(1, parts.shape[2] // sinks.shape[1])))
    weights = weights.to(parts.dtype)[..., None]
    out = parts[0] * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out.addcmul_(part, weight)
    return out


def _take_rows(folded: Tensor, rows: SegmentRows) -> Tensor:
    if rows.padded_places is None:
        return folded.narrow(2, rows.first, padded(rows.count))
    return folded.index_select(2, rows.padded_places)


def _put_rows(target: Tensor, rows: SegmentRows, values: Tensor) -> None:
    """Store the first `rows.count` of values [KV, >= count, ...] into target [KV, R, ...]."""
    if rows.places is None:
        target[:, rows.first : rows.first + rows.count] = values[:, : rows.count]
    else:
        target.index_copy_(1, rows.places, values[:, : rows.count])


def padded(num_rows: int) -> int:
    """Round `num_rows` up to a multiple of `ROW_MULTIPLE`."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


class _Reader:
    """Keys and values [1, KV, num_keys, D] of a tile or segment: views for a slot range, else copies."""

    __slots__ = ("_block_size", "_dtype", "_pools", "value_dim")

    def __init__(self, keys_pool: Tensor, values_pool: Tensor, block_size: int, dtype: torch.dtype) -> None:
        self._pools = (keys_pool.unsqueeze(0), values_pool.unsqueeze(0))
        self._block_size, self._dtype = block_size, dtype
        self.value_dim = values_pool.shape[2] - (SCALE_BYTES if values_pool.dtype == torch.int8 else 0)

    def __call__(self, part: Tile | Segment) -> tuple[Tensor, Tensor]:
        keys, values = self._read(part)
        wide = unpack_rows(keys, self._dtype)
        return wide, wide if values is keys else unpack_rows(values, self._dtype)

    def _read(self, part: Tile | Segment) -> tuple[Tensor, Tensor]:
        where = part.keys
        keys_pool, values_pool = self._pools
        if isinstance(where, slice):
            return keys_pool.narrow(2, where.start, part.num_keys), values_pool.narrow(2, where.start, part.num_keys)
        keys = self._gather(keys_pool, where, part.num_keys)
        return keys, keys if values_pool is keys_pool else self._gather(values_pool, where, part.num_keys)

    def _gather(self, pool: Tensor, block_ids: Tensor, num_keys: int) -> Tensor:
        _, kv_heads, num_slots, dim = pool.shape
        blocks = pool.view(kv_heads, num_slots // self._block_size, self._block_size * dim)
        return blocks.index_select(1, block_ids).view(1, kv_heads, num_keys, dim)


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
    """A segment's rows with query heads folded in: [first, first + count), or `places` [count] if they lie apart.

    `padded_places` has one place per padded row.
    """

    first: int
    count: int
    places: Tensor | None = None
    padded_places: Tensor | None = None


class AttentionTiles:
    """Tiles of each window length (None: no window) and the segments of layers without a window.

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
        """Return the tiles of layers with this window length, which counts the token itself."""
        tiles = self._tiles.get(window)
        if tiles is None:
            tiles = self._tiles[window] = self._cut(window)
        return tiles

    @property
    def segments(self) -> list[Segment]:
        """The segments that layers without a window see before their tiles."""
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
        """Return one additive mask [padded rows, num_keys] per tile.

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
        """Return the folded rows of every segment."""
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


def _note_segments(
    chunk: ChunkSpan, row: int, length: int, block_size: int, shared: dict[tuple[int, bytes], list[tuple[int, int]]]
) -> None:
    """Add the chunk's rows to every segment that lies before them."""
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
