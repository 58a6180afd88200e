"""A layer's placement as the tables that dispatch looks experts up in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotTables:
    """What rank `here` has to know of a layer's placement; the first two [R, E + 1] int64, -1 for "not there".

    to_ranks[r, e]: the slot on rank r that serves expert e for tokens at home here.
    from_homes[h, e]: the slot here that serves expert e for tokens at home on rank h.
    The last column is -1 throughout: expert -1 of a row that is padding finds it. homes: [R, 1], 0 to R - 1.
    """

    to_ranks: Tensor
    from_homes: Tensor
    homes: Tensor

    @classmethod
    def of(
        cls,
        destinations: NDArray[np.int64],
        experts_of: Sequence[Sequence[int]],
        here: int,
        device: torch.device | None = None,
    ) -> SlotTables:
        """destinations: as `Placement.destinations`. experts_of[rank][slot]: the expert in a rank's slot."""
        num_ranks = len(destinations)
        slots = np.full(destinations.shape, -1, np.int64)
        for of_rank, experts in zip(slots, experts_of, strict=True):
            of_rank[list(experts)] = np.arange(len(experts))
        nowhere = np.full((num_ranks, 1), -1, np.int64)
        served = destinations[here] == np.arange(num_ranks)[:, None]
        return cls(
            torch.from_numpy(np.hstack((np.where(served, slots, -1), nowhere))).to(device),
            torch.from_numpy(np.hstack((np.where(destinations == here, slots[here], -1), nowhere))).to(device),
            torch.arange(num_ranks, device=device)[:, None],
        )

    def become(self, other: SlotTables) -> None:
        """Takes over another placement where the tables lie, so that graphs which read them there go by it."""
        self.to_ranks.copy_(other.to_ranks)
        self.from_homes.copy_(other.from_homes)

    def slots_on_ranks(self, expert_ids: Tensor) -> Tensor:
        """Ids [T, k] of tokens at home here -> [R, T, k]."""
        return self.to_ranks[:, expert_ids]

    def slots_here(self, expert_ids: Tensor) -> Tensor:
        """Ids [R * T, k], T tokens of each home in rank order -> [R * T, k]."""
        of_homes = expert_ids.view(len(self.from_homes), -1)
        return self.from_homes[self.homes, of_homes].view(expert_ids.shape)
