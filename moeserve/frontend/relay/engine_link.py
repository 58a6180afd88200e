"""The frontend's socket to one life of the engine."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
import zmq
import zmq.asyncio

from moeserve import wire
from moeserve.wire import Hello, Message, RunContext

log = structlog.get_logger(__name__)

_MAX_QUEUED_FRAMES = 100_000
_ENDED = "the engine process ended"


class EngineLink:
    """A DEALER to the engine of one incarnation, and the watch over its process.

    One task reads the socket and is not cancelled while the link is open. Callbacks: `on_message` for each message of
    this incarnation; `on_unreadable` for a frame that is none; `on_end`, once, when the watched process has ended;
    `on_broken`, once, if the reader fails. Both tell the reason. After `close` none is called.
    """

    def __init__(
        self,
        run: RunContext,
        sockets: zmq.asyncio.Context,
        *,
        on_message: Callable[[Message], None],
        on_unreadable: Callable[[str], None],
        on_end: Callable[[str], None],
        on_broken: Callable[[str], None],
    ) -> None:
        """Connect and begin to introduce the frontend; return at once. run: of the incarnation."""
        self._run = run
        self._on_message, self._on_unreadable, self._on_end = on_message, on_unreadable, on_end
        self._on_broken = on_broken
        self._is_open = True
        self._pidfd: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._socket = sockets.socket(zmq.DEALER)
        identity = f"frontend.{run.incarnation}.{os.getpid()}.{secrets.token_hex(4)}"
        self._socket.setsockopt(zmq.ROUTING_ID, identity.encode())
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED_FRAMES)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_FRAMES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        self._socket.connect(run.engine_address)
        self._spawn(self._read())
        self.send(Hello(wire.PROTOCOL_VERSION, run.model_hash))

    async def stop(self) -> None:
        """Close the link and wait for its tasks."""
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """End the tasks and close the socket. Messages that were not read are dropped."""
        self._is_open = False
        for task in self._tasks:
            task.cancel()
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._socket.close(linger=0)

    def send(self, message: Message) -> None:
        """Send a message now, or as soon as the engine takes it, in order. None is lost while the link is open."""
        self._socket.send(wire.encode(message, self._run.incarnation))

    def watch(self, pid: int) -> None:
        """Call `on_end` when the engine's process ends, or now if it has ended."""
        if self._pidfd is not None:
            return
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._on_end(_ENDED)
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end, _ENDED)

    async def _read(self) -> None:
        while self._is_open:
            frame = await self._socket.recv()
            try:
                incarnation, message = wire.decode(frame, wire.FromEngine)
            except wire.DecodeError as error:
                self._on_unreadable(str(error)[:200])
                continue
            if incarnation == self._run.incarnation:
                self._on_message(message)

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(job)
        task.add_done_callback(self._on_task_end)
        self._tasks.append(task)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Give the link up if its reader failed: nobody would hear of outputs any more."""
        if self._is_open and not task.cancelled() and (error := task.exception()) is not None:
            log.error("engine_link_failed", exc_info=error)
            self._on_broken("the frontend lost its connection to the engine")
