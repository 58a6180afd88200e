"""Causal attention of new tokens over paged keys and values.

The CPU body folds the query heads of a KV head into the query length and calls torch's flash attention once per tile.
A tile is the part of a chunk that lies in one block of positions; its keys always end with that block, whatever else is
in the batch. With rows padded to a multiple of eight (below that the matrix library changes its path) a token's result
is then the same bits in any batch and any chunking. Where a request's blocks are one run, keys are read in place.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

_ROW_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """One request's rows of a step: `num_tokens` rows from position `start`; its KV lies in `block_ids`."""

    num_tokens: int
    start: int
    block_ids: array[int]


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


@dataclass(slots=True)
class AttentionPlan:
    """What attention needs of one step; made once, used by every layer. Masks are made on first use per head shape."""

    num_rows: int
    block_size: int
    tiles: dict[int | None, list[Tile]]
    chunks: Sequence[ChunkSpan]
    _masks: dict[tuple[int, int | None], list[Tensor]] = field(default_factory=dict)

    def masks(self, group: int, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """One additive mask [padded rows, num_keys] per tile, for `group` query heads per KV head.

        Row (offset, head) may see a key if it is at most its own position and, with a window, within it. All masks are
        views of one: a tile takes the rows from its offset and the last columns.
        """
        key = (group, window)
        masks = self._masks.get(key)
        if masks is None:
            tiles = self.tiles[window]
            whole = self._whole_mask(group, window, dtype, max((tile.num_keys for tile in tiles), default=0))
            masks = self._masks[key] = [
                whole[tile.offset * group :, whole.shape[1] - tile.num_keys :][: _padded(tile.num_rows * group)]
                for tile in tiles
            ]
        return masks

    def _whole_mask(self, group: int, window: int | None, dtype: torch.dtype, longest: int) -> Tensor:
        offsets = torch.arange(self.block_size).repeat_interleave(group)
        offsets = torch.cat([offsets, offsets.new_full((_ROW_MULTIPLE,), self.block_size - 1)])[:, None]
        position = torch.arange(longest)[None] - (longest - self.block_size)
        hidden = position > offsets
        if window is not None:
            hidden |= position <= offsets - window
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def plan_attention(
    chunks: Sequence[ChunkSpan], block_size: int, windows: Sequence[int | None], device: torch.device | str = "cpu"
) -> AttentionPlan:
    """Tiles of a step whose rows are the chunks one after another. `windows` are the distinct window lengths in use.

    A window length counts the token itself; None sees everything before.
    """
    tiles: dict[int | None, list[Tile]] = {window: [] for window in windows}
    row = 0
    for chunk in chunks:
        end = chunk.start + chunk.num_tokens
        for position in range(chunk.start - chunk.start % block_size, end, block_size):
            first = max(position, chunk.start)
            count = min(position + block_size, end) - first
            last_block = position // block_size
            for window, found in tiles.items():
                first_block = 0 if window is None else max(0, (position - window + 1) // block_size)
                block_ids = chunk.block_ids[first_block : last_block + 1]
                keys = _locate(block_ids, block_size, device)
                num_keys = len(block_ids) * block_size
                found.append(Tile(row, count, first - position, num_keys, keys))
            row += count
    return AttentionPlan(row, block_size, tiles, chunks)


def paged_attention(
    q: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, H, Dk] over the pools [KV, num_slots, D]; returns [T, H, Dv].

    The new tokens' own keys and values are in the pools already. `sinks` [H] are logits of a key without value
    (gpt-oss). Dv equals Dk here: where values are a prefix of the keys the caller passes the keys twice and cuts the
    result.
    """
    num_rows, num_heads, key_dim = q.shape
    kv_heads = keys_pool.shape[0]
    group = num_heads // kv_heads
    folded = torch.empty((1, kv_heads, num_rows * group + _ROW_MULTIPLE, key_dim), dtype=q.dtype)
    folded[0, :, : num_rows * group].view(kv_heads, num_rows, group, key_dim).copy_(
        q.view(num_rows, kv_heads, group, key_dim).transpose(0, 1)
    )
    folded[:, :, num_rows * group :] = 0
    read_keys, read_values = _Reader(keys_pool, plan.block_size), _Reader(values_pool, plan.block_size)
    sink_rows = None if sinks is None else sinks.view(kv_heads, group)
    results = []
    for tile, mask in zip(plan.tiles[window], plan.masks(group, window, q.dtype), strict=True):
        count = tile.num_rows * group
        rows = folded.narrow(2, tile.first_row * group, _padded(count))
        keys, values = read_keys(tile), read_values(tile)
        if sink_rows is None:
            result = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
        else:
            result = _attend_with_sinks(rows, keys, values, mask, scale, sink_rows)
        results.append(result.narrow(2, 0, count))
    out = results[0] if len(results) == 1 else torch.cat(results, 2)
    return out.reshape(kv_heads, num_rows, group, -1).transpose(0, 1).reshape(num_rows, num_heads, -1)


def paged_attention_reference(
    q: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same, one token at a time in fp32."""
    group = q.shape[1] // keys_pool.shape[0]
    rows: list[Tensor] = []
    for chunk in plan.chunks:
        block_ids = torch.tensor(chunk.block_ids.tolist())
        slots = (block_ids[:, None] * plan.block_size + torch.arange(plan.block_size)).flatten()
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            first = 0 if window is None else max(0, position - window + 1)
            seen = slots[first : position + 1]
            keys = keys_pool[:, seen].float().repeat_interleave(group, 0)
            values = values_pool[:, seen].float().repeat_interleave(group, 0)
            scores = torch.einsum("hd,hsd->hs", q[len(rows)].float(), keys) * scale
            if sinks is not None:
                scores = torch.cat([scores, sinks.float()[:, None]], -1)
            weights = scores.softmax(-1)[:, : len(seen)]
            rows.append(torch.einsum("hs,hsd->hd", weights, values).to(q.dtype))
    return torch.stack(rows)


def _attend_with_sinks(rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, sinks: Tensor) -> Tensor:
    flash: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result, logsumexp = flash(rows, keys, values, 0.0, False, attn_mask=mask[None, None], scale=scale)
    repeats = -(-rows.shape[2] // sinks.shape[1])
    sink_of_row = sinks.repeat(1, repeats)[None, :, : rows.shape[2]]
    share = torch.sigmoid(logsumexp.view(sink_of_row.shape) - sink_of_row)
    return result * share[..., None].to(result.dtype)


def _locate(block_ids: array[int], block_size: int, device: torch.device | str) -> slice | Tensor:
    first = block_ids[0]
    count = len(block_ids)
    if block_ids[-1] - first == count - 1 and block_ids == array("i", range(first, first + count)):
        return slice(first * block_size, (first + count) * block_size)
    return torch.tensor(block_ids, dtype=torch.int64, device=device)


class _Reader:
    """[1, KV, num_keys, D] of a tile from a pool [KV, num_slots, D]: a view for a slot range, else a copy."""

    __slots__ = ("_blocks", "_pool", "_shape")

    def __init__(self, pool: Tensor, block_size: int) -> None:
        kv_heads, num_slots, dim = pool.shape
        self._pool = pool.unsqueeze(0)
        self._blocks = pool.view(kv_heads, num_slots // block_size, block_size * dim)
        self._shape = (1, kv_heads, -1, dim)

    def __call__(self, tile: Tile) -> Tensor:
        keys = tile.keys
        if isinstance(keys, slice):
            return self._pool.narrow(2, keys.start, tile.num_keys)
        return self._blocks.index_select(1, keys).view(self._shape)


def _padded(num_rows: int) -> int:
    return -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
