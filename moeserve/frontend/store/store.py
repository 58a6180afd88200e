"""The store of one HTTP process: shelves of callers, and transactions on threads.

A shelf holds what one caller keeps. Bytes and age are bounded, and the least recently used things are dropped first.
Each caller has a share of the bytes. What it has in use never exceeds its share, and things beyond a share are dropped
before all others, so every caller finds room for as much as its share.

All HTTP processes of a service open one file. Each writes on one thread, a transaction at a time, and reads on others,
so that the event loop waits for no disk and no lock.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from moeserve.forever import Forever
from moeserve.frontend import limits
from moeserve.frontend.errors import ApiError, unavailable
from moeserve.frontend.store.clock import Clock, Instant, boot_id, instant
from moeserve.frontend.store.file import prepare
from moeserve.frontend.store.threads import Threads

# A use is recorded only if the last one was recorded this many seconds ago, so that reading does not always write.
_USE_APART_S = 60.0
OVERHEAD_BYTES = 1024  # of the rows around one kept thing
ROW_BYTES = 128  # of the file, beside the content of one of many rows that belong to a kept thing

log = structlog.get_logger(__name__)

STORE_FULL = "store_full"  # the code of an error
_NUM_READERS = 2
_DROPPED_AT_ONCE = 256  # things that one transaction drops: each takes 0.1 ms or more
_SECONDS_BETWEEN_CLEANINGS = 600.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bytes of all callers together, and the seconds since the last use. share_of: a caller's share of the
    bytes."""

    max_bytes: int
    max_age_s: float
    share_of: Callable[[bytes], float] = lambda _: 1.0


class NoRoom(Exception):
    """A caller's things in use take up its share; there is no room for another one, or for one that grows."""

    def __init__(self, share_bytes: int) -> None:
        super().__init__(share_bytes)
        self.share_bytes = share_bytes


class Crowded(Exception):
    """More things must make room for `num_bytes` of a caller than one transaction drops."""

    def __init__(self, caller: bytes, num_bytes: int) -> None:
        super().__init__(caller, num_bytes)
        self.caller, self.num_bytes = caller, num_bytes


