"""Decide from the ticks of HTTP processes when the service falls asleep and when it wakes. Pure: knows no clock."""

from __future__ import annotations

from collections.abc import Iterable

from moeserve.wire import Tick


class Idleness:
    """Knows from ticks since when no HTTP process has had a request, and which processes have clients that wait for
    sleep or for its end.

    Times are seconds of the caller's monotonic clock. `sleep_after`: seconds without a request after which the service
    sleeps by itself; None for never.
    """

    def __init__(self, names: Iterable[str], sleep_after: float | None) -> None:
        self._sleep_after = sleep_after
        self._latest = dict.fromkeys(names, Tick(0))
        self._since = 0.0

    def begin(self, now: float) -> None:
        self._since = now

    def observe(self, name: str, ticks: bytes, now: float) -> None:
        """Record new ticks of an HTTP process, at least one. Mutates `since` if one of them is busy."""
        self._latest[name] = Tick(ticks[-1])
        if any(tick & Tick.BUSY for tick in ticks):
            self._since = now

    def forget(self, name: str) -> None:
        """Record that an HTTP process has ended, and its requests and wishes with it."""
        self._latest[name] = Tick(0)

    def wants_sleep(self, name: str, now: float) -> bool:
        """Return whether no process has a request, and either a client waits for sleep or no request came for long.

        name: the process that has just ticked. Only clients that wait there count: a client of another process may have
        left since that one's last tick, before the last request ended.
        """
        if any(tick & Tick.BUSY for tick in self._latest.values()):
            return False
        is_asked = bool(self._latest[name] & Tick.SLEEP)
        return is_asked or (self._sleep_after is not None and now - self._since >= self._sleep_after)

    def wants_wake(self) -> bool:
        """Return whether a request waits, or a client that has asked for the end of the sleep."""
        return any(tick & Tick.WAKE for tick in self._latest.values())
