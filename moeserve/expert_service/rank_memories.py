"""The expert memories of all ranks, as rank 0 knows them."""

from __future__ import annotations

from collections.abc import Callable

from experts.memory.residency_control import ResidencyCounters
from experts.memory.stats import ExpertMemoryStats
from moeserve.ranks.messages import RankBeat


class RankMemories:
    """Asks the memory of rank 0 and keeps what the others told last, a fraction of a second ago."""

    def __init__(self, own: Callable[[], ExpertMemoryStats], num_ranks: int, num_layers: int) -> None:
        self._own = own
        # What is true of all before their first step: they begin to count when they have warmed up.
        nothing = ExpertMemoryStats(ResidencyCounters(), 0.0, 0.0, {}, 0, [[] for _ in range(num_layers)])
        self._told = [nothing] * (num_ranks - 1)

    def heed(self, beat: RankBeat) -> None:
        if beat.memory is not None:
            self._told[beat.rank - 1] = beat.memory

    def stats(self) -> list[ExpertMemoryStats]:
        """Of each rank."""
        return [self._own(), *self._told]
