"""The text processes of one HTTP process: they get jobs fair by key, and are ended if a job takes too long."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import structlog

from moeserve.frontend import limits
from moeserve.frontend.errors import internal_error
from moeserve.frontend.prepare.prepare import NotHere, Preparer
from moeserve.frontend.prepare.text_messages import (
    PAGE_BYTES,
    SIZE_BYTES,
    Ask,
    Defect,
    Prepared,
    Reply,
    Stage,
    least_seconds,
    pack_ask,
    refusal,
    unpack_reply,
)
from moeserve.frontend.prepare.text_program import CPU_SECONDS, CheckLine
from moeserve.model.spec import ModelError

_T = TypeVar("_T")

_DEAR_SECONDS = 0.05  # processor time of a job beyond this is its key's debt
_MOST_DEBT_S = 0.1  # a key with more debt than this is slow
_FORGIVEN = 0.25  # seconds of debt that a key loses each second
_MAX_IDLE_FLOWS = 1024  # flows without jobs that are remembered

log = structlog.get_logger(__name__)

_MODULE = "moeserve.frontend.prepare.text_program"
_LONGEST_JOB_S = 60.0  # by the clock, for a busy machine; the process bounds its own processor time
_LONGEST_START_S = 120.0
_LONGEST_CHECK_S = 180.0
_MOST_PROCESSES = 4  # that get one body
_HINT_BYTES = 1024  # bodies that begin alike are of one conversation, whose tokens one process knows
_MAX_REPLY_BYTES = 2**30
_PIECE_BYTES = 256 * 1024  # of a frame at most that the event loop copies in one turn
_CORES_PER_PROCESS = 8
# Small bodies of these kinds are prepared on the event loop, unless they ask for a grammar.
_INLINE_KINDS = frozenset({"completions", "detokenize", "prefix", "tokenize", "pin", "warm"})


@dataclass(slots=True)
class _Debt:
    seconds: float = 0.0
    at: float = 0.0

    def left(self, now: float) -> float:
        return max(0.0, self.seconds - _FORGIVEN * (now - self.at))


@dataclass(slots=True)
class _Flow(Generic[_T]):
    """The small or the big jobs of one key, in the order of their arrival."""

    key: Hashable
    is_big: bool
    used: float  # seconds of processor time; the flow with the least is next
    jobs: deque[tuple[_T, int]] = field(default_factory=deque)
    num_running: int = 0


class TextQueue(Generic[_T]):
    """Jobs that wait for one of `num_places` processes.

    Small and big jobs of a key are flows of their own. The flow with the fewest running jobs is next; among several,
    the flow that has used the least processor time. Big jobs, and all jobs of a key whose jobs have lately taken long,
    get one process less than there are: the last one is for jobs that end soon, of any key.
    """

    def __init__(self, num_places: int) -> None:
        self.num_waiting = 0
        self._num_places = num_places
        self._num_running = 0
        self._num_slow = 0  # running jobs that may take long
        self._flows: dict[tuple[Hashable, bool], _Flow[_T]] = {}
        self._debts: dict[Hashable, _Debt] = {}
        self._least_used = 0.0  # by the flow that was served last

    def add(self, key: Hashable, num_bytes: int, job: _T) -> None:
        """Add a job to the queue."""
        name = (key, num_bytes >= limits.BIG_BODY_BYTES)
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = _Flow(key, name[1], self._least_used)
        if not flow.jobs and not flow.num_running:
            flow.used = max(flow.used, self._least_used)
        flow.jobs.append((job, num_bytes))
        self.num_waiting += 1

    def drop(self, key: Hashable, num_bytes: int, job: _T) -> bool:
        """Remove a job that waits; return whether it did."""
        flow = self._flows.get((key, num_bytes >= limits.BIG_BODY_BYTES))
        if flow is None or (job, num_bytes) not in flow.jobs:
            return False
        flow.jobs.remove((job, num_bytes))
        self.num_waiting -= 1
        return True

    def next(self, now: float) -> Running[_T] | None:
        """Return the job that begins now, None if none may. now: seconds on a clock."""
        if self._num_running == self._num_places:
            return None
        may_be_slow = self._num_slow < max(1, self._num_places - 1)
        ready = [flow for flow in self._flows.values() if flow.jobs and (may_be_slow or not self._is_slow(flow, now))]
        if not ready:
            return None
        flow = min(ready, key=lambda flow: (flow.num_running, flow.used))
        job, _ = flow.jobs.popleft()
        self.num_waiting -= 1
        self._least_used = max(self._least_used, flow.used)
        flow.num_running += 1
        self._num_running += 1
        is_slow = self._is_slow(flow, now)
        self._num_slow += is_slow
        return Running(job, flow, is_slow)

    def finish(self, running: Running[_T], cpu_s: float, now: float) -> None:
        """End a job. cpu_s: the processor time that it took."""
        flow = running.flow
        flow.used += cpu_s
        flow.num_running -= 1
        self._num_running -= 1
        self._num_slow -= running.is_slow
        debt = self._debts.get(flow.key, _Debt())
        owed = debt.left(now) + max(0.0, cpu_s - _DEAR_SECONDS)
        if owed:
            self._debts[flow.key] = _Debt(owed, now)
        else:
            self._debts.pop(flow.key, None)
        if len(self._flows) > _MAX_IDLE_FLOWS:
            self._forget_idle(now)

    def _is_slow(self, flow: _Flow[_T], now: float) -> bool:
        debt = self._debts.get(flow.key)
        return flow.is_big or (debt is not None and debt.left(now) > _MOST_DEBT_S)

    def _forget_idle(self, now: float) -> None:
        self._flows = {name: flow for name, flow in self._flows.items() if flow.jobs or flow.num_running}
        self._debts = {key: debt for key, debt in self._debts.items() if debt.left(now)}


@dataclass(frozen=True, slots=True)
class Running(Generic[_T]):
    """A job that runs. is_slow: it counts among the jobs that may take long."""

    job: _T
    flow: _Flow[_T]
    is_slow: bool


def check_model_texts(folder: Path) -> None:
    """Load tokenizer and template once in a process with a limit on time and memory.

    Raise ModelError, also where a library aborts that process.
    """
    command = [sys.executable, "-m", _MODULE, "--check", str(folder)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_LONGEST_CHECK_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"The tokenizer and chat template of {folder} did not load in time.") from None
    lines = [msgspec.json.decode(line, type=CheckLine) for line in done.stdout.splitlines()]
    part = next((line.part for line in reversed(lines) if line.part is not None), "tokenizer")
    last = lines[-1] if lines else CheckLine()
    if last.swelled:
        raise ModelError(f"The {part} of {folder} cannot be used: it takes too much memory.")
    if last.error is not None:
        raise ModelError(last.error)
    if done.returncode == -signal.SIGPROF:
        raise ModelError(f"The {part} of {folder} cannot be used: it takes too long.")
    if done.returncode:
        raise ModelError(f"The {part} of {folder} cannot be used: loading it breaks its library.")


@dataclass(slots=True, eq=False)
class _Job:
    frame: list[bytes]
    num_bytes: int
    hint: int
    eos_token_ids: Sequence[int]
    reply: asyncio.Future[Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class TextProcesses:
    """Owns the processes of one frontend, which `start` or asks start. Used by its event loop alone."""

    def __init__(self, folder: Path, calls: str, reasoning: str, inline: Preparer, num_processes: int = 0) -> None:
        """calls, reasoning: the settings of `choose_shape`. inline: prepares small bodies on the event loop.
        num_processes: by the machine's cores unless given."""
        self._command = [sys.executable, "-m", _MODULE, str(folder), calls, reasoning]
        self._inline = inline
        num_processes = num_processes or max(2, (os.cpu_count() or 1) // _CORES_PER_PROCESS)
        self._workers: list[_Worker | None] = [None] * num_processes
        self._idle = list(range(num_processes))
        self._queue: TextQueue[_Job] = TextQueue(num_processes)
        self._nursery: _Nursery | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the processes, without waiting until they can prepare anything."""
        nursery = self._living_nursery()
        for place in range(len(self._workers)):
            self._workers[place] = nursery.fork(())

    async def stop(self) -> None:
        """End the processes. Their jobs fail, and a later one starts them again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for place, worker in enumerate(self._workers):
            if worker is not None:
                worker.end()
            self._workers[place] = None
        if self._nursery is not None:
            self._nursery.end()
            self._nursery = None

    async def prepare(self, ask: Ask, body: bytes) -> Reply:
        """Return the prepared request of a body, or the error that its client gets."""
        if ask.kind in _INLINE_KINDS and len(body) <= limits.INLINE_BODY_BYTES and ask.coding is None:
            with suppress(NotHere):
                return self._inline.prepare(ask, body)
        hint = hash((ask.owner, body[:_HINT_BYTES]))
        job = _Job(pack_ask(ask, body), len(body) + ask.num_earlier_bytes, hint, ask.model.eos_token_ids)
        self._queue.add(ask.owner, job.num_bytes, job)
        self._turn()
        try:
            return await job.reply
        except asyncio.CancelledError:
            # The client has left. A job that has begun runs to its end.
            self._queue.drop(ask.owner, job.num_bytes, job)
            raise

    def _turn(self) -> None:
        """Begin the jobs for which there are processes."""
        while self._idle and (running := self._queue.next(asyncio.get_running_loop().time())) is not None:
            preferred = running.job.hint % len(self._workers)
            place = preferred if preferred in self._idle else self._idle[-1]
            self._idle.remove(place)
            task = asyncio.create_task(self._run(place, running))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, place: int, running: Running[_Job]) -> None:
        loop, job = asyncio.get_running_loop(), running.job
        reply: Reply | None = None
        began, cpu_s = loop.time(), 0.0
        try:
            reply, cpu_s = await self._do(place, job)
            if isinstance(reply, Defect):
                log.error("text_process_failed", exception=reply.trace)
                reply = internal_error()
            if isinstance(reply, Prepared):
                for one in reply.relaxed:
                    log.warning("tool_schema_relaxed", tool=one.tool, without=one.paths)
        except Exception as error:  # A defect, or a process that cannot be started.
            log.error("text_process_failed", exc_info=error)
            reply = internal_error()
        finally:
            if reply is None:
                job.reply.cancel()
            elif not job.reply.done():
                job.reply.set_result(reply)
            now = loop.time()
            self._queue.finish(running, cpu_s or now - began, now)
            self._idle.append(place)
            self._turn()

    async def _do(self, place: int, job: _Job) -> tuple[Reply, float]:
        """Return a job's reply and its processor time.

        A process that ends while it idles is replaced. A process that ends with the body before its time may have been
        killed from outside: another one gets the body.
        """
        num_ended = 0  # with the body
        for _ in range(_MOST_PROCESSES):
            worker = self._workers[place]
            if worker is None:
                worker = self._workers[place] = self._living_nursery().fork(job.eos_token_ids)
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                await worker.connected()
                async with asyncio.timeout(_LONGEST_JOB_S):
                    return await worker.exchange(job.frame)
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
                page, took = worker.end(), loop.time() - began
                self._workers[place] = None
                log.warning("text_process_ended", stage=page[0])
                if page[0] == Stage.IDLE:
                    continue
                num_ended += 1
                if num_ended == 2 or took >= least_seconds(page):
                    return refusal(page), took
        raise RuntimeError(f"{_MOST_PROCESSES} text processes ended before they had read a body")

    def _living_nursery(self) -> _Nursery:
        if self._nursery is None or not self._nursery.lives:
            self._nursery = _Nursery(self._command)
        return self._nursery


