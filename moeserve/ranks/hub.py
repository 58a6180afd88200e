"""Rank 0's end of the sockets to the other ranks, and its watch over their processes."""

from __future__ import annotations

import os
import select
import threading
import time
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from moeserve.frames import MAX_FRAME_BYTES, DecodeError, decode, encode
from moeserve.ranks.keys import Gatekeeper
from moeserve.ranks.meeting import Meeting
from moeserve.ranks.messages import FromRank, Joined, RankError, ToRank

_POLL_SECONDS = 0.1
_SEND_SECONDS = 5.0
_SECONDS_TO_JOIN = 300.0
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

log = structlog.get_logger(__name__)


class RankHub:
    """A PUSH socket per rank from 1 on, one PULL socket for what they answer. Used by the engine's thread alone.

    Between nodes both demand the meeting's key. Processes on this machine are watched through pidfds; of all ranks it
    is known when they were last heard of.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], meeting: Meeting) -> None:
        self.others = range(1, len(meeting.steps) + 1)
        self._incarnation = meeting.incarnation
        self._poller = zmq.Poller()
        self._joined: dict[int, Joined] = {}
        self._pidfds: dict[int, int] = {}
        self._last_heard: dict[int, float] = {}
        self._monitors: list[zmq.Socket[bytes]] = []
        self._keys = meeting.keys
        self._gatekeeper = Gatekeeper(context, self._keys) if self._keys else None
        self._results = context.socket(zmq.PULL)
        self._results.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._bind(self._results, meeting.results)
        self._poller.register(self._results, zmq.POLLIN)
        self._steps: dict[int, zmq.Socket[bytes]] = {}
        for rank, address in zip(self.others, meeting.steps, strict=True):
            socket = context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 500)
            socket.setsockopt(zmq.SNDTIMEO, int(1000 * _SEND_SECONDS))
            self._bind(socket, address)
            self._steps[rank] = socket

    @property
    def addresses(self) -> tuple[str, list[str]]:
        """What was bound: of the results, of the steps."""
        return _address(self._results), [_address(socket) for socket in self._steps.values()]

    def send(self, rank: int, message: ToRank) -> None:
        """Raises RankError if the rank takes nothing any more."""
        try:
            self._steps[rank].send(encode(message, self._incarnation))
        except zmq.Again:
            self.check()
            raise RankError(f"{self.name(rank)} does not take its messages.") from None

    def receive(self, timeout: float) -> Any:
        """The next message of any rank, None if there is none in `timeout` seconds. Raises RankError if a rank dies."""
        events = dict(self._poller.poll(int(1000 * timeout)))
        if self._results in events:
            try:
                incarnation, message = decode(self._results.recv(), FromRank)
            except DecodeError as error:
                log.warning("bad_message", error=str(error))
                return None
            if incarnation != self._incarnation:
                return None
            self._last_heard[message.rank] = time.monotonic()
            return message
        for monitor in self._monitors:
            if monitor in events:
                parse_monitor_message(monitor.recv_multipart())
                log.warning("node_refused", reason="it does not have the key of this service")
                return None
        if events:
            self.check()
        return None

    def gather(
        self, kind: type[Any], stop: threading.Event, *, patience: float = float("inf")
    ) -> dict[int, Any] | None:
        """Every rank's one message of a `kind`; None if `stop` is set before.

        Raises RankError for a rank that never joins, or was heard of before and then not for `patience` seconds.
        """
        gathered: dict[int, Any] = {}
        deadline = time.monotonic() + _SECONDS_TO_JOIN
        while len(gathered) < len(self.others):
            if stop.is_set():
                return None
            if len(self._joined) < len(self.others) and time.monotonic() > deadline:
                missing = next(rank for rank in self.others if rank not in self._joined)
                raise RankError(f"Rank {missing} did not come within {_SECONDS_TO_JOIN:.0f} s.")
            message = self.receive(_POLL_SECONDS)
            if isinstance(message, kind):
                gathered[message.rank] = message
                if isinstance(message, Joined):
                    self._joined[message.rank] = message
            self.check_signs_of_life(patience)
        return gathered

    def watch(self, machine: str) -> None:
        """From now on the end of a rank's process on this machine is noticed at once."""
        for rank, joined in self._joined.items():
            if joined.machine != machine:
                continue
            try:
                self._pidfds[rank] = os.pidfd_open(joined.pid)
            except ProcessLookupError:
                raise RankError(f"{self.name(rank)} died.") from None
            self._poller.register(self._pidfds[rank], zmq.POLLIN)

    def check(self) -> None:
        """Raises RankError if the process of a rank has ended."""
        for rank, pidfd in self._pidfds.items():
            if select.select([pidfd], [], [], 0)[0]:
                raise RankError(f"{self.name(rank)} died.")

    def check_for(self, seconds: float) -> None:
        """The same for a while: a process that is just ending counts."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            time.sleep(_POLL_SECONDS)

    def check_signs_of_life(self, patience: float) -> None:
        """Raises RankError for a rank that has joined and was not heard of for `patience` seconds.

        Only what `receive` has taken counts.
        """
        now = time.monotonic()
        for rank in self._joined:
            if now - self._last_heard[rank] > patience:
                raise RankError(f"{self.name(rank)} is lost or hung: it gives no sign of life.")

    def name(self, rank: int) -> str:
        joined = self._joined[rank]
        return f"Rank {rank} (process {joined.pid}{'' if self._keys is None else f' on {joined.node}'})"

    def close(self) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        for socket in (*self._steps.values(), self._results):
            socket.close()
        for monitor in self._monitors:
            monitor.close(linger=0)
        if self._gatekeeper is not None:
            self._gatekeeper.close()

    def _bind(self, socket: zmq.Socket[bytes], address: str) -> None:
        if self._keys is not None:
            self._keys.secure_server(socket)
            monitor = socket.get_monitor_socket(_REFUSALS)
            self._monitors.append(monitor)
            self._poller.register(monitor, zmq.POLLIN)
        socket.bind(address)


def _address(socket: zmq.Socket[bytes]) -> str:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.decode().rstrip("\0")
