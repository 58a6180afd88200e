"""A response store's file without threads: shelves of callers on one connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moeserve.frontend.store import files
from moeserve.frontend.store.file import connect, prepare
from moeserve.frontend.store.store import Bounds, Shelf

LARGE = Bounds(2**30, 1e9)
MakeShelf = Callable[..., Shelf]


@contextmanager
def shelves(folder: Path, bounds: Bounds = LARGE) -> Iterator[MakeShelf]:
    """Give a function that returns a shelf, from its caller and the time, which goes on by a second with each call."""
    path = folder / "store"
    prepare(path)
    db = connect(path)
    clock = iter(range(1, 10**9))

    def shelf(caller: bytes = b"", now: float | None = None) -> Shelf:
        return Shelf(db, caller, next(clock) if now is None else now, bounds)

    try:
        yield shelf
    finally:
        db.close()


def add_file(shelf: Shelf, content: bytes) -> str:
    """Keep a whole file of requests; return its id."""
    file_id = files.new_id()
    assert files.begin_upload(shelf, file_id, "in")
    assert files.append(shelf, file_id, 0, content)
    files.finish(shelf, file_id)
    return file_id
