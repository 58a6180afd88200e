"""The store of one HTTP process: shelves of callers, and transactions on threads.

A shelf holds what one caller keeps. Bytes and age are bounded, and the least recently used things are dropped first.
All HTTP processes of a service open one file. Each writes on one thread, a transaction at a time, and reads on others,
so that the event loop waits for no disk and no lock.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from moeserve.frontend import limits
from moeserve.frontend.errors import ApiError, unavailable
from moeserve.frontend.store.file import connect, prepare

# A use is recorded only if the last one was recorded this many seconds ago, so that reading does not always write.
_USE_APART_S = 60.0
OVERHEAD_BYTES = 1024  # of the rows around one kept thing

log = structlog.get_logger(__name__)

_NUM_READERS = 2
_SECONDS_BETWEEN_CLEANINGS = 600.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bytes of all callers together, and the seconds since the last use."""

    max_bytes: int
    max_age_s: float


class Shelf:
    """The things of one caller, in one transaction. Other callers' are not found by their ids."""

    def __init__(self, db: sqlite3.Connection, caller: bytes, now: float, bounds: Bounds) -> None:
        """caller: digest of a key, empty on a server without keys, whose callers share one shelf. now: UNIX time."""
        self.db = db
        self.caller = caller
        self.now = now
        self.bounds = bounds

    @property
    def num_bytes(self) -> int:
        row = self.db.execute("SELECT num_bytes FROM shelves WHERE caller = ?", (self.caller,)).fetchone()
        return 0 if row is None else int(row[0])

    def has(self, name: str) -> bool:
        """Return whether the caller keeps something of that id."""
        found = self.db.execute("SELECT 1 FROM kept WHERE id = ? AND caller = ? AND NOT hidden", (name, self.caller))
        return found.fetchone() is not None

    def add(self, name: str, size: int, *, needs: str | None = None, busy: bool = False) -> None:
        """Enter a thing to keep. needs: another thing that must stay as long as this one."""
        row = (name, self.caller, size + OVERHEAD_BYTES, self.now, needs, busy)
        self.db.execute("INSERT INTO kept(id, caller, size, used, needs, busy) VALUES (?, ?, ?, ?, ?, ?)", row)

    def grow(self, name: str, num_bytes: int) -> None:
        """Add a number of bytes, which may be negative, to the size of a thing."""
        self.db.execute("UPDATE kept SET size = size + ? WHERE id = ?", (num_bytes, name))

    def is_stale(self, name: str) -> bool:
        """Return whether a thing was last touched long enough ago for another `touch`."""
        row = self.db.execute("SELECT used FROM kept WHERE id = ?", (name,)).fetchone()
        return row is not None and self.now - row[0] > _USE_APART_S

    def touch(self, names: Sequence[str]) -> None:
        """Record a use, now, of these things and of the things they need."""
        self.db.executemany(
            """WITH RECURSIVE used_now(id) AS (
                 VALUES (?1) UNION SELECT needs FROM kept JOIN used_now USING (id) WHERE needs IS NOT NULL)
               UPDATE kept SET used = ?2 WHERE id IN used_now""",
            [(name, self.now) for name in names],
        )

    def delete(self, name: str) -> bool:
        """Drop a thing of the caller's; return whether it was there. Things that need it keep it, hidden."""
        is_there = self.has(name)
        if is_there:
            self.drop(name)
        return is_there

    def drop(self, name: str) -> None:
        """Drop a thing and the hidden things that only it needs; hide it while another thing needs it."""
        found: str | None = name
        while found is not None:
            if self.db.execute("SELECT 1 FROM kept WHERE needs = ?", (found,)).fetchone() is not None:
                self.db.execute("UPDATE kept SET hidden = 1 WHERE id = ?", (found,))
                return
            row = self.db.execute("DELETE FROM kept WHERE id = ? RETURNING needs", (found,)).fetchone()
            needed = None if row is None else row[0]
            hidden = self.db.execute("SELECT id FROM kept WHERE id = ? AND hidden", (needed,)).fetchone()
            found = None if hidden is None else hidden[0]

    def make_room(self) -> None:
        """Drop the least recently used things of the caller that keeps most, until everything fits."""
        while _total(self.db) > self.bounds.max_bytes:
            callers = self.db.execute("SELECT caller FROM shelves ORDER BY num_bytes DESC, caller")
            oldest = next((name for (caller,) in callers if (name := self._oldest_of(caller)) is not None), None)
            if oldest is None:
                return
            self.drop(oldest)

    def _oldest_of(self, caller: bytes) -> str | None:
        row = self.db.execute(
            "SELECT id FROM kept WHERE caller = ? AND NOT hidden AND NOT busy ORDER BY used, rowid LIMIT 1", (caller,)
        ).fetchone()
        return None if row is None else str(row[0])


