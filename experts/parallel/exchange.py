"""Three ways for rows to reach the ranks that own their experts and to come back, behind the same two functions.

`dispatch` brings every row to the ranks that own some of its chosen experts, `combine` brings their results home. Each
rank sums its experts' weighted results for a row in fp32 before it sends the sum back, rounded to the dtype of
`combine`'s parts if that is narrower; the home rank adds the parts in rank order, in fp32. So all ways give the same
bits. A row's bits depend on no other row, only on the placement and, if experts have replicas, on the row's home rank
and its experts, by which replicas are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

import torch
from torch import Tensor

from experts.parallel.collectives import Collectives
from experts.parallel.tables import SlotTables

# The room of a block of `FixedCapacity`, as a multiple of the rows that it gets if each choice falls on any rank alike.
_SLACK = 1.5


@dataclass(slots=True)
class Arrived:
    """Rows [M, H] of all ranks, in rank order, for this rank's experts to compute.

    slots: [M, k] int64, this rank's expert slots, -1 for experts that other ranks compute. weights: [M, k] fp32.
    num_from[r]: the number of rows that came from rank r. of_home[r]: the indices of this rank's rows that went to rank
    r. Both are empty if all sizes follow from the plan, or from a capacity. rounds: of blocks of a fixed capacity C;
    each is [R, C] int64, the indices of this rank's rows that went to each rank, T for padding. Then the arrived rows
    are in rank order within each round.
    """

    rows: Tensor
    slots: Tensor
    weights: Tensor
    num_from: list[int] = field(default_factory=list)
    of_home: list[Tensor] = field(default_factory=list)
    rounds: list[Tensor] = field(default_factory=list)


class Exchange(Protocol):
    """A shape of dispatch. It counts the rows that it sends to other ranks in `Collectives.traffic`."""

    def dispatch(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, num_rows: Sequence[int], tables: SlotTables
    ) -> Arrived:
        """Send x [T, H], expert_ids [T, k] int64, weights [T, k] fp32. num_rows[r]: the T of rank r, known to all."""

    def combine(self, partial: Tensor, arrived: Arrived, num_rows: Sequence[int]) -> Tensor:
        """partial [M, H] fp32 or narrower, one row per arrived row; rows travel in its dtype -> [T, H] fp32."""


class AllToAll:
    """One row per (token, rank that serves at least one of its experts); the ranks exchange the counts first."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def dispatch(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, num_rows: Sequence[int], tables: SlotTables
    ) -> Arrived:
        me, num_ranks = self._collectives.rank, self._collectives.num_ranks
        slots = tables.slots_on_ranks(expert_ids)
        of_home = [reached.nonzero().flatten() for reached in (slots >= 0).any(2)]
        num_to = [0 if rank == me else len(rows) for rank, rows in enumerate(of_home)]
        ones = [1] * num_ranks
        num_from = self._collectives.all_to_all(torch.tensor(num_to), ones, ones).tolist()
        packed = [
            pack_rows(x[rows], slots[rank][rows], weights[rows]) for rank, rows in enumerate(of_home) if rank != me
        ]
        received = self._collectives.all_to_all(torch.cat(packed), num_to, num_from)
        self._collectives.count_rows(num_to)
        rows, ids, of_rows = unpack_rows(received, x, expert_ids.shape[1])
        mine = of_home[me]
        before = sum(num_from[:me])
        num_from[me] = len(mine)
        return Arrived(
            torch.cat((rows[:before], x[mine], rows[before:])),
            torch.cat((ids[:before], slots[me][mine], ids[before:])),
            torch.cat((of_rows[:before], weights[mine], of_rows[before:])),
            num_from,
            of_home,
        )

    def combine(self, partial: Tensor, arrived: Arrived, num_rows: Sequence[int]) -> Tensor:
        me = self._collectives.rank
        before = sum(arrived.num_from[:me])
        after = before + arrived.num_from[me]
        back = [0 if rank == me else count for rank, count in enumerate(arrived.num_from)]
        num_home = [0 if rank == me else len(rows) for rank, rows in enumerate(arrived.of_home)]
        parts = list(
            self._collectives.all_to_all(torch.cat((partial[:before], partial[after:])), back, num_home).split(num_home)
        )
        parts[me] = partial[before:after]
        out = partial.new_zeros((num_rows[me], partial.shape[1]), dtype=torch.float32)
        for rows, part in zip(arrived.of_home, parts, strict=True):
            out.index_add_(0, rows, part.float())
        return out


