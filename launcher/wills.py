"""Executes the last wills of an HTTP process (`moeserve.frontend.wills`) when it dies, by whatever cause."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from array import array
from contextlib import suppress

from moeserve.config import ServeConfig
from moeserve.frontend.wills import HEADER, LEAVE, MAX_PACKET_BYTES, REPLACE, REVOKE

_PACKETS_AT_ONCE = 64  # packets that are read before other events have their turn
# Descriptors of a supervisor beside wills: 26 were counted with two HTTP processes, and a start takes some more.
_OTHER_FILES, _FILES_PER_PROCESS = 40, 4


def allow_wills(config: ServeConfig) -> int:
    """Raise this process's limit of open files so that each connection can have a will, as far as the system lets it.
    Return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OTHER_FILES + config.num_frontends * (_FILES_PER_PROCESS + config.max_connections)
    if resource.RLIM_INFINITY in (soft, hard):
        return wanted
    soft = max(soft, min(wanted, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def wills_within(limit: int, config: ServeConfig) -> int:
    """Return the number of wills of each HTTP process that a supervisor with this limit of open files can keep."""
    free = (limit - _OTHER_FILES) // config.num_frontends - _FILES_PER_PROCESS
    return max(0, min(config.max_connections, free))


class WillKeeper:
    """Keeps the wills of one HTTP process: a duplicate of a connection, and the bytes that its client is to get.

    The other end of the pair of sockets is the process's alone, so that this one ends with the process. Wills sent
    before its end are read first. `most`: wills that are kept at once; the duplicates of further ones are closed.
    """

    def __init__(self, most: int) -> None:
        """Make the pair of sockets. `child_end` is for the process, and to be closed here once that has started."""
        own, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        self.child_end = child
        self._socket = own
        self._most = most
        self._wills: dict[int, tuple[int, bytes]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(own, self._read)

    def __len__(self) -> int:
        return len(self._wills)

    def finish(self) -> None:
        """Read the rest of a dead process's pipe and execute its wills. No effect the second time."""
        while self._socket.fileno() >= 0:
            if not self._read():
                self._execute()

    def _read(self) -> bool:
        """Handle some packets; return whether there were any."""
        for count in range(_PACKETS_AT_ONCE):
            try:
                packet, descriptors = _receive(self._socket)
            except BlockingIOError:
                return count > 0
            except OSError:
                packet, descriptors = b"", []
            if not packet:
                self._execute()
                return True
            self._handle(packet, descriptors)
        return True

    def _handle(self, packet: bytes, descriptors: list[int]) -> None:
        operation, number = HEADER.unpack_from(packet)
        content = packet[HEADER.size :]
        if operation == LEAVE and descriptors and len(self._wills) < self._most:
            self._wills[number] = (descriptors.pop(), content)
        elif operation == REPLACE and number in self._wills:
            self._wills[number] = (self._wills[number][0], content)
        elif operation == REVOKE and number in self._wills:
            os.close(self._wills.pop(number)[0])
        for descriptor in descriptors:
            os.close(descriptor)

    def _execute(self) -> None:
        """Write all that is left, as far as connections take it at once, and end them."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for descriptor, content in self._wills.values():
            with socket.socket(fileno=descriptor) as connection, suppress(OSError):
                connection.send(content, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                connection.shutdown(socket.SHUT_WR)
        self._wills.clear()


def _receive(own: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next packet and the descriptors that came with it, which no child inherits."""
    found = array("i")
    packet, ancillary, _, _ = own.recvmsg(MAX_PACKET_BYTES, socket.CMSG_LEN(found.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return packet, list(found)
