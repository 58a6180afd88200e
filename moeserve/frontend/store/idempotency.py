"""Keys that clients chose for requests (`Idempotency-Key`), and the whole answers that are kept for them.

A key belongs to one request: to a response in the background, or to an answer. While an HTTP process computes an
answer, the store knows the process alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeserve.frontend.errors import ApiError
from moeserve.frontend.store.store import Shelf


@dataclass(frozen=True, slots=True)
class Name:
    """The key that a client chose for a request, and the request's content, as digests."""

    key: bytes
    content: bytes


@dataclass(frozen=True, slots=True)
class Named:
    """The request of a key. kept_id: of the job, or of the answer. owner: the HTTP process that computes the answer.
    headers: of a whole answer, whose body has `num_bytes`. A job has neither owner nor headers."""

    kept_id: str
    owner: str | None
    headers: bytes | None
    num_bytes: int


def find(shelf: Shelf, name: Name) -> Named | None:
    """Return the request of a caller's key, None without one. Raise ApiError (422) if it is another request."""
    query = "SELECT content, id, owner, headers, length(body) FROM idempotency WHERE caller = ? AND name = ?"
    row = shelf.db.execute(query, (shelf.caller, name.key)).fetchone()
    if row is None:
        return None
    content, kept_id, owner, headers, num_bytes = row
    if bytes(content) != name.content:
        raise key_of_another()
    return Named(kept_id, owner, None if headers is None else bytes(headers), num_bytes or 0)


def enter(shelf: Shelf, name: Name, kept_id: str, owner: str | None = None) -> None:
    """Give a key that no request has to a thing that the shelf keeps."""
    row = (shelf.caller, name.key, name.content, kept_id, owner)
    shelf.db.execute("INSERT INTO idempotency(caller, name, content, id, owner) VALUES (?, ?, ?, ?, ?)", row)


def begin(shelf: Shelf, name: Name, answer_id: str, owner: str, is_over: Callable[[str], bool]) -> None:
    """Enter an answer that `owner` computes. is_over: returns whether an owner's answer is lost.

    Raise ApiError: 422, and 409 where the key has its answer. Raise NoRoom.
    """
    if (named := find(shelf, name)) is not None:
        if named.owner is None or not is_over(named.owner):
            raise in_use()
        shelf.drop(named.kept_id)
    shelf.add(answer_id, 0, busy=True)
    enter(shelf, name, answer_id, owner)


def finish(shelf: Shelf, answer_id: str, headers: bytes, body: bytes) -> None:
    """Keep a whole answer. Raise NoRoom."""
    query = "UPDATE idempotency SET owner = NULL, headers = ?, body = ? WHERE id = ?"
    if shelf.db.execute(query, (headers, body, answer_id)).rowcount:
        shelf.db.execute("UPDATE kept SET busy = 0, used = ? WHERE id = ?", (shelf.now, answer_id))
        shelf.grow(answer_id, len(headers) + len(body))


def read(shelf: Shelf, answer_id: str, start: int, size: int) -> bytes:
    """Return a part of the body of a whole answer; nothing where it was dropped."""
    query = "SELECT rowid FROM idempotency WHERE id = ? AND caller = ? AND body IS NOT NULL"
    row = shelf.db.execute(query, (answer_id, shelf.caller)).fetchone()
    return b"" if row is None else shelf.part("idempotency", "body", row[0], start, size)


def key_of_another() -> ApiError:
    """422: another request had this key."""
    message = "This `Idempotency-Key` was sent before with another request: choose another key for this one"
    return ApiError(422, message, param="Idempotency-Key", code="idempotency_key_reused")


def in_use() -> ApiError:
    """409: the request with this key is not answered yet, and its answer cannot be followed from here."""
    message = "The request with this `Idempotency-Key` is not answered yet: send it again a little later"
    return ApiError(409, message, param="Idempotency-Key", code="idempotency_key_in_use", retry_after_s=1.0)
