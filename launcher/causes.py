"""Tells ends of an engine that no request can have caused: a signal that came from outside, or a stop by one."""

from __future__ import annotations

import signal
from pathlib import Path

# Exit code 0 is that of an orderly end. A request of a faulty program ends it by other signals, or by the kernel's
# SIGKILL when memory runs out.
_FROM_OUTSIDE = {0, *(-number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))}
_VMSTAT = Path("/proc/vmstat")


class MemoryKills:
    """Watches whether the kernel has killed a process for lack of memory, anywhere on this machine, since another
    process was last seen alive."""

    def __init__(self, vmstat: Path = _VMSTAT) -> None:
        self._vmstat = vmstat
        self._before = self._latest = self._count()

    def note_alive(self) -> None:
        """Record that the process lives. A kill that is counted now may still be its end, until it shows life again."""
        self._before, self._latest = self._latest, self._count()

    def may_have_come(self) -> bool:
        """Return whether one may have come since; True where the kernel does not tell."""
        return self._before is None or self._count() != self._before

    def _count(self) -> int | None:
        try:
            counters = dict(line.split(" ", 1) for line in self._vmstat.read_text().splitlines())
            return int(counters["oom_kill"])
        except (OSError, ValueError, KeyError):
            return None


def is_from_outside(code: int | None, *, was_stopped: bool, out_of_memory: bool) -> bool:
    """Return whether no request can have caused an engine's end.

    code: its exit code, or a signal below zero; None if it was killed for being hung. was_stopped: one of its processes
    was stopped by a signal then. out_of_memory: the kernel may have killed it for lack of memory.
    """
    return was_stopped or code in _FROM_OUTSIDE or (code == -signal.SIGKILL and not out_of_memory)
