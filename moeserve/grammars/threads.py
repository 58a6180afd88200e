"""Threads that compile grammars and make masks: a few for quick work, in turn, and a few for slow work, fair by key."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import structlog

from moeserve.forever import repeat
from moeserve.grammars.compiler import GrammarError
from moeserve.grammars.queue import FairJobs

log = structlog.get_logger(__name__)

# Processor time of one slow job. Frontends refuse grammars that compile longer than a small part of it.
_MAX_CPU_SECONDS = 5.0
# The number of threads that are replaced because their job does not end. Nothing can stop such a thread. Beyond it only
# the last one is replaced.
_MAX_LOST = 4
_SECONDS_BETWEEN_LOOKS = 0.25
# At the end threads are awaited for at most this time: a thread that comes back from the library's code while the
# interpreter ends would end the process by a signal.
_SECONDS_TO_END = 2.0
# The threads of slow jobs are nicer than the threads that compute steps: a step waits for all of its threads.
_NICENESS = 10


@dataclass(eq=False, slots=True)
class Job:
    """Work of a thread for a tenant. `result`, `error` and the processor time are set when it is done.

    The owner of the threads receives the job through its queue and calls `done(job)`.
    """

    tenant: str
    run: Callable[[], object]
    done: Callable[[Job], None]
    result: object = None
    error: Exception | None = None
    cpu_seconds: float = 0.0

    def work(self) -> None:
        started = time.thread_time()
        try:
            self.result = self.run()
        except Exception as error:
            self.error = error
        self.cpu_seconds = time.thread_time() - started


class QuickThreads:
    """Threads for jobs of far less than a millisecond, by age. Daemons, started with the first job."""

    def __init__(self, num_threads: int, done: SimpleQueue[Job]) -> None:
        self._num_threads = num_threads
        self._done = done
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def put(self, job: Job) -> None:
        while len(self._threads) < self._num_threads:
            thread = threading.Thread(target=repeat, args=("masks", self._do_next), name="masks", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the threads after all jobs."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(_SECONDS_TO_END)

    def _do_next(self) -> bool:
        """Do the next job; return False where there will be none."""
        if (job := self._jobs.get()) is None:
            return False
        job.work()
        self._done.put(job)
        return True


@dataclass(eq=False, slots=True)
class _Worker:
    """A thread for slow jobs. `job` since it had used `began_at` seconds of processor time, None while it waits.

    is_lost: the job did not end in time; the thread ends with it, and its result is dropped.
    """

    job: Job | None = None
    began_at: float = 0.0
    is_lost: bool = False
    thread: threading.Thread | None = None

    def cpu_seconds(self) -> float:
        """Return the processor time of the job so far."""
        assert self.thread is not None
        assert self.thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident)) - self.began_at


class FairThreads:
    """Threads for jobs that may take long, in the order of `FairJobs`. Daemons, started with the first job."""

    def __init__(self, num_threads: int, max_bytes: int, done: SimpleQueue[Job]) -> None:
        """max_bytes: of all results that are held, see `FairJobs`."""
        self._num_threads = num_threads
        self._done = done
        self._changed = threading.Condition()
        self._jobs = FairJobs[Job](max_bytes)
        self._workers: list[_Worker] = []
        self._num_lost = 0
        self._looked_at = 0.0
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of jobs that wait."""
        return len(self._jobs)

    @property
    def num_held_bytes(self) -> int:
        """The bytes of all held results and of the results that jobs in progress will have."""
        return self._jobs.num_held_bytes

    def put(self, job: Job, num_bytes: int = 0) -> None:
        """Add a job. num_bytes: of its result, which counts as held from the job's beginning until `release`."""
        with self._changed:
            while len(self._workers) < self._num_threads:
                self._start_worker()
            self._jobs.put(job.tenant, job, num_bytes)
            self._changed.notify()

    def remove(self, job: Job) -> bool:
        """Remove a job that has not begun. Return False for any other."""
        with self._changed:
            return self._jobs.remove(job.tenant, job)

    def hold(self, tenant: str, num_bytes: int) -> None:
        with self._changed:
            self._jobs.hold(tenant, num_bytes)

    def release(self, tenant: str, num_bytes: int) -> None:
        with self._changed:
            self._jobs.release(tenant, num_bytes)
            self._changed.notify_all()

    def take_overdue(self) -> list[Job]:
        """Return jobs that have taken too long, failed, and replace their threads. Looks a few times a second."""
        now = time.monotonic()
        if now - self._looked_at < _SECONDS_BETWEEN_LOOKS:
            return []
        self._looked_at, overdue = now, []
        with self._changed:
            for worker in self._workers[:]:
                job = worker.job
                if job is not None and worker.cpu_seconds() > _MAX_CPU_SECONDS:
                    worker.is_lost = True
                    self._workers.remove(worker)
                    error = GrammarError("it takes too long to compile")
                    overdue.append(Job(job.tenant, job.run, job.done, error=error, cpu_seconds=_MAX_CPU_SECONDS))
                    self._replace_lost()
        return overdue

    def close(self) -> None:
        """End the threads after their present jobs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for worker in self._workers:
            assert worker.thread is not None
            worker.thread.join(_SECONDS_TO_END)

    def _start_worker(self) -> None:
        worker = _Worker()
        worker.thread = threading.Thread(target=self._run, args=(worker,), name="grammars", daemon=True)
        self._workers.append(worker)
        worker.thread.start()

    def _replace_lost(self) -> None:
        self._num_lost += 1
        if self._num_lost > _MAX_LOST and self._num_threads > 1:
            self._num_threads -= 1
        else:
            self._start_worker()
        log.error("grammar_thread_lost", lost=self._num_lost, threads=self._num_threads)

    def _run(self, worker: _Worker) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, os.nice(0) + _NICENESS))
        repeat("grammars", partial(self._do_next, worker))

    def _do_next(self, worker: _Worker) -> bool:
        """Do the next job; return False where the worker is to end."""
        with self._changed:
            while (job := self._jobs.pop()) is None and not self._is_closed:
                self._changed.wait()
            if job is None or self._is_closed:
                return False
            worker.began_at = time.thread_time()
            worker.job = job
        job.work()
        with self._changed:
            self._jobs.charge(job.tenant, job.cpu_seconds)
            if worker.is_lost:
                return False
            worker.job = None
        self._done.put(job)
        return True
