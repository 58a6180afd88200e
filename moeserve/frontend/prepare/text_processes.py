"""Has bodies prepared in text processes, which can be ended, and small ones that need no program on the event loop."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from moeserve.frontend import limits
from moeserve.frontend.http import internal_error, unavailable
from moeserve.frontend.prepare.messages import SIZE_BYTES, Ask, Reply, pack_ask, unpack_reply
from moeserve.frontend.prepare.prepare import NotHere, Preparer
from moeserve.frontend.prepare.text_program import CPU_SECONDS, CheckLine
from moeserve.frontend.prepare.text_queue import QueueFull, Running, TextQueue
from moeserve.frontend.prepare.watch import PAGE_BYTES, Stage, refusal
from moeserve.model.spec import ModelError

log = structlog.get_logger(__name__)

_MODULE = "moeserve.frontend.prepare.text_program"
_LONGEST_JOB_S = 60.0  # on the clock, for a machine that has no time for the process; it bounds its processor time
_LONGEST_START_S = 120.0
_LONGEST_CHECK_S = 180.0
_HINT_BYTES = 1024  # bodies that begin alike are of one conversation, whose tokens one process knows
_MAX_REPLY_BYTES = 2**30
_CORES_PER_PROCESS = 8
# Small bodies of these kinds are prepared on the event loop, unless they ask for a grammar.
_INLINE_KINDS = frozenset({"completions", "detokenize", "prefix", "tokenize", "unpin", "warm"})


def check_model_texts(folder: Path) -> None:
    """Load tokenizer and template once in a process with a limit on time and memory.

    Raises ModelError, also where a library aborts that process.
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

    async def start(self) -> None:
        """Start the processes, without waiting until they can prepare anything."""
        nursery = await self._living_nursery()
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
            await self._nursery.end()
            self._nursery = None

    async def prepare(self, ask: Ask, body: bytes) -> Reply:
        """Return the prepared request of a body, or the error that its client gets."""
        if ask.kind in _INLINE_KINDS and len(body) <= limits.INLINE_BODY_BYTES and ask.coding is None:
            with suppress(NotHere):
                return self._inline.prepare(ask, body)
        hint = hash((ask.owner, body[:_HINT_BYTES]))
        job = _Job(pack_ask(ask, body), len(body), hint, ask.model.eos_token_ids)
        try:
            self._queue.add(ask.owner, job.num_bytes, job)
        except QueueFull:
            return unavailable("The server is converting too much text already", "too_much_text")
        self._turn()
        try:
            return await job.reply
        except asyncio.CancelledError:
            # The client has left; a job that has begun goes on to its end.
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
        began, cpu_s = loop.time(), 0.0
        try:
            reply, cpu_s = await self._do(place, job)
            if not job.reply.done():
                job.reply.set_result(reply)
        except Exception as error:  # A defect, or a process that cannot be started.
            log.error("text_process_failed", exc_info=error)
            if not job.reply.done():
                job.reply.set_result(internal_error())
        finally:
            job.reply.cancel()
            now = loop.time()
            self._queue.finish(running, cpu_s or now - began, now)
            self._idle.append(place)
            self._turn()

    async def _do(self, place: int, job: _Job) -> tuple[Reply, float]:
        """Return a job's reply and its processor time. A process that ends while it idles is replaced."""
        for _ in range(2):
            worker = self._workers[place]
            if worker is None:
                worker = self._workers[place] = (await self._living_nursery()).fork(job.eos_token_ids)
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                await worker.connected()
                async with asyncio.timeout(_LONGEST_JOB_S):
                    return await worker.exchange(job.frame)
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
                page = worker.end()
                self._workers[place] = None
                log.warning("text_process_ended", stage=page[0])
                if page[0] != Stage.IDLE:
                    return refusal(page), loop.time() - began
        raise RuntimeError("two text processes ended before they began with a body")

    async def _living_nursery(self) -> _Nursery:
        if self._nursery is None or not self._nursery.lives:
            self._nursery = await _Nursery.start(self._command)
        return self._nursery


class _Nursery:
    """The process that forks the others."""

    def __init__(self, process: Process, control: socket.socket) -> None:
        self._process = process
        self._control = control

    @classmethod
    async def start(cls, command: Sequence[str]) -> _Nursery:
        own, theirs = socket.socketpair()
        with theirs:
            # A session of its own: an interrupt from the keyboard is for the frontend, which ends the process itself.
            process = await asyncio.create_subprocess_exec(
                *command, stdin=theirs.fileno(), stdout=DEVNULL, start_new_session=True
            )
        return cls(process, own)

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

    async def end(self) -> None:
        self._control.close()
        if self.lives:
            self._process.kill()
        await self._process.wait()


class _Worker:
    """One text process, with one job at a time."""

    def __init__(self, connection: socket.socket, page: mmap.mmap) -> None:
        self._connection = connection
        self._page = page
        self._pid_fd: int | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connected(self) -> None:
        """Wait until the process is there. Raises ConnectionError, IncompleteReadError or TimeoutError."""
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
        writer.writelines(frame)
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
