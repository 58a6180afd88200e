"""The lives of children: one life, the possible causes of its end, and whether another one follows."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from launcher.processes import Child
from launcher.watches import any_is_stopped


@dataclass(eq=False)
class Life:
    """One life of a child. `serves_since`: on the monotonic clock, None before. `why`: it was ended, or ended itself,
    in a sentence. `starting`: tasks that end when it serves. `tasks`: tasks that end with it. `code`: how the engine,
    or its first rank that ended, did so before it was killed here. `was_killed`, `was_stopped`: it was killed here, and
    was stopped (SIGSTOP) then.

    An engine that `is_copy` of the child, or of one of its ranks (`launcher.copies`), has a life, a `pid`, and once it
    serves `copy`, a pidfd, of its own.
    """

    child: Child
    began: float
    pid: int
    is_copy: bool = False
    copy: int | None = None
    has_ended: bool = False
    serves_since: float | None = None
    why: str | None = None
    code: int | None = None
    was_killed: bool = False
    was_stopped: bool = False
    num_reports: int = 0
    starting: list[asyncio.Task[None]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def serve(self) -> None:
        self.serves_since = time.monotonic()
        for task in self.starting:
            task.cancel()

    def count_report(self) -> None:
        self.num_reports += 1

    def record_end(self, code: int | None) -> None:
        if not self.was_killed and self.code is None:
            self.code = code

    def kill(self) -> None:
        """Kill the engine alone where it is a copy, else the child. No effect on a life that has ended."""
        if not self.has_ended:
            self.was_killed, self.was_stopped = True, self.was_stopped or any_is_stopped(self.child.pid)
        if self.copy is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.copy, signal.SIGKILL)
        elif not self.has_ended:
            self.child.send_signal(signal.SIGKILL)

    def end(self) -> None:
        self.has_ended = True
        for task in (*self.starting, *self.tasks):
            task.cancel()
        if self.copy is not None:
            os.close(self.copy)
            self.copy = None


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

    def record_alive(self) -> None:
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
