"""Batches of requests: the lines that have no answer yet. Answers are in the batch's output and error file."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.batch_lines import BatchLine, LinePlace, repeated, result_line
from moeserve.frontend.listing import Page
from moeserve.frontend.store import files
from moeserve.frontend.store.store import Shelf

BATCH_PREFIX = "batch_"
WINDOW_S = 86_400  # seconds that a batch may take
BatchState = Literal["validating", "in_progress", "completed", "failed", "expired", "cancelling", "cancelled"]
RUNNING = ("validating", "in_progress")
_OPEN = (*RUNNING, "cancelling")
_IS_OPEN = f"state IN {_OPEN}"
_LINES_AT_ONCE = 500  # lines that one transaction closes
_PART_BITS = 16  # of the place of a piece of an answer, behind the number of its line
_EXPIRED = {"code": "batch_expired", "message": "The batch's time was over before this request was answered"}
_LINE_BYTES = 320  # of a line without an answer, beside its `custom_id`


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch. created: UNIX time. metadata, errors: JSON. times: UNIX times by state, as JSON. total: its lines, once
    they are known. tries: processes that have died while they had it.
    """

    batch_id: str
    caller: bytes
    state: BatchState
    path: str
    input_file: str
    created: int
    metadata: bytes
    times: str
    errors: bytes | None
    total: int
    succeeded: int
    failed: int
    tries: int
    output_file: str | None
    error_file: str | None


class OpenBatch(NamedTuple):
    """A batch that has not ended. owner: the HTTP process that works on it, "" for none."""

    batch_id: str
    caller: bytes
    state: BatchState
    owner: str


_COLUMNS = """id, caller, state, path, input_file, created, metadata, times, errors, total, succeeded, failed, tries,
              output_file, error_file"""


def add_batch(shelf: Shelf, owner: str, path: str, input_file: str, metadata: bytes) -> StoredBatch | None:
    """Enter a batch of a file that the caller has; return None where too many of the caller's are open. Raise
    NoRoom."""
    counted = f"SELECT count(*) FROM batches WHERE caller = ? AND {_IS_OPEN}"
    if shelf.db.execute(counted, (shelf.caller,)).fetchone()[0] >= limits.MAX_OPEN_BATCHES_PER_KEY:
        return None
    batch_id = BATCH_PREFIX + secrets.token_hex(12)
    shelf.add(batch_id, len(metadata), needs=input_file, busy=True)
    shelf.db.execute(
        """INSERT INTO batches(id, caller, owner, state, path, input_file, created, expires, metadata)
           VALUES (?, ?, ?, 'validating', ?, ?, ?, ?, ?)""",
        (batch_id, shelf.caller, owner, path, input_file, shelf.date, shelf.now + WINDOW_S, metadata),
    )
    return find(shelf, batch_id)


def find(shelf: Shelf, batch_id: str) -> StoredBatch | None:
    query = f"SELECT {_COLUMNS} FROM batches WHERE id = ? AND caller = ?"
    row = shelf.db.execute(query, (batch_id, shelf.caller)).fetchone()
    return None if row is None else StoredBatch(*row)


def listed(shelf: Shelf, page: Page) -> tuple[list[StoredBatch], bool]:
    """Return batches of the caller's, and whether there are further ones. Raise ApiError."""
    found, has_more = files.rows_of_page(shelf, "batches", _COLUMNS, page)
    return [StoredBatch(*row) for row in found], has_more


def open_ones(shelf: Shelf) -> list[OpenBatch]:
    """Return the open batches of all callers, the oldest first; those whose time is over as expired."""
    state = "CASE WHEN expires < ? AND state != 'cancelling' THEN 'expired' ELSE state END"
    query = f"SELECT id, caller, {state}, owner FROM batches WHERE {_IS_OPEN} ORDER BY rowid"
    return [OpenBatch(*row) for row in shelf.db.execute(query, (shelf.now,))]


def take(shelf: Shelf, batch_id: str, before: str, owner: str) -> StoredBatch | None:
    """Give a batch that runs to `owner`, or to nobody (""); return None unless it still belongs to `before`.

    Lines that `before` had are free again. They, and the batch, count a try where another process takes them.
    """
    has_died = "" not in (before, owner) and before != owner
    row = shelf.db.execute(
        f"""UPDATE batches SET owner = ?, tries = tries + ?
            WHERE id = ? AND owner = ? AND state IN {RUNNING} RETURNING {_COLUMNS}""",
        (owner, has_died, batch_id, before),
    ).fetchone()
    if row is None:
        return None
    free = "UPDATE batch_lines SET running = 0, tries = tries + ? WHERE batch = ? AND running"
    shelf.db.execute(free, (has_died, batch_id))
    return StoredBatch(*row)


def move(shelf: Shelf, batch_id: str, before: Collection[str], state: BatchState, total: int | None = None) -> bool:
    """Move a batch from a state in `before` to `state`, and record the time; return False from any other state."""
    moved = shelf.db.execute(
        f"""UPDATE batches SET state = ?, times = json_set(times, ?, ?), total = coalesce(?, total)
            WHERE id = ? AND state IN ({",".join("?" * len(before))})""",
        (state, f"$.{state}", shelf.date, total, batch_id, *before),
    )
    return moved.rowcount > 0


