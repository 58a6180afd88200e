"""A rank's end of the sockets to rank 0."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from experts.memory.stats import ExpertMemoryStats
from moeserve.frames import MAX_FRAME_BYTES, decode, encode
from moeserve.ranks.meeting import Meeting
from moeserve.ranks.messages import FromRank, RankBeat, RankError, Shutdown, ToRank

_BEAT_SECONDS = 0.2
_PING_SECONDS = 1
_LOST_SECONDS = 4
_LOST = zmq.EVENT_DISCONNECTED
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class RankLink:
    """A PULL socket for steps, a PUSH socket for results. Used by one thread.

    The end of rank 0 is seen through a pidfd on its own machine, and by the broken connection from another one.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], meeting: Meeting, rank: int) -> None:
        self._incarnation = meeting.incarnation
        self._address = meeting.steps[rank - 1]
        self._steps = context.socket(zmq.PULL)
        self._steps.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._poller = zmq.Poller()
        self._poller.register(self._steps, zmq.POLLIN)
        self._monitor: zmq.Socket[bytes] | None = None
        if meeting.keys is not None:
            meeting.keys.secure_client(self._steps)
            self._steps.setsockopt(zmq.HEARTBEAT_IVL, 1000 * _PING_SECONDS)
            self._steps.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000 * _LOST_SECONDS)
            self._monitor = self._steps.get_monitor_socket(_LOST | _REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            self._poller.register(self._monitor, zmq.POLLIN)
        self._met = False
        self._steps.connect(self._address)
        self._results = _connect_results(context, meeting)
        self._first_rank: int | None = None

    def watch(self, pid: int) -> None:
        """From now on the end of process `pid` on this machine, rank 0's, counts as `Shutdown`."""
        try:
            self._first_rank = os.pidfd_open(pid)
        except ProcessLookupError:
            raise ConnectionError("rank 0 is gone") from None
        self._poller.register(self._first_rank, zmq.POLLIN)

    def send(self, message: FromRank) -> None:
        self._results.send(encode(message, self._incarnation))

    def receive(self, on_wait: Callable[[], None] = lambda: None) -> Any:
        """Blocks until there is a message; meanwhile calls `on_wait` a few times a second.

        Raises RankError if rank 0, on another node, refuses this one or is gone.
        """
        while (message := self.poll(_BEAT_SECONDS)) is None:
            on_wait()
        return message

    def poll(self, seconds: float = 0.0) -> Any:
        """The next message, None if there is none in so long. Raises as `receive` does."""
        events = dict(self._poller.poll(int(1000 * seconds)))
        if self._steps in events:
            incarnation, message = decode(self._steps.recv(), ToRank)
            if incarnation == self._incarnation:
                return message
        elif self._first_rank in events:
            return Shutdown()
        elif self._monitor is not None and self._monitor in events:
            self._heed(self._monitor)
        return None

    def close(self) -> None:
        self._steps.disable_monitor()
        self._steps.close()
        self._results.close()
        if self._monitor is not None:
            self._monitor.close(linger=0)
        if self._first_rank is not None:
            os.close(self._first_rank)

    def _heed(self, monitor: zmq.Socket[bytes]) -> None:
        event = parse_monitor_message(monitor.recv_multipart())["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._met = True
        elif event & _REFUSED and not self._met:
            raise RankError(f"Rank 0 at {self._address} refuses this node: it has another --curve-key-file.")
        elif event == _LOST and self._met:
            raise RankError(f"Rank 0 at {self._address} is gone: node 0 has ended or cannot be reached.")


class BeatThread(threading.Thread):
    """Sends `RankBeat` on a socket of its own: while `busy` is set, and otherwise when the rank itself says so.

    So a rank that computes for long is not taken for lost, and one that hangs while it should wait is.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        meeting: Meeting,
        rank: int,
        num_entered: Callable[[], int],
        memory: Callable[[], ExpertMemoryStats | None] = lambda: None,
    ) -> None:
        super().__init__(name="beat", daemon=True)
        self.busy = threading.Event()
        self._waits = threading.Event()
        self._rank = rank
        self._incarnation = meeting.incarnation
        self._num_entered = num_entered
        self._memory = memory
        self._stopped = threading.Event()
        self._socket = _connect_results(context, meeting)

    def say_waiting(self) -> None:
        """Called by the rank's own thread again and again while it waits for a message."""
        self._waits.set()

    def run(self) -> None:
        while not self._stopped.wait(_BEAT_SECONDS):
            if self.busy.is_set() or self._waits.is_set():
                self._waits.clear()
                beat = encode(RankBeat(self._rank, self._num_entered(), self._memory()), self._incarnation)
                with suppress(zmq.Again):
                    self._socket.send(beat, zmq.NOBLOCK)
        self._socket.close()

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _connect_results(context: zmq.Context[zmq.Socket[bytes]], meeting: Meeting) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 500)
    # A rank 0 that does not read any more is not waited for: whoever notices first ends the service.
    socket.setsockopt(zmq.SNDTIMEO, 1000 * _LOST_SECONDS)
    if meeting.keys is not None:
        meeting.keys.secure_client(socket)
    socket.connect(meeting.results)
    return socket