class Shelf:
    """The things of one caller, in one transaction. Other callers' are not found by their ids."""

    def __init__(
        self, db: sqlite3.Connection, caller: bytes, now: float, bounds: Bounds, date: int | None = None
    ) -> None:
        """caller: digest of a key, empty on a server without keys, whose callers share one shelf. now: by the store's
        clock, for ages. date: UNIX time for clients to see; `now` by default."""
        self.db = db
        self.caller = caller
        self.now = now
        self.bounds = bounds
        self.date = int(now) if date is None else date

    @property
    def num_bytes(self) -> int:
        row = self.db.execute("SELECT num_bytes FROM shelves WHERE caller = ?", (self.caller,)).fetchone()
        return 0 if row is None else int(row[0])

    def has(self, name: str) -> bool:
        """Return whether the caller keeps something of that id."""
        found = self.db.execute("SELECT 1 FROM kept WHERE id = ? AND caller = ? AND NOT hidden", (name, self.caller))
        return found.fetchone() is not None

    def add(self, name: str, size: int, *, needs: str | None = None, busy: bool = False) -> None:
        """Enter a thing to keep, and make room for it. Raise NoRoom, Crowded.

        needs: another thing that must stay as long as this one. busy: it is in use, with all that it needs, until
        somebody sets that to 0; it is not dropped meanwhile.
        """
        row = (name, self.caller, size + OVERHEAD_BYTES, self.now, needs, busy)
        self.db.execute("INSERT INTO kept(id, caller, size, used, needs, busy) VALUES (?, ?, ?, ?, ?, ?)", row)
        self._make_room(name, self.caller, size + OVERHEAD_BYTES, is_busy=busy)

    def grow(self, name: str, num_bytes: int) -> None:
        """Add a number of bytes, which may be negative, to the size of a thing of any caller. Raise NoRoom, Crowded."""
        query = "UPDATE kept SET size = size + ? WHERE id = ? RETURNING caller, busy"
        row = self.db.execute(query, (num_bytes, name)).fetchone()
        if row is not None and num_bytes > 0:
            self._make_room(name, bytes(row[0]), num_bytes, is_busy=bool(row[1]))

    def part(self, table: str, column: str, row: int, start: int, size: int) -> bytes:
        """Return bytes of a column's value, from `start` on, without reading the value whole. row: its rowid."""
        with self.db.blobopen(table, column, row, readonly=True) as value:
            value.seek(min(start, len(value)))
            return value.read(size)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Undo the block's part of the transaction where it raises NoRoom."""
        self.db.execute("SAVEPOINT attempt")
        try:
            yield
        except NoRoom:
            self.db.execute("ROLLBACK TO attempt")
            raise
        finally:
            self.db.execute("RELEASE attempt")

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

    def _make_room(self, name: str, caller: bytes, num_bytes: int, *, is_busy: bool) -> None:
        """Drop other things than that of the name until everything fits. num_bytes: that have come. Raise NoRoom,
        Crowded."""
        if is_busy and self._bytes_in_use(caller) > self._share_bytes(caller):
            raise NoRoom(self._share_bytes(caller))
        if not self._drop_some(caller, 0, name):
            raise Crowded(caller, num_bytes)

    def make_way(self, caller: bytes, num_bytes: int) -> bool:
        """Drop things for further bytes of a caller; return whether these fit now. Raise NoRoom."""
        return self._drop_some(caller, num_bytes)

    def _drop_some(self, caller: bytes, num_bytes: int, name: str = "") -> bool:
        for _ in range(_DROPPED_AT_ONCE):
            if _total(self.db) + num_bytes <= self.bounds.max_bytes:
                return True
            victim = self._victim(caller, num_bytes, name)
            if victim is None:
                raise NoRoom(self._share_bytes(caller))
            self.drop(victim)
        return _total(self.db) + num_bytes <= self.bounds.max_bytes

    def _victim(self, caller: bytes, num_bytes: int, name: str) -> str | None:
        """Return the thing to drop next for further bytes of a caller, or for the thing of a name.

        Callers lose their least recently used things in the order in which they exceed their shares. A caller beyond
        its share displaces nothing of a caller that has less of its own.
        """
        sizes = Counter({bytes(one): size for one, size in self.db.execute("SELECT caller, num_bytes FROM shelves")})
        sizes[caller] += num_bytes
        for one, size in sorted(sizes.items(), key=lambda row: (-row[1] / max(1, self._share_bytes(row[0])), row[0])):
            query = """SELECT id FROM kept WHERE caller = ? AND NOT hidden AND NOT busy AND id != ?
                       ORDER BY used, rowid LIMIT 1"""
            if (row := self.db.execute(query, (one, name)).fetchone()) is not None:
                return str(row[0])
            if one == caller and size > self._share_bytes(one):
                return None
        return None

    def _share_bytes(self, caller: bytes) -> int:
        return int(self.bounds.max_bytes * self.bounds.share_of(caller))

    def _bytes_in_use(self, caller: bytes) -> int:
        """Return the bytes of a caller's busy things and of what they need, with whole conversations."""
        query = """WITH busy(id, needs) AS (SELECT id, needs FROM kept WHERE caller = ? AND busy),
                     held(id) AS (SELECT id FROM busy UNION SELECT needs FROM busy WHERE needs IS NOT NULL)
                   SELECT coalesce(sum(size + coalesce(past_size, 0)), 0)
                   FROM held JOIN kept USING (id) LEFT JOIN responses USING (id)"""
        return int(self.db.execute(query, (caller,)).fetchone()[0])


def drop_old(shelf: Shelf) -> bool:
    """Drop some of the things that were not used for too long; return whether there may be more.

    Drop the keys of requests that ended, or whose process died, long ago, with the answers that were kept for them.
    """
    query = "SELECT id FROM kept WHERE used < ? AND NOT hidden AND NOT busy LIMIT ?"
    unused = shelf.db.execute(query, (shelf.now - shelf.bounds.max_age_s, _DROPPED_AT_ONCE)).fetchall()
    for (name,) in unused:
        shelf.drop(name)
    query = """SELECT id, jobs.id IS NULL FROM idempotency JOIN kept USING (id) LEFT JOIN jobs USING (id)
               WHERE (jobs.id IS NULL OR NOT busy) AND used < ? LIMIT ?"""
    found = shelf.db.execute(query, (shelf.now - limits.IDEMPOTENCY_KEY_S, _DROPPED_AT_ONCE)).fetchall()
    for kept_id, is_answer in found:
        if is_answer:
            shelf.drop(kept_id)
        else:
            shelf.db.execute("DELETE FROM idempotency WHERE id = ?", (kept_id,))
    shelf.db.execute("PRAGMA incremental_vacuum(1000)")
    return _DROPPED_AT_ONCE in (len(unused), len(found))


