"""Files of callers, in pieces: uploads, and the answers of batches. None is ever held whole."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from moeserve.frontend import limits
from moeserve.frontend.listing import Page
from moeserve.frontend.store.store import ROW_BYTES, Shelf

FILE_PREFIX = "file-"
PIECE_BYTES = 64 * 1024  # of all pieces of an upload but the last; a piece of another file may have fewer
_LONGEST_UPLOAD_S = 3600.0  # far longer than one takes
_PIECES_AT_ONCE = 64  # pieces that one transaction deletes
_COLUMNS = "id, name, purpose, created, num_bytes"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """created: UNIX time."""

    file_id: str
    name: str
    purpose: str
    created: int
    num_bytes: int


def new_id() -> str:
    return FILE_PREFIX + secrets.token_hex(12)


def begin(shelf: Shelf, file_id: str, name: str, purpose: str, *, busy: bool) -> None:
    """Enter an empty file, which is shown once it is whole. busy: see `Shelf.add`. Raise NoRoom."""
    shelf.add(file_id, 0, busy=busy)
    row = (file_id, shelf.caller, name, purpose, shelf.date)
    shelf.db.execute("INSERT INTO files(id, caller, name, purpose, created) VALUES (?, ?, ?, ?, ?)", row)


def begin_upload(shelf: Shelf, file_id: str, name: str) -> bool:
    """Enter an empty file of requests; return False where the caller has as many files as it may have. Raise NoRoom.

    One that is not whole soon is dropped: its process has ended.
    """
    count = "SELECT count(*) FROM files WHERE caller = ?"
    if shelf.db.execute(count, (shelf.caller,)).fetchone()[0] >= limits.MAX_FILES_PER_KEY:
        return False
    begin(shelf, file_id, name, "batch", busy=False)
    used = min(0.0, _LONGEST_UPLOAD_S - shelf.bounds.max_age_s) + shelf.now
    shelf.db.execute("UPDATE kept SET used = ? WHERE id = ?", (used, file_id))
    return True


def append(shelf: Shelf, file_id: str, place: int, content: bytes) -> bool:
    """Add bytes to a file that is not whole: at a place, and behind it where they are more than a piece.

    Return False for a file that is gone. Raise NoRoom.
    """
    grown = shelf.db.execute("UPDATE files SET num_bytes = num_bytes + ? WHERE id = ?", (len(content), file_id))
    if grown.rowcount == 0:
        return False
    cuts = range(0, len(content), PIECE_BYTES)
    pieces = [(file_id, place + number, content[cut : cut + PIECE_BYTES]) for number, cut in enumerate(cuts)]
    shelf.db.executemany("INSERT INTO file_pieces(file, place, piece) VALUES (?, ?, ?)", pieces)
    shelf.grow(file_id, len(content) + ROW_BYTES * len(pieces))
    return True


def finish(shelf: Shelf, file_id: str) -> StoredFile | None:
    """Show a file to its caller, and return it: it is whole. Return None if it is gone."""
    shelf.db.execute("UPDATE files SET is_whole = 1 WHERE id = ?", (file_id,))
    shelf.db.execute("UPDATE kept SET busy = 0, used = ? WHERE id = ?", (shelf.now, file_id))
    return find(shelf, file_id)


def find(shelf: Shelf, file_id: str) -> StoredFile | None:
    if not shelf.has(file_id):
        return None
    query = f"SELECT {_COLUMNS} FROM files WHERE id = ? AND is_whole"
    row = shelf.db.execute(query, (file_id,)).fetchone()
    return None if row is None else StoredFile(*row)


def listed(shelf: Shelf, page: Page, purpose: str | None = None) -> tuple[list[StoredFile], bool]:
    """Return files of the caller's, and whether there are further ones. purpose: of all of them. Raise ApiError."""
    shown = """is_whole AND purpose = coalesce(?, purpose)
               AND EXISTS (SELECT 1 FROM kept WHERE kept.id = files.id AND NOT hidden)"""
    found, has_more = rows_of_page(shelf, "files", _COLUMNS, page, shown, purpose)
    return [StoredFile(*row) for row in found], has_more


def rows_of_page(
    shelf: Shelf, table: str, columns: str, page: Page, condition: str = "TRUE", *values: str | None
) -> tuple[list[tuple[Any, ...]], bool]:
    """Return rows of the caller's that meet a condition, and whether there are further ones. Raise ApiError."""
    after = None
    if page.after is not None:
        query = f"SELECT rowid FROM {table} WHERE id = ? AND caller = ?"
        if (row := shelf.db.execute(query, (page.after, shelf.caller)).fetchone()) is None:
            raise page.not_listed()
        after = row[0]
    clause, bounds = page.clause("rowid", after)
    query = f"SELECT {columns} FROM {table} WHERE caller = ? AND {condition} {clause}"
    found = shelf.db.execute(query, (shelf.caller, *values, *bounds)).fetchall()
    return found[: page.limit], len(found) > page.limit


def next_pieces(shelf: Shelf, file_id: str, place: int) -> tuple[bytes, int] | None:
    """Return the pieces of a file from a place on, about as much as a full one, and the place behind them.

    Return None where the file is gone, and no bytes at its end.
    """
    if find(shelf, file_id) is None:
        return None
    query = "SELECT place, piece FROM file_pieces WHERE file = ? AND place >= ? ORDER BY place"
    pieces, size = [], 0
    for number, piece in shelf.db.execute(query, (file_id, place)):
        pieces.append(piece)
        place, size = number + 1, size + len(piece)
        if size >= PIECE_BYTES:
            break
    return b"".join(pieces), place


def read(shelf: Shelf, file_id: str, start: int, size: int) -> bytes:
    """Return `size` bytes of an upload from byte `start` on, fewer at its end. The caller may have dropped it."""
    first, last = start // PIECE_BYTES, (start + size - 1) // PIECE_BYTES
    query = "SELECT piece FROM file_pieces WHERE file = ? AND place BETWEEN ? AND ? ORDER BY place"
    content = b"".join(piece for (piece,) in shelf.db.execute(query, (file_id, first, last)))
    return content[start - first * PIECE_BYTES :][:size]


def has_dropped(shelf: Shelf) -> bool:
    """Return whether `sweep` has anything to do."""
    return shelf.db.execute("SELECT 1 FROM dropped_files LIMIT 1").fetchone() is not None


def sweep(shelf: Shelf) -> None:
    """Delete some pieces of dropped files."""
    for (file_id,) in shelf.db.execute("SELECT id FROM dropped_files LIMIT 1").fetchall():
        swept = shelf.db.execute(
            "DELETE FROM file_pieces WHERE rowid IN (SELECT rowid FROM file_pieces WHERE file = ? LIMIT ?)",
            (file_id, _PIECES_AT_ONCE),
        )
        if swept.rowcount < _PIECES_AT_ONCE:
            shelf.db.execute("DELETE FROM dropped_files WHERE id = ?", (file_id,))
