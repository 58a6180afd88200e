"""Which cores a rank keeps to: its own, where the ranks of a machine take all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence


def own_cores(place: int, num_ranks: int, threads: int, usable: Sequence[int]) -> list[int]:
    """The cores of the rank in `place` among the `num_ranks` of a machine, each with so many threads.

    All `usable` ones, unless the ranks fill them exactly. With fewer threads there is room to go elsewhere, and under a
    container's quota these cores are not this service's alone: others would keep to the same ones.
    """
    if num_ranks * threads != len(usable):
        return list(usable)
    return sorted(usable)[place * threads : (place + 1) * threads]


def bind_to_cores(place: int, num_ranks: int, threads: int) -> list[int]:
    """Has this thread, and all that it starts from now on, keep to `own_cores`; returns them.

    Ranks meet in every layer, so that two of them on one core for a moment cost a step twice its time. The system moves
    them there now and then: while one waits, its core looks idle.
    """
    cores = own_cores(place, num_ranks, threads, sorted(os.sched_getaffinity(0)))
    os.sched_setaffinity(0, cores)
    return cores
