"""The clock by which the store counts ages: it goes on evenly, whatever the machine's clock is set to.

Its time is close to UNIX time when a file is new. While the machine runs it follows the clock that nobody sets, in all
processes alike. What the machine's clock was set by is noted from time to time, so that the time goes on evenly after
the next boot, too.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

_SET_S = 60.0  # a clock that is off by more seconds was set; by fewer it was corrected
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Instant:
    """A moment. wall: UNIX time of the machine's clock. steady: seconds since the machine's boot."""

    wall: float
    steady: float


def instant() -> Instant:
    return Instant(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))


def boot_id() -> str:
    return _BOOT_ID.read_text().strip()


class Clock:
    """The clock of one file, which shows the same time to every process that has it open."""

    def __init__(self, beginning: float) -> None:
        """beginning: the time at the machine's boot."""
        self._beginning = beginning

    @classmethod
    def of(cls, db: sqlite3.Connection, now: Instant, boot: str) -> Clock:
        """Return the clock of a file, which begins in this transaction unless it goes already."""
        row = db.execute("SELECT boot, beginning, behind FROM clock").fetchone()
        known, beginning, behind = row or ("", 0.0, 0.0)
        if known != boot:
            (latest,) = db.execute("SELECT coalesce(max(used), 0.0) FROM kept").fetchone()
            beginning = max(now.wall - behind, latest) - now.steady
            db.execute("DELETE FROM clock")
            db.execute("INSERT INTO clock(boot, beginning, behind) VALUES (?, ?, ?)", (boot, beginning, behind))
        return cls(beginning)

    def time(self, now: Instant) -> float:
        return self._beginning + now.steady

    def note(self, db: sqlite3.Connection, now: Instant) -> None:
        """Note by how much this clock is behind the machine's, if that has changed."""
        behind = now.wall - self.time(now)
        db.execute("UPDATE clock SET behind = ?1 WHERE abs(behind - ?1) > ?2", (behind, _SET_S))
