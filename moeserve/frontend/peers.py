"""The frontends of one service ask each other for responses that one of them keeps in its memory.

Each frontend answers on a ZeroMQ socket of its own in the run directory. A frontend asks all others at once and
goes without the answer of one that is silent: it hangs, or is being started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import structlog
import zmq
import zmq.asyncio

from moeserve import wire
from moeserve.frontend import limits
from moeserve.frontend.response_store import LentTurn, ResponseStore
from moeserve.wire import Message, RunContext

log = structlog.get_logger(__name__)

_PATIENCE_S = 1.0
_MAX_WAITING = 1000
MAX_LENT_BYTES = 2 * limits.MAX_STORED_CONVERSATION_BYTES


class Lend(Message):
    """Tell of the conversations up to the responses of these names, or up to those with the items of these names.

    caller: see `ResponseStore`.
    """

    caller: bytes
    names: list[str]


class Drop(Message):
    """Delete a response."""

    caller: bytes
    response_id: str


class Answer(Message):
    """The turns of a response and of those it follows; see `Shelf.lend`."""

    turns: list[LentTurn]


class Peers:
    """Answers the other frontends out of the store of this one, and asks them for what it lacks."""

    def __init__(self, run: RunContext, number: int, store: ResponseStore) -> None:
        """number: of this frontend, from 0."""
        self._own_address = run.peer_address(number)
        self._others = [run.peer_address(other) for other in range(run.config.num_frontends) if other != number]
        self._store = store

    @property
    def has_others(self) -> bool:
        return bool(self._others)

    async def start(self) -> None:
        """Begin to answer, if there are others."""
        if self._others:
            self._zmq = zmq.asyncio.Context()
            self._answering = asyncio.create_task(self._answer_all())

    async def stop(self) -> None:
        """Answer no more."""
        if self._others:
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)
            self._zmq.destroy(linger=0)

    async def borrow(self, caller: bytes, names: Sequence[str]) -> None:
        """Keep here as well what the others keep of these responses and items, as far as this frontend lacks them."""
        shelf = self._store.shelf(caller)
        missing = [name for name in names if not shelf.knows(name)]
        if missing and self._others:
            for answer in await self._ask(Lend(caller, missing)):
                shelf.adopt(answer.turns)

    async def drop(self, caller: bytes, response_id: str) -> None:
        """Delete a response here and in the others."""
        self._store.shelf(caller).delete(response_id)
        if self._others:
            await self._ask(Drop(caller, response_id))

    async def _ask(self, question: Lend | Drop) -> list[Answer]:
        answers = await asyncio.gather(*(self._ask_one(address, question) for address in self._others))
        return [answer for answer in answers if answer is not None]

    async def _ask_one(self, address: str, question: Lend | Drop) -> Answer | None:
        with self._socket(zmq.DEALER) as socket:
            socket.connect(address)
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await socket.send(wire.pack(question))
                    return wire.unpack(await socket.recv(), Answer)
            except (TimeoutError, wire.DecodeError) as error:
                log.warning("frontend_silent", address=address, error=repr(error)[:200])
                return None

    async def _answer_all(self) -> None:
        with self._socket(zmq.ROUTER) as socket:
            socket.bind(self._own_address)
            while True:
                sender, frame = await socket.recv_multipart()
                try:
                    question = wire.unpack(frame, cast("type[Lend | Drop]", Lend | Drop))
                except wire.DecodeError as error:
                    log.warning("bad_question", error=str(error)[:200])
                    continue
                # A ROUTER drops what is for one that has gone.
                await socket.send_multipart([sender, wire.pack(self._answer(question))])

    def _answer(self, question: Lend | Drop) -> Answer:
        shelf = self._store.shelf(question.caller)
        if isinstance(question, Drop):
            shelf.delete(question.response_id)
            return Answer([])
        return Answer(shelf.lend(question.names, MAX_LENT_BYTES))

    def _socket(self, kind: int) -> Any:
        socket = self._zmq.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _MAX_WAITING)
        socket.setsockopt(zmq.RCVHWM, _MAX_WAITING)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        return socket
