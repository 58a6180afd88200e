"""The sockets between rank 0 and the other ranks, and how each end notices that the other has died or hangs.

`RankHub` is the end of rank 0, `RankLink` the end of every other rank, `BeatThread` a rank's signs of life. When a
collective fails, `find_fault` names the rank at fault as far as rank 0 knows.
"""

from __future__ import annotations

import os
import platform
import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import structlog
import torch
import zmq
from zmq.utils.monitor import parse_monitor_message

from experts.errors import CollectiveError
from experts.memory.residency import ExpertMemoryStats
from moeserve.config import VERSION
from moeserve.engine.curve import Gatekeeper
from moeserve.engine.ranks.meeting import Meeting, machine_id
from moeserve.engine.ranks.messages import Dismissed, FromRank, Joined, RankBeat, RankError, Shutdown, ToRank
from moeserve.forever import repeat
from moeserve.run_context import RunContext
from moeserve.wire import MAX_FRAME_BYTES, MAX_STEP_BYTES, DecodeError, decode, encode

# A message above this travels in several frames, so that no plan and no result is too large for a socket.
_PART_BYTES = 8 * 2**20
_MAX_MESSAGE_BYTES = MAX_STEP_BYTES + MAX_FRAME_BYTES
_POLL_SECONDS = 0.1
_SEND_SECONDS = 5.0
_SECONDS_TO_DIE = 0.5  # s; a collective fails because a rank has died: within this time its end is seen
# Milliseconds for which a closed hub still delivers: a rank that misses the last message waits for node 0 to come back.
_LINGER_MS, _LAST_LINGER_MS = 500, 10_000
_BEAT_SECONDS = 0.2
# A rank without a beat for this share of the time that ranks wait for each other, at most for this many seconds, gives
# no sign of life. On a busy machine a beat may be late.
_SHARE_FOR_A_BEAT, _SECONDS_FOR_A_BEAT = 0.25, 2.0
_PING_SECONDS = 1
_LOST_SECONDS = 4
_LOST = zmq.EVENT_DISCONNECTED
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

log = structlog.get_logger(__name__)


class RankHub:
    """Rank 0's end: a PUSH socket to each other rank and one PULL socket for their answers. Only one thread uses it.

    Between nodes both demand the meeting's key. The hub watches processes on this machine through pidfds, and notes
    when each rank sent its last message.
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
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
            socket.setsockopt(zmq.SNDTIMEO, int(1000 * _POLL_SECONDS))
            self._bind(socket, address)
            self._steps[rank] = socket

    @property
    def addresses(self) -> tuple[str, list[str]]:
        """The bound addresses: one for results, and one per rank from 1 on for steps."""
        return _address(self._results), [_address(socket) for socket in self._steps.values()]

    def send(self, rank: int, message: ToRank) -> None:
        """Raise RankError if the rank has died or takes no messages."""
        frame = encode(message, self._incarnation)
        deadline = time.monotonic() + _SEND_SECONDS
        while True:
            try:
                send_parts(self._steps[rank], frame)
                return
            except zmq.Again:
                self.check()
                if time.monotonic() > deadline:
                    raise RankError(f"{self.name(rank)} does not take its messages.") from None

    def send_all(self, message: ToRank) -> None:
        """Send a message to every other rank. Raise RankError as `send` does."""
        for rank in self.others:
            self.send(rank, message)

    def send_last(self, message: ToRank) -> None:
        """Send a message to every other rank, after which only `close` follows. Raise RankError as `send` does."""
        for socket in self._steps.values():
            socket.setsockopt(zmq.LINGER, _LAST_LINGER_MS)
        self.send_all(message)

    def receive(self, timeout: float) -> Any:
        """Return the next message of any rank, None if none comes in `timeout` s. Raise RankError if a rank dies."""
        events = dict(self._poller.poll(int(1000 * timeout)))
        if self._results in events:
            try:
                incarnation, message = receive_parts(self._results, FromRank)
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

    def gather(self, kind: type[Any], *, within: float, patience: float) -> dict[int, Any]:
        """Return one message of a `kind` from every rank, by rank.

        Raise RankError if a rank does not join `within` seconds, dies, or has joined and then sends nothing for
        `patience` seconds.
        """
        gathered: dict[int, Any] = {}
        deadline = time.monotonic() + within
        while len(gathered) < len(self.others):
            message = self.receive(_POLL_SECONDS)
            if isinstance(message, kind):
                gathered[message.rank] = message
                if isinstance(message, Joined):
                    self._joined[message.rank] = message
            if message is not None:
                # Signs of life that came while rank 0 was busy are still unread.
                continue
            if len(self._joined) < len(self.others) and time.monotonic() > deadline:
                missing = next(rank for rank in self.others if rank not in self._joined)
                raise RankError(f"Rank {missing} did not come within {within:.0f} s.")
            self.check_signs_of_life(patience)
        return gathered

    def watch(self, machine: str) -> None:
        """Watch the processes of the ranks on this machine from now on. Raise RankError if one has ended already."""
        for rank, joined in self._joined.items():
            if joined.machine != machine:
                continue
            try:
                self._pidfds[rank] = os.pidfd_open(joined.pid)
            except ProcessLookupError:
                raise RankError(f"{self.name(rank)} died.") from None
            self._poller.register(self._pidfds[rank], zmq.POLLIN)

    def check(self) -> None:
        """Raise RankError if the process of a rank has ended."""
        for rank, pidfd in self._pidfds.items():
            if select.select([pidfd], [], [], 0)[0]:
                raise RankError(f"{self.name(rank)} died.")

    def fault_behind(self, error: CollectiveError) -> RankError:
        """Return the error of a collective that failed though no rank is found to have died. Raise RankError if one
        has, or is just ending."""
        deadline = time.monotonic() + _SECONDS_TO_DIE
        while time.monotonic() < deadline:
            self.check()
            time.sleep(_POLL_SECONDS)
        return RankError(f"The ranks cannot reach each other: {error}.")

    def check_signs_of_life(self, patience: float) -> None:
        """Raise RankError for a rank that has joined and then sent nothing for `patience` seconds.

        A message counts once `receive` has taken it.
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
            monitor = socket.get_monitor_socket(_REFUSED)
            self._monitors.append(monitor)
            self._poller.register(monitor, zmq.POLLIN)
        socket.bind(address)


