"""Whether prefetching pays: it is switched off where it gains no more than it costs, and tried again. Pure.

Prefetches move no fewer bytes, they hide waiting. What a step gained and what it cost is told by the switch's owner,
both in one unit: seconds of waiting (`experts.prefetch.judge`) or experts used (`experts.prefetch.prefix_warmth`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwitchRules:
    """memory: steps over which gain and cost are averaged. trial: steps before a judgement. first_pause,
    longest_pause: steps of rest after it was negative; each negative trial doubles the pause."""

    memory: int = 64
    trial: int = 32
    first_pause: int = 256
    longest_pause: int = 8192


class PrefetchSwitch:
    """Asked before each step whether to predict at all; told after it what that gained and cost."""

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

    def step_done(self, gain: float, cost: float) -> None:
        """A step ended that gained and cost so much, in one unit; while off, the figures are not looked at."""
        if not self.on:
            self._resting -= 1
            return
        self._tried += 1
        self._mean += (gain - cost - self._mean) / min(self._tried, self._rules.memory)
        if self._tried < self._rules.trial:
            return
        if self._mean > 0:
            self._pause = self._rules.first_pause
            return
        self._resting = self._pause
        self._pause = min(2 * self._pause, self._rules.longest_pause)
        self._tried = 0
        self._mean = 0.0
