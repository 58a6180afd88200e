"""The thread that hands blocks of KV to other services, from the memory that the engine computes in."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    WAIT,
    pack_number,
    read_number,
)
from moeserve.engine.ranks.meeting import RankKeys

_WORD_SECONDS = 1.0  # between two messages to a waiting service; it ends its fetch after a longer silence

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Ask:
    """The blocks of a ticket from number `next` to `stop` that somebody asks for."""

    asker: bytes
    ticket: bytes
    next: int
    stop: int

    @property
    def ticket_id(self) -> str:
        return self.ticket.decode("ascii", "replace")


class BlockServer(threading.Thread):
    """Answers who asks for the blocks of a ticket, on a ROUTER socket."""

    def __init__(self, sockets: zmq.Context[Any], keys: RankKeys, address: str, memory: BlockMemory) -> None:
        """Bind `address`; port `*` takes a free one. Raise ConfigError if it cannot be had."""
        super().__init__(name="kv-server", daemon=True)
        self._memory = memory
        self._blocks: Callable[[str], Sequence[int] | None] = _no_blocks
        self._is_growing: Callable[[str], bool] = _grows_not
        # Blocks that are still computed, by who asks, in the order of the asks.
        self._waiting: dict[bytes, deque[_Ask]] = {}
        self._last_word = 0.0
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

    def serve(self, blocks: Callable[[str], Sequence[int] | None], is_growing: Callable[[str], bool]) -> None:
        """Begin. blocks, is_growing: see `KvOffers`."""
        self._blocks, self._is_growing = blocks, is_growing
        self.start()

    def look_again(self) -> None:
        """Look for the blocks that services wait for: more are computed, or will not be. Any thread may call it."""
        os.eventfd_write(self._news, 1)

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
            for source, _ in poller.poll(1000 * _WORD_SECONDS if self._waiting else None):
                if source == self._news:
                    os.eventfd_read(self._news)
                else:
                    try:
                        self._answer(self._socket.recv_multipart(zmq.NOBLOCK), buffer)
                    except zmq.ZMQError as error:
                        self._check_gone(error)
            if self._waiting:
                self._answer_waiting(buffer)
        self._socket.close()

    def _check_gone(self, error: zmq.ZMQError) -> None:
        """Raise an error again unless it says that the asker is gone, or does not read."""
        if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            raise error

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
                start = read_number(first)
                ask = _Ask(asker, ticket, start, start + min(read_number(count), BLOCKS_AT_ONCE))
                self._fetched.append((ask.ticket_id, False))
                if asker in self._waiting or not self._send_blocks(ask, buffer):
                    self._waiting.setdefault(asker, deque()).append(ask)
            case _:
                log.warning("kv_transfer_odd_request", frames=len(frames))

    def _answer_waiting(self, buffer: BlockBuffer) -> None:
        """Send blocks that have been computed meanwhile, and now and then a message to each service that still
        waits."""
        is_due = time.monotonic() - self._last_word > _WORD_SECONDS
        for asker, asks in list(self._waiting.items()):
            try:
                while asks and self._send_blocks(asks[0], buffer):
                    asks.popleft()
                if is_due and asks:
                    self._socket.send_multipart([asker, b"", WAIT, asks[0].ticket], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self._check_gone(error)
                asks.clear()
            if not asks:
                del self._waiting[asker]
        if is_due:
            self._last_word = time.monotonic()

    def _send_blocks(self, ask: _Ask, buffer: BlockBuffer) -> bool:
        """Send blocks that are asked for, or that there are none. Return False if some of them are still computed."""
        ticket_id = ask.ticket_id
        while ask.next < ask.stop:
            is_growing, blocks = self._is_growing(ticket_id), self._blocks(ticket_id)
            if is_growing and blocks is not None and ask.next >= len(blocks):
                return False
            if blocks is None or not 0 <= ask.next < len(blocks):
                break
            buffer.load(blocks[ask.next])
            if self._blocks(ticket_id) is None:
                # The block may have been given to another request while it was copied.
                break
            number, content = pack_number(ask.next), bytes(buffer.content)
            ask.next += 1
            self._socket.send_multipart([ask.asker, b"", BLOCK, ask.ticket, number, content], zmq.NOBLOCK, copy=False)
        else:
            return True
        self._socket.send_multipart([ask.asker, b"", NONE, ask.ticket], zmq.NOBLOCK)
        return True


def _no_blocks(_: str) -> None:
    return None


def _grows_not(_: str) -> bool:
    return False
