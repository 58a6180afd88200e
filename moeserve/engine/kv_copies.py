"""The copies of KV between memory and the tier below it, as the engine's loop sees them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from moeserve.scheduling.lower_tier import CopyJob, CopyResult, Hosted, LowerTier
from moeserve.scheduling.parts import Part
from moeserve.scheduling.waiting_room import WaitingRoom
from radix_cache import Tier

_WAIT_SECONDS = 0.002  # an ending engine looks this often whether its last writes are done
_SEARCH_SECONDS = 0.001  # the longest wait of the engine for a file lookup
_LAST_WRITES_SECONDS = 5.0  # an ending engine writes KV for at most this long


class Copier(Protocol):
    """Carries out the copies between memory and the lower tier, of one rank or of several."""

    @property
    def hosted(self) -> Hosted | None:
        """The blocks of a disk that are in the host's memory as well; None if none are kept there."""

    @property
    def is_busy(self) -> bool:
        """True until the result of every job has been taken."""

    def start(self, job: CopyJob) -> None:
        """Begin a job; `take` returns its result."""

    def take(self, seconds: float = 0.0) -> list[CopyResult]:
        """Return the results since the last call. Wait up to `seconds` for the first."""

    def close(self) -> None:
        """End all threads after their present jobs, without a wait."""


class KvCopies(Part):
    """Hands the copies of a lower tier to a copier, and those that have ended to the requests that wait for them."""

    def __init__(self, lower: LowerTier, copier: Copier, waiting: WaitingRoom) -> None:
        self._lower = lower
        self._copier = copier
        self._waiting = waiting

    def turn(self) -> None:
        self._exchange()

    def wait(self, seconds: float) -> bool:
        """Wait for a copy, also while none is under way: all requests wait for something."""
        self._exchange(seconds)
        return True

    def is_working(self) -> bool:
        return self._copier.is_busy

    def close(self) -> Iterator[None]:
        """Write computed blocks to a disk for a moment, and end the copier."""
        end = time.monotonic() + _LAST_WRITES_SECONDS
        while self._lower.stored.tier is Tier.DISK:
            self._exchange(_WAIT_SECONDS)
            if not self._copier.is_busy or time.monotonic() > end:
                break
            yield
        self._copier.close()

    def _exchange(self, seconds: float = 0.0) -> None:
        """Hand new copies to the copier, and ended copies to the requests. Wait for one up to `seconds`."""
        self._take(seconds)
        if self._start():
            # Files are found at once unless the disk hangs: their requests should not wait for a whole step.
            self._take(_SEARCH_SECONDS)
            self._start()

    def _take(self, seconds: float) -> None:
        for result in self._copier.take(seconds):
            self._waiting.end_job(self._lower, result, time.time())

    def _start(self) -> bool:
        """Start new jobs. Return whether files are sought."""
        jobs = self._waiting.take_jobs(self._lower, time.time())
        for job in jobs:
            self._copier.start(job)
        return any(job.sought is not None for job in jobs)