def send_parts(socket: zmq.Socket[bytes], message: bytes) -> None:
    """Send an encoded message in frames that the other end takes. It arrives as a whole or not at all."""
    if len(message) <= _PART_BYTES:
        socket.send(message)
    else:
        view = memoryview(message)
        socket.send_multipart([view[start : start + _PART_BYTES] for start in range(0, len(message), _PART_BYTES)])


def receive_parts(socket: zmq.Socket[bytes], expected: Any) -> tuple[int, Any]:
    """Return the incarnation and the message that `send_parts` sent. Raise DecodeError as `decode` does."""
    frames = socket.recv_multipart()
    return decode(frames[0] if len(frames) == 1 else b"".join(frames), expected, _MAX_MESSAGE_BYTES)


def _address(socket: zmq.Socket[bytes]) -> str:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.decode().rstrip("\0")


class RankLink:
    """Another rank's end: a PULL socket for steps and a PUSH socket for results. Only one thread uses it.

    It notices the end of rank 0 through a pidfd on the same machine, and by the broken connection on another node.
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
        self._first_pidfd: int | None = None

    def watch(self, pid: int) -> None:
        """Take the end of rank 0, process `pid` here, as `Shutdown`. Raise ConnectionError if it has ended."""
        try:
            self._first_pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise ConnectionError("rank 0 is gone") from None
        self._poller.register(self._first_pidfd, zmq.POLLIN)

    def send(self, message: FromRank) -> None:
        send_parts(self._results, encode(message, self._incarnation))

    def receive(self, on_wait: Callable[[], None] = lambda: None) -> Any:
        """Wait for the next message and return it; meanwhile call `on_wait` a few times a second.

        Raise RankError if rank 0, on another node, refuses this rank or is gone.
        """
        while (message := self.poll(_BEAT_SECONDS)) is None:
            on_wait()
        return message

    def poll(self, seconds: float = 0.0) -> Any:
        """Return the next message, None if none comes in `seconds`. Raise RankError as `receive` does."""
        events = dict(self._poller.poll(int(1000 * seconds)))
        if self._steps in events:
            incarnation, message = receive_parts(self._steps, ToRank)
            if incarnation == self._incarnation:
                return message
        elif self._first_pidfd in events:
            return Shutdown()
        elif self._monitor is not None and self._monitor in events:
            self._handle_event(self._monitor)
        return None

    def close(self) -> None:
        self._steps.disable_monitor()
        self._steps.close()
        self._results.close()
        if self._monitor is not None:
            self._monitor.close(linger=0)
        if self._first_pidfd is not None:
            os.close(self._first_pidfd)

    def _handle_event(self, monitor: zmq.Socket[bytes]) -> None:
        event = parse_monitor_message(monitor.recv_multipart())["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._met = True
        elif event & _REFUSED and not self._met:
            raise RankError(f"Rank 0 at {self._address} refuses this node: it has another --curve-key-file.")
        elif event == _LOST and self._met:
            raise RankError(f"Rank 0 at {self._address} is gone: node 0 has ended or cannot be reached.")


class BeatThread(threading.Thread):
    """Sends `RankBeat` on a socket of its own: while `busy` is set, and otherwise only after `say_waiting`.

    So a rank that computes for long is not taken for lost, and a rank that hangs between steps is.
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
        """Allow one more beat. The rank's own thread calls this again and again while it waits for a message."""
        self._waits.set()

    def run(self) -> None:
        repeat(self.name, self._beat)
        self._socket.close()

    def _beat(self) -> bool:
        if self._stopped.wait(_BEAT_SECONDS):
            return False
        if self.busy.is_set() or self._waits.is_set():
            self._waits.clear()
            beat = encode(RankBeat(self._rank, self._num_entered(), self._memory()), self._incarnation)
            with suppress(zmq.Again):
                self._socket.send(beat, zmq.NOBLOCK)
        return True

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _connect_results(context: zmq.Context[zmq.Socket[bytes]], meeting: Meeting) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 500)
    # A rank 0 that reads no more has died or hangs: do not wait for it, the service is about to end.
    socket.setsockopt(zmq.SNDTIMEO, 1000 * _LOST_SECONDS)
    if meeting.keys is not None:
        meeting.keys.secure_client(socket)
    socket.connect(meeting.results)
    return socket


