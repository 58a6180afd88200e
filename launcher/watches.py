"""How the supervisor finds a process that hangs: by the engine's heartbeats, by a frontend's ticks, before these come
by the process's state."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import zmq
import zmq.asyncio

from moeserve.wire import DecodeError, Heartbeat, decode

_SECONDS_BETWEEN_HEARTBEAT_CHECKS = 0.25
_SECONDS_BETWEEN_BEATING = 1.0
# The state of a stopped process in /proc/PID/stat.
_STOPPED = "T"


class ProgressWatch:
    """Judges from heartbeats whether the engine makes progress. Times are seconds of the caller's monotonic clock.

    An engine hangs when its count of progress stands still, or when no heartbeat comes at all, for `timeout`.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._last_beat = now
        self._last_progress = now
        self._progress: int | None = None
        self._busy = False
        self._last_check = now

    def observe(self, heartbeat: Heartbeat, now: float) -> None:
        self._last_beat = now
        if heartbeat.progress != self._progress:
            self._last_progress = now
        self._progress, self._busy = heartbeat.progress, heartbeat.busy

    def verdict(self, now: float) -> str | None:
        """Return why the engine counts as hung, or None. To be called a few times per timeout.

        If the caller itself was held up since its last check (by a suspended machine, say), the times start again:
        heartbeats may still be unread.
        """
        late = now - self._last_check > self._timeout / 2
        self._last_check = now
        if late:
            self._last_beat = self._last_progress = now
        if now - self._last_beat > self._timeout:
            return f"no heartbeat for {self._timeout:g} s"
        if now - self._last_progress > self._timeout:
            return f"{'busy' if self._busy else 'idle'} without progress for {self._timeout:g} s"
        return None


class _Ticks(asyncio.Protocol):
    """Counts the bytes that come through a pipe, and passes them to `on_ticks`."""

    def __init__(self, on_ticks: Callable[[bytes], None]) -> None:
        self.count = 0
        self.first = asyncio.Event()
        self.ended = False
        self._on_ticks = on_ticks

    def data_received(self, data: bytes) -> None:
        self.count += len(data)
        self.first.set()
        self._on_ticks(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        self.first.set()


async def wait_for_silence(descriptor: int, timeout: float, on_ticks: Callable[[bytes], None]) -> str | None:
    """Watch the ticks of an event loop, bytes in a pipe. Return why it counts as hung, once it does.

    Return None when the pipe ends. The time counts from the first tick on: the start before it has other limits.
    on_ticks: called with new ticks.
    """
    pipe = open(descriptor, "rb", buffering=0)  # noqa: SIM115 - the transport closes it
    transport, ticks = await asyncio.get_running_loop().connect_read_pipe(lambda: _Ticks(on_ticks), pipe)
    try:
        await ticks.first.wait()
        watch = ProgressWatch(timeout, time.monotonic())
        seen = 0
        while not ticks.ended:
            if ticks.count != seen:
                seen = ticks.count
                watch.observe(Heartbeat(0, seen, False), time.monotonic())
            if verdict := watch.verdict(time.monotonic()):
                return verdict
            await asyncio.sleep(_SECONDS_BETWEEN_HEARTBEAT_CHECKS)
    finally:
        # The loop must forget the descriptor, whose number another pipe soon has.
        transport.close()
    return None


async def wait_for_stop(pid: int, timeout: float) -> str:
    """Wait until a process, or one that it has started, has been stopped (SIGSTOP) for `timeout` seconds; say which.

    This is for processes that load and do not beat yet. Looks are counted, not seconds: time in which this process was
    stopped with the others (Ctrl-Z) must not count.
    """
    num_looks: Counter[int] = Counter()
    while True:
        await asyncio.sleep(_SECONDS_BETWEEN_HEARTBEAT_CHECKS)
        num_looks = Counter({stopped: num_looks[stopped] + 1 for stopped in _tree(pid) if _is_stopped(stopped)})
        for stopped, count in num_looks.items():
            if count * _SECONDS_BETWEEN_HEARTBEAT_CHECKS >= timeout:
                return f"process {stopped} was stopped for {timeout:g} s"


def any_is_stopped(pid: int) -> bool:
    """Return whether a process, or one that it has started, is stopped (SIGSTOP)."""
    return any(map(_is_stopped, _tree(pid)))


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                yield from _tree(int(child))


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == _STOPPED
    return False


async def wait_for_hang(address: str, incarnation: int, timeout: float, on_beats: Callable[[], None]) -> str:
    """Watch the heartbeats of the engine at `address`. Return why it counts as hung, once it does.

    timeout: seconds that an engine may be without progress, or without a heartbeat. on_beats: called after heartbeats
    came.
    """
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as heartbeats:
        heartbeats.setsockopt(zmq.LINGER, 0)
        heartbeats.setsockopt(zmq.RCVHWM, 100)
        heartbeats.subscribe(b"")
        heartbeats.connect(address)
        watch = ProgressWatch(timeout, time.monotonic())
        while (verdict := watch.verdict(time.monotonic())) is None:
            await asyncio.sleep(_SECONDS_BETWEEN_HEARTBEAT_CHECKS)
            if await _observe_all(heartbeats, incarnation, watch):
                on_beats()
        return verdict


async def _observe_all(heartbeats: zmq.asyncio.Socket, incarnation: int, watch: ProgressWatch) -> bool:
    """Return whether a heartbeat of this life came."""
    heard = False
    # Polling first, so that no receive is ever cancelled: a cancelled one may lose its message.
    while await heartbeats.poll(0):
        try:
            life, heartbeat = decode(await heartbeats.recv(), Heartbeat)
        except DecodeError:
            continue
        if life == incarnation:
            watch.observe(heartbeat, time.monotonic())
            heard = True
    return heard


class Vitals:
    """Knows when each of some processes last gave a sign of life.

    `beating` is called each time that all processes, except excused ones, have given one since the last call.
    """

    def __init__(self, names: Iterable[str], beating: Callable[[], None]) -> None:
        self._names = set(names)
        self._beating = beating
        self._heard: dict[str, float] = {}
        self._fresh: set[str] = set()
        self._excused: set[str] = set()
        self._beat_at = 0.0

    def record(self, name: str) -> None:
        now = time.monotonic()
        self._heard[name] = now
        self._fresh.add(name)
        if self._fresh | self._excused >= self._names and now - self._beat_at >= _SECONDS_BETWEEN_BEATING:
            self._beat_at = now
            self._fresh.clear()
            self._beating()

    def excuse(self, name: str) -> None:
        """Expect nothing of a process that is being started again."""
        self._excused.add(name)
        self._heard.pop(name, None)

    def expect(self, name: str) -> None:
        self._excused.discard(name)

    def of(self, name: str) -> str:
        """Return when a process was last heard from, as the end of a phrase."""
        heard = self._heard.get(name)
        return "not heard yet" if heard is None else f"heard {time.monotonic() - heard:.1f} s ago"
