"""KV that moves, as the engine's loop sees it: jobs of a source go to threads, results to the waiting requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Generic, Protocol

from moeserve.scheduling.arrivals import J, Result, Source
from moeserve.scheduling.parts import Part
from moeserve.scheduling.waiting_room import WaitingRoom

_WAIT_SECONDS = 0.002  # of one wait for jobs that end, as the last writes of an ending engine
_QUICK_SECONDS = 0.001  # the engine waits this long for a job that is quick
_LAST_WRITES_SECONDS = 5.0  # an ending engine writes KV for this time at most


class Mover(Protocol[J]):
    """Carries out the jobs of a source on threads, or has other ranks do it. One thread calls the methods."""

    @property
    def is_busy(self) -> bool:
        """True until the result of every job has been taken."""

    def start(self, job: J) -> None:
        """Begin a job; `take` returns its result."""

    def take(self, seconds: float = 0.0) -> list[Result[J]]:
        """Return the results since the last call. Wait up to `seconds` for the first."""

    def close(self) -> None:
        """End all threads after their present jobs, without a wait."""


class KvMoves(Part, Generic[J]):
    """Hands the jobs of a source to a mover, and their results to the requests that wait for them."""

    def __init__(self, source: Source[J], mover: Mover[J], waiting: WaitingRoom) -> None:
        self._source = source
        self._mover = mover
        self._waiting = waiting

    def turn(self) -> None:
        self._exchange()

    def wait(self, seconds: float) -> bool:
        """Wait for a job that ends, also where requests wait for no more than memory that is being copied."""
        if not (self._source.arrivals.waiting or self._mover.is_busy):
            return False
        self._exchange(seconds)
        return True

    def is_working(self) -> bool:
        return self._mover.is_busy

    def close(self) -> Iterator[None]:
        """Write for a moment the blocks that are to outlive the engine, and end the mover."""
        end = time.monotonic() + _LAST_WRITES_SECONDS
        while self._source.writes_last:
            self._exchange(_WAIT_SECONDS)
            if not self._mover.is_busy or time.monotonic() > end:
                break
            yield
        self._mover.close()

    def _exchange(self, seconds: float = 0.0) -> None:
        """Hand ended jobs to the requests, and new ones to the mover. Wait up to `seconds` for one that ends."""
        self._take(seconds)
        if self._start():
            # The requests of a quick job should not wait for a whole step.
            self._take(_QUICK_SECONDS)
            self._start()

    def _take(self, seconds: float) -> None:
        for result in self._mover.take(seconds):
            self._waiting.end_job(self._source, result, time.time())

    def _start(self) -> bool:
        """Start new jobs. Return whether one of them is quick."""
        jobs = self._waiting.take_jobs(self._source, time.time())
        for job in jobs:
            self._mover.start(job)
        return any(job.is_quick for job in jobs)
