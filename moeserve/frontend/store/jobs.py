"""Jobs: responses in the background, and their journals.

A job's journal holds the engine's outputs, in order; what clients see follows from the job's record and its journal
alone, so any HTTP process can show a job, and can go on with one whose owner has died. A job ends once: the first
process that finds it open decides how.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moeserve.frontend import limits
from moeserve.frontend.errors import ApiError
from moeserve.frontend.store import idempotency
from moeserve.frontend.store.idempotency import Name
from moeserve.frontend.store.store import ROW_BYTES, NoRoom, Shelf

State = Literal["open", "done", "failed", "cancelled"]
_ROWS_AT_ONCE = 64  # rows of a journal in one read, which the event loop shows in one turn


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job as the store has it. record: `moeserve.frontend.jobs.journal.JobRecord`."""

    job_id: str
    caller: bytes
    record: bytes


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job that waits or runs, without its record: many jobs may wait."""

    job_id: str
    caller: bytes
    tries: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a job. failure: the error of a failed job. is_kept: its response was kept. has_begun: it has put
    something out."""

    state: State
    ended_at: float | None
    failure: bytes | None
    is_kept: bool
    has_begun: bool


@dataclass(frozen=True, slots=True)
class News:
    """The new rows of a journal, and the number of its last row; the state is of the same moment."""

    rows: Sequence[bytes]
    number: int
    status: Status
    is_whole: bool


def create(
    shelf: Shelf, job_id: str, record: bytes, owner: str, needs: str | None, name: Name | None, own_items: bytes = b"[]"
) -> str:
    """Enter an open job, unless one has the name; return the job's id. needs: a response that must stay as long as the
    job. own_items: the items of its request, as JSON.

    Raise ApiError: 422 for the name of another request, 429. Raise NoRoom.
    """
    if name is not None and (named := idempotency.find(shelf, name)) is not None:
        return named.kept_id
    counted = "SELECT count(*) FROM jobs WHERE caller = ? AND state = 'open'"
    if shelf.db.execute(counted, (shelf.caller,)).fetchone()[0] >= limits.MAX_OPEN_JOBS_PER_KEY:
        most = limits.MAX_OPEN_JOBS_PER_KEY
        message = f"This key has {most} responses in the background already that have not ended"
        raise ApiError(429, message, type="rate_limit_error", code="too_many_jobs", retry_after_s=5.0)
    needed = needs if needs is not None and shelf.has(needs) else None
    shelf.add(job_id, len(record) + len(own_items), needs=needed, busy=True)
    row = (job_id, shelf.caller, record, own_items, owner)
    shelf.db.execute("INSERT INTO jobs(id, caller, record, input, owner) VALUES (?, ?, ?, ?, ?)", row)
    if name is not None:
        idempotency.enter(shelf, name, job_id)
    return job_id


def find(shelf: Shelf, job_id: str) -> StoredJob | None:
    """Return a job of the caller's, None for an unknown one."""
    row = shelf.db.execute(
        "SELECT record FROM jobs JOIN kept USING (id) WHERE id = ? AND jobs.caller = ? AND NOT hidden",
        (job_id, shelf.caller),
    ).fetchone()
    return None if row is None else StoredJob(job_id, shelf.caller, bytes(row[0]))


def status(shelf: Shelf, job_id: str) -> Status | None:
    row = shelf.db.execute(
        """SELECT state, ended_at, failure, is_kept, EXISTS (SELECT 1 FROM job_outputs WHERE job = id)
           FROM jobs WHERE id = ?""",
        (job_id,),
    ).fetchone()
    if row is None:
        return None
    state, ended_at, failure, is_kept, has_begun = row
    return Status(state, ended_at, None if failure is None else bytes(failure), bool(is_kept), bool(has_begun))


