"""Paged attention by torch's flash attention, once per tile and segment.

Query heads of a KV head are folded into the query length. Where a context has segments, the parts are put together by
their log-sum-exp, in the order of the context (as split-KV decoding does; Dao et al., 2023). Where the blocks of a tile
or segment are one run, keys and values are read in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.attention_tiles import ROW_MULTIPLE, AttentionTiles, Segment, SegmentRows, Tile, padded

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
    reader = _Reader(keys_pool, values_pool, tiling.block_size)
    if sinks is None and (window is not None or not tiling.segments):
        out = _attend_tiles(folded, reader, tiling, group, window, scale)
    else:
        out = _attend_parts(folded, reader, tiling, group, window, scale, sinks)
    return out.view(kv_heads, num_rows, group, -1).transpose(0, 1).reshape(num_rows, num_heads, -1)


def _attend_tiles(
    folded: Tensor, reader: _Reader, tiling: AttentionTiles, group: int, window: int | None, scale: float
) -> Tensor:
    """[KV, rows, D] where tiles see all there is to see."""
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
    """[KV, rows, D] put together from segments and tiles, the tiles last; parts that a row lacks weigh nothing."""
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
    """Weighs parts [P, KV, R, D] by their log-sum-exps [P, KV, R]; sinks [KV, group] take their share of the weight.

    Through fp64: rounded from there, a weight has the same bits wherever in a tensor it stands.
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
    """Stores the first `rows.count` of values [KV, >= count, ...] into target [KV, R, ...]."""
    if rows.places is None:
        target[:, rows.first : rows.first + rows.count] = values[:, : rows.count]
    else:
        target.index_copy_(1, rows.places, values[:, : rows.count])


class _Reader:
    """Keys and values [1, KV, num_keys, D] of a tile or segment: views for a slot range, else copies."""

    __slots__ = ("_block_size", "_pools", "value_dim")

    def __init__(self, keys_pool: Tensor, values_pool: Tensor, block_size: int) -> None:
        self._pools = (keys_pool.unsqueeze(0), values_pool.unsqueeze(0))
        self._block_size = block_size
        self.value_dim = values_pool.shape[2]

    def __call__(self, part: Tile | Segment) -> tuple[Tensor, Tensor]:
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