def add_lines(shelf: Shelf, batch_id: str, start: int, places: Iterable[LinePlace]) -> list[str]:
    """Enter the lines of a part of a batch's file that begins at byte `start`; return the problems. Raise NoRoom."""
    problems, num_bytes = [], 0
    for line in places:
        problem = line.problem
        if problem is None:
            added = shelf.db.execute(
                "INSERT OR IGNORE INTO batch_lines(batch, number, custom_id, start, size) VALUES (?, ?, ?, ?, ?)",
                (batch_id, line.number, line.custom_id, start + line.start, line.size),
            )
            num_bytes += _line_bytes(line.custom_id) * added.rowcount
            problem = None if added.rowcount else repeated(line.number, line.custom_id)
        if problem is not None:
            problems.append(problem)
    shelf.grow(batch_id, num_bytes)
    return problems


def _line_bytes(custom_id: str) -> int:
    """Return the bytes that a line without an answer counts: as many as the error that it may end with."""
    return _LINE_BYTES + len(msgspec.json.encode(custom_id))


def next_line(shelf: Shelf, batch_id: str) -> LinePlace | None:
    """Return a free line of a batch in progress, which is not free any more; None where there is none.

    A line that a process had when it died comes after all others and alone, so that it is the only one that the next
    death counts for.
    """
    alone = "NOT EXISTS (SELECT 1 FROM batch_lines WHERE batch = ?1 AND running)"
    for condition in ("tries = 0 AND NOT running", alone):
        query = f"""UPDATE batch_lines SET running = 1 WHERE batch = ?1 AND number = (
                      SELECT number FROM batch_lines WHERE batch = ?1 AND {condition} ORDER BY number LIMIT 1)
                      AND EXISTS (SELECT 1 FROM batches WHERE id = ?1 AND state = 'in_progress')
                    RETURNING number, custom_id, start, size, tries"""
        if (row := shelf.db.execute(query, (batch_id,)).fetchone()) is not None:
            return LinePlace(*row)
    return None


def keep_answer(shelf: Shelf, batch_id: str, number: int, answer: bytes, *, failed: bool) -> None:
    """Put an answer in its place in the output or error file, unless its line has one or is gone. Raise NoRoom."""
    query = "DELETE FROM batch_lines WHERE batch = ? AND number = ? RETURNING custom_id"
    if (row := shelf.db.execute(query, (batch_id, number)).fetchone()) is None:
        return
    shelf.grow(batch_id, -_line_bytes(row[0]))
    kind, count = ("error", "failed") if failed else ("output", "succeeded")
    (file_id,) = shelf.db.execute(f"SELECT {kind}_file FROM batches WHERE id = ?", (batch_id,)).fetchone()
    if file_id is None:
        file_id = files.new_id()
        files.begin(shelf, file_id, f"{batch_id}_{kind}.jsonl", "batch_output", busy=True)
    files.append(shelf, file_id, number << _PART_BITS, answer)
    counted = f"UPDATE batches SET {kind}_file = ?, {count} = {count} + 1 WHERE id = ?"
    shelf.db.execute(counted, (file_id, batch_id))


def close_lines(shelf: Shelf, batch_id: str, state: BatchState | None = None) -> bool:
    """Drop some lines without an answer; if the batch expires, they get an error. Return whether there were any."""
    query = "SELECT number, custom_id FROM batch_lines WHERE batch = ? ORDER BY number LIMIT ?"
    lines = shelf.db.execute(query, (batch_id, _LINES_AT_ONCE)).fetchall()
    for number, custom_id in lines:
        if state == "expired":
            answer = result_line(BatchLine(number, custom_id), None, _EXPIRED)
            keep_answer(shelf, batch_id, number, answer, failed=True)
        else:
            shelf.db.execute("DELETE FROM batch_lines WHERE batch = ? AND number = ?", (batch_id, number))
            shelf.grow(batch_id, -_line_bytes(custom_id))
    return bool(lines)


def end(shelf: Shelf, batch_id: str, state: BatchState, errors: bytes | None = None) -> None:
    """End an open batch of the caller's that has no lines any more, and show the files with its answers.

    One that is being cancelled is cancelled then, whatever the state.
    """
    found = find(shelf, batch_id)
    if found is None or not move(shelf, batch_id, _OPEN, "cancelled" if found.state == "cancelling" else state):
        return
    for file_id in (found.output_file, found.error_file):
        if file_id is not None:
            files.finish(shelf, file_id)
    shelf.db.execute("UPDATE batches SET errors = ? WHERE id = ?", (errors, batch_id))
    shelf.db.execute("UPDATE kept SET busy = 0, needs = NULL, used = ? WHERE id = ?", (shelf.now, batch_id))
    if not shelf.has(found.input_file):
        shelf.drop(found.input_file)  # the caller has deleted it