class DeviceAllToAll:
    """`AllToAll` for rows on a GPU, with the same bits: the host waits once a layer, for the numbers of rows.

    Rows that stay take part in the exchange, which only copies them, so that all rows arrive in order.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def dispatch(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, num_rows: Sequence[int], tables: SlotTables
    ) -> Arrived:
        slots = tables.slots_on_ranks(expert_ids)
        num_ranks, num_here, top_k = slots.shape
        reached = (slots >= 0).any(2)
        # All (rank, row) pairs, rank by rank; the padding behind them is cut off once the counts are known.
        pairs = reached.flatten().nonzero_static(size=num_ranks * num_here).flatten()
        num_to, num_from = self._exchange_counts(reached.sum(1))
        pairs = pairs[: sum(num_to)]
        rows = pairs % max(1, num_here)
        packed = pack_rows(x[rows], slots.view(-1, top_k)[pairs], weights[rows])
        received = self._collectives.all_to_all(packed, num_to, num_from)
        self._collectives.count_rows(num_to)
        arrived, ids, of_rows = unpack_rows(received, x, top_k)
        return Arrived(arrived, ids, of_rows, num_from, list(rows.split(num_to)))

    def combine(self, partial: Tensor, arrived: Arrived, num_rows: Sequence[int]) -> Tensor:
        num_to = [len(rows) for rows in arrived.of_home]
        parts = self._collectives.all_to_all(partial, arrived.num_from, num_to).split(num_to)
        out = partial.new_zeros((num_rows[self._collectives.rank], partial.shape[1]), dtype=torch.float32)
        for rows, part in zip(arrived.of_home, parts, strict=True):
            # Each rank has a row at most once, so no two additions collide.
            out.index_add_(0, rows, part.float())
        return out

    def _exchange_counts(self, num_to: Tensor) -> tuple[list[int], list[int]]:
        """Return the number of rows that go to each rank, and the number that come from it."""
        ones = [1] * len(num_to)
        num_from = self._collectives.all_to_all(num_to, ones, ones)
        counts = torch.stack((num_to, num_from))
        self._collectives.waits.wait_for_device()
        to_ranks, from_ranks = counts.tolist()
        return to_ranks, from_ranks


class AllGather:
    """Every row goes to every rank, padded to the largest number of rows of a rank: all sizes follow from the plan.

    If all ranks have equally many rows, nothing depends on the step, so a graph can capture it. No expert computes rows
    whose experts are -1.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def dispatch(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, num_rows: Sequence[int], tables: SlotTables
    ) -> Arrived:
        longest = max(num_rows)
        packed = pack_rows(x, expert_ids, weights)
        if len(packed) < longest:
            # With every bit set an expert id is -1, which no rank holds; the rest of such a row is not read.
            packed = torch.cat((packed, packed.new_full((longest - len(packed), packed.shape[1]), 255)))
        self._collectives.count_rows([longest] * self._collectives.num_ranks)
        rows, ids, of_rows = unpack_rows(self._collectives.all_gather(packed), x, expert_ids.shape[1])
        return Arrived(rows, tables.slots_here(ids), of_rows)

    def combine(self, partial: Tensor, arrived: Arrived, num_rows: Sequence[int]) -> Tensor:
        return self._collectives.reduce_scatter(partial)[: num_rows[self._collectives.rank]]


