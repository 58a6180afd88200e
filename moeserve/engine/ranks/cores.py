"""Which cores a rank keeps to."""

from __future__ import annotations

import os
from collections.abc import Sequence

from moeserve.machine import numa_nodes


def own_cores(
    place: int, num_ranks: int, threads: int, usable: Sequence[int], nodes: Sequence[Sequence[int]] = ()
) -> list[int]:
    """Return the cores for the rank at `place` among `num_ranks` ranks of a machine, each with `threads` threads.

    These are all `usable` cores, unless the ranks fill them exactly. With fewer threads the system can move them to
    idle cores, and under a container's quota other services share the cores and would bind to the same ones. Where the
    ranks can be shared equally among NUMA nodes, a rank keeps to a node, whose memory it then gets. nodes: their cores.
    """
    of_nodes = [cores for node in nodes if (cores := sorted(set(node) & set(usable)))]
    if len(of_nodes) > 1 and num_ranks % len(of_nodes) == 0:
        of_node = num_ranks // len(of_nodes)
        return own_cores(place % of_node, of_node, threads, of_nodes[place // of_node])
    if num_ranks * threads != len(usable):
        return list(usable)
    return sorted(usable)[place * threads : (place + 1) * threads]


def bind_to_cores(place: int, num_ranks: int, threads: int) -> list[int]:
    """Bind this thread, and all threads that it starts from now on, to `own_cores`, and return them.

    Ranks exchange rows in every layer, so two ranks that share a core for a moment double the time of a step. Without
    binding the system puts them on one core now and then, because the core of a rank that waits looks idle. Linux gives
    a thread memory of the NUMA node that it runs on.
    """
    cores = own_cores(place, num_ranks, threads, sorted(os.sched_getaffinity(0)), numa_nodes())
    os.sched_setaffinity(0, cores)
    return cores
