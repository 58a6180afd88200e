"""What learnt placements save on requests they have not seen. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from experts.placement.affinity_placement import affinity_placement
from experts.placement.coactivation_placement import coactivation_placement
from experts.placement.metrics import balancedness, hops, remote_ranks
from experts.placement.placement import Placement, contiguous, round_robin
from experts.routing.traces import RoutingTrace


@dataclass(frozen=True, slots=True)
class RemoteRanksFigure:
    """Ranks other than its home to which a token is sent, mean over tokens and layers, and how even that makes ranks.

    plain: of contiguous and round-robin the one with fewer remote ranks. The balances are mean over greatest load of
    the ranks, mean over layers.
    """

    num_ranks: int
    plain: float
    learnt: float
    plain_balance: float
    learnt_balance: float

    @property
    def saved(self) -> float:
        """Share saved against the plain placement."""
        return 1 - self.learnt / self.plain


@dataclass(frozen=True, slots=True)
class HopsFigure:
    """Share of layer transitions at which a token's first choice changes its rank (ExFlow's metric), by placement.

    by_load: placed by the same algorithm as if what follows an expert did not depend on it, so that it knows no more
    than which experts are busy. It says nothing of data-parallel attention, where a token returns home after every
    layer.
    """

    num_ranks: int
    round_robin: float
    by_load: float
    affinity: float

    @property
    def saved(self) -> float:
        return 1 - self.affinity / self.round_robin

    @property
    def saved_beyond_load(self) -> float:
        """Share saved by knowing what follows what."""
        return 1 - self.affinity / self.by_load


def remote_ranks_figure(
    learning: RoutingTrace,
    held_out: RoutingTrace,
    num_ranks: int,
    *,
    by_family: bool = False,
    max_load: float | None = 1.1,
) -> RemoteRanksFigure:
    """Of co-activation placement. by_family: requests that begin alike live on the same rank, and that is known when
    experts are placed; otherwise requests are dealt in turn. max_load: see `coactivation_placement`. PlacementError if
    the ranks cannot share the experts equally."""
    homes = learning.family_homes(num_ranks) if by_family else None
    learnt = coactivation_placement(learning.ids, learning.num_experts, num_ranks, homes, max_load=max_load)
    return remote_ranks_of(learnt, held_out, by_family=by_family)


def remote_ranks_of(learnt: Placement, held_out: RoutingTrace, *, by_family: bool = False) -> RemoteRanksFigure:
    """Of any placement."""
    num_ranks = learnt.num_ranks
    homes = held_out.family_homes(num_ranks) if by_family else held_out.homes(num_ranks)
    load = held_out.load()
    sizes = learnt.num_layers, learnt.num_experts, num_ranks
    found = [
        (float(remote_ranks(held_out.ids, homes, placement).mean()), float(balancedness(load, placement).mean()))
        for placement in (contiguous(*sizes), round_robin(*sizes), learnt)
    ]
    plain = min(found[:2])
    return RemoteRanksFigure(num_ranks, plain[0], found[2][0], plain[1], found[2][1])


def hops_figure(learning: RoutingTrace, held_out: RoutingTrace, num_ranks: int) -> HopsFigure:
    """PlacementError if the ranks cannot share the experts equally."""
    transitions = learning.transitions()
    leaving, arriving = transitions.sum(axis=2), transitions.sum(axis=1)
    independent = leaving[:, :, None] * arriving[:, None, :] / leaving.sum(axis=1)[:, None, None]
    placements = (
        round_robin(len(learning.ids), learning.num_experts, num_ranks),
        affinity_placement(independent, num_ranks),
        affinity_placement(transitions, num_ranks),
    )
    first = held_out.ids[:, :, 0]
    return HopsFigure(num_ranks, *(hops(first, placement) for placement in placements))
