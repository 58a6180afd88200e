"""Rank 0's end of the sockets to the other ranks, and its watch over their processes."""

from __future__ import annotations

import os
import select
import threading
import time
from typing import Any

import zmq

from moeserve.messages import MAX_FRAME_BYTES, decode, encode
from moeserve.rank_messages import FromRank, Joined, RankError, ToRank
from moeserve.run_context import RunContext

_POLL_SECONDS = 0.1
_SEND_SECONDS = 5.0


class RankHub:
    """A PUSH socket per rank from 1 on, one PULL socket for what they answer. Used by the engine's thread alone."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run: RunContext) -> None:
        self.others = range(1, run.config.expert_parallel_size)
        self._incarnation = run.incarnation
        self._poller = zmq.Poller()
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._results = context.socket(zmq.PULL)
        self._results.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._results.bind(run.results_address)
        self._poller.register(self._results, zmq.POLLIN)
        self._steps: dict[int, zmq.Socket[bytes]] = {}
        for rank in self.others:
            socket = context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 500)
            socket.setsockopt(zmq.SNDTIMEO, int(1000 * _SEND_SECONDS))
            socket.bind(run.steps_address(rank))
            self._steps[rank] = socket

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
            incarnation, message = decode(self._results.recv(), FromRank)
            return message if incarnation == self._incarnation else None
        if events:
            self.check()
        return None

    def gather(self, kind: type[Any], stop: threading.Event) -> bool:
        """Waits until every rank has sent its one message of a `kind`; False if `stop` is set before."""
        missing = set(self.others)
        while missing:
            if stop.is_set():
                return False
            message = self.receive(_POLL_SECONDS)
            if isinstance(message, kind):
                missing.discard(message.rank)
                if isinstance(message, Joined):
                    self._watch(message)
        return True

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

    def name(self, rank: int) -> str:
        return f"Rank {rank} (process {self._pids[rank]})"

    def close(self) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        for socket in (*self._steps.values(), self._results):
            socket.close()

    def _watch(self, joined: Joined) -> None:
        self._pids[joined.rank] = joined.pid
        try:
            pidfd = os.pidfd_open(joined.pid)
        except ProcessLookupError:
            raise RankError(f"{self.name(joined.rank)} died.") from None
        self._pidfds[joined.rank] = pidfd
        self._poller.register(pidfd, zmq.POLLIN)
