"""Which rank owns which experts."""

from __future__ import annotations

from torch import Tensor


class EqualShares:
    """Experts in order, the same number for each rank. Raises ValueError if that is impossible."""

    def __init__(self, num_experts: int, num_ranks: int) -> None:
        if num_experts % num_ranks:
            raise ValueError(f"{num_experts} experts cannot be shared equally by {num_ranks} ranks")
        self.num_experts = num_experts
        self.num_ranks = num_ranks
        self.per_rank = num_experts // num_ranks

    def owned(self, rank: int) -> range:
        return range(rank * self.per_rank, (rank + 1) * self.per_rank)

    def local_ids(self, expert_ids: Tensor, rank: int) -> Tensor:
        """Numbers among the experts of `rank`; -1 for those of others."""
        local = expert_ids - rank * self.per_rank
        return local.masked_fill_((local < 0) | (local >= self.per_rank), -1)
