"""What learnt placements save on requests they have not seen. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.affinity_placement import affinity_placement
from experts.placement.coactivation_placement import coactivation_placement
from experts.placement.metrics import hops, remote_ranks
from experts.placement.placement import contiguous, round_robin
from experts.routing.traces import RoutingTrace


@dataclass(frozen=True, slots=True)
class RemoteRanksFigure:
    """Ranks other than its home to which a token is sent, mean over tokens and layers, by placement."""

    num_ranks: int
    contiguous: float
    round_robin: float
    coactivation: float

    @property
    def saved(self) -> float:
        """Share saved against the better of the plain placements."""
        return 1 - self.coactivation / min(self.contiguous, self.round_robin)


@dataclass(frozen=True, slots=True)
class HopsFigure:
    """Share of layer transitions at which a token's first choice changes its rank (ExFlow's metric), by placement.

    It says nothing of data-parallel attention, where a token returns home after every layer.
    """

    num_ranks: int
    round_robin: float
    affinity: float

    @property
    def saved(self) -> float:
        return 1 - self.affinity / self.round_robin


def remote_ranks_figure(
    learning: RoutingTrace, held_out: RoutingTrace, num_ranks: int, *, by_family: bool = False
) -> RemoteRanksFigure:
    """by_family: requests that begin alike live on the same rank, as a scheduler that looks for cached prefixes does
    it; otherwise requests are dealt in turn. PlacementError if the ranks cannot share the experts equally."""

    def homes(trace: RoutingTrace) -> NDArray[np.int64]:
        return trace.family_homes(num_ranks) if by_family else trace.homes(num_ranks)

    sizes = len(learning.ids), learning.num_experts, num_ranks
    learnt = coactivation_placement(
        learning.ids, learning.num_experts, num_ranks, homes(learning) if by_family else None
    )
    found = [
        float(remote_ranks(held_out.ids, homes(held_out), placement).mean())
        for placement in (contiguous(*sizes), round_robin(*sizes), learnt)
    ]
    return RemoteRanksFigure(num_ranks, *found)


def hops_figure(learning: RoutingTrace, held_out: RoutingTrace, num_ranks: int) -> HopsFigure:
    """PlacementError if the ranks cannot share the experts equally."""
    plain = round_robin(len(learning.ids), learning.num_experts, num_ranks)
    learnt = affinity_placement(learning.transitions(), num_ranks)
    first = held_out.ids[:, :, 0]
    return HopsFigure(num_ranks, hops(first, plain), hops(first, learnt))
