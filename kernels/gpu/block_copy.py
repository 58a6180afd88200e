"""Copies KV blocks between pools: from the device's pool into a dense staging pool, which one transfer then moves to
another tier, back again, or from block to block of one pool. Bits are moved, never converted."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS_PER_PROGRAM = 4096


@triton.jit
def _copy_kernel(
    source,
    target,
    source_ids,
    target_ids,
    source_head: tl.int64,
    source_slot: tl.int64,
    target_head: tl.int64,
    target_slot: tl.int64,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FROM_IDS: tl.constexpr,
    TO_IDS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_DIM)
    source_block = index
    if FROM_IDS:
        source_block = tl.load(source_ids + index).to(tl.int64)
    target_block = index
    if TO_IDS:
        target_block = tl.load(target_ids + index).to(tl.int64)
    exists = (source_block >= 0) & (target_block >= 0)
    mask = ((rows < BLOCK_SIZE) & exists)[:, None] & (columns < DIM)[None, :]
    source_rows = head * source_head + (source_block * BLOCK_SIZE + rows) * source_slot
    target_rows = head * target_head + (target_block * BLOCK_SIZE + rows) * target_slot
    values = tl.load(source + source_rows[:, None] + columns[None, :], mask=mask)
    tl.store(target + target_rows[:, None] + columns[None, :], values, mask=mask)


def copy_blocks(
    source: Tensor,
    target: Tensor,
    source_ids: Tensor | None,
    target_ids: Tensor | None,
    *,
    block_size: int,
    num_blocks: int | None = None,
) -> None:
    """Copies block `source_ids[i]` of `source` to block `target_ids[i]` of `target`, for all i; mutates `target`.

    Pools [KV, num_slots, D] of one dtype, in any layout with contiguous channels; block b has the slots from
    b * block_size on. Ids [n] int32 or int64; None stands for 0, 1, 2, ... (`num_blocks` of them, if both are None); an
    id of -1 skips the pair. No target block may be named twice, nor be a source of another pair.
    """
    heads, _, dim = source.shape
    if source.dtype != target.dtype or target.shape[0] != heads or target.shape[2] != dim:
        raise ValueError(f"pools differ: {tuple(source.shape)} {source.dtype}, {tuple(target.shape)} {target.dtype}")
    ids = source_ids if source_ids is not None else target_ids
    count = num_blocks if ids is None else ids.shape[0]
    if not count:
        return
    block_dim = triton.next_power_of_2(dim)
    rows = max(1, min(triton.next_power_of_2(block_size), _ELEMENTS_PER_PROGRAM // block_dim))
    _copy_kernel[(count, heads, triton.cdiv(block_size, rows))](
        source,
        target,
        source if source_ids is None else source_ids,
        target if target_ids is None else target_ids,
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        BLOCK_SIZE=block_size,
        DIM=dim,
        ROWS=rows,
        BLOCK_DIM=block_dim,
        FROM_IDS=source_ids is not None,
        TO_IDS=target_ids is not None,
        num_warps=4,
    )


def copy_blocks_reference(
    source: Tensor,
    target: Tensor,
    source_ids: Tensor | None,
    target_ids: Tensor | None,
    *,
    block_size: int,
    num_blocks: int | None = None,
) -> None:
    """The same, block by block."""
    ids = source_ids if source_ids is not None else target_ids
    count = num_blocks or 0 if ids is None else ids.shape[0]
    for i in range(count):
        first = i if source_ids is None else int(source_ids[i])
        last = i if target_ids is None else int(target_ids[i])
        if first >= 0 and last >= 0:
            target[:, last * block_size : (last + 1) * block_size] = source[
                :, first * block_size : (first + 1) * block_size
            ]