class _Nursery:
    """The process that forks the others, and reaps them at once when they end."""

    def __init__(self, command: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            # A session of its own: an interrupt from the keyboard is for the frontend, which ends the process itself.
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
        self._ended = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._ended, self._reap)

    @property
    def lives(self) -> bool:
        return self._process.returncode is None

    def fork(self, eos_token_ids: Sequence[int]) -> _Worker:
        """Return a new process, to which `connected` is to be called."""
        own, theirs = socket.socketpair()
        page_fd = os.memfd_create("text-stage")
        os.ftruncate(page_fd, PAGE_BYTES)
        page = mmap.mmap(page_fd, PAGE_BYTES)
        page[0] = Stage.IDLE
        with theirs:
            request = msgspec.json.encode(list(eos_token_ids)[: limits.MAX_STOP_TOKEN_IDS])
            with suppress(OSError):  # the nursery has ended, and the process will not connect
                socket.send_fds(self._control, [request], [theirs.fileno(), page_fd])
        os.close(page_fd)
        return _Worker(own, page)

    def end(self) -> None:
        self._control.close()
        if self.lives:
            self._process.kill()
            self._reap()

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._ended)
        os.close(self._ended)
        self._process.wait()


class _Worker:
    """One text process, with one job at a time."""

    def __init__(self, connection: socket.socket, page: mmap.mmap) -> None:
        self._connection = connection
        self._page = page
        self._pid_fd: int | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connected(self) -> None:
        """Wait until the process is there. Raise ConnectionError, IncompleteReadError or TimeoutError."""
        if self._streams is not None:
            return
        self._streams = await asyncio.open_unix_connection(sock=self._connection)
        async with asyncio.timeout(_LONGEST_START_S):
            pid = int.from_bytes(await self._streams[0].readexactly(SIZE_BYTES))
        with suppress(ProcessLookupError):
            self._pid_fd = os.pidfd_open(pid)

    async def exchange(self, frame: Sequence[bytes]) -> tuple[Reply, float]:
        """Return the reply to an ask and the processor time that it took."""
        assert self._streams is not None
        reader, writer = self._streams
        if sum(map(len, frame)) <= _PIECE_BYTES:
            writer.writelines(frame)
            await writer.drain()
        else:
            for part in frame:
                for start in range(0, len(part), _PIECE_BYTES):
                    writer.write(memoryview(part)[start : start + _PIECE_BYTES])
                    await writer.drain()
        head = await reader.readexactly(SIZE_BYTES + CPU_SECONDS.size)
        size = int.from_bytes(head[:SIZE_BYTES])
        if size > _MAX_REPLY_BYTES:
            raise ConnectionError("the process does not keep to its bounds")
        (cpu_s,) = CPU_SECONDS.unpack(head[SIZE_BYTES:])
        return unpack_reply(await reader.readexactly(size)), cpu_s

    def end(self) -> bytes:
        """End the process; return the page of its latest stage."""
        page = self._page[:]
        if self._pid_fd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pid_fd, signal.SIGKILL)
            os.close(self._pid_fd)
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._connection.close()
        self._page.close()
        return page
