"""Starts the model process and the HTTP process, watches them, and ends them; exactly one life, no restarts.

A signal, a child's end, a status or a hang is an event in one queue. Events are handled one after the other, so that no
two reactions overlap. A reaction that acts later sets a timer, which signals a child.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq
import zmq.asyncio

from launcher.listener import reachable_address
from launcher.processes import (
    Child,
    Computing,
    Failed,
    Loading,
    Ready,
    child_environment,
    decode_status,
    default_threads,
)
from moeserve.frontend.engine_client import ProgressWatch
from moeserve.wire import DecodeError, Heartbeat, RunContext, decode

WORKER_MODULE = "launcher.worker"
GROUP_MODULE = "launcher.rank_group"
FRONTEND_MODULE = "launcher.frontend_main"
_SECONDS_BETWEEN_HEARTBEAT_CHECKS = 0.25
_SECONDS_BETWEEN_READY_CHECKS = 0.05
_SECONDS_BETWEEN_BEATING = 1.0
_NUM_CHILDREN = 2


@dataclass(frozen=True, kw_only=True)
class Grace:
    """Seconds that children get: to tell clients of a failure, to end after that, to end after a drain, to end at once,
    to answer HTTP for the first time."""

    telling: float = 1.0
    after_failure: float = 3.0
    after_drain: float = 5.0
    at_once: float = 1.5
    http_ready: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Listeners:
    """Callbacks of the supervisor.

    `failed` gets the one sentence that explains exit code 1, `state` one that SIGUSR1 asks for. `beating` is called
    about once a second while both children make progress.
    """

    loading: Callable[[Loading], None]
    ready: Callable[[Ready], None]
    stopping: Callable[[], None]
    failed: Callable[[str], None]
    state: Callable[[str], None] = lambda _: None
    beating: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class _Signal:
    number: signal.Signals


@dataclass(frozen=True)
class _Exited:
    child: Child


@dataclass(frozen=True)
class _Serving:
    """The HTTP process answers that it is ready."""


@dataclass(frozen=True)
class _Stuck:
    child: Child
    sentence: str


_Event = _Signal | _Exited | _Serving | _Stuck | Loading | Ready | Computing | Failed


class Supervisor:
    """Supervises one service: a worker and a frontend, children of this process.

    With several ranks the worker is torchrun's agent (`launcher.rank_group`), and the ranks die with it, unless
    `worker_module` names another module.

    `listener` is the listening socket; it is closed here once the frontend has it. The modules are the children's
    entry points: `WORKER CONTEXT --status-fd N` and `FRONTEND CONTEXT --fd N --beat-fd M`.

    SIGTERM and SIGHUP drain, unless SIGHUP is ignored already (nohup); SIGINT and SIGQUIT stop at once, and so does a
    second signal; SIGUSR1 asks for the state.
    """

    def __init__(
        self,
        context: RunContext,
        listener: socket.socket,
        listeners: Listeners,
        *,
        grace: Grace | None = None,
        worker_module: str | None = None,
        frontend_module: str = FRONTEND_MODULE,
    ) -> None:
        self._context, self._listener, self._tell = context, listener, listeners
        self._grace = grace or Grace()
        of_size = WORKER_MODULE if context.config.expert_parallel_size == 1 else GROUP_MODULE
        self._worker_module, self._frontend_module = worker_module or of_size, frontend_module
        self._address = reachable_address(listener)
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._children: list[Child] = []
        self._ready: Ready | None = None
        # Set once, by the first event that ends the service; a failure on the way out overrides a clean 0.
        self._exit_code: int | None = None
        self._why_stuck: str | None = None
        self._why_failed: str | None = None
        self._vitals = Vitals(listeners.beating)

    @property
    def worker_pid(self) -> int:
        return self._worker.pid

    @property
    def frontend_pid(self) -> int:
        return self._frontend.pid

    async def run(self) -> int:
        """Serve until stopped and return the exit code. Both children are gone when it returns."""
        loop = asyncio.get_running_loop()
        for number in handled_signals():
            loop.add_signal_handler(number, self._events.put_nowait, _Signal(number))
        context_file = str(self._context.save())
        try:
            self._worker = self._start_worker(context_file)
            self._frontend = self._start_frontend(context_file)
            while self._children:
                self._handle(await self._events.get())
        finally:
            for child in self._children:
                child.send_signal(signal.SIGKILL)
            for task in self._tasks:
                task.cancel()
        return self._exit_code or 0

    def _start_worker(self, context_file: str) -> Child:
        reading, writing = os.pipe()
        config = self._context.config
        threads = config.threads or default_threads(config)
        try:
            worker = Child(
                "model process",
                self._worker_module,
                [context_file, "--status-fd", str(writing)],
                environment=child_environment(os.environ, threads),
                pass_fds=[writing],
            )
        finally:
            os.close(writing)
        self._children.append(worker)
        status = self._spawn(self._read_status(reading))
        self._spawn(self._announce_exit(worker, after=status))
        return worker

    def _start_frontend(self, context_file: str) -> Child:
        reading, writing = os.pipe()
        try:
            with self._listener as listener:
                frontend = Child(
                    "HTTP process",
                    self._frontend_module,
                    [context_file, "--fd", str(listener.fileno()), "--beat-fd", str(writing)],
                    environment=child_environment(os.environ, 1),
                    pass_fds=[listener.fileno(), writing],
                )
        finally:
            os.close(writing)
        self._children.append(frontend)
        self._spawn(self._await_frontend_hang(frontend, reading))
        self._spawn(self._announce_exit(frontend))
        return frontend

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    async def _announce_exit(self, child: Child, after: asyncio.Task[None] | None = None) -> None:
        await child.ended
        if after is not None:
            # Its last words, if any, are still in the pipe.
            await asyncio.wait({after}, timeout=0.5)
        self._events.put_nowait(_Exited(child))

    async def _read_status(self, descriptor: int) -> None:
        reader = asyncio.StreamReader()
        with open(descriptor, "rb", buffering=0) as pipe:
            loop = asyncio.get_running_loop()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
            while line := await reader.readline():
                self._events.put_nowait(decode_status(line))

    async def _await_http(self) -> None:
        try:
            await asyncio.wait_for(wait_until_ready(*self._address), self._grace.http_ready)
        except TimeoutError:
            sentence = f"The HTTP process did not become ready within {self._grace.http_ready:.0f} s."
            self._events.put_nowait(_Stuck(self._frontend, sentence))
        else:
            self._events.put_nowait(_Serving())

    async def _await_hang(self) -> None:
        context = self._context
        who, timeout = "The model process", context.config.engine_timeout
        if context.config.expert_parallel_size > 1:
            # The ranks themselves notice a hang of another rank in less time, so only a hang of rank 0 is left.
            who, timeout = "Rank 0", 0.7 * timeout
        note_beat = partial(self._vitals.note, self._worker)
        why = await wait_for_hang(context.heartbeat_address, context.incarnation, timeout, note_beat)
        self._events.put_nowait(_Stuck(self._worker, f"{who} hung ({why}) and was ended."))

    async def _await_frontend_hang(self, frontend: Child, descriptor: int) -> None:
        timeout = self._context.config.engine_timeout
        why = await wait_for_silence(descriptor, timeout, partial(self._vitals.note, frontend))
        if why is not None:
            self._events.put_nowait(_Stuck(frontend, f"The HTTP process hung ({why}) and was ended."))

    def _handle(self, event: _Event) -> None:
        match event:
            case Loading():
                self._tell.loading(event)
            case Ready():
                self._ready = event
                self._spawn(self._await_http())
                self._spawn(self._await_hang())
            case Failed(message=message):
                # The first failure is the cause of the next ones.
                self._why_failed = self._why_failed or message
                self._later(self._grace.at_once, self._worker, signal.SIGKILL)
            case _Serving():
                if self._ready is not None and self._exit_code is None:
                    self._tell.ready(self._ready)
            case _Signal(number=number):
                self._on_signal(number)
            case _Exited(child=child):
                self._children.remove(child)
                self._on_exit(child)
            case _Stuck(child=child, sentence=sentence):
                if self._why_failed is None:
                    self._why_stuck = self._why_stuck or sentence
                child.send_signal(signal.SIGKILL)

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR1:
            self._tell.state(self._state())
            return
        self._tell.stopping()
        drains = number in (signal.SIGTERM, signal.SIGHUP)
        if self._exit_code is None and drains:
            self._drain()
            return
        if self._exit_code in (None, 0):
            self._exit_code = 128 + number
        self._frontend.send_signal(signal.SIGTERM if drains else signal.SIGINT)
        self._worker.send_signal(signal.SIGTERM)
        for child in self._children:
            self._later(self._grace.at_once, child, signal.SIGKILL)

    def _state(self) -> str:
        """Return one line about the service and its processes."""
        doing = "loading" if self._ready is None else "serving"
        children = ", ".join(f"{child.name} {child.pid} {self._vitals.of(child)}" for child in self._children)
        return f"{doing if self._exit_code is None else 'stopping'}; {children}"

    def _drain(self) -> None:
        """Let the frontend finish its streams; the worker ends after it."""
        self._exit_code = 0
        self._frontend.send_signal(signal.SIGTERM)
        limit = self._context.config.shutdown_timeout + self._grace.after_drain
        self._later(limit, self._frontend, signal.SIGKILL)

    def _on_exit(self, child: Child) -> None:
        if child is self._frontend:
            if self._exit_code is None or (self._exit_code == 0 and self._why_stuck is not None):
                self._fail(self._why_stuck or self._why_no_frontend() or f"The HTTP process {child.end()}.")
            self._worker.send_signal(signal.SIGTERM)
            # A worker that still loads has nothing to finish and does not look at its signals.
            self._later(self._grace.after_drain if self._ready else 0.0, self._worker, signal.SIGKILL)
        elif self._frontend.running:
            if self._exit_code in (None, 0):
                self._fail(self._why_stuck or self._why_failed or f"The model process {child.end()}.")
            # The frontend has seen it too and is telling its clients, if it can have any.
            patience = self._grace.telling if self._ready else 0.0
            self._later(patience, self._frontend, signal.SIGTERM)
            self._later(patience + self._grace.after_failure, self._frontend, signal.SIGKILL)

    def _why_no_frontend(self) -> str | None:
        """Return the sentence that a frontend leaves which cannot serve the model."""
        try:
            return self._context.frontend_failure.read_text(encoding="utf-8")
        except OSError:
            return None

    def _fail(self, sentence: str) -> None:
        self._exit_code = 1
        self._tell.failed(sentence)

    def _later(self, delay: float, child: Child, number: signal.Signals) -> None:
        asyncio.get_running_loop().call_later(delay, child.send_signal, number)


class Vitals:
    """When each child was last heard, and whether all are. `beating` is called once both children were heard anew."""

    def __init__(self, beating: Callable[[], None]) -> None:
        self._beating = beating
        self._heard: dict[str, float] = {}
        self._fresh: set[str] = set()
        self._told = 0.0

    def note(self, child: Child) -> None:
        """Note that a child makes progress."""
        now = time.monotonic()
        self._heard[child.name] = now
        self._fresh.add(child.name)
        if len(self._fresh) == _NUM_CHILDREN and now - self._told >= _SECONDS_BETWEEN_BEATING:
            self._told = now
            self._fresh.clear()
            self._beating()

    def of(self, child: Child) -> str:
        """Return when a child was last heard, as the end of a phrase."""
        heard = self._heard.get(child.name)
        return "not heard yet" if heard is None else f"heard {time.monotonic() - heard:.1f} s ago"


def handled_signals() -> list[signal.Signals]:
    """Return the signals that the supervisor handles. A SIGHUP that nohup has had ignored stays so."""
    handled = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1]
    return handled if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*handled, signal.SIGHUP]


class _Ticks(asyncio.Protocol):
    """Counts the bytes that come through a pipe."""

    def __init__(self) -> None:
        self.count = 0
        self.first = asyncio.Event()
        self.ended = False

    def data_received(self, data: bytes) -> None:
        self.count += len(data)
        self.first.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        self.first.set()


async def wait_for_silence(descriptor: int, timeout: float, note: Callable[[], None]) -> str | None:
    """Listen to the ticks of an event loop, bytes of a pipe; return why it counts as hung, once it does.

    Return None when the pipe ends. The time counts from the first tick on: what comes before it has other limits.
    note: called for ticks that came.
    """
    with open(descriptor, "rb", buffering=0) as pipe:
        _, ticks = await asyncio.get_running_loop().connect_read_pipe(_Ticks, pipe)
        await ticks.first.wait()
        watch = ProgressWatch(timeout, time.monotonic())
        seen = 0
        while not ticks.ended:
            if ticks.count != seen:
                seen = ticks.count
                watch.observe(Heartbeat(0, seen, False), time.monotonic())
                note()
            if verdict := watch.verdict(time.monotonic()):
                return verdict
            await asyncio.sleep(_SECONDS_BETWEEN_HEARTBEAT_CHECKS)
    return None


async def wait_for_hang(address: str, incarnation: int, timeout: float, note: Callable[[], None] = lambda: None) -> str:
    """Listen to the heartbeats of the engine at `address`; return why it counts as hung, once it does.

    timeout: seconds that an engine may take without a turn of its loop, or without a heartbeat. note: called for
    heartbeats that came.
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
                note()
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


async def wait_until_ready(host: str, port: int) -> None:
    """Return once `GET /ready` answers 200. Never gives up: the caller sets the limit."""
    while not await _is_ready(host, port):
        await asyncio.sleep(_SECONDS_BETWEEN_READY_CHECKS)


async def _is_ready(host: str, port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()
