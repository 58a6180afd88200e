"""Sort (token, expert) pairs by expert without involving the host.

A pair is one choice of one token: pair = token * k + rank of the choice. Pairs are sorted by the slot that holds their
expert's weights, stably, into a compact list; the list is cut into row tiles that each belong to one slot. Grid and
sizes follow from the number of tokens alone, so that a graph can hold the launches; only the device knows the number of
tiles. Absent experts (id -1, or slot -1) have no row in the list.

A program ranks the pairs of its chunk by comparing them with each other, and finds the start of its chunk from
histograms of all chunks: without atomics and sorting, and in the same order every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.moe_config import MAX_PAIRS_AT_ONCE

CHUNK = 256
_TILES_PER_PROGRAM = 64
_CHUNKS_PER_STEP = 32


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """pairs [n] int32 in sorted order. Tile m covers sorted rows first[m] to first[m] + rows[m] of slot[m], -1 for no
    tile; all [max_tiles] int32. num_tiles: int32 scalar tensor."""

    pairs: Tensor
    slot: Tensor
    first: Tensor
    rows: Tensor
    num_tiles: Tensor

    @property
    def max_tiles(self) -> int:
        return self.slot.shape[0]


def sort_pairs(
    expert_ids: Tensor,
    num_slots: int,
    block_m: int,
    into: SortedPairs,
    counts: Tensor,
    expert_slot: Tensor | None = None,
) -> SortedPairs:
    """Fill the tensors of `into` from contiguous expert_ids [T, k] and return `into`.

    num_slots: slots 0..num_slots-1 hold experts. into.slot, first and rows: [max_row_tiles(T * k, num_slots, block_m)].
    counts: int32 scratch of num_chunks(T * k) * padded_bins(num_slots). expert_slot: [E] int32, the slot of each
    expert, -1 for absent ones; None when expert e is in slot e. Ids outside 0..E-1 count as absent. T >= 1.
    """
    num_pairs = expert_ids.numel()
    chunks, bins = num_chunks(num_pairs), padded_bins(num_slots)
    counted = num_pairs > MAX_PAIRS_AT_ONCE
    has_map = expert_slot is not None
    num_experts = num_slots if expert_slot is None else expert_slot.shape[0]
    slots = expert_ids if expert_slot is None else expert_slot
    if counted:
        _count_kernel[(chunks,)](
            expert_ids, slots, counts, num_pairs, NUM_EXPERTS=num_experts, HAS_MAP=has_map, BINS=bins, CHUNK=CHUNK
        )
    _place_kernel[(max(chunks, triton.cdiv(into.max_tiles, _TILES_PER_PROGRAM)),)](
        expert_ids,
        slots,
        counts,
        into.pairs,
        into.slot,
        into.first,
        into.rows,
        into.num_tiles,
        num_pairs,
        chunks,
        into.max_tiles,
        NUM_EXPERTS=num_experts,
        HAS_MAP=has_map,
        COUNTED=counted,
        BLOCK_M=block_m,
        BINS=bins,
        CHUNK=CHUNK,
        TILES=_TILES_PER_PROGRAM,
        STEP=_CHUNKS_PER_STEP,
        num_warps=8,
    )
    return into


def sort_pairs_reference(
    expert_ids: Tensor, num_slots: int, block_m: int, expert_slot: Tensor | None = None
) -> SortedPairs:
    """Do the work of `sort_pairs` in plain torch, into new tensors; entries without meaning are -1 (slots) or 0."""
    flat = expert_ids.flatten()
    slots = flat if expert_slot is None else torch.where(flat < 0, -1, expert_slot[flat.clamp(min=0)].long())
    order = slots.sort(stable=True).indices
    pairs = order[slots[order] >= 0].int()
    counts = torch.bincount(slots[slots >= 0], minlength=num_slots).tolist()
    records, start = [], 0
    for slot, count in enumerate(counts):
        records += [(slot, start + done, min(block_m, count - done)) for done in range(0, count, block_m)]
        start += count
    num_tiles = torch.tensor(len(records), dtype=torch.int32)
    records += [(-1, 0, 0)] * (max_row_tiles(len(flat), num_slots, block_m) - len(records))
    slot_of_tile, first, rows = torch.tensor(records, dtype=torch.int32).unbind(1)
    return SortedPairs(pairs, slot_of_tile, first, rows, num_tiles)


def max_row_tiles(num_pairs: int, num_slots: int, block_m: int) -> int:
    """Return the most tiles that pairs can make: as many slots as possible with one row, the rest in full tiles."""
    occupied = min(num_pairs, num_slots)
    return occupied + (num_pairs - occupied) // block_m


def num_chunks(num_pairs: int) -> int:
    return triton.cdiv(num_pairs, CHUNK)


def padded_bins(num_slots: int) -> int:
    """Return the bins of a histogram over slots: a power of two, at least a warp."""
    return max(32, triton.next_power_of_2(num_slots))


@triton.jit(
    do_not_specialize=["num_pairs", "num_chunks", "max_tiles"], do_not_specialize_on_alignment=["ids", "expert_slot"]
)
def _place_kernel(
    ids,
    expert_slot,
    counts,
    pairs,
    tile_slot,
    tile_first,
    tile_rows,
    num_tiles,
    num_pairs,
    num_chunks,
    max_tiles,
    NUM_EXPERTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
    STEP: tl.constexpr,
):
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    if COUNTED:
        for first in range(0, num_chunks, STEP):
            other = first + tl.arange(0, STEP)[:, None]
            counted = tl.load(counts + other * BINS + bins[None, :], mask=other < num_chunks, other=0)
            total += tl.sum(counted, 0)
            before += tl.sum(tl.where(other < chunk, counted, 0), 0)
    else:
        for other in range(0, num_chunks):
            some = other * CHUNK + tl.arange(0, CHUNK)
            theirs = slot_of(ids, expert_slot, some, some < num_pairs, NUM_EXPERTS, HAS_MAP)
            counted = tl.histogram(theirs, BINS, mask=theirs >= 0)
            total += counted
            before += tl.where(other < chunk, counted, 0)
    start = tl.cumsum(total, 0) - total

    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    slot = slot_of(ids, expert_slot, pair, pair < num_pairs, NUM_EXPERTS, HAS_MAP)
    # Lanes run along the last axis, so a thread sums the first axis alone.
    index = tl.arange(0, CHUNK)
    earlier = (slot[:, None] == slot[None, :]) & (index[:, None] < index[None, :])
    rank = tl.sum(earlier.to(tl.int32), 0)
    position = tl.gather(start + before, tl.maximum(slot, 0), 0) + rank
    tl.store(pairs + position, pair, mask=slot >= 0)

    tiles = (total + BLOCK_M - 1) // BLOCK_M
    tile_end = tl.cumsum(tiles, 0)
    tile = chunk * TILES + tl.arange(0, TILES)
    # The slots that end before a tile are the slots below its own; an empty slot ends where the slot before it ends.
    own = tl.sum((tile_end[:, None] <= tile[None, :]).to(tl.int32), 0)
    is_tile = own < BINS
    own = tl.minimum(own, BINS - 1)
    skipped = (tile - tl.gather(tile_end - tiles, own, 0)) * BLOCK_M
    tl.store(tile_slot + tile, tl.where(is_tile, own, -1), mask=tile < max_tiles)
    tl.store(tile_first + tile, tl.gather(start, own, 0) + skipped, mask=tile < max_tiles)
    tl.store(tile_rows + tile, tl.minimum(tl.gather(total, own, 0) - skipped, BLOCK_M), mask=tile < max_tiles)
    if chunk == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["ids", "expert_slot"])
def _count_kernel(
    ids,
    expert_slot,
    counts,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    slot = slot_of(ids, expert_slot, pair, pair < num_pairs, NUM_EXPERTS, HAS_MAP)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(slot, BINS, mask=slot >= 0))


@triton.jit
def slot_of(ids, expert_slot, pair, mask, NUM_EXPERTS: tl.constexpr, HAS_MAP: tl.constexpr):
    """Return the slot of each pair's expert, -1 where the expert is absent or mask is false."""
    expert = tl.load(ids + pair, mask=mask, other=-1).to(tl.int32)
    known = (expert >= 0) & (expert < NUM_EXPERTS)
    if HAS_MAP:
        return tl.load(expert_slot + expert, mask=known, other=-1).to(tl.int32)
    else:
        return tl.where(known, expert, -1)