class FixedCapacity:
    """One row per (token, rank that serves at least one of its experts), in blocks whose size follows from the plan.

    For each rank goes a block of `capacity` rows, padded. With it travels the number of rows of its sender's fullest
    block, so that all ranks know how many rounds of blocks it takes: one, unless routing is uneven. No row is dropped.
    DeepSeek's DeepEP has such blocks for decodes, with room for every row.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def dispatch(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, num_rows: Sequence[int], tables: SlotTables
    ) -> Arrived:
        top_k = expert_ids.shape[1]
        capacity = self._capacity(max(num_rows), top_k)
        slots = tables.slots_on_ranks(expert_ids)
        reached = (slots >= 0).any(2)
        fullest = reached.sum(1).max()
        # The number of each row among the rows for a rank.
        number = reached.cumsum(1) - 1
        # A row of padding behind the others, with experts that no rank holds.
        x, weights = (torch.cat((rows, rows.new_zeros((1, rows.shape[1])))) for rows in (x, weights))
        slots = torch.cat((slots, slots.new_full((len(slots), 1, top_k), -1)), 1)
        arrived, num_rounds, rounds = list[Tensor](), 1, list[Tensor]()
        while len(rounds) < num_rounds:
            first = capacity * len(rounds)
            of_rank = _rows_of_blocks(number - first, reached, capacity)
            blocks = pack_rows(x[of_rank.flatten()], _rows_of(slots, of_rank), weights[of_rank.flatten()])
            received = self._exchange(blocks.view(*of_rank.shape, -1), fullest)
            if not rounds:
                self._collectives.waits.wait_for_device()
                num_rounds = max(1, -(-int(received[:, -1, :8].contiguous().view(torch.int64).max()) // capacity))
            arrived.append(received[:, :-1].flatten(0, 1))
            rounds.append(of_rank)
        return Arrived(*unpack_rows(torch.cat(arrived), x, top_k), rounds=rounds)

    def combine(self, partial: Tensor, arrived: Arrived, num_rows: Sequence[int]) -> Tensor:
        num_ranks, capacity = arrived.rounds[0].shape
        sizes = [capacity] * num_ranks
        blocks = [
            self._collectives.all_to_all(part, sizes, sizes).split(capacity)
            for part in partial.split(num_ranks * capacity)
        ]
        # Padding is added up in a row behind the others.
        out = partial.new_zeros((num_rows[self._collectives.rank] + 1, partial.shape[1]), dtype=torch.float32)
        for rank in range(num_ranks):
            for rows, parts in zip(arrived.rounds, blocks, strict=True):
                out.index_add_(0, rows[rank], parts[rank].float())
        return out[:-1]

    def _capacity(self, longest: int, top_k: int) -> int:
        """Return the rows of a block. longest: the most rows of a rank, at least 1."""
        num_ranks = self._collectives.num_ranks
        expected = longest * (1 - (1 - 1 / num_ranks) ** top_k)
        return min(longest, ceil(_SLACK * expected))

    def _exchange(self, blocks: Tensor, fullest: Tensor) -> Tensor:
        """Send blocks [R, C, bytes] uint8, one to each rank, with the number of rows of the fullest.

        Returns [R, C + 1, bytes]: the block of each rank, then a row that begins with its number.
        """
        num_ranks, capacity, num_bytes = blocks.shape
        tail = blocks.new_zeros((num_ranks, 1, num_bytes))
        tail[:, 0, :8] = fullest.view(1).view(torch.uint8)
        ones = [1] * num_ranks
        received = self._collectives.all_to_all(torch.cat((blocks, tail), 1).flatten(1), ones, ones)
        self._collectives.count_rows([capacity] * num_ranks)
        return received.view(num_ranks, capacity + 1, num_bytes)


def _rows_of_blocks(number: Tensor, reached: Tensor, capacity: int) -> Tensor:
    """Return the rows [R, C] of the blocks that begin with number 0, T for padding; no size depends on the numbers.

    number: [R, T] int64, the number of each row among the rows for a rank. reached: [R, T] bool, whether it goes there.
    """
    num_ranks, num_rows = number.shape
    found = number.new_full((num_ranks, capacity + 1), num_rows)
    # Rows of other rounds are written behind the block.
    places = number.where(reached & (number >= 0) & (number < capacity), capacity)
    rows = torch.arange(num_rows, device=number.device).expand(num_ranks, num_rows)
    return found.scatter_(1, places, rows)[:, :capacity]


def _rows_of(slots: Tensor, rows: Tensor) -> Tensor:
    """slots [R, T + 1, k], rows [R, C] -> the slots of each rank's rows, [R * C, k]."""
    return slots.gather(1, rows[..., None].expand(-1, -1, slots.shape[2])).flatten(0, 1)


def pack_rows(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """[T, bytes] uint8: each row with its experts (or slots) and their weights, for one collective."""
    parts = (x.contiguous(), weights.contiguous(), ids.to(torch.int16))
    return torch.cat([part.view(torch.uint8) for part in parts], 1)


def unpack_rows(packed: Tensor, like: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [like.shape[1] * like.element_size(), 4 * top_k, 2 * top_k]
    # `contiguous` would keep the stride of a single row, at an offset that may be no multiple of its element size.
    rows, weights, ids = (part.new_empty(part.shape).copy_(part) for part in packed.split(sizes, 1))
    return rows.view(like.dtype), ids.view(torch.int16).long(), weights.view(torch.float32)
