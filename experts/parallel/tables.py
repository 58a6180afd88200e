"""A layer's placement as tensors: which slots on which ranks serve which experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experts.placement.placement import Serving


@dataclass(frozen=True, slots=True)
class ReplicaTables:
    """`experts.placement.placement.Serving` as tensors; the last row or column is for expert -1 of a padding row.

    destinations: [R, E + 1] int64, R for expert -1. is_fixed: [R, E + 1] bool. preferences: [E + 1, R] int64, 0 where
    the rank lacks the expert, and the larger the lower the rank. slots: [R, E + 1] int64, the slot of the expert on the
    rank, -1 where no choice leads.
    """

    destinations: Tensor
    is_fixed: Tensor
    preferences: Tensor
    slots: Tensor

    def ranks(self, homes: Tensor, expert_ids: Tensor) -> Tensor:
        """homes [N] int64, ids [N, k] -> ranks [N, k] int64, R for expert -1. Same as `Serving.ranks`."""
        num_ranks = len(self.destinations)
        home = homes[:, None]
        by_default, fixed = self.destinations[home, expert_ids], self.is_fixed[home, expert_ids]
        sent = torch.zeros((len(expert_ids), num_ranks + 1), dtype=torch.int64, device=expert_ids.device)
        sent.scatter_(1, by_default.where(fixed, num_ranks), 1)
        able = self.preferences[expert_ids] * sent[:, None, :num_ranks]
        most, best = able.max(2)
        at_default = able.gather(2, by_default.clamp(max=num_ranks - 1)[..., None])[..., 0] > 0
        return by_default.where(fixed | at_default | (most == 0), best)


@dataclass(frozen=True, slots=True)
class SlotTables:
    """A layer's placement as tables for rank `here`; the first two are [R, E + 1] int64, -1 for "not there".

    to_ranks[r, e]: the slot on rank r that serves expert e for tokens at home here, at its destination.
    from_homes[h, e]: the slot here that serves expert e for tokens at home on rank h, at its destination.
    The last column is all -1, for expert -1 of a padding row. homes: [R, 1], 0 to R - 1. replicas: None if no expert
    has replicas; else destinations may give way to other replicas.
    """

    to_ranks: Tensor
    from_homes: Tensor
    homes: Tensor
    here: int
    replicas: ReplicaTables | None = None

    @classmethod
    def of(
        cls, serving: Serving, experts_of: Sequence[Sequence[int]], here: int, device: torch.device | None = None
    ) -> SlotTables:
        """Make the tables. experts_of[rank][slot]: the expert in a slot."""
        destinations = serving.destinations
        num_ranks = len(destinations)
        slots = np.full(destinations.shape, -1, np.int64)
        for of_rank, experts in zip(slots, experts_of, strict=True):
            of_rank[list(experts)] = np.arange(len(experts))
        nowhere = np.full((num_ranks, 1), -1, np.int64)
        served = destinations[here] == np.arange(num_ranks)[:, None]
        replicas = None
        if serving.has_replicas:
            preferences = serving.holders * np.arange(num_ranks, 0, -1)
            tables = (
                np.hstack((destinations, nowhere + 1 + num_ranks)),
                np.hstack((serving.is_fixed(), nowhere < 0)),
                np.vstack((preferences, np.zeros((1, num_ranks), np.int64))),
                np.hstack((slots, nowhere)),
            )
            replicas = ReplicaTables(*(torch.from_numpy(table).to(device) for table in tables))
        return cls(
            torch.from_numpy(np.hstack((np.where(served, slots, -1), nowhere))).to(device),
            torch.from_numpy(np.hstack((np.where(destinations == here, slots[here], -1), nowhere))).to(device),
            torch.arange(num_ranks, device=device)[:, None],
            here,
            replicas,
        )

    def become(self, other: SlotTables) -> None:
        """Copy the tables of another placement with as many replicas in place, so that captured graphs that read these
        tables follow it."""
        self.to_ranks.copy_(other.to_ranks)
        self.from_homes.copy_(other.from_homes)
        if self.replicas is not None:
            assert other.replicas is not None
            for name in ("destinations", "is_fixed", "preferences", "slots"):
                getattr(self.replicas, name).copy_(getattr(other.replicas, name))

    def slots_on_ranks(self, expert_ids: Tensor) -> Tensor:
        """Ids [T, k] of tokens at home here -> slots [R, T, k]."""
        if self.replicas is None:
            return self.to_ranks[:, expert_ids]
        homes = torch.full((len(expert_ids),), self.here, dtype=torch.int64, device=expert_ids.device)
        served = self.replicas.ranks(homes, expert_ids) == self.homes[..., None]
        return self.replicas.slots[:, expert_ids].where(served, -1)

    def slots_here(self, expert_ids: Tensor) -> Tensor:
        """Ids [R * T, k], T tokens of each home rank in rank order -> slots [R * T, k]."""
        if self.replicas is None:
            of_homes = expert_ids.view(len(self.from_homes), -1)
            return self.from_homes[self.homes, of_homes].view(expert_ids.shape)
        num_homes = len(self.homes)
        homes = self.homes.expand(num_homes, len(expert_ids) // num_homes).reshape(-1)
        served = self.replicas.ranks(homes, expert_ids) == self.here
        return self.replicas.slots[self.here][expert_ids].where(served, -1)
