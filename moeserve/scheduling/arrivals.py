"""Requests that wait outside of the queue until something of theirs has arrived: KV blocks, or knowledge of files.

Threads do the jobs, and their ends are reported. No clock and no input or output here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from moeserve.plan import Request
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.parts import Part
from moeserve.scheduling.request_memory import RankLoads
from radix_cache import Fill, PrefixCache, Room, StoredBlock, begin_fill, is_still_full

LEAST_WAIT_SECONDS = 5.0  # the longest wait of a request for blocks, or for a file lookup
_UNKNOWN_WAIT_SECONDS = 30.0  # the same while it is not known how long computing takes


def longest_wait_s(compute_s: float) -> float:
    """Return how long requests wait for blocks at most. compute_s: to compute these blocks, 0 if not known."""
    return max(compute_s, LEAST_WAIT_SECONDS) if compute_s else _UNKNOWN_WAIT_SECONDS


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """Work of threads. is_cancelled: its result is not wanted any more. is_begun: a thread does it, and ends it soon
    after it is cancelled; always False for a disk, which may hang."""

    is_cancelled: bool = False
    is_begun: bool = False

    @property
    def is_quick(self) -> bool:
        """True if its end is worth a short wait."""
        return False


J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True)
class Result(Generic[J]):
    """The end of a job."""

    job: J
    num_bytes: Sequence[int]  # of each of the job's first blocks, which are copied
    seconds: float  # that this took
    error: str | None = None  # of the next block; None if all are copied or the job was cancelled
    found: Sequence[StoredBlock] = ()  # the first of the blocks that were sought, as they are in the lower tier
    hosted: Sequence[bool] = ()  # of each copied block: it was in the host's memory above the disk


@dataclass(eq=False, slots=True)
class Arrival(Generic[J]):
    """A job, and the requests that wait for its end until `deadline`. fill: the blocks that it fills, None for none."""

    job: J
    deadline: float
    fill: Fill | None
    waiting: list[Request] = field(default_factory=list)


class Arrivals(Generic[J]):
    """The arrivals that are on their way, by their jobs. Once nobody waits for an arrival any more its job is cancelled
    and its lease released; its blocks are free when the job has ended."""

    def __init__(self) -> None:
        self._open: dict[J, Arrival[J]] = {}
        self._of_request: dict[Request, Arrival[J]] = {}
        self._new_jobs: list[J] = []

    @property
    def waiting(self) -> Collection[Request]:
        return self._of_request.keys()

    @property
    def jobs(self) -> Collection[J]:
        """The jobs that have not ended, cancelled ones too."""
        return self._open.keys()

    def find(self, request: Request) -> Arrival[J] | None:
        """Return what a request waits for, None if it does not wait here."""
        return self._of_request.get(request)

    def begin(self, job: J, deadline: float, fill: Fill | None = None) -> Arrival[J]:
        self._new_jobs.append(job)
        arrival = self._open[job] = Arrival(job, deadline, fill)
        return arrival

    def wait(self, request: Request, arrival: Arrival[J]) -> None:
        """Let a request wait until `end`, `leave` or `take_overdue` returns it."""
        arrival.waiting.append(request)
        self._of_request[request] = arrival

    def leave(self, request: Request) -> bool:
        """Forget a request that has ended. Return whether it waited."""
        arrival = self._of_request.pop(request, None)
        if arrival is None:
            return False
        arrival.waiting.remove(request)
        if not arrival.waiting:
            _give_up(arrival)
        return True

    def take_overdue(self, now: float) -> tuple[int, list[Request]]:
        """Cancel what has not arrived in time. Return its number, and the requests that wait no longer.

        Of a job that has begun something may have arrived: its requests wait for its end.
        """
        overdue = [one for one in self._open.values() if now > one.deadline and not one.job.is_cancelled]
        requests: list[Request] = []
        for arrival in overdue:
            if arrival.job.is_begun:
                arrival.job.is_cancelled = True
            else:
                requests += self._dismiss(arrival)
                _give_up(arrival)
        return len(overdue), requests

    def take_jobs(self) -> list[J]:
        """Return the jobs that have come since the last call."""
        jobs, self._new_jobs = self._new_jobs, []
        return jobs

    def end(self, job: J) -> tuple[Arrival[J], list[Request]]:
        """Return what has arrived, and the requests that waited for it."""
        arrival = self._open.pop(job)
        return arrival, self._dismiss(arrival)

    def _dismiss(self, arrival: Arrival[J]) -> list[Request]:
        requests, arrival.waiting = arrival.waiting, []
        for request in requests:
            del self._of_request[request]
        return requests


def _give_up(arrival: Arrival[J]) -> None:
    arrival.job.is_cancelled = True
    if arrival.fill is not None:
        arrival.fill.release()


class Source(Part, ABC, Generic[J]):
    """KV that comes from elsewhere by jobs of threads. `arrivals`: what is on its way."""

    def __init__(self) -> None:
        self.arrivals: Arrivals[J] = Arrivals()
        # By request id, the room that there was when its blocks found none.
        self._no_room: dict[str, Room | None] = {}

    def begin_fill(
        self, request: Request, cache: PrefixCache, stop: int, num_spoken_for: int, names: list[bytes] | None = None
    ) -> Fill | None:
        """Lease blocks for the request's tokens up to block number `stop`. Return None if there is no room for them.

        num_spoken_for: available blocks that other requests need. names: see `begin_fill` of `radix_cache`.
        """
        room = cache.counts.room(num_spoken_for)
        spare = num_spoken_for + -(-len(request.token_ids) // cache.block_size) - stop
        fill = begin_fill(cache, request.token_ids, request.namespace, stop, spare, names)
        self._no_room[request.request_id] = room if fill is None else None
        return fill

    def lacks_room(self, request: Request, cache: PrefixCache, num_spoken_for: int) -> bool:
        """Return whether blocks of the request found no room before, and would find no more now."""
        return is_still_full(cache.counts.room(num_spoken_for), self._no_room.get(request.request_id))

    def left(self, output: RequestOutput) -> None:
        self._no_room.pop(output.request.request_id, None)

    @property
    def writes_last(self) -> bool:
        """True if an ending engine is to write for a moment."""
        return False

    @abstractmethod
    def num_found(self, request: Request) -> int:
        """Count the request's leading tokens that are in memory or there, as far as is known."""

    @abstractmethod
    def is_looked_for(self, request: Request) -> bool:
        """Return whether more of the request's tokens may be found."""

    def concerns(self, request: Request) -> bool:
        """Return whether the request may have KV there."""
        return True

    def seek(self, request: Request, now: float) -> bool:
        """Return whether a request of the queue waits, from now on, until its KV has been looked for."""
        return False

    @abstractmethod
    def look_up(self, request: Request, now: float, loads: RankLoads, num_running: int) -> bool:
        """Return whether a request of the queue waits, from now on, until its KV has come.

        It is then to leave the queue until `end` or `take_overdue` returns it. now: on the scheduler's clock. loads: of
        the `num_running` running requests, beside which the request has to fit.
        """

    def count_found(self, request: Request, num_beyond: int) -> None:
        """Receive a request that ends uncomputed, for which `num_beyond` tokens were found that memory lacks."""

    @abstractmethod
    def take_overdue(self, now: float) -> list[Request]:
        """Return the requests that have waited too long; they are to be computed."""

    @abstractmethod
    def take_jobs(self, now: float, num_running: int) -> list[J]:
        """Return the jobs that are to begin. now: in seconds since the epoch. num_running: requests."""

    @abstractmethod
    def end(self, result: Result[J], now: float) -> list[Request]:
        """Receive the end of a job. Return the requests that go back to the queue."""
