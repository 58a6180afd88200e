"""Files that callers upload, and batches of requests in them: their lines, with an answer for each."""

from __future__ import annotations

import codecs
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.listing import Page
from moeserve.frontend.store import jobs
from moeserve.frontend.store.store import ROW_BYTES, Shelf

FILE_PREFIX, BATCH_PREFIX = "file-", "batch_"
BatchState = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_OPEN = "state IN ('validating', 'in_progress', 'finalizing', 'cancelling')"

_PATH = re.compile(r"/v1/[\w/.-]{1,200}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """created: UNIX time."""

    file_id: str
    name: str
    purpose: str
    created: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch. metadata, errors: JSON. times: UNIX times by the field of the API, as JSON. total: its lines, once they
    are known."""

    batch_id: str
    caller: bytes
    state: BatchState
    path: str
    input_file: str
    created: int
    expires: int
    metadata: bytes
    times: str
    errors: bytes | None
    total: int
    output_file: str | None
    error_file: str | None


_COLUMNS = """id, caller, state, path, input_file, created, expires, metadata, times, errors, total, output_file,
              error_file"""


class TooManyFiles(Exception):
    """The caller has as many files as it may have."""


def add_file(shelf: Shelf, name: str, purpose: str, content: bytes) -> StoredFile:
    """Keep a file. Raise TooManyFiles, NoRoom."""
    counted = "SELECT count(*) FROM files JOIN kept USING (id) WHERE caller = ? AND NOT hidden"
    if shelf.db.execute(counted, (shelf.caller,)).fetchone()[0] >= limits.MAX_FILES_PER_KEY:
        raise TooManyFiles
    made = StoredFile(FILE_PREFIX + secrets.token_hex(12), name, purpose, int(shelf.now), len(content))
    shelf.add(made.file_id, len(content))
    shelf.db.execute(
        "INSERT INTO files(id, name, purpose, created, content) VALUES (?, ?, ?, ?, ?)",
        (made.file_id, name, purpose, made.created, content),
    )
    return made


def file(shelf: Shelf, file_id: str) -> StoredFile | None:
    if not shelf.has(file_id):
        return None
    query = "SELECT id, name, purpose, created, length(content) FROM files WHERE id = ?"
    row = shelf.db.execute(query, (file_id,)).fetchone()
    return None if row is None else StoredFile(*row)


def files(shelf: Shelf, page: Page, purpose: str | None = None) -> tuple[list[StoredFile], bool]:
    """Return files of the caller's, and whether there are further ones. purpose: of all of them. Raise ApiError."""
    clause, bounds = page.clause("files.rowid", _number_of(shelf, "files", page))
    query = f"""SELECT id, name, purpose, created, length(content) FROM files JOIN kept USING (id)
                WHERE caller = ? AND NOT hidden AND purpose = coalesce(?, purpose) {clause}"""
    found = [StoredFile(*row) for row in shelf.db.execute(query, (shelf.caller, purpose, *bounds))]
    return found[: page.limit], len(found) > page.limit


def _number_of(shelf: Shelf, table: str, page: Page) -> int | None:
    """Return the number of the row that a page is to follow, None for a first page. Raise ApiError."""
    if page.after is None:
        return None
    row = shelf.db.execute(f"SELECT rowid FROM {table} WHERE id = ?", (page.after,)).fetchone()
    if row is None or not shelf.has(page.after):
        raise page.not_listed()
    return int(row[0])


def content(shelf: Shelf, file_id: str) -> bytes | None:
    if not shelf.has(file_id):
        return None
    row = shelf.db.execute("SELECT content FROM files WHERE id = ?", (file_id,)).fetchone()
    return None if row is None else bytes(row[0])


def add_batch(
    shelf: Shelf, owner: str, path: str, input_file: str, expires: int, metadata: bytes
) -> StoredBatch | None:
    """Enter a batch of a file that the caller has; return None where too many of the caller's are open. Raise
    NoRoom."""
    counted = f"SELECT count(*) FROM batches WHERE caller = ? AND {_OPEN}"
    if shelf.db.execute(counted, (shelf.caller,)).fetchone()[0] >= limits.MAX_OPEN_BATCHES_PER_KEY:
        return None
    batch_id = BATCH_PREFIX + secrets.token_hex(12)
    shelf.add(batch_id, len(metadata), needs=input_file, busy=True)
    shelf.db.execute(
        """INSERT INTO batches(id, caller, owner, state, path, input_file, created, expires, metadata)
           VALUES (?, ?, ?, 'validating', ?, ?, ?, ?, ?)""",
        (batch_id, shelf.caller, owner, path, input_file, int(shelf.now), expires, metadata),
    )
    return batch(shelf, batch_id)


def batch(shelf: Shelf, batch_id: str) -> StoredBatch | None:
    query = f"SELECT {_COLUMNS} FROM batches WHERE id = ? AND caller = ?"
    row = shelf.db.execute(query, (batch_id, shelf.caller)).fetchone()
    return None if row is None else StoredBatch(*row)


def batches(shelf: Shelf, page: Page) -> tuple[list[StoredBatch], bool]:
    """Return batches of the caller's, and whether there are further ones. Raise ApiError."""
    clause, bounds = page.clause("rowid", _number_of(shelf, "batches", page))
    query = f"SELECT {_COLUMNS} FROM batches WHERE caller = ? {clause}"
    found = [StoredBatch(*row) for row in shelf.db.execute(query, (shelf.caller, *bounds))]
    return found[: page.limit], len(found) > page.limit


def counts(shelf: Shelf, batch_id: str) -> tuple[int, int]:
    """Return how many lines of a batch have succeeded and failed."""
    query = "SELECT coalesce(sum(NOT failed), 0), coalesce(sum(failed), 0) FROM batch_results WHERE batch = ?"
    succeeded, failed = shelf.db.execute(query, (batch_id,)).fetchone()
    return succeeded, failed


def move(
    shelf: Shelf, batch_id: str, before: Collection[str], state: BatchState, field: str, *, total: int | None = None
) -> bool:
    """Move a batch from a state in `before` to `state`, and record the time in `field`; return False from any other
    state."""
    now = int(shelf.now)
    moved = shelf.db.execute(
        f"""UPDATE batches SET state = ?, times = json_set(times, ?, ?), total = coalesce(?, total)
            WHERE id = ? AND state IN ({",".join("?" * len(before))})""",
        (state, f"$.{field}", now, total, batch_id, *before),
    )
    return moved.rowcount > 0


def line_name(batch_id: str, number: int) -> bytes:
    """Return the name of a line's job. Names of clients' requests are digests, so the two never collide."""
    return f"{batch_id}/{number}".encode()


def drop_lines(shelf: Shelf, batch_id: str) -> None:
    """Cancel the jobs of a batch's lines."""
    jobs.cancel_all(shelf, line_name(batch_id, 0)[:-1])


def add_result(shelf: Shelf, batch_id: str, number: int, line: bytes, *, failed: bool) -> None:
    """Record the answer to a line of an open batch, unless there is one, and forget the job that made it. Raise
    NoRoom."""
    jobs.forget(shelf, line_name(batch_id, number))
    added = shelf.db.execute(
        f"""INSERT OR IGNORE INTO batch_results(batch, number, line, failed)
            SELECT id, ?, ?, ? FROM batches WHERE id = ? AND {_OPEN}""",
        (number, line, failed, batch_id),
    )
    if added.rowcount:
        shelf.grow(batch_id, len(line) + ROW_BYTES)


def answered(shelf: Shelf, batch_id: str) -> set[int]:
    """Return the numbers of the lines that have an answer."""
    return {number for (number,) in shelf.db.execute("SELECT number FROM batch_results WHERE batch = ?", (batch_id,))}


def end(shelf: Shelf, batch_id: str, state: BatchState, field: str, errors: bytes | None = None) -> None:
    """End an open batch: its answers become files, successes and failures apart, in the order of the lines."""
    if not move(shelf, batch_id, OPEN, state, field):
        return
    drop_lines(shelf, batch_id)
    made: dict[bool, str | None] = {}
    for failed in (False, True):
        query = "SELECT line FROM batch_results WHERE batch = ? AND failed = ? ORDER BY number"
        lines = [bytes(line) for (line,) in shelf.db.execute(query, (batch_id, failed))]
        ending = "error" if failed else "output"
        made[failed] = None
        if lines:
            row = (FILE_PREFIX + secrets.token_hex(12), f"{batch_id}_{ending}.jsonl", b"".join(lines))
            shelf.add(row[0], len(row[2]))
            shelf.db.execute(
                "INSERT INTO files(id, name, purpose, created, content) VALUES (?, ?, 'batch_output', ?, ?)",
                (row[0], row[1], int(shelf.now), row[2]),
            )
            made[failed] = row[0]
    ready = (made[False], made[True], errors, batch_id)
    shelf.db.execute("UPDATE batches SET output_file = ?, error_file = ?, errors = ? WHERE id = ?", ready)
    shelf.db.execute("UPDATE kept SET busy = 0, used = ? WHERE id = ?", (shelf.now, batch_id))


def input_of(shelf: Shelf, found: StoredBatch) -> bytes | None:
    """Return the content of a batch's input file, also where the caller has dropped that meanwhile."""
    row = shelf.db.execute("SELECT content FROM files WHERE id = ?", (found.input_file,)).fetchone()
    return None if row is None else bytes(row[0])


def open_ones(shelf: Shelf) -> dict[str, tuple[str, str]]:
    """Return owner and state of every open batch."""
    found = shelf.db.execute(f"SELECT id, owner, state FROM batches WHERE {_OPEN}")
    return {batch_id: (owner, state) for batch_id, owner, state in found}


def adopt(shelf: Shelf, batch_ids: Collection[str], owner: str) -> list[StoredBatch]:
    """Give `owner` the batches that are still open; return them."""
    found = []
    for batch_id in batch_ids:
        query = f"UPDATE batches SET owner = ? WHERE id = ? AND {_OPEN} RETURNING {_COLUMNS}"
        found += [StoredBatch(*row) for row in shelf.db.execute(query, (owner, batch_id)).fetchall()]
    return found


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of a batch: a request in OpenAI's form. `problem` says why it is none; `custom_id` is then None."""

    number: int
    custom_id: str | None = None
    path: str = ""
    body: bytes = b""
    problem: str | None = None

    @property
    def result_id(self) -> str:
        return f"batch_req_{self.number}"


def read_line(number: int, line: bytes, seen: set[str]) -> BatchLine:
    """Return a line as a request, and add its `custom_id` to those seen."""
    try:
        entry = msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8), type=dict[str, Any])
        custom_id, path, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
        if not isinstance(custom_id, str) or not custom_id:
            raise ValueError("`custom_id` must be a text")
        if custom_id in seen:
            raise ValueError(f"`custom_id` {custom_id!r} is that of an earlier line")
        if entry.get("method") != "POST":
            raise ValueError("`method` must be POST")
        if not isinstance(path, str) or not _PATH.fullmatch(path):
            raise ValueError("`url` must be the path of a route, such as /v1/chat/completions")
        if not isinstance(body, dict):
            raise ValueError("`body` must be an object")
        if body.get("stream"):
            raise ValueError("`stream` is for one answer, not for a batch")
    except (UnicodeDecodeError, RecursionError) as error:
        fault = "nested too deeply" if isinstance(error, RecursionError) else "no UTF-8"
        return BatchLine(number, problem=f"line {number} is {fault}")
    except ValueError as error:  # msgspec's errors are ValueErrors
        return BatchLine(number, problem=f"line {number}: {error}")
    seen.add(custom_id)
    return BatchLine(number, custom_id, path, msgspec.json.encode(body))


def result_line(job: BatchLine, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    """Return the line of an output file that answers a line."""
    entry = {"id": job.result_id, "custom_id": job.custom_id, "response": response, "error": error}
    return msgspec.json.encode(entry) + b"\n"
