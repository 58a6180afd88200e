"""A rank's end of the sockets to rank 0."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import zmq

from moeserve.messages import MAX_FRAME_BYTES, decode, encode
from moeserve.rank_messages import FromRank, RankBeat, Shutdown, ToRank
from moeserve.run_context import RunContext

_BEAT_SECONDS = 0.2


class RankLink:
    """A PULL socket for steps, a PUSH socket for results. Used by one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run: RunContext, rank: int) -> None:
        self._incarnation = run.incarnation
        self._steps = context.socket(zmq.PULL)
        self._steps.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._steps.connect(run.steps_address(rank))
        self._results = _connect_results(context, run)
        self._first_rank: int | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._steps, zmq.POLLIN)

    def watch(self, pid: int) -> None:
        """From now on the end of process `pid`, rank 0's, counts as `Shutdown`."""
        try:
            self._first_rank = os.pidfd_open(pid)
        except ProcessLookupError:
            raise ConnectionError("rank 0 is gone") from None
        self._poller.register(self._first_rank, zmq.POLLIN)

    def send(self, message: FromRank) -> None:
        self._results.send(encode(message, self._incarnation))

    def receive(self) -> Any:
        """Blocks until there is a message."""
        while True:
            events = dict(self._poller.poll())
            if self._steps in events:
                incarnation, message = decode(self._steps.recv(), ToRank)
                if incarnation == self._incarnation:
                    return message
            elif self._first_rank in events:
                return Shutdown()

    def close(self) -> None:
        self._steps.close()
        self._results.close()
        if self._first_rank is not None:
            os.close(self._first_rank)


class BeatThread(threading.Thread):
    """Sends `RankBeat` on a socket of its own while `busy` is set."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        run: RunContext,
        rank: int,
        num_entered: Callable[[], int],
    ) -> None:
        super().__init__(name="beat", daemon=True)
        self.busy = threading.Event()
        self._rank = rank
        self._incarnation = run.incarnation
        self._num_entered = num_entered
        self._stopped = threading.Event()
        self._socket = _connect_results(context, run)

    def run(self) -> None:
        while not self._stopped.wait(_BEAT_SECONDS):
            if self.busy.is_set():
                self._socket.send(encode(RankBeat(self._rank, self._num_entered()), self._incarnation))
        self._socket.close()

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _connect_results(context: zmq.Context[zmq.Socket[bytes]], run: RunContext) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 500)
    socket.connect(run.results_address)
    return socket
