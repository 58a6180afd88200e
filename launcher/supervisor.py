"""Starts the model process and the HTTP processes, watches them, starts them again when they fail, and ends them.

A signal, a child's end, a status or a hang is an event in one queue. Events are handled one after the other, so that no
two reactions overlap. A reaction that acts later sets a timer, which signals a child or puts another event.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher.idleness import Idleness
from launcher.life import Life, MemoryKills, RestartPolicy, is_from_outside
from launcher.processes import Child, child_environment, describe_end, start_computing, statuses
from launcher.watches import Vitals, any_is_stopped, wait_for_hang, wait_for_silence, wait_for_stop
from launcher.wills import WillKeeper, allow_wills, wills_within
from moeserve.engine.crashes.judgement import suspicion_after
from moeserve.engine.crashes.record import read_record
from moeserve.run_context import RunContext
from moeserve.statuses import Ended, Failed, Forked, Loading, Ready, Status
from moeserve.wire import EngineNews, Rest, Tick, encode_news

WORKER_MODULE = "launcher.worker"
GROUP_MODULE = "launcher.rank_group"
FRONTEND_MODULE = "launcher.frontend_main"
_WORKER = "model process"
UNENDING = (signal.SIGHUP, signal.SIGUSR1)  # signals that end nothing
# A restart may take at most this many times the seconds of the first start, or of finding a hang if that is longer.
_START_PATIENCE = 5.0
_SILENT_SLICES = 20  # looks at the first start within the time in which it has to report something


@dataclass(frozen=True, kw_only=True)
class Grace:
    """Seconds that children get for each task; then they are killed."""

    naming: float = 0.5  # name the rank that ended
    telling: float = 1.0  # tell clients of a failure
    after_failure: float = 3.0  # end after a failure was told
    after_drain: float = 5.0  # end after a drain
    falling_asleep: float = 15.0  # end when the service falls asleep
    at_once: float = 1.5  # end without a drain
    http_ready: float = 30.0  # answer HTTP for the first time
    reporting: float = 1800.0  # report something of the first start: a large file is read for minutes in between


@dataclass(frozen=True, kw_only=True)
class Listeners:
    """Callbacks of the supervisor.

    All but `loading`, `ready`, `stopping` and `beating` get one sentence: `failed` the reason of exit code 1, `notice`
    the end of a process that is started again, and that it serves again, `state` the answer to SIGUSR1. `beating` is
    called about once a second while both children make progress, or are being started again.
    """

    loading: Callable[[Loading], None]
    ready: Callable[[Ready], None]
    stopping: Callable[[], None]
    failed: Callable[[str], None]
    notice: Callable[[str], None] = lambda _: None
    state: Callable[[str], None] = lambda _: None
    beating: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class _Signal:
    number: signal.Signals


@dataclass(frozen=True)
class _Exited:
    child: Child


@dataclass(frozen=True)
class _Said:
    child: Child
    status: Status


@dataclass(frozen=True)
class _Serving:
    """An HTTP process answers."""

    life: Life


@dataclass(frozen=True)
class _Stuck:
    life: Life
    sentence: str


@dataclass(frozen=True)
class _Due:
    """A process is to be started again."""

    name: str


@dataclass(frozen=True)
class _Wish:
    """HTTP processes wish that the service sleeps, or wakes."""

    rest: Rest


@dataclass(frozen=True)
class _Failed:
    """A task that watches a process failed: nobody would see what becomes of the process."""

    error: BaseException


_Event = _Failed | _Signal | _Exited | _Said | _Serving | _Stuck | _Due | _Wish


class Supervisor:
    """Supervises one service: a worker and a frontend, children of this process.

    With several ranks the worker is torchrun's agent (`launcher.rank_group`), and the ranks die with it, unless
    `worker_module` names another module. A worker that ends after it has served is started again as the engine of
    the next incarnation, and frontends are told. If a process that has loaded the model can be forked, the restart is a
    fork (`launcher.copies`). A frontend that ends is started again on the same listener, while the others serve. The
    service ends after too many restarts (`RestartPolicy`), and at once where the ranks were not all started here.

    `listener` is the listening socket, closed here at the end. All frontends accept from its one queue, so that a
    connection waits for none of them in particular. The modules are the children's entry points:
    `WORKER CONTEXT --status-fd N` and `FRONTEND CONTEXT --fd N --number I --beat-fd M --news-fd L --wills-fd K`. When a
    frontend dies its last wills are executed (`launcher.wills`).

    SIGTERM drains; SIGINT and SIGQUIT stop at once, and so does a second signal of these; SIGHUP has the frontends read
    the keys and the public prefixes again; SIGUSR1 asks for the state.
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
        of_size = WORKER_MODULE if context.config.num_ranks == 1 else GROUP_MODULE
        self._worker_module, self._frontend_module = worker_module or of_size, frontend_module
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lives: list[Life] = []
        self._due: set[str] = set()
        # A user's torchrun ends the other ranks with rank 0.
        joins_again = not context.meets_in_store or self._worker_module == GROUP_MODULE
        max_restarts = context.config.max_restarts if joins_again else 0
        self._frontend_names = frontend_names(context.config.num_frontends)
        self._policies = {name: RestartPolicy(max_restarts) for name in (_WORKER, *self._frontend_names)}
        self._makes_copies = max_restarts > 0 and self._worker_module in (WORKER_MODULE, GROUP_MODULE)
        self._ready: Ready | None = None
        self._has_served = False
        self._seconds_to_load = 0.0
        self._engine_lost_at = 0.0
        self._num_engines_lost = 0
        # By name: the newest life of each frontend, and the pipe that brings it news of the engine.
        self._frontends: dict[str, Life] = {}
        self._news: dict[str, int] = {}
        self._will_keepers: dict[str, WillKeeper] = {}
        self._most_wills = wills_within(allow_wills(context.config), context.config)
        self._orders: int | None = None
        # Set once, by the first event that ends the service; a failure on the way out overrides a clean 0.
        self._exit_code: int | None = None
        self._failure_code = 1
        self._vitals = Vitals(self._policies, listeners.beating)
        self._rest, self._idleness = Rest.AWAKE, Idleness(self._frontend_names, context.config.sleep_after)
        self._wakes_since: float | None = None
        self._memory_kills = MemoryKills()

    @property
    def worker_pid(self) -> int:
        return self._worker.child.pid

    @property
    def frontend_pids(self) -> list[int]:
        return [life.child.pid for life in self._frontends.values()]

    async def run(self) -> int:
        """Serve until stopped and return the exit code. All children are gone when it returns."""
        loop = asyncio.get_running_loop()
        for number in handled_signals():
            loop.add_signal_handler(number, self._events.put_nowait, _Signal(number))
        self._context.save()
        if self._context.shared_metrics is not None:
            self._context.shared_metrics.mkdir(mode=0o700)
        try:
            self._worker = self._start_worker()
            self._worker.starting.append(self._spawn(self._await_report(self._worker)))
            for name in self._frontend_names:
                self._start_frontend(name)
            while self._lives or self._due:
                self._handle(await self._events.get())
        finally:
            for life in self._lives:
                life.child.send_signal(signal.SIGKILL)
            for keeper in self._will_keepers.values():
                keeper.finish()
            for task in self._tasks:
                task.cancel()
            self._listener.close()
        return self._exit_code or 0

    def _start_worker(self) -> Life:
        if self._orders is not None:
            os.close(self._orders)
        child, reading, self._orders = start_computing(
            _WORKER, self._worker_module, self._context, takes_orders=self._makes_copies
        )
        life = self._begin(child)
        status = self._spawn(self._read_status(child, reading))
        self._spawn(self._announce_exit(child, after=status))
        return life

    def _start_frontend(self, name: str) -> Life:
        (beats, beat), (hearing, news) = os.pipe(), os.pipe()
        if (before := self._news.get(name)) is not None:
            os.close(before)
        self._news[name] = news
        os.set_blocking(news, False)
        if name in self._will_keepers:
            self._will_keepers[name].finish()
        keeper = self._will_keepers[name] = WillKeeper(self._most_wills)
        will = keeper.child_end.fileno()
        environment = child_environment(os.environ, 1)
        if (folder := self._context.shared_metrics) is not None:
            # prometheus_client takes it from there alone.
            environment["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        number = self._frontend_names.index(name)
        try:
            child = Child(
                name,
                self._frontend_module,
                [
                    *(str(self._context.file), "--fd", str(self._listener.fileno()), "--number", str(number)),
                    *("--beat-fd", str(beat), "--news-fd", str(hearing), "--wills-fd", str(will)),
                ],
                environment=environment,
                pass_fds=[self._listener.fileno(), beat, hearing, will],
            )
        finally:
            os.close(beat)
            os.close(hearing)
            keeper.child_end.close()
        life = self._frontends[name] = self._begin(child)
        life.tasks.append(self._spawn(self._await_frontend_hang(life, beats)))
        self._spawn(self._announce_exit(child))
        return life

    def _begin(self, child: Child) -> Life:
        life = Life(child, time.monotonic(), child.pid)
        life.starting.append(self._spawn(self._await_stop(life)))
        self._lives.append(life)
        return life

    def _life_of(self, child: Child) -> Life:
        return next(life for life in self._lives if life.child is child)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.put_nowait(_Failed(error))

    async def _announce_exit(self, child: Child, after: asyncio.Task[None] | None = None) -> None:
        await child.ended
        if after is not None:
            # Its last statuses may still be in the pipe.
            await asyncio.wait({after}, timeout=0.5)
        self._events.put_nowait(_Exited(child))

    async def _read_status(self, child: Child, descriptor: int) -> None:
        async for status in statuses(descriptor):
            self._events.put_nowait(_Said(child, status))

    async def _await_stop(self, life: Life) -> None:
        why = await wait_for_stop(life.child.pid, self._context.config.engine_timeout)
        self._events.put_nowait(_Stuck(life, f"{subject(life.child.name)} hung at its start ({why}) and was ended."))

    async def _await_report(self, life: Life) -> None:
        """End a first start that has reported nothing for too long: a kernel may hang, or a disk."""
        limit = self._grace.reporting
        looked, silent = life.num_reports, 0.0
        # Slices, so that the time in which this process was stopped does not count.
        while silent < limit:
            await asyncio.sleep(limit / _SILENT_SLICES)
            silent = silent + limit / _SILENT_SLICES if life.num_reports == looked else 0.0
            looked = life.num_reports
        sentence = f"hung at its start (nothing reported for {limit:g} s) and was ended."
        self._events.put_nowait(_Stuck(life, f"{subject(life.child.name)} {sentence}"))

    async def _await_http(self, life: Life) -> None:
        await asyncio.sleep(self._grace.http_ready)
        sentence = f"{subject(life.child.name)} did not become ready within {self._grace.http_ready:.0f} s."
        self._events.put_nowait(_Stuck(life, sentence))

    async def _await_hang(self, life: Life) -> None:
        context = self._context
        who, timeout = "The model process", context.config.engine_timeout
        if context.config.num_ranks > 1:
            # The ranks themselves notice a hang of another rank in less time, so only a hang of rank 0 is left.
            who, timeout = "Rank 0", 0.7 * timeout
        why = await wait_for_hang(context.heartbeat_address, context.incarnation, timeout, self._on_heartbeat)
        self._events.put_nowait(_Stuck(life, f"{who} hung ({why}) and was ended."))

    def _on_heartbeat(self) -> None:
        self._vitals.record(_WORKER)
        self._memory_kills.record_alive()

    async def _await_first_rank(self, life: Life, pidfd: int) -> None:
        """End the ranks when rank 0 has ended: torchrun's agent would take seconds to end the others and itself."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        await asyncio.sleep(self._grace.naming)
        if self._exit_code is None or self._has_frontend:
            self._events.put_nowait(_Stuck(life, f"Rank 0 (process {life.pid}) ended."))

    async def _await_frontend_hang(self, life: Life, descriptor: int) -> None:
        timeout = self._context.config.engine_timeout
        why = await wait_for_silence(descriptor, timeout, partial(self._on_ticks, life))
        if why is not None:
            self._events.put_nowait(_Stuck(life, f"{subject(life.child.name)} hung ({why}) and was ended."))

    def _on_ticks(self, life: Life, ticks: bytes) -> None:
        """Record that a frontend ticks. The service is ready once all frontends have been; later on a frontend serves
        as soon as it ticks, since the engine may be away."""
        self._vitals.record(life.child.name)
        if life.serves_since is None and (self._has_served or any(tick & Tick.READY for tick in ticks)):
            self._events.put_nowait(_Serving(life))
        now = time.monotonic()
        self._idleness.observe(life.child.name, ticks, now)
        if self._rest is Rest.AWAKE and self._idleness.wants_sleep(life.child.name, now):
            self._events.put_nowait(_Wish(Rest.ASLEEP))
        elif self._rest is Rest.ASLEEP and self._idleness.wants_wake():
            self._events.put_nowait(_Wish(Rest.AWAKE))

    async def _await_start(self, life: Life) -> None:
        limit = _START_PATIENCE * max(self._seconds_to_load, self._context.config.engine_timeout)
        await asyncio.sleep(limit)
        sentence = f"The model process did not load its model again within {limit:.0f} s and was ended."
        self._events.put_nowait(_Stuck(life, sentence))

    def _handle(self, event: _Event) -> None:
        match event:
            case _Failed(error=error):
                raise error
            case _Said(child=child, status=status):
                self._on_status(self._life_of(child), status)
            case _Serving(life=life) if life.serves_since is None:
                life.serve()
                self._on_serving()
            case _Signal(number=number):
                self._on_signal(number)
            case _Exited(child=child):
                life = self._life_of(child)
                self._lives.remove(life)
                life.record_end(child.code)
                life.end()
                self._on_exit(life)
            case _Stuck(life=life, sentence=sentence):
                life.why = life.why or sentence
                life.kill()
                if life.copy is not None:
                    # The process that would report the copy's end may be stopped itself.
                    asyncio.get_running_loop().call_later(self._grace.at_once, self._kill_silent, life)
            case _Due(name=name) if name in self._due:
                self._due.remove(name)
                self._restart(name)
            case _Wish(rest=Rest.ASLEEP) if self._rest is Rest.AWAKE:
                self._fall_asleep()
            case _Wish(rest=Rest.AWAKE) if self._rest is Rest.ASLEEP and self._exit_code in (None, 0):
                self._wake()

    def _kill_silent(self, life: Life) -> None:
        """Kill a child that has not reported the end of its copy."""
        if not life.has_ended:
            life.child.send_signal(signal.SIGKILL)

    def _fall_asleep(self) -> None:
        """End the engine if all of the service serves now, and start none until a client wishes it."""
        serves = self._has_served and self._worker.serves_since is not None and not self._worker.has_ended
        if not serves or self._exit_code is not None or self._context.meets_in_store or _WORKER in self._due:
            return
        self._rest = Rest.FALLING
        self._tell_frontends(self._engine_news())
        self._worker.child.send_signal(signal.SIGTERM)
        self._later(self._grace.falling_asleep, self._worker, signal.SIGKILL)

    def _on_asleep(self) -> None:
        self._rest = Rest.ASLEEP
        self._vitals.excuse(_WORKER)
        self._tell_frontends(self._engine_news())
        self._tell.notice("The service sleeps: the model has left memory, and a request or /wake_up loads it again.")

    def _wake(self) -> None:
        self._rest, self._wakes_since = Rest.AWAKE, time.monotonic()
        self._due.add(_WORKER)
        self._events.put_nowait(_Due(_WORKER))

    def _on_serving(self) -> None:
        """Report once that the service is ready, when all of it is."""
        if self._ready is None or self._exit_code is not None or self._has_served:
            return
        if all(life.serves_since is not None for life in self._frontends.values()):
            self._has_served = True
            self._tell.ready(self._ready)

    def _on_status(self, life: Life, status: Status) -> None:
        life.count_report()
        match status:
            case Loading() if self._ready is None:
                self._tell.loading(status)
            case Ready():
                self._on_ready(life, status)
            case Failed(message=message, code=code, of_settings=of_settings):
                life.record_end(code)
                if of_settings and not self._has_served:
                    self._failure_code = 2
                # A rank that hangs is ended with the others.
                life.was_stopped = life.was_stopped or any_is_stopped(life.child.pid)
                # The first failure is the cause of the next ones.
                life.why = life.why or message
                is_group = self._worker_module == GROUP_MODULE and life.serves_since is not None
                patience = self._grace.naming if is_group else self._grace.at_once
                asyncio.get_running_loop().call_later(patience, life.kill)
            case Forked():
                life.is_copy = True
            case Ended(code=code):
                life.why = life.why or f"The model process {describe_end(code)}."
                life.record_end(code)
                if self._context.meets_in_store and life.serves_since is None:
                    # Another node may have lost the process that its copies come from: start all of them again.
                    life.child.send_signal(signal.SIGKILL)
                    return
                life.end()
                if not self._starts_again(life):
                    life.child.send_signal(signal.SIGTERM)

    def _on_ready(self, life: Life, status: Ready) -> None:
        life.serve()
        if status.pid not in (None, life.child.pid):
            with suppress(ProcessLookupError):
                pidfd, life.pid = os.pidfd_open(status.pid), status.pid
                if life.is_copy:
                    life.copy = pidfd
                else:
                    life.tasks.append(self._spawn(self._await_first_rank(life, pidfd)))
        life.tasks.append(self._spawn(self._await_hang(life)))
        self._vitals.expect(_WORKER)
        self._idleness.begin(time.monotonic())
        if self._ready is None:
            self._ready = status
            self._seconds_to_load = time.monotonic() - life.began
            self._tell_frontends(self._engine_news())
            for frontend in self._frontends.values():
                frontend.starting.append(self._spawn(self._await_http(frontend)))
            self._on_serving()
        elif self._wakes_since is not None:
            self._tell.notice(f"The service is awake, {time.monotonic() - self._wakes_since:.1f} s after it was woken.")
            self._wakes_since = None
        elif self._exit_code in (None, 0):
            pause = time.monotonic() - self._engine_lost_at
            self._tell.notice(f"The model process serves again, {pause:.1f} s after its end.")

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR1:
            self._tell.state(self._state())
            return
        if number == signal.SIGHUP:
            # A frontend that has not begun to tick reads the files at its start.
            for frontend in self._frontends.values():
                if frontend.serves_since is not None:
                    frontend.child.send_signal(number)
            return
        self._tell.stopping()
        drains = number == signal.SIGTERM
        if self._exit_code is None and drains:
            self._drain()
            return
        if self._exit_code in (None, 0):
            self._exit_code = 128 + number
        self._due.clear()
        for frontend in self._frontends.values():
            frontend.child.send_signal(signal.SIGTERM if drains else signal.SIGINT)
        self._worker.child.send_signal(signal.SIGTERM)
        for life in self._lives:
            self._later(self._grace.at_once, life, signal.SIGKILL)

    def _state(self) -> str:
        """Return one line about the service and its processes."""
        doing = "loading" if self._ready is None else "serving" if self._rest is Rest.AWAKE else "asleep"
        lives = ", ".join(f"{life.child.name} {life.pid} {self._vitals.of(life.child.name)}" for life in self._lives)
        return f"{doing if self._exit_code is None else 'stopping'}; {lives}"

    def _drain(self) -> None:
        """Let the frontends finish their streams; the worker ends after the last."""
        self._exit_code = 0
        self._listener.close()
        self._drain_frontends()
        if not self._has_frontend:
            self._end_worker()

    def _drain_frontends(self) -> None:
        self._due &= {_WORKER}
        limit = self._context.config.shutdown_timeout + self._grace.after_drain
        loop = asyncio.get_running_loop()
        for frontend in self._frontends.values():
            frontend.child.send_signal(signal.SIGTERM)
            sentence = f"{subject(frontend.child.name)} did not end within {limit:g} s of SIGTERM and was ended."
            loop.call_later(limit, self._events.put_nowait, _Stuck(frontend, sentence))

    @property
    def _has_frontend(self) -> bool:
        return any(life.child.running for life in self._frontends.values())

    def _on_exit(self, life: Life) -> None:
        if life.child.name in self._frontends:
            self._idleness.forget(life.child.name)
            self._on_frontend_exit(life)
        elif self._rest is Rest.FALLING and self._exit_code in (None, 0):
            self._on_asleep()
        elif (self._exit_code is None or self._has_frontend) and not self._starts_again(life):
            if self._exit_code in (None, 0):
                self._fail(life.why or f"The model process {life.child.end()}.")
            # The frontends inform their clients, if they can have any.
            self._tell_frontends(EngineNews(None, "the engine process ended"))
            patience = self._grace.telling if self._ready else 0.0
            for frontend in self._frontends.values():
                self._later(patience, frontend, signal.SIGTERM)
                self._later(patience + self._grace.after_failure, frontend, signal.SIGKILL)

    def _on_frontend_exit(self, life: Life) -> None:
        if self._exit_code is None and self._has_served and self._starts_again(life):
            return
        if self._exit_code is None or (self._exit_code == 0 and not life.child.ended_well):
            was_serving = self._exit_code is None
            self._fail(life.why or self._why_no_frontend() or f"{subject(life.child.name)} {life.child.end()}.")
            if was_serving and self._has_frontend:
                # The others finish their requests.
                self._drain_frontends()
        if not self._has_frontend:
            self._end_worker()

    def _end_worker(self) -> None:
        self._due.clear()
        self._worker.child.send_signal(signal.SIGTERM)
        # A worker that still loads has nothing to finish and handles no signals yet.
        self._later(self._grace.after_drain if self._ready else 0.0, self._worker, signal.SIGKILL)

    def _starts_again(self, life: Life) -> bool:
        """Start a process that ended again, if it may be; return whether."""
        if self._ready is None or self._exit_code not in (None, 0):
            return False
        if life.child.name in self._due:
            return True
        now, name = time.monotonic(), life.child.name
        policy = self._policies[name]
        delay = policy.next_delay(None if life.serves_since is None else now - life.serves_since)
        if delay is None:
            return False
        if name == _WORKER and life.serves_since is not None:
            self._engine_lost_at = now
            self._num_engines_lost += 1
        self._vitals.excuse(name)
        why = (life.why or f"{subject(name)} {life.child.end()}.").removesuffix(".")
        when = f" in {delay:g} s" if delay else ""
        count = f"{policy.num_restarts} of at most {policy.max_restarts} in a row"
        self._tell.notice(f"{why}; it is started again{when} ({count}).")
        self._due.add(name)
        asyncio.get_running_loop().call_later(delay, self._events.put_nowait, _Due(name))
        return True

    def _restart(self, name: str) -> None:
        if name != _WORKER:
            life = self._start_frontend(name)
            self._write(self._news[name], encode_news(self._engine_news()))
            self._vitals.expect(name)
            life.starting.append(self._spawn(self._await_http(life)))
            return
        self._context = self._next_context()
        self._context.save()
        if self._worker.child.running:
            # The process has the model in memory and makes another copy of itself.
            self._lives.remove(self._worker)
            self._worker = self._begin(self._worker.child)
            self._write(self._orders, f"{self._context.file}\n".encode())
        else:
            # The store of the agent that has ended, which may have served for many lives.
            for store in Path(self._context.run_dir).glob("torchrun-*"):
                store.unlink(missing_ok=True)
            self._worker = self._start_worker()
        self._worker.starting.append(self._spawn(self._await_start(self._worker)))
        self._tell_frontends(self._engine_news())

    def _next_context(self) -> RunContext:
        """Return the context of the engine's next life, and remove the files of the last one."""
        context, life = self._context, self._worker
        out_of_memory = self._memory_kills.may_have_come()
        suspicion = suspicion_after(
            context.suspicion,
            read_record(context.work_record, context.incarnation),
            from_outside=is_from_outside(life.code, was_stopped=life.was_stopped, out_of_memory=out_of_memory),
            now=time.monotonic(),
        )
        remove_files_of(context)
        return replace(context, incarnation=context.incarnation + 1, suspicion=suspicion)

    def _engine_news(self) -> EngineNews:
        seconds, num_restarts = self._seconds_to_load, self._num_engines_lost
        return EngineNews(self._context.incarnation, seconds=seconds, num_restarts=num_restarts, rest=self._rest)

    def _tell_frontends(self, news: EngineNews) -> None:
        for pipe in self._news.values():
            self._write(pipe, encode_news(news))

    def _write(self, pipe: int | None, line: bytes) -> None:
        """Write a line to a child. A child that does not read any more is about to be noticed elsewhere."""
        assert pipe is not None
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(pipe, line)

    def _why_no_frontend(self) -> str | None:
        """Return the sentence that a frontend has left if it cannot serve the model."""
        try:
            return self._context.frontend_failure.read_text(encoding="utf-8")
        except OSError:
            return None

    def _fail(self, sentence: str) -> None:
        self._exit_code = self._failure_code
        self._due.clear()
        self._listener.close()
        self._tell.failed(sentence)

    def _later(self, delay: float, life: Life, number: signal.Signals) -> None:
        asyncio.get_running_loop().call_later(delay, life.child.send_signal, number)


def frontend_names(count: int) -> list[str]:
    """Return a name for each HTTP process, for sentences; with a number from 0 where there are several."""
    return ["HTTP process"] if count == 1 else [f"HTTP process {number}" for number in range(count)]


def subject(name: str) -> str:
    """Return a process's name as the subject that begins a sentence."""
    return name if name[-1].isdigit() else f"The {name}"


def remove_files_of(context: RunContext) -> None:
    """Remove sockets and other files of an engine that has ended, and the contexts of engines before it.

    Its own context stays, which a frontend may yet read.
    """
    run_dir = Path(context.run_dir)
    for path in (*run_dir.glob(f"*.{context.incarnation}"), *run_dir.glob("run.*.json")):
        if path != context.file:
            path.unlink(missing_ok=True)


def handled_signals() -> list[signal.Signals]:
    """Return the signals that the supervisor handles."""
    return [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, *UNENDING]
