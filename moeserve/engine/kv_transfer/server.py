"""The thread that hands blocks of KV to other services, from the memory that the engine computes in."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import zmq

from moeserve.config import ConfigError
from moeserve.engine.kv_disk.copier import BlockBuffer, BlockMemory
from moeserve.engine.kv_transfer.messages import (
    BLOCK,
    BLOCKS_AT_ONCE,
    FREE,
    GET,
    MAX_REQUEST_BYTES,
    NONE,
    pack_number,
    read_number,
)
from moeserve.engine.ranks.meeting import RankKeys

log = structlog.get_logger(__name__)


class BlockServer(threading.Thread):
    """Answers who asks for the blocks of a ticket, on a ROUTER socket."""

    def __init__(
        self,
        sockets: zmq.Context[Any],
        keys: RankKeys,
        address: str,
        memory: BlockMemory,
    ) -> None:
        """Bind `address`; port `*` takes a free one. Raise ConfigError if it cannot be had."""
        super().__init__(name="kv-server", daemon=True)
        self._memory = memory
        self._blocks: Callable[[str], Sequence[int] | None] = _no_blocks
        self._stopped = threading.Event()
        self._fetched: deque[tuple[str, bool]] = deque()
        self._socket = sockets.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        keys.secure_server(self._socket)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"--kv-transfer-config: cannot listen on {address}: {error.strerror}.") from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def serve(self, blocks: Callable[[str], Sequence[int] | None]) -> None:
        """Begin. blocks: see `KvOffers.blocks`."""
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
        poller.register(self._news, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        buffer = BlockBuffer(self._memory)
        while not self._stopped.is_set():
            for source, _ in poller.poll():
                if source is self._socket:
                    try:
                        self._answer(self._socket.recv_multipart(zmq.NOBLOCK), buffer)
                    except zmq.ZMQError as error:
                        # The asker is gone, or does not read.
                        if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                            raise
        self._socket.close()

    def stop(self) -> None:
        """Close the socket and end the thread."""
        self._stopped.set()
        os.eventfd_write(self._news, 1)
        if self.is_alive():
            self.join()
        os.close(self._news)

    def _answer(self, frames: Sequence[bytes], buffer: BlockBuffer) -> None:
        match frames:
            case [_, b"", kind, ticket] if kind == FREE:
                self._fetched.append((ticket.decode("ascii", "replace"), True))
            case [asker, b"", kind, ticket, first, count] if kind == GET:
                self._send_blocks(asker, ticket, read_number(first), read_number(count), buffer)
            case _:
                log.warning("kv_transfer_odd_request", frames=len(frames))

    def _send_blocks(self, asker: bytes, ticket: bytes, first: int, count: int, buffer: BlockBuffer) -> None:
        ticket_id = ticket.decode("ascii", "replace")
        self._fetched.append((ticket_id, False))
        for number in range(first, first + min(count, BLOCKS_AT_ONCE)):
            blocks = self._blocks(ticket_id)
            if blocks is None or not 0 <= number < len(blocks):
                break
            buffer.load(blocks[number])
            if self._blocks(ticket_id) is None:
                # The block may have been given to another request while it was copied.
                break
            content = bytes(buffer.content)
            self._socket.send_multipart(
                [asker, b"", BLOCK, ticket, pack_number(number), content], zmq.NOBLOCK, copy=False
            )
        else:
            return
        self._socket.send_multipart([asker, b"", NONE, ticket], zmq.NOBLOCK)


def _no_blocks(_: str) -> None:
    return None