def news(shelf: Shelf, job_id: str, number: int) -> News | None:
    """Return the rows of a journal after that of a number, some at a time; None for a job that is gone."""
    found = status(shelf, job_id)
    if found is None:
        return None
    rows = shelf.db.execute(
        "SELECT number, entries FROM job_outputs WHERE job = ? AND number > ? ORDER BY number LIMIT ?",
        (job_id, number, _ROWS_AT_ONCE),
    ).fetchall()
    latest = rows[-1][0] if rows else number
    return News([bytes(entries) for _, entries in rows], latest, found, len(rows) < _ROWS_AT_ONCE)


def append(shelf: Shelf, owner: str, entries: Mapping[str, bytes]) -> dict[str, NoRoom | None]:
    """Add a row to the journals of jobs; return the jobs that get none: their callers have no room for it, or (None)
    the owner has them no longer open."""
    refused: dict[str, NoRoom | None] = {}
    for job_id, packed in entries.items():
        try:
            with shelf.attempt():
                if not _append(shelf, owner, job_id, packed):
                    refused[job_id] = None
        except NoRoom as lack:
            refused[job_id] = lack
    return refused


def _append(shelf: Shelf, owner: str, job_id: str, packed: bytes) -> bool:
    added = shelf.db.execute(
        """INSERT INTO job_outputs(job, number, entries)
           SELECT id, (SELECT coalesce(max(number) + 1, 0) FROM job_outputs WHERE job = ?1), ?2
           FROM jobs WHERE id = ?1 AND state = 'open' AND owner = ?3""",
        (job_id, packed, owner),
    )
    if added.rowcount == 0:
        return False
    shelf.grow(job_id, len(packed) + ROW_BYTES)
    shelf.db.execute("UPDATE jobs SET tries = 0 WHERE id = ? AND tries > 0", (job_id,))
    return True


def end(shelf: Shelf, job_id: str, state: State, *, failure: bytes | None = None, at: float | None = None) -> bool:
    """Record how an open job ended; return False if it is not open any more. A failed job releases its key.

    at: UNIX time, now by default.
    """
    ended = shelf.db.execute(
        "UPDATE jobs SET state = ?, failure = ?, ended_at = ? WHERE id = ? AND state = 'open'",
        (state, failure, shelf.date if at is None else at, job_id),
    )
    if ended.rowcount == 0:
        return False
    shelf.db.execute("UPDATE kept SET busy = 0, used = ? WHERE id = ?", (shelf.now, job_id))
    if state == "failed":
        shelf.db.execute("DELETE FROM idempotency WHERE id = ?", (job_id,))
    return True


def note_kept(shelf: Shelf, job_id: str) -> None:
    """Record that the response of a job was kept."""
    shelf.db.execute("UPDATE jobs SET is_kept = 1 WHERE id = ?", (job_id,))


def is_open(shelf: Shelf, job_id: str) -> bool:
    found = shelf.db.execute("SELECT 1 FROM jobs WHERE id = ? AND state = 'open'", (job_id,))
    return found.fetchone() is not None


def owners(shelf: Shelf) -> set[str]:
    return {owner for (owner,) in shelf.db.execute("SELECT DISTINCT owner FROM jobs WHERE state = 'open'")}


def open_of(shelf: Shelf, owner: str) -> set[str]:
    found = shelf.db.execute("SELECT id FROM jobs WHERE state = 'open' AND owner = ?", (owner,))
    return {job_id for (job_id,) in found}


def adopt(shelf: Shelf, dead: Collection[str], left: Collection[str], owner: str) -> list[OpenJob]:
    """Give `owner` all open jobs of dead owners, and its own jobs that it has `left`; return them, oldest first."""
    job_ids = [job_id for other in dead for job_id in open_of(shelf, other)] + [*left]
    for job_id in job_ids:
        shelf.db.execute("UPDATE jobs SET owner = ?, tries = tries + 1 WHERE id = ?", (owner, job_id))
    found = []
    for job_id in job_ids:
        query = "SELECT rowid, caller, tries FROM jobs WHERE id = ? AND state = 'open'"
        if (row := shelf.db.execute(query, (job_id,)).fetchone()) is not None:
            found.append((row[0], OpenJob(job_id, bytes(row[1]), row[2])))
    return [job for _, job in sorted(found, key=lambda one: one[0])]
