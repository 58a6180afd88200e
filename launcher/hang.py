"""Decides from heartbeats whether an engine hangs. Pure: the caller brings the clock."""

from __future__ import annotations


class HangDetector:
    """An engine hangs when for `timeout` seconds it was neither heard to be idle nor seen to take a step."""

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._step: int | None = None
        self._progress = now

    def observe(self, now: float, *, step: int, busy: bool) -> None:
        """Takes in one heartbeat."""
        if not busy or step != self._step:
            self._progress = now
        self._step = step

    def restart(self, now: float) -> None:
        """Forgets the silence so far, for a caller that was itself stopped."""
        self._progress = now

    def is_hung(self, now: float) -> bool:
        return now - self._progress > self._timeout