def _total(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT coalesce(sum(num_bytes), 0) FROM shelves").fetchone()[0])


class Store:
    """Runs synchronous work on the shelf of a caller, each call in one transaction."""

    def __init__(self, path: Path, bounds: Bounds, read_clock: Callable[[], Instant] = instant) -> None:
        """read_clock: gives the present moment."""
        self._path = path
        self._bounds = bounds
        self._read_clock = read_clock
        self._clock = Clock(0.0)  # until the store has started
        self._writer = Threads(path, 1)
        self._readers = Threads(path, _NUM_READERS)
        self._watcher = Threads(path, 1)
        self._version = -1  # data_version of the file, as the watcher's connection sees it
        self._cleaning = Forever("cleaning of the store", self._clean, _SECONDS_BETWEEN_CLEANINGS)

    async def start(self) -> None:
        """Make the file if it is not there. Raise StoreError."""
        await asyncio.to_thread(prepare, self._path)
        self._clock = await self.write(b"", lambda shelf: Clock.of(shelf.db, self._read_clock(), boot_id()))
        self._cleaning.start()

    async def stop(self) -> None:
        await self._cleaning.stop()
        for threads in (self._writer, self._readers, self._watcher):
            await threads.stop()

    async def read(self, caller: bytes, work: Callable[[Shelf], _T]) -> _T:
        """Return the result of work that only reads. Raise the work's errors, and ApiError (503) for a bad file."""
        return await self._run(self._readers, "BEGIN", caller, work)

    async def write(self, caller: bytes, work: Callable[[Shelf], _T]) -> _T:
        """Return the result of work, which other processes see as a whole when this returns, or not at all.

        It is done even if its caller is cancelled. It is begun anew where others' things made room for it in
        transactions of their own. Raise the work's errors, and ApiError: 429 where there is no room, 503 for the file's
        faults; then nothing of it is done.
        """
        while True:
            try:
                return await self._run(self._writer, "BEGIN IMMEDIATE", caller, work)
            except Crowded as crowd:
                make_way = partial(Shelf.make_way, caller=crowd.caller, num_bytes=crowd.num_bytes)
            while not await self._run(self._writer, "BEGIN IMMEDIATE", caller, make_way):
                continue

    async def has_changed(self) -> bool:
        """Return whether any process has written since the last call; True where the file does not tell."""
        before = self._version
        try:
            self._version = await self._watcher.run(
                b"", lambda db: int(db.execute("PRAGMA data_version").fetchone()[0])
            )
        except (sqlite3.Error, MemoryError):
            return True
        return self._version != before

    async def _run(self, threads: Threads, begin: str, caller: bytes, work: Callable[[Shelf], _T]) -> _T:
        def transact(db: sqlite3.Connection) -> _T:
            db.execute(begin)
            try:
                now = self._read_clock()
                result = work(Shelf(db, caller, self._clock.time(now), self._bounds, int(now.wall)))
                db.execute("COMMIT")
                return result
            except BaseException:
                with suppress(sqlite3.Error, MemoryError):
                    db.execute("ROLLBACK")
                raise

        try:
            return await threads.run(caller, transact)
        except NoRoom as lack:
            raise store_full(lack) from None
        except (sqlite3.Error, MemoryError) as error:  # SQLITE_NOMEM is a MemoryError.
            log.error("response_store_failed", error=str(error) or type(error).__name__)
            raise store_unavailable() from error

    async def _clean(self) -> None:
        with suppress(ApiError):
            while await self.write(b"", drop_old):
                continue
            await self.write(b"", lambda shelf: self._clock.note(shelf.db, self._read_clock()))


def store_unavailable() -> ApiError:
    """503: the file is full, damaged, or held by another process for too long."""
    return unavailable("The response store cannot be used now", "store_unavailable", 5.0)


def store_full(lack: NoRoom) -> ApiError:
    """429: the caller's things in use take up its share."""
    share = f"{lack.share_bytes / 2**20:.4g} MiB"
    message = (
        f"There is no room for this in the response store: it takes up to {share} of this key's requests and batches "
        "that have not ended. Wait until some have, or cancel them"
    )
    return ApiError(429, message, type="rate_limit_error", code=STORE_FULL, retry_after_s=60.0)
