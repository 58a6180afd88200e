"""The engine's sockets: requests in and outputs out, and heartbeats beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import structlog
import zmq

from moeserve.forever import repeat
from moeserve.wire import MAX_FRAME_BYTES, DecodeError, Heartbeat, Message, ToEngine, decode, encode

_HIGH_WATER_MARK = 100_000  # messages that wait in each direction
_HEARTBEAT_SECONDS = 0.2  # between two heartbeats

log = structlog.get_logger(__name__)


class EngineSocket:
    """A ROUTER that frontends connect to; it never blocks. Used by the engine's thread alone."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, incarnation: int) -> None:
        self._incarnation = incarnation
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)

    def wait(self, seconds: float) -> None:
        self._socket.poll(int(seconds * 1000))

    def receive(self) -> tuple[bytes, Any] | None:
        """Return the next message that has arrived, and its sender; None without one.

        Frames that do not decode or have another incarnation are dropped.
        """
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                if len(frames) != 2:
                    raise DecodeError(f"{len(frames)} frames instead of 2")
                incarnation, message = decode(frames[1], ToEngine)
            except DecodeError as error:
                log.warning("bad_message", error=str(error))
                continue
            if incarnation == self._incarnation:
                return frames[0], message

    def send(self, receiver: bytes, message: Message) -> bool:
        """Send a message. Return False if the receiver is gone or does not read: its requests are to be aborted."""
        try:
            self._socket.send_multipart([receiver, encode(message, self._incarnation)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class HeartbeatThread(threading.Thread):
    """Publishes `Heartbeat` on a socket of its own while the engine computes, so that a long step is not a hang."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, incarnation: int, read: Callable[[], Heartbeat]
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._incarnation = incarnation
        self._read = read
        self._stopped = threading.Event()
        self._socket = context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)

    def run(self) -> None:
        repeat(self.name, self._beat)
        self._socket.close()

    def _beat(self) -> bool:
        if self._stopped.wait(_HEARTBEAT_SECONDS):
            return False
        self._socket.send(encode(self._read(), self._incarnation), zmq.NOBLOCK)
        return True

    def stop(self) -> None:
        self._stopped.set()
        self.join()
