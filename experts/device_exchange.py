"""The all-to-all shape where rows are on a GPU: the host waits once a layer, for the numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from experts.collectives import Collectives
from experts.exchange import Arrived, pack_rows, unpack_rows
from experts.slot_tables import SlotTables


class DeviceAllToAll:
    """As `experts.exchange.AllToAll`, with the same bits: one row per (token, rank that serves some of its experts).

    The rows that stay take part in the exchange, which for them is a copy, so that what arrives is in order.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.rows_to = [0] * collectives.num_ranks

    def dispatch(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, num_rows: Sequence[int], tables: SlotTables
    ) -> Arrived:
        slots = tables.slots_on_ranks(expert_ids)
        num_ranks, num_here, top_k = slots.shape
        reached = (slots >= 0).any(2)
        # Of every (rank, row) pair, rank by rank; what is behind the last is cut off when the numbers are known.
        pairs = reached.flatten().nonzero_static(size=num_ranks * num_here).flatten()
        num_to, num_from = self._exchange_counts(reached.sum(1))
        pairs = pairs[: sum(num_to)]
        rows = pairs % max(1, num_here)
        packed = pack_rows(x[rows], slots.view(-1, top_k)[pairs], weights[rows])
        received = self._collectives.all_to_all(packed, num_to, num_from)
        me = self._collectives.rank
        self.rows_to = [
            total + count * (rank != me) for rank, (total, count) in enumerate(zip(self.rows_to, num_to, strict=True))
        ]
        arrived, ids, of_rows = unpack_rows(received, x, top_k)
        return Arrived(arrived, ids, of_rows, num_from, list(rows.split(num_to)))

    def combine(self, partial: Tensor, arrived: Arrived, num_rows: Sequence[int]) -> Tensor:
        num_to = [len(rows) for rows in arrived.of_home]
        parts = self._collectives.all_to_all(partial, arrived.num_from, num_to).split(num_to)
        out = partial.new_zeros((num_rows[self._collectives.rank], partial.shape[1]))
        for rows, part in zip(arrived.of_home, parts, strict=True):
            # A row is there at most once for each rank, so no two additions meet.
            out.index_add_(0, rows, part)
        return out

    def _exchange_counts(self, num_to: Tensor) -> tuple[list[int], list[int]]:
        """How many rows go to each rank, and come from it."""
        ones = [1] * len(num_to)
        num_from = self._collectives.all_to_all(num_to, ones, ones)
        counts = torch.stack((num_to, num_from))
        self._collectives.waits.wait_for_device()
        to_ranks, from_ranks = counts.tolist()
        return to_ranks, from_ranks
