"""The lives of a node's ranks that serve in copies of themselves: one end and one beginning for all of them.

A rank alone cannot go on: the others wait for it in collectives. So when the copy of one rank has ended the copies of
the others end too, and when all have, the supervisor gets one message. Its order for another life goes to every rank.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import suppress

import msgspec

from launcher.processes import Ended, Failed, Forked, Report, decode_status, describe_end

# The time that rank 0 has to say why after the copy of another rank has ended.
_SECONDS_TO_SAY_WHY = 1.0


class RankLives(threading.Thread):
    """Stands between the supervisor and the ranks: passes their reports and its orders on.

    A thread of the process whose children the ranks are, which open its descriptors as `arguments` says.
    """

    def __init__(self, num_ranks: int, orders: int, report: Report) -> None:
        """num_ranks: on this node. orders: the supervisor's pipe, lines. report: to the supervisor."""
        super().__init__(name="rank lives", daemon=True)
        self._num_ranks, self._supervisor, self._report = num_ranks, orders, report
        self._reports, self._reporting = os.pipe()
        self._orders = [os.pipe() for _ in range(num_ranks)]
        self._copies: dict[int, int] = {}
        self._ended: list[Ended] = []
        self._kill_at: float | None = None
        self._has_killed = False

    @property
    def arguments(self) -> list[str]:
        """The arguments of `launcher.worker` that name the pipes."""
        return ["--status-fd", str(self._reporting), "--orders-fd", ",".join(str(fd) for fd, _ in self._orders)]

    def run(self) -> None:
        sources = {self._reports: b"", self._supervisor: b""}
        while True:
            left = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            readable = select.select(list(sources), [], [], left)[0]
            for source in readable:
                data = os.read(source, 1 << 16)
                if not data:
                    # The supervisor has ended, and this process is about to.
                    del sources[source]
                    continue
                *lines, sources[source] = (sources[source] + data).split(b"\n")
                for line in lines:
                    if source == self._supervisor:
                        self._begin(line)
                    else:
                        self._on_report(line)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_at = None
                self._kill()

    def _begin(self, order: bytes) -> None:
        """Have every rank begin another life."""
        self._ended.clear()
        self._has_killed = False
        for _, pipe in self._orders:
            os.write(pipe, order + b"\n")

    def _on_report(self, line: bytes) -> None:
        match status := decode_status(line):
            case Forked(rank=rank, pid=pid):
                with suppress(ProcessLookupError):
                    self._copies[rank] = os.pidfd_open(pid)
                self._pass_on(status)
            case Ended():
                self._on_end(status)
            case _:
                self._pass_on(status)

    def _on_end(self, end: Ended) -> None:
        if (pidfd := self._copies.pop(end.rank, None)) is not None:
            os.close(pidfd)
        self._ended.append(end)
        if end.code < 0 and not self._has_killed:
            # It could not say so itself.
            self._pass_on(Failed(f"Rank {end.rank} (process {end.pid}) {describe_end(end.code)}.", end.code))
        if len(self._ended) == self._num_ranks:
            self._kill_at = None
            self._pass_on(self._ended[0])
        elif end.rank == 0:
            self._kill_at = time.monotonic()
        elif self._kill_at is None:
            self._kill_at = time.monotonic() + _SECONDS_TO_SAY_WHY

    def _kill(self) -> None:
        self._has_killed = True
        for pidfd in self._copies.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _pass_on(self, status: msgspec.Struct) -> None:
        self._report(msgspec.to_builtins(status))
