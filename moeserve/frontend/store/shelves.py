"""A shelf holds the things that one caller keeps. It is bounded in bytes and age, and loses the least recently used.

All methods are synchronous.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

# Seconds between two recorded uses of an item: reading does not always write.
_USE_APART_S = 60.0
OVERHEAD_BYTES = 1024  # of the rows around one thing that is kept


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
        """Enter something that is to be kept. needs: another one that is to stay as long as this one."""
        row = (name, self.caller, size + OVERHEAD_BYTES, self.now, needs, busy)
        self.db.execute("INSERT INTO kept(id, caller, size, used, needs, busy) VALUES (?, ?, ?, ?, ?, ?)", row)

    def grow(self, name: str, num_bytes: int) -> None:
        """Add a number of bytes, which may be negative, to the count of something."""
        self.db.execute("UPDATE kept SET size = size + ? WHERE id = ?", (num_bytes, name))

    def is_stale(self, name: str) -> bool:
        """Return whether a use of something is worth a `touch`."""
        row = self.db.execute("SELECT used FROM kept WHERE id = ?", (name,)).fetchone()
        return row is not None and self.now - row[0] > _USE_APART_S

    def touch(self, names: Sequence[str]) -> None:
        """Record that these things, and the things they need, were used now."""
        self.db.executemany(
            """WITH RECURSIVE used_now(id) AS (
                 VALUES (?1) UNION SELECT needs FROM kept JOIN used_now USING (id) WHERE needs IS NOT NULL)
               UPDATE kept SET used = ?2 WHERE id IN used_now""",
            [(name, self.now) for name in names],
        )

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
        """Drop the least recently used things of the caller that keeps most, until all together fit."""
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
    """Drop what no caller has used for too long."""
    query = "SELECT id FROM kept WHERE used < ? AND NOT hidden AND NOT busy"
    for (name,) in shelf.db.execute(query, (shelf.now - shelf.bounds.max_age_s,)).fetchall():
        shelf.drop(name)
    shelf.db.execute("PRAGMA incremental_vacuum(1000)")


def is_overfull(shelf: Shelf) -> bool:
    """Return whether callers keep more than they may, because nothing can make room."""
    return _total(shelf.db) > shelf.bounds.max_bytes


def _total(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT coalesce(sum(num_bytes), 0) FROM shelves").fetchone()[0])
