"""The answers to services that ask for blocks: computed blocks, and the first layers of blocks that are being
computed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from moeserve.engine.kv_disk.copier import BlockBuffer
from moeserve.engine.kv_transfer.messages import BLOCK, BLOCKS_AT_ONCE, NONE, PART, WAIT, pack_number

_PARTS = 4  # messages in which a block is sent at most, while it is computed
_WORD_SECONDS = 1.0  # between two messages to a waiting service; it ends its fetch after a longer silence


@dataclass(frozen=True, slots=True)
class Coming:
    """The blocks of a prompt, with the blocks that the present step completes; of these the first `num_arrays` arrays
    of memory are computed."""

    step: object
    blocks: Sequence[int]
    num_arrays: int


class Offered(Protocol):
    """The blocks that a service offers, by tickets. Any thread may call the methods."""

    def blocks(self, ticket_id: str) -> Sequence[int] | None:
        """See `KvOffers.blocks`."""
        ...

    def is_growing(self, ticket_id: str) -> bool:
        """See `KvOffers.is_growing`."""
        ...

    def coming(self, ticket_id: str) -> Coming | None:
        """Return the blocks of a ticket with the blocks that the present step completes; None if it completes none."""
        ...

    def is_present(self, step: object) -> bool:
        """Return whether a step is still computed, so that its blocks have no other owner yet."""
        ...

    def is_last(self, step: object) -> bool:
        """Return whether a step is the last one that has ended, and has not failed."""
        ...


@dataclass(slots=True)
class _Ask:
    """A service's request for the blocks number `next` to `stop` of a ticket.

    sent: for each block that was sent in part, by its number: the step that computes it, and the number of its arrays
    that were sent.
    """

    asker: bytes
    ticket: bytes
    next: int
    stop: int
    sent: dict[int, tuple[object, int]] = field(default_factory=dict)

    @property
    def ticket_id(self) -> str:
        return self.ticket.decode("ascii", "replace")


class Answers:
    """Sends blocks to the services that ask for them, through a ROUTER socket."""

    def __init__(self, socket: zmq.Socket[bytes], offered: Offered, buffer: BlockBuffer) -> None:
        """buffer: of the memory that has the blocks."""
        self._socket = socket
        self._offered = offered
        self._buffer = buffer
        # By asking service, its requests for blocks that are still computed, in their order.
        self._waiting: dict[bytes, deque[_Ask]] = {}
        self._last_word = 0.0

    @property
    def has_waiting(self) -> bool:
        """True while services wait for blocks that are still computed."""
        return bool(self._waiting)

    def take(self, asker: bytes, ticket: bytes, first: int, count: int) -> None:
        """Send blocks of a ticket to the service `asker`, now or later."""
        ask = _Ask(asker, ticket, first, first + min(count, BLOCKS_AT_ONCE))
        try:
            if asker in self._waiting or not self._send_blocks(ask):
                self._waiting.setdefault(asker, deque()).append(ask)
        except zmq.ZMQError as error:
            _check_gone(error)

    def send(self) -> None:
        """Send the blocks that were computed meanwhile, and now and then a message to each service that still waits."""
        is_due = time.monotonic() - self._last_word > _WORD_SECONDS
        for asker, asks in list(self._waiting.items()):
            try:
                while asks and self._send_blocks(asks[0]):
                    asks.popleft()
                for ask in asks:
                    self._send_parts(ask)
                if is_due and asks:
                    self._send(asks[0], WAIT)
            except zmq.ZMQError as error:
                _check_gone(error)
                asks.clear()
            if not asks:
                del self._waiting[asker]
        if is_due:
            self._last_word = time.monotonic()

    def _send_blocks(self, ask: _Ask) -> bool:
        """Send the requested blocks, or the message that there are none. Return False if some are still computed."""
        ticket_id, offered, buffer = ask.ticket_id, self._offered, self._buffer
        while ask.next < ask.stop:
            is_growing, blocks = offered.is_growing(ticket_id), offered.blocks(ticket_id)
            if is_growing and blocks is not None and ask.next >= len(blocks):
                return False
            if blocks is None or not 0 <= ask.next < len(blocks):
                break
            step, first = ask.sent.pop(ask.next, (None, 0))
            if step is not None and not offered.is_last(step):
                first = 0  # the step failed, or ended a while ago: which, is not known any more
            buffer.load(blocks[ask.next], first)
            if offered.blocks(ticket_id) is None:
                # The block may have been given to another request while it was copied.
                break
            number, content = ask.next, bytes(buffer.content[buffer.starts[first] :])
            ask.next += 1
            self._send(ask, BLOCK, pack_number(number), pack_number(first), content)
        else:
            return True
        self._send(ask, NONE)
        return True

    def _send_parts(self, ask: _Ask) -> None:
        """Send the computed layers of blocks."""
        coming, buffer = self._offered.coming(ask.ticket_id), self._buffer
        if coming is None:
            return
        stop, least = coming.num_arrays, -(-len(buffer.starts) // _PARTS)
        for number in range(ask.next, min(ask.stop, len(coming.blocks))):
            step, first = ask.sent.get(number, (None, 0))
            if step is not coming.step:
                first = 0
            if stop - first < least:
                continue
            buffer.load(coming.blocks[number], first, stop)
            if not self._offered.is_present(coming.step):
                return
            content = bytes(buffer.content[buffer.starts[first] : buffer.starts[stop]])
            ask.sent[number] = (coming.step, stop)
            self._send(ask, PART, pack_number(number), pack_number(first), content)

    def _send(self, ask: _Ask, kind: bytes, *frames: bytes) -> None:
        self._socket.send_multipart([ask.asker, b"", kind, ask.ticket, *frames], zmq.NOBLOCK, copy=False)


def _check_gone(error: zmq.ZMQError) -> None:
    """Raise an error again unless its cause is that the asker is gone, or does not read."""
    if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
        raise error
