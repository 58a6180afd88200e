"""The usage of keys: tokens and answers by day, and the requests that began in the latest minute.

An answer is counted in the transaction that enters its log line. The line leaves the store once it is written, so the
lines of a process that was killed are found here, and the counts are the sums of the log lines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from moeserve.frontend.account import Spent
from moeserve.frontend.store.store import Shelf

DAY_S = 86_400
MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class Used:
    """Counts of a key. tokens: of prompts, cached ones among them, and of answers."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated


@dataclass(frozen=True, slots=True)
class Account:
    """A key's counts of this day, which began at 00:00 UTC, and of all days, and the requests that began in this
    minute."""

    today: Used = Used()
    total: Used = Used()
    minute: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A limit that is used up: `tokens` or `requests`. used: of it. retry_s: seconds until there is room again."""

    limit: str
    used: int
    retry_s: int


class Line(msgspec.Struct, frozen=True):
    """An answer and its log line."""

    spent: Spent
    event: str
    fields: dict[str, Any]


def add(shelf: Shelf, owner: str, spents: Iterable[Spent], lines: Iterable[Line]) -> int:
    """Count answers, and enter the lines of some as those that a process is to write; return the number of the
    process's newest line."""
    day = shelf.date // DAY_S
    for spent in spents:
        shelf.db.execute(
            """INSERT INTO key_usage VALUES (?, ?, 1, ?, ?, ?) ON CONFLICT DO UPDATE SET
               requests = requests + 1, prompt = prompt + excluded.prompt, cached = cached + excluded.cached,
               generated = generated + excluded.generated""",
            (spent.key, day, spent.prompt, spent.cached, spent.generated),
        )
    for line in lines:
        shelf.db.execute("INSERT INTO usage_lines(owner, line) VALUES (?, ?)", (owner, msgspec.msgpack.encode(line)))
    return _last_number(shelf, owner)


def drop_written(shelf: Shelf, owner: str, last: int) -> None:
    """Drop the lines of a process up to that of a number."""
    shelf.db.execute("DELETE FROM usage_lines WHERE owner = ? AND number <= ?", (owner, last))


def _last_number(shelf: Shelf, owner: str) -> int:
    row = shelf.db.execute("SELECT coalesce(max(number), 0) FROM usage_lines WHERE owner = ?", (owner,)).fetchone()
    return int(row[0])


def line_owners(shelf: Shelf) -> set[str]:
    return {owner for (owner,) in shelf.db.execute("SELECT DISTINCT owner FROM usage_lines")}


def adopt_lines(shelf: Shelf, dead: Collection[str], owner: str) -> tuple[list[Line], int]:
    """Give the lines of dead processes to another one, which is to write them; return them, and the number of the
    newest line that it has."""
    found = []
    for name in dead:
        rows = shelf.db.execute("SELECT line FROM usage_lines WHERE owner = ? ORDER BY number", (name,)).fetchall()
        found += [msgspec.msgpack.decode(line, type=Line) for (line,) in rows]
        shelf.db.execute("UPDATE usage_lines SET owner = ? WHERE owner = ?", (owner, name))
    return found, _last_number(shelf, owner)


def begin(shelf: Shelf, key: str, tokens: int | None, requests: int | None) -> Refusal | None:
    """Count a request that begins, unless a limit of its key is used up."""
    if tokens is not None:
        day, past_s = divmod(shelf.date, DAY_S)
        query = "SELECT prompt + generated FROM key_usage WHERE key = ? AND day = ?"
        row = shelf.db.execute(query, (key, day)).fetchone()
        if row is not None and row[0] >= tokens:
            return Refusal("tokens", row[0], DAY_S - past_s)
    if requests is None:
        return None
    minute, past_s = divmod(shelf.date, MINUTE_S)
    count = _begun(shelf, key)
    if count >= requests:
        return Refusal("requests", count, MINUTE_S - past_s)
    shelf.db.execute("INSERT OR REPLACE INTO key_minutes VALUES (?, ?, ?)", (key, minute, count + 1))
    return None


def accounts(shelf: Shelf, keys: Collection[str] | None = None) -> dict[str, Account]:
    """Return the accounts of keys, of all that have one for None."""
    day = shelf.date // DAY_S
    found: dict[str, Account] = {}
    sums = ", ".join(f"sum({column})" for column in ("requests", "prompt", "cached", "generated"))
    totals = shelf.db.execute(f"SELECT key, {sums} FROM key_usage GROUP BY key").fetchall()
    for key, *counts in totals:
        if keys is None or key in keys:
            row = shelf.db.execute(
                "SELECT requests, prompt, cached, generated FROM key_usage WHERE key = ? AND day = ?", (key, day)
            ).fetchone()
            found[key] = Account(Used() if row is None else Used(*row), Used(*counts), _begun(shelf, key))
    return found


def _begun(shelf: Shelf, key: str) -> int:
    """Return how many requests of a key began in this minute."""
    query = "SELECT count FROM key_minutes WHERE key = ? AND minute = ?"
    row = shelf.db.execute(query, (key, shelf.date // MINUTE_S)).fetchone()
    return 0 if row is None else int(row[0])
