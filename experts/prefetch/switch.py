"""Whether prefetching pays: it is switched off where it saves no more stall than it costs, and tried again. Pure.

Prefetches move no fewer bytes, they hide waiting. A predictor that lowers misses and takes longer than it saves makes a
service slower, so the switch looks at measured seconds alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwitchRules:
    """memory: steps over which saving and cost are averaged. trial: steps before a judgement. first_pause,
    longest_pause: steps of rest after it was negative; each negative trial doubles the pause."""

    memory: int = 64
    trial: int = 32
    first_pause: int = 256
    longest_pause: int = 8192


class PrefetchSwitch:
    """Asked before each step whether to predict at all; told after it what that saved and cost."""

    __slots__ = ("_mean", "_pause", "_resting", "_rules", "_tried")

    def __init__(self, rules: SwitchRules = SwitchRules()) -> None:
        self._rules = rules
        self._mean = 0.0
        self._tried = 0
        self._pause = rules.first_pause
        self._resting = 0

    @property
    def on(self) -> bool:
        return self._resting == 0

    @property
    def net_seconds(self) -> float:
        """Mean of saving less cost of the latest steps that prefetched, per step."""
        return self._mean

    def step_done(self, stall_saved: float, cost: float) -> None:
        """A step ended; while off, the figures are not looked at.

        stall_saved: seconds that useful prefetches would have been waited for. cost: seconds of prediction, and of
        waiting that prefetches caused: for experts they evicted and for the link they held.
        """
        if not self.on:
            self._resting -= 1
            return
        self._tried += 1
        self._mean += (stall_saved - cost - self._mean) / min(self._tried, self._rules.memory)
        if self._tried < self._rules.trial:
            return
        if self._mean > 0:
            self._pause = self._rules.first_pause
            return
        self._resting = self._pause
        self._pause = min(2 * self._pause, self._rules.longest_pause)
        self._tried = 0
        self._mean = 0.0


def stall_saved(num_useful: int, late_waits: float, num_late: int, load_seconds: float) -> float:
    """Seconds that would have been waited without prefetches, had each of these experts been loaded on demand.

    num_useful: experts that a prefetch had ready in time. num_late: those that were still on their way, waited for
    `late_waits` seconds in all. load_seconds: an undisturbed load, as measured.
    """
    return num_useful * load_seconds + max(num_late * load_seconds - late_waits, 0.0)
