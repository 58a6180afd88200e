"""The part between a source of KV and its threads: quick jobs end in the turn that begins them, nothing is left."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from moeserve.engine.kv.moves import KvMoves
from moeserve.scheduling.arrivals import Job, Result


@dataclass(eq=False, slots=True)
class Search(Job):
    @property
    def is_quick(self) -> bool:
        return True


@dataclass
class AtOnce:
    """Ends each job when its result is asked for."""

    open: list[Any] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    is_closed: bool = False

    @property
    def is_busy(self) -> bool:
        return bool(self.open)

    def start(self, job: Any) -> None:
        self.open.append(job)

    def take(self, seconds: float = 0.0) -> list[Any]:
        self.waits.append(seconds)
        ended, self.open = self.open, []
        return [Result(job, [], 0.0) for job in ended]

    def close(self) -> None:
        self.is_closed = True


class Room:
    """Stands for the waiting room: gives out jobs, and keeps the ended ones."""

    def __init__(self, *jobs: list[Any]) -> None:
        self._jobs = list(jobs)
        self.ended: list[Any] = []

    def take_jobs(self, source: object, now: float) -> list[Any]:
        return self._jobs.pop(0) if self._jobs else []

    def end_job(self, source: object, result: Result[Any], now: float) -> None:
        self.ended.append(result.job)


def source(*, waiting: int = 0, writes_last: bool = False) -> Any:
    return SimpleNamespace(arrivals=SimpleNamespace(waiting=range(waiting)), writes_last=writes_last)


def test_a_quick_job_ends_in_the_turn_that_begins_it_and_its_successors_begin_there() -> None:
    search, read = Search(), Job()
    room, mover = Room([search], [read]), AtOnce()
    KvMoves(source(), mover, room).turn()  # type: ignore[arg-type]
    assert (room.ended, mover.open) == ([search], [read])


def test_other_jobs_are_left_to_the_next_turn_without_a_wait() -> None:
    read = Job()
    room, mover = Room([read]), AtOnce()
    moves = KvMoves(source(), mover, room)  # type: ignore[arg-type]
    moves.turn()
    assert (room.ended, moves.is_working()) == ([], True)
    moves.turn()
    assert (room.ended, mover.waits) == ([read], [0.0, 0.0])


def test_the_engine_waits_here_only_for_what_is_under_way() -> None:
    assert not KvMoves(source(), AtOnce(), Room()).wait(0.5)  # type: ignore[arg-type]
    for waiting, jobs in ((1, []), (0, [Job()])):
        mover = AtOnce(jobs)
        assert KvMoves(source(waiting=waiting), mover, Room()).wait(0.5)  # type: ignore[arg-type]
        assert mover.waits == [0.5]


def test_an_engine_that_ends_writes_what_is_to_outlive_it_and_then_ends_the_threads() -> None:
    first, last = Job(), Job()
    room, mover = Room([first], [last]), AtOnce()
    slices = list(KvMoves(source(writes_last=True), mover, room).close())  # type: ignore[arg-type]
    assert (room.ended, mover.is_closed, len(slices)) == ([first, last], True, 2)
    room, mover = Room([first]), AtOnce()
    assert list(KvMoves(source(), mover, room).close()) == []  # type: ignore[arg-type]
    assert (room.ended, mover.is_closed) == ([], True)
