"""Find a placement by its name. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from experts.placement.balanced import load_balanced, with_replicas
from experts.placement.coactivation import coactivation_placement
from experts.placement.placement import Placement, PlacementError, contiguous, round_robin
from experts.routing.choices import RoutingStatistics

# The names of placements that need no statistics, and of placements learnt from them.
PLAIN: Final = ("contiguous", "round-robin")
LEARNT: Final = ("balanced", "coactivation")


def choose_placement(
    name: str,
    sizes: Sequence[int],
    *,
    num_redundant: int = 0,
    num_nodes: int = 1,
    num_groups: int = 1,
    statistics: RoutingStatistics | None = None,
) -> Placement:
    """Return the placement `name`, one of PLAIN or LEARNT.

    sizes: layers with experts, experts, ranks. num_redundant: replicas per layer, of the busiest experts.

    num_nodes, num_groups: see `load_balanced`; the other placements ignore them.

    Without statistics all experts count as equally busy. PlacementError if the sizes do not divide, or if the
    statistics are missing, empty or of other sizes.
    """
    num_layers, num_experts, num_ranks = sizes
    if statistics is None:
        if name in LEARNT:
            raise PlacementError(f"A {name} placement is learnt from statistics, and there are none.")
        load = np.ones((num_layers, num_experts), np.float32)
    else:
        load = statistics.load()
        if load.shape != (num_layers, num_experts):
            raise PlacementError(
                f"The statistics are of {load.shape[0]} layers with {load.shape[1]} experts, "
                f"but the model has {num_layers} with {num_experts}."
            )
        if name in LEARNT and not load.any():
            raise PlacementError(f"A {name} placement is learnt from statistics, and these are empty.")
    if name == "balanced":
        return load_balanced(load, num_ranks, num_redundant=num_redundant, num_nodes=num_nodes, num_groups=num_groups)
    if name == "contiguous":
        placement = contiguous(num_layers, num_experts, num_ranks)
    elif name == "round-robin":
        placement = round_robin(num_layers, num_experts, num_ranks)
    else:
        assert statistics is not None
        placement = _learnt(name, statistics, num_ranks)
    return with_replicas(placement, load, num_redundant) if num_redundant else placement


def _learnt(name: str, statistics: RoutingStatistics, num_ranks: int) -> Placement:
    num_experts = statistics.load().shape[1]
    if name == "coactivation":
        return coactivation_placement(statistics.recent(), num_experts, num_ranks)
    raise PlacementError(f"There is no placement {name!r}.")
