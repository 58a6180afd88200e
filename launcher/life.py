"""One life of a child of the supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

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
    starting: list[asyncio.Task[None]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def serve(self) -> None:
        self.serves_since = time.monotonic()
        for task in self.starting:
            task.cancel()

    def note_end(self, code: int | None) -> None:
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
