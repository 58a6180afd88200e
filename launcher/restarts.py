"""Decide whether and when a process that ended is started again. Pure: the policy knows no clock and no process."""

from __future__ import annotations

# A process that has served this number of seconds is sound: its end begins a new count.
SOUND_SECONDS = 60.0
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0


class RestartPolicy:
    """Counts the lives in a row that ended soon, and allows another one at most `max_restarts` times.

    A life that has served is followed at once, so that a crash is a short pause. Lives that end before they serve are
    followed later and later: half a second, then twice as long each time, up to half a minute.
    """

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.num_restarts = 0
        self._num_failed_starts = 0

    def next_delay(self, served: float | None) -> float | None:
        """Return the seconds until the next start, None if there is to be none.

        served: how many seconds the process that ended has served, None if it never did. Mutates the counts.
        """
        if served is not None:
            self._num_failed_starts = 0
            if served >= SOUND_SECONDS:
                self.num_restarts = 0
        if self.num_restarts >= self.max_restarts:
            return None
        self.num_restarts += 1
        if served is not None:
            return 0.0
        self._num_failed_starts += 1
        return min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** (self._num_failed_starts - 1))
