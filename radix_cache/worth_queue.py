"""Evictable rows that all cost the same, snapshots or window blocks, and which of them goes next.

A row that is worth nothing goes first, whoever it belongs to, the oldest before all others. Then the account gives that
holds most rows in proportion to its weight, as with KV blocks (`radix_cache.victims`), and of its rows the one of least
worth goes. Worth is that of GreedyDual (Young, 1994; with gains for costs as in Cherkasova's GDSF, 1998): the gain of a
row added to the age when it was made or used last; the age grows to the worth of what goes. So a row that saves ten
times as much stays about ten times as long, and none stays for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, TypeVar

from radix_cache.errors import require

_HEAP_SLACK = 64
Row = TypeVar("Row")


class _Holding(Generic[Row]):
    """The rows of an account: `num_rows` in all, `num_queued` of them in the queue.

    `queue`: (worth, entry, row), the least worth first. An entry whose number is not the row's is dead.
    """

    __slots__ = ("num_queued", "num_rows", "queue")

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_queued = 0
        self.queue: list[tuple[int, int, Row]] = []


class WorthQueue(Generic[Row]):
    """The evictable rows of all accounts. It frees none: the caller does, and counts it (`count`)."""

    __slots__ = ("_entries", "_excess", "_holdings", "_next_entry", "age")

    def __init__(self, excess: Callable[[str, int], float]) -> None:
        """excess: measures an account's holding of a number of rows (`Victims.excess_of`); -inf if the account is
        nobody's, and so the last."""
        self._excess = excess
        self._holdings: dict[str, _Holding[Row]] = {}
        # By row: the account, and the number of its live entry.
        self._entries: dict[Row, tuple[str, int]] = {}
        self._next_entry = 0
        self.age = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, row: Row) -> bool:
        return row in self._entries

    def __iter__(self) -> Iterator[Row]:
        return iter(self._entries)

    def count(self, account: str, change: int) -> None:
        """Note that an account holds `change` rows more, or fewer, evictable or not."""
        holding = self._holdings.setdefault(account, _Holding())
        holding.num_rows += change
        if not holding.num_rows:
            del self._holdings[account]

    def put(self, row: Row, account: str, worth: int) -> None:
        """Queue a row of an account that holds it, or queue it anew."""
        self.discard(row)
        self._next_entry += 1
        self._entries[row] = account, self._next_entry
        holding = self._holdings[account]
        holding.num_queued += 1
        heappush(holding.queue, (worth, self._next_entry, row))

    def discard(self, row: Row) -> None:
        """Take a row out of the queue, if it is there: it is needed, or gone."""
        if (entry := self._entries.pop(row, None)) is not None:
            holding = self._holdings[entry[0]]
            holding.num_queued -= 1
            if len(holding.queue) > 2 * holding.num_queued + _HEAP_SLACK:
                holding.queue = [one for one in holding.queue if self._is_live(one)]
                heapify(holding.queue)

    def first(self, taker: str, *, sparing: bool = False) -> Row | None:
        """Return the row that goes next if the account `taker` wants one, None without any.

        Rows with a worth of accounts that would hold less than the taker then are the last. sparing: they do not go.
        """
        found: Row | None = None
        first: tuple[int, float, int, int] | None = None
        taking = self._holdings.get(taker)
        level = self._excess(taker, 1 if taking is None else taking.num_rows + 1)
        for account, holding in self._holdings.items():
            if (head := self._head(holding)) is None:
                continue
            worth, entry, row = head
            excess = self._excess(account, holding.num_rows)
            is_poorer = account != taker and excess < level
            if worth and is_poorer and sparing and excess > -inf:
                continue
            place = (1 + is_poorer, -excess, worth, entry) if worth else (0, 0.0, 0, entry)
            if first is None or place < first:
                found, first = row, place
        return found

    def evict(self, row: Row) -> None:
        """Take the first row out of the queue, whose worth becomes the age."""
        worth, *_ = self._holdings[self._entries[row][0]].queue[0]
        self.age = max(self.age, worth)
        self.discard(row)

    def check(self, num_rows: dict[str, int]) -> None:
        """Raise InvariantError unless the accounts hold so many rows each, or if dead entries pile up."""
        require({name: one.num_rows for name, one in self._holdings.items()} == num_rows, "rows are miscounted")
        for holding in self._holdings.values():
            live = [row for entry in holding.queue if self._is_live(entry) for row in entry[2:]]
            require(len(live) == holding.num_queued, "a row is not where the queue looks for it")
            require(len(holding.queue) <= 2 * holding.num_queued + _HEAP_SLACK, "a queue outgrew its rows")
        require(sum(one.num_queued for one in self._holdings.values()) == len(self), "queued rows are miscounted")

    def _head(self, holding: _Holding[Row]) -> tuple[int, int, Row] | None:
        """Return the first live entry of an account, None without any. Forgets dead ones."""
        while holding.queue:
            if self._is_live(holding.queue[0]):
                return holding.queue[0]
            heappop(holding.queue)
        return None

    def _is_live(self, entry: tuple[int, int, Row]) -> bool:
        return self._entries.get(entry[2], ("", 0))[1] == entry[1]
