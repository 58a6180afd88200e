"""Last wills: the bytes that the supervisor sends a client when the HTTP process with its request dies.

An HTTP process hands a duplicate of a connection's descriptor to the supervisor (`launcher.wills`), with the bytes to
write: a whole response until the answer begins, then the error event that ends a stream. It revokes the will before it
writes the end of the answer itself. Only its death executes a will, so each stream is whole or ends with one error.

A message is one packet: an operation, the will's number, and the bytes; the descriptor comes with the first one.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from struct import Struct

from starlette.types import Scope

LEAVE, REPLACE, REVOKE = 1, 2, 3
HEADER = Struct("<BQ")
MAX_PACKET_BYTES = 16 * 1024
_MAX_WAITING = 65_536  # packets that wait for the supervisor to read


class WillLink:
    """Tells the supervisor of wills, over one end of a pair of sockets. Never waits for it.

    A new will that finds the sockets full is not left; messages that replace or revoke one wait for room.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._waiting: deque[bytes] = deque(maxlen=_MAX_WAITING)
        self._number = 0

    def leave(self, descriptor: int, content: bytes) -> int | None:
        """Leave a will for a connection; return its number, None where it was not taken."""
        self._number += 1
        if self._waiting:
            return None
        try:
            socket.send_fds(self._socket, [HEADER.pack(LEAVE, self._number), content], [descriptor])
        except OSError:
            return None
        return self._number

    def replace(self, number: int, content: bytes) -> None:
        self._tell(HEADER.pack(REPLACE, number) + content)

    def revoke(self, number: int) -> None:
        self._tell(HEADER.pack(REVOKE, number))

    def _tell(self, packet: bytes) -> None:
        if not self._waiting:
            try:
                self._socket.send(packet)
                return
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._socket, self._tell_waiting)
            except OSError:
                # The supervisor is gone, and its duplicates with it.
                return
        self._waiting.append(packet)

    def _tell_waiting(self) -> None:
        with suppress(BlockingIOError):
            while self._waiting:
                with suppress(BrokenPipeError, ConnectionResetError):
                    self._socket.send(self._waiting[0])
                self._waiting.popleft()
            asyncio.get_running_loop().remove_writer(self._socket)


class Connection:
    """One client's connection, for the wills of the requests that it carries, one after the other."""

    def __init__(self, link: WillLink | None, transport: asyncio.Transport) -> None:
        self._link = link
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._number: int | None = None
        self._has_duplicate = False
        self._wrote_at = 0.0

    def leave(self, content: bytes) -> None:
        """Have the client sent these bytes if this process dies."""
        self._wrote_at = self._loop.time()
        if self._link is None or len(content) > MAX_PACKET_BYTES - HEADER.size:
            self.revoke()
        elif self._number is not None:
            self._link.replace(self._number, content)
        else:
            self._number = self._link.leave(self._transport.get_extra_info("socket").fileno(), content)
            self._has_duplicate |= self._number is not None

    def revoke(self) -> None:
        if self._number is not None and self._link is not None:
            self._link.revoke(self._number)
        self._number = None

    def record_write(self) -> None:
        """Revoke the will of a stream whose client does not read: half an event may be on its way, after which the
        error could not be read either. To be called before each write."""
        now = self._loop.time()
        if self._number is not None:
            # A transport writes at the end of a turn of the loop.
            if now > self._wrote_at and self._transport.get_write_buffer_size():
                self.revoke()
            self._wrote_at = now

    def end(self) -> None:
        """End a connection that is about to be closed for both: the supervisor closes its duplicate a little later."""
        self.revoke()
        if self._has_duplicate:
            descriptor = os.dup(self._transport.get_extra_info("socket").fileno())
            with socket.socket(fileno=descriptor) as own, suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class Will:
    """The will of one request. connection: None where there is nobody to leave it to."""

    connection: Connection | None = None
    is_chunked: bool = True

    @classmethod
    def of(cls, scope: Scope) -> Will:
        """Return the will of a request, which says nothing yet."""
        found: Callable[[], Connection] | None = scope.get("extensions", {}).get("moeserve.connection")
        return cls(None if found is None else found(), scope["http_version"] != "1.0")

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Leave a whole response, for as long as no other has begun."""
        if self.connection is not None:
            length = (b"content-length", str(len(body)).encode())
            lines = [b"%b: %b\r\n" % header for header in (*headers, length)]
            start = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
            self.connection.leave(start + b"".join(lines) + b"\r\n" + body)

    def end_stream(self, events: bytes) -> None:
        """Leave the last events of a stream that is about to begin."""
        if self.connection is not None:
            self.connection.leave(b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events) if self.is_chunked else events)

    def record_write(self) -> None:
        if self.connection is not None:
            self.connection.record_write()

    def revoke(self) -> None:
        """Leave nothing: this process itself says how the answer ends."""
        if self.connection is not None:
            self.connection.revoke()


NO_WILL = Will()