def drop_old(shelf: Shelf) -> None:
    """Drop the things that were not used for too long.

    Drop old keys of requests as well, with the answers that were kept only for them.
    """
    query = "SELECT id FROM kept WHERE used < ? AND NOT hidden AND NOT busy"
    for (name,) in shelf.db.execute(query, (shelf.now - shelf.bounds.max_age_s,)).fetchall():
        shelf.drop(name)
    query = """SELECT job, EXISTS (SELECT 1 FROM responses WHERE id = job) FROM idempotency JOIN jobs ON jobs.id = job
               WHERE ended_at < ?"""
    for job_id, is_response in shelf.db.execute(query, (shelf.now - limits.IDEMPOTENCY_KEY_S,)).fetchall():
        if is_response:
            shelf.db.execute("DELETE FROM idempotency WHERE job = ?", (job_id,))
        else:
            shelf.drop(job_id)
    shelf.db.execute("PRAGMA incremental_vacuum(1000)")


def is_overfull(shelf: Shelf) -> bool:
    """Return whether callers keep more than they may, because everything is in use."""
    return _total(shelf.db) > shelf.bounds.max_bytes


def _total(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT coalesce(sum(num_bytes), 0) FROM shelves").fetchone()[0])


class Store:
    """Runs synchronous work on the shelf of a caller, each call in one transaction."""

    def __init__(self, path: Path, bounds: Bounds) -> None:
        self._path = path
        self._bounds = bounds
        self._writer = _Threads(path, 1)
        self._readers = _Threads(path, _NUM_READERS)
        self._watcher = _Threads(path, 1)
        self._version = -1  # data_version of the file, as the watcher's connection sees it
        self._cleaning: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Make the file if it is not there. Raise StoreError."""
        await asyncio.to_thread(prepare, self._path)
        self._cleaning = asyncio.create_task(self._clean())

    async def stop(self) -> None:
        if self._cleaning is not None:
            self._cleaning.cancel()
            await asyncio.gather(self._cleaning, return_exceptions=True)
        for threads in (self._writer, self._readers, self._watcher):
            await threads.stop()

    async def read(self, caller: bytes, work: Callable[[Shelf], _T]) -> _T:
        """Return the result of work that only reads. Raise the work's errors, and ApiError (503) for a bad file."""
        return await self._run(self._readers, "BEGIN", caller, work)

    async def write(self, caller: bytes, work: Callable[[Shelf], _T]) -> _T:
        """Return the result of work, which other processes see as a whole when this returns, or not at all.

        It is done even if its caller is cancelled. Raise the work's errors, and ApiError (503) for the file's faults;
        then nothing of it is done.
        """
        return await self._run(self._writer, "BEGIN IMMEDIATE", caller, work)

    async def has_changed(self) -> bool:
        """Return whether any process has written since the last call; True where the file does not tell."""
        before = self._version
        try:
            self._version = await self._watcher.run(lambda db: int(db.execute("PRAGMA data_version").fetchone()[0]))
        except sqlite3.Error:
            return True
        return self._version != before

    async def _run(self, threads: _Threads, begin: str, caller: bytes, work: Callable[[Shelf], _T]) -> _T:
        def transact(db: sqlite3.Connection) -> _T:
            db.execute(begin)
            try:
                result = work(Shelf(db, caller, time.time(), self._bounds))
                db.execute("COMMIT")
                return result
            except BaseException:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise

        try:
            return await threads.run(transact)
        except sqlite3.Error as error:
            log.error("response_store_failed", error=str(error))
            raise store_unavailable() from error

    async def _clean(self) -> None:
        while True:
            with suppress(ApiError):
                await self.write(b"", drop_old)
            await asyncio.sleep(_SECONDS_BETWEEN_CLEANINGS)


class _Threads:
    """Threads that have a connection each while they work."""

    def __init__(self, path: Path, num_threads: int) -> None:
        self._path = path
        self._idle: list[sqlite3.Connection] = []
        self._pool = ThreadPoolExecutor(num_threads, "store")

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._work, work)

    async def stop(self) -> None:
        """Wait for the transactions that have begun, and close the file."""
        await asyncio.to_thread(self._pool.shutdown)
        for connection in self._idle:
            connection.close()

    def _work(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        connection = self._idle.pop() if self._idle else connect(self._path)
        try:
            return work(connection)
        finally:
            self._idle.append(connection)


def store_unavailable() -> ApiError:
    """503: the file is full, damaged, or held by another process for too long."""
    return unavailable("The response store cannot be used now", "store_unavailable", 5.0)
