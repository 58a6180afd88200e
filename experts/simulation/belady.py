"""The bound of all eviction: who is needed last in a known future leaves first (Belady 1966). For simulations. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from experts.memory.eviction import Worth


class Belady:
    """A policy for one layer whose events are all known."""

    def __init__(self, events: Sequence[Sequence[int]]) -> None:
        """events: the experts of each event to come, in order."""
        self._now = -1
        self._uses: dict[int, list[int]] = {}
        for number, experts in enumerate(events):
            for expert in experts:
                self._uses.setdefault(expert, []).append(number)

    def touch(self, experts: Sequence[int]) -> None:
        self._now += 1

    def worth(self, expert: int) -> Worth:
        uses = self._uses.get(expert, [])
        following = bisect_right(uses, self._now)
        return (-uses[following] if following < len(uses) else -float("inf")), 0.0
