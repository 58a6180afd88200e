"""How many connections an HTTP process takes, and how several of one service share them evenly.

All accept from one queue, so that a connection waits for none of them in particular. But who is awake first would take
a whole burst, and its end would cost all of these streams. So each process tells the others how many busy connections
it has, and one that is ahead leaves the next to them for some milliseconds.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from struct import Struct

_ROW = Struct("<dq")  # when the process was last awake, on the system's monotonic clock; its busy connections
_ASLEEP_AFTER_S = 0.5  # seconds; no other process waits for one that has not run for longer
_AHEAD = 2  # connections that a process may have more than another before it leaves the next to that
_PATIENCE_S = 0.02  # how long a connection is left to the others at most: a few turns of a busy core
_PAUSE_S = 0.001
_HURRY_S = 0.05  # how long a process that has waited in vain waits no more
# Descriptors of an HTTP process beside connections: 44 were counted, and some come and go.
_OTHER_FILES = 56
_SPARE_FILES = 76


def allow_connections(most: int) -> int:
    """Raise this process's limit of open files for that many connections, and as many that are refused, as far as the
    system lets it. Return how many there can be."""
    wanted = 2 * most + _OTHER_FILES + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most_files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, hard))
    return connections_within(hard, most)


def connections_within(limit: int, most: int) -> int:
    """Return the number of connections, at most `most`, that a process with this limit of open files can have."""
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, (limit - _OTHER_FILES) // 2))


class Load:
    """The busy connections of each HTTP process: those with a request, and new ones. A file maps them into all."""

    def __init__(self, file: Path, number: int, num_processes: int) -> None:
        """number: of this process, from 0."""
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, num_processes * _ROW.size)
            self._map = mmap.mmap(descriptor, num_processes * _ROW.size)
        finally:
            os.close(descriptor)
        self._number = number
        self._others = [other * _ROW.size for other in range(num_processes) if other != number]
        self.busy = 0
        self.tell()

    def change(self, by: int) -> None:
        """Count a connection that has become busy, or one that is so no more."""
        self.busy += by
        self.tell()

    def tell(self) -> None:
        """Tell the others, and that this process is awake; to be called several times in `_ASLEEP_AFTER_S`."""
        _ROW.pack_into(self._map, self._number * _ROW.size, time.monotonic(), self.busy)

    def is_ahead(self) -> bool:
        """Return whether a process that is awake has clearly fewer."""
        now = time.monotonic()
        rows = (_ROW.unpack_from(self._map, place) for place in self._others)
        return any(now - awake < _ASLEEP_AFTER_S and self.busy - busy >= _AHEAD for awake, busy in rows)


class EvenListener:
    """Accepts connections from a listener that several processes have."""

    def __init__(self, listener: socket.socket, load: Load, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listener = listener
        self._load = load
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waits_since: float | None = None
        self._hurries_until = 0.0
        self._opening: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._listener)
        if self._timer is not None:
            self._timer.cancel()

    def _listen(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept what waits, unless it is another's turn."""
        while not self._leaves_next():
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                # Another was faster, or the client has left.
                return
            except OSError:
                # The system is short of something. The waiting connection would call this again at once.
                break
            finally:
                self._waits_since = None
            self._load.change(+1)
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(_PAUSE_S, self._listen)

    def _leaves_next(self) -> bool:
        now = time.monotonic()
        if now < self._hurries_until or not self._load.is_ahead():
            return False
        if self._waits_since is None:
            self._waits_since = now
        elif now - self._waits_since >= _PATIENCE_S:
            self._hurries_until = now + _HURRY_S
            return False
        return True

    async def _open(self, connection: socket.socket) -> None:
        """Hand a connection to a protocol, which counts it from then on."""
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        finally:
            self._load.change(-1)
