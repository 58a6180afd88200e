"""The thread that hands blocks of KV to other services, from the memory that the engine computes in."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from typing import Any

import structlog
import zmq

from moeserve.config import ConfigError
from moeserve.engine.kv_disk.copier import BlockBuffer, BlockMemory
from moeserve.engine.kv_transfer.answers import Answers, Offered
from moeserve.engine.kv_transfer.messages import FREE, GET, MAX_REQUEST_BYTES, MOST_WAITING, read_number
from moeserve.engine.ranks.meeting import RankKeys

_LOOK_MS = 10  # between two looks for computed layers of awaited blocks

log = structlog.get_logger(__name__)


class BlockServer(threading.Thread):
    """Answers requests for the blocks of tickets, on a ROUTER socket."""

    def __init__(self, sockets: zmq.Context[Any], keys: RankKeys, address: str, memory: BlockMemory) -> None:
        """Bind `address`; port `*` takes a free one. Raise ConfigError if it cannot be had."""
        super().__init__(name="kv-server", daemon=True)
        self._memory = memory
        self._offered: Offered | None = None
        self._stopped = threading.Event()
        self._fetched: deque[tuple[str, bool]] = deque()
        self._socket = sockets.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, MOST_WAITING)
        keys.secure_server(self._socket)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"--kv-transfer-config: cannot listen on {address}: {error.strerror}.") from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def serve(self, offered: Offered) -> None:
        """Begin to answer."""
        self._offered = offered
        self.start()

    def look_again(self) -> None:
        """Look at awaited blocks again: more of them are computed, or never will be. Any thread may call it."""
        os.eventfd_write(self._news, 1)

    def take_fetched(self) -> list[tuple[str, bool]]:
        """Return the tickets whose blocks were fetched since the last call, and whether for the last time."""
        taken = []
        while self._fetched:
            taken.append(self._fetched.popleft())
        return taken

    def run(self) -> None:
        assert self._offered is not None
        answers = Answers(self._socket, self._offered, BlockBuffer(self._memory))
        poller = zmq.Poller()
        poller.register(self._news, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while not self._stopped.is_set():
            for source, _ in poller.poll(_LOOK_MS if answers.has_waiting else None):
                if source == self._news:
                    os.eventfd_read(self._news)
                else:
                    with suppress(zmq.Again):  # A service may be gone since the poll, and its message with it.
                        self._take(self._socket.recv_multipart(zmq.NOBLOCK), answers)
            if answers.has_waiting:
                answers.send()
        self._socket.close()

    def stop(self) -> None:
        """Close the socket and end the thread."""
        self._stopped.set()
        os.eventfd_write(self._news, 1)
        if self.is_alive():
            self.join()
        os.close(self._news)

    def _take(self, frames: list[bytes], answers: Answers) -> None:
        match frames:
            case [_, b"", kind, ticket] if kind == FREE:
                self._fetched.append((_text(ticket), True))
            case [asker, b"", kind, ticket, *numbers] if kind == GET and _are_numbers(numbers):
                self._fetched.append((_text(ticket), False))
                answers.take(asker, ticket, *map(read_number, numbers))
            case _:
                log.warning("kv_transfer_odd_request", frames=len(frames))


def _are_numbers(frames: list[bytes]) -> bool:
    """Return whether these are the number of a block and a count."""
    return len(frames) == 2 and all(read_number(frame) >= 0 for frame in frames)


def _text(ticket: bytes) -> str:
    return ticket.decode("ascii", "replace")
