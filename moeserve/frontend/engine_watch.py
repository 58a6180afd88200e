"""Judges from heartbeats whether the engine still makes progress."""

from __future__ import annotations

from moeserve.messages import Heartbeat


class ProgressWatch:
    """Times are seconds of one monotonic clock, given by the caller.

    An engine is hung when it is busy and its step does not change, or when no heartbeat comes at all, for `timeout`.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._last_beat = now
        self._last_progress = now
        self._step: int | None = None
        self._last_check = now

    def observe(self, heartbeat: Heartbeat, now: float) -> None:
        """Notes a heartbeat."""
        self._last_beat = now
        if not heartbeat.busy or heartbeat.step != self._step:
            self._last_progress = now
        self._step = heartbeat.step

    def verdict(self, now: float) -> str | None:
        """Why the engine counts as hung, or None. To be called a few times per timeout.

        If the caller itself was held up since its last check (the machine was suspended, say), the engine gets a new
        chance: the heartbeats of that time may still be unread.
        """
        late = now - self._last_check > self._timeout / 2
        self._last_check = now
        if late:
            self._last_beat = self._last_progress = now
        if now - self._last_beat > self._timeout:
            return f"no heartbeat for {self._timeout:g} s"
        if now - self._last_progress > self._timeout:
            return f"busy without progress for {self._timeout:g} s"
        return None