def find_fault(hub: RankHub, error: CollectiveError, num_entered: int, timeout: float) -> RankError:
    """Return, or raise, an error that names a dead rank, else a silent one, else the rank that is behind all others.

    num_entered: the collectives that this rank has entered. timeout: the seconds that it waited in the last one.
    """
    try:
        entered = _latest_beats(hub, min(_SECONDS_FOR_A_BEAT, _SHARE_FOR_A_BEAT * timeout))
    except RankError as found:
        return found
    for rank in hub.others:
        if rank not in entered:
            return RankError(f"{hub.name(rank)} is lost or hung: it gives no sign of life.")
    last = min(entered, key=entered.__getitem__)
    if entered[last] < num_entered:
        return RankError(f"{hub.name(last)} hung: the others waited for it for {timeout:g} s.")
    return hub.fault_behind(error)


def _latest_beats(hub: RankHub, seconds: float) -> dict[int, int]:
    """Return, by rank, the collectives that each rank that beats within `seconds` has entered.

    Raise RankError if a rank has died.
    """
    while hub.receive(0) is not None:
        continue
    entered: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(entered) < len(hub.others) and (left := deadline - time.monotonic()) > 0:
        message = hub.receive(left)
        if isinstance(message, RankBeat):
            entered[message.rank] = message.num_entered
    return entered


def introduction(context: RunContext, rank: int) -> Joined:
    """Return the message with which this process joins as `rank`."""
    software = f"moeserve {VERSION} with torch {torch.__version__}"
    return Joined(rank, os.getpid(), platform.node(), machine_id(), software, context.model_hash)


def dismiss_strangers(hub: RankHub, joined: Mapping[int, Joined], first: Joined) -> None:
    """Dismiss the first rank whose model or software differs from `first`, that of rank 0, and raise RankError."""
    for rank, other in sorted(joined.items()):
        where = f"{hub.name(rank)} cannot take part"
        if other.software != first.software:
            reason = f"{where}: it runs {other.software}, rank 0 {first.software}."
        elif other.model_hash != first.model_hash:
            reason = f"{where}: its model differs from that of rank 0; give every node the same files."
        else:
            continue
        hub.send(rank, Dismissed(reason))
        raise RankError(reason)
