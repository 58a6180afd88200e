"""Jobs for programs that may spin or swell: each runs in a process that is ended with the job it fails at.

A program is a module that calls `job_program.serve_jobs`; `JobProcesses` runs copies of it. Jobs come on a program's
standard input and answers go to its standard output, each as bytes behind their length; the end of the input ends the
program.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

import structlog

from moeserve.frontend.job_program import SIZE_BYTES

log = structlog.get_logger(__name__)

# Of the clock, for a machine that has no time for the process; a program limits its own processor time.
_LONGEST_WAIT_S = 30.0


class JobProcesses:
    """Copies of one program, each with one job at a time. Used by one event loop alone."""

    def __init__(self, module: str, arguments: Sequence[str], num_processes: int, max_answer_bytes: int) -> None:
        """arguments: of the program's command line. A longer answer than `max_answer_bytes` is a failure."""
        self._command = [sys.executable, "-m", module, *arguments]
        self._max_answer_bytes = max_answer_bytes
        self._processes: list[Process | None] = [None] * num_processes
        self._idle: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for place in range(num_processes):
            self._idle.put_nowait(place)

    async def start(self) -> None:
        """Start the processes that wait for jobs, without waiting until they can do them."""
        places = [self._idle.get_nowait() for _ in range(self._idle.qsize())]
        try:
            for place in places:
                await self._running(place)
        finally:
            for place in places:
                self._idle.put_nowait(place)

    async def stop(self) -> None:
        """End the processes. Their jobs fail, and a later job starts a process again."""
        for process in self._processes:
            if process is not None:
                await _end(process)

    async def ask(self, job: bytes) -> bytes | None:
        """Return the answer to a job, as soon as a process is idle; None if the job takes too much of something."""
        # A client that leaves must not leave an answer unread behind.
        return await asyncio.shield(asyncio.ensure_future(self._ask(job)))

    async def _ask(self, job: bytes) -> bytes | None:
        place = await self._idle.get()
        try:
            process = await self._running(place)
            try:
                async with asyncio.timeout(_LONGEST_WAIT_S):
                    return await self._exchange(process, job)
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                await _end(process)
                log.warning("job_ended", command=" ".join(self._command[1:3]), status=process.returncode)
                return None
        finally:
            self._idle.put_nowait(place)

    async def _exchange(self, process: Process, job: bytes) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(len(job).to_bytes(SIZE_BYTES) + job)
        await process.stdin.drain()
        size = int.from_bytes(await process.stdout.readexactly(SIZE_BYTES))
        if size > self._max_answer_bytes:
            raise ConnectionError("the program does not keep to its bounds")
        return await process.stdout.readexactly(size)

    async def _running(self, place: int) -> Process:
        """Return a process, started if it does not run."""
        process = self._processes[place]
        if process is None or process.returncode is not None:
            # A session of its own: an interrupt from the keyboard is for the frontend, which ends the process itself.
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, start_new_session=True
            )
            self._processes[place] = process
        return process


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
