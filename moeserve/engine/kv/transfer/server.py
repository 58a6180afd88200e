"""The thread that hands blocks of KV to other services, from the memory that the engine computes in."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import structlog
import zmq

from moeserve.config import ConfigError
from moeserve.engine.curve import CurveKeys
from moeserve.engine.kv.disk.copier import BlockBuffer, BlockMemory
from moeserve.engine.kv.transfer.messages import (
    BLOCK,
    BLOCKS_AT_ONCE,
    FREE,
    GET,
    MAX_REQUEST_BYTES,
    MOST_WAITING,
    NONE,
    pack_number,
    read_number,
)
from moeserve.forever import repeat

log = structlog.get_logger(__name__)


class BlockServer(threading.Thread):
    """Answers requests for the blocks of tickets, on a ROUTER socket."""

    def __init__(self, sockets: zmq.Context[Any], keys: CurveKeys, address: str, memory: BlockMemory) -> None:
        """Bind `address`; port `*` takes a free one. Raise ConfigError if it cannot be had."""
        super().__init__(name="kv-server", daemon=True)
        self._buffer = BlockBuffer(memory)
        self._blocks: Callable[[str], Sequence[int] | None] = lambda _: None
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
        self._stop_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def serve(self, blocks: Callable[[str], Sequence[int] | None]) -> None:
        """Begin to answer. blocks: see `KvOffers.blocks`."""
        self._blocks = blocks
        self.start()

    def take_fetched(self) -> list[tuple[str, bool]]:
        """Return the tickets whose blocks were fetched since the last call, and whether for the last time."""
        taken = []
        while self._fetched:
            taken.append(self._fetched.popleft())
        return taken

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stop_event, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        repeat(self.name, partial(self._serve, poller))
        self._socket.close()

    def _serve(self, poller: zmq.Poller) -> bool:
        if self._socket in dict(poller.poll()):
            with suppress(zmq.Again):  # A service may be gone since the poll, and its message with it.
                self._take(self._socket.recv_multipart(zmq.NOBLOCK))
        return not self._stopped.is_set()

    def stop(self) -> None:
        """Close the socket and end the thread."""
        self._stopped.set()
        os.eventfd_write(self._stop_event, 1)
        if self.is_alive():
            self.join()
        os.close(self._stop_event)

    def _take(self, frames: list[bytes]) -> None:
        match frames:
            case [_, b"", kind, ticket] if kind == FREE:
                self._fetched.append((_text(ticket), True))
            case [asker, b"", kind, ticket, *numbers] if kind == GET and _are_numbers(numbers):
                self._fetched.append((_text(ticket), False))
                self._answer(asker, ticket, *map(read_number, numbers))
            case _:
                log.warning("kv_transfer_odd_request", frames=len(frames))

    def _answer(self, asker: bytes, ticket: bytes, first: int, count: int) -> None:
        """Send blocks of a ticket up to the first one that is not held, if the asker is there and reads."""
        try:
            for number in range(first, first + min(count, BLOCKS_AT_ONCE)):
                content = self._load(_text(ticket), number)
                frames = [NONE, ticket] if content is None else [BLOCK, ticket, pack_number(number), content]
                self._socket.send_multipart([asker, b"", *frames], zmq.NOBLOCK, copy=False)
                if content is None:
                    return
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise

    def _load(self, ticket_id: str, number: int) -> bytes | None:
        """Return the bytes of a block of a ticket, None if it is not held."""
        blocks = self._blocks(ticket_id)
        if blocks is None or number >= len(blocks):
            return None
        self._buffer.load(blocks[number])
        # If the lease has ended the block may have been given to another request while it was copied.
        return None if self._blocks(ticket_id) is None else bytes(self._buffer.content)


def _are_numbers(frames: list[bytes]) -> bool:
    """Return whether these are the number of a block and a count."""
    return len(frames) == 2 and all(read_number(frame) >= 0 for frame in frames)


def _text(ticket: bytes) -> str:
    return ticket.decode("ascii", "replace")
