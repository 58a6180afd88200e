"""Evictable rows that all cost the same, snapshots or window blocks, and which of them goes next.

Rows without worth go first, of any account, the oldest before all others. Then the account gives that
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
from radix_cache.nodes import PUBLIC

_HEAP_SLACK = 64  # a heap is rebuilt once it has more entries than twice the live ones and this
Row = TypeVar("Row")


class _Holding(Generic[Row]):
    """The rows of an account: `num_rows` in all, `num_queued` of them evictable and worth something.

    `queue`: (worth, entry, row) of these, the least worth first. An entry whose number is not the row's is dead.
    `order`: the number of the account's entry in the order of accounts, where entries with others are dead.
    """

    __slots__ = ("num_queued", "num_rows", "order", "queue")

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_queued = 0
        self.order = 0
        self.queue: list[tuple[int, int, Row]] = []


class WorthQueue(Generic[Row]):
    """The evictable rows of all accounts. It frees none: the caller does, and counts it (`count`).

    Worthless rows lie in one heap, and accounts with other rows in a heap ordered by their holdings. There an account
    may be further ahead than it belongs, never behind: the first one is put right until it is where it belongs.
    """

    def __init__(self, excess: Callable[[str, int], float]) -> None:
        """excess: returns how far an account with a number of rows is over its share (`Victims.excess_of`); -inf for
        rows that no account owns. Call `reorder` after it has risen for the same number."""
        self._excess = excess
        self._holdings: dict[str, _Holding[Row]] = {}
        # By row: the account, the worth, and the number of its live entry.
        self._entries: dict[Row, tuple[str, int, int]] = {}
        # (entry, row) of the rows that are worth nothing.
        self._worthless: list[tuple[int, Row]] = []
        # (excess with its sign turned, worth and entry of the first row, number, account).
        self._order: list[tuple[float, int, int, int, str]] = []
        self._next_entry = 0
        self.age = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, row: Row) -> bool:
        return row in self._entries

    def __iter__(self) -> Iterator[Row]:
        return iter(self._entries)

    def count(self, account: str, change: int) -> None:
        """Record that an account holds `change` rows more, or fewer, evictable or not."""
        holding = self._holdings.setdefault(account, _Holding())
        holding.num_rows += change
        if not holding.num_rows:
            del self._holdings[account]
            self._drop_dead_accounts()
        elif change > 0:
            self._put_account(account, holding)

    def reorder(self) -> None:
        """Put all accounts in order anew: the excess of some may have risen."""
        self._order.clear()
        for account, holding in self._holdings.items():
            self._put_account(account, holding)

    def put(self, row: Row, account: str, worth: int) -> None:
        """Queue a row of an account that holds it, or queue it anew."""
        self.discard(row)
        self._next_entry += 1
        self._entries[row] = account, worth, self._next_entry
        if not worth:
            heappush(self._worthless, (self._next_entry, row))
            return
        holding = self._holdings[account]
        holding.num_queued += 1
        heappush(holding.queue, (worth, self._next_entry, row))
        if holding.queue[0][1] == self._next_entry:
            self._put_account(account, holding)

    def discard(self, row: Row) -> None:
        """Take a row out of the queue, if it is there: it is needed, or gone."""
        if (entry := self._entries.pop(row, None)) is None:
            return
        account, worth, _ = entry
        if not worth:
            if len(self._worthless) > 2 * len(self._entries) + _HEAP_SLACK:
                self._worthless = [one for one in self._worthless if self._is_live(*one)]
                heapify(self._worthless)
            return
        holding = self._holdings[account]
        holding.num_queued -= 1
        if len(holding.queue) > 2 * holding.num_queued + _HEAP_SLACK:
            holding.queue = [one for one in holding.queue if self._is_live(one[1], one[2])]
            heapify(holding.queue)

    def first(self, taker: str, *, sparing: bool = False) -> Row | None:
        """Return the row that goes next if the account `taker` wants one, None without any.

        Rows with a worth of accounts that would hold less than the taker then are the last. sparing: they do not go.
        """
        while self._worthless:
            if self._is_live(*self._worthless[0]):
                return self._worthless[0][1]
            heappop(self._worthless)
        taking = self._holdings.get(taker)
        level = self._excess(taker, 1 if taking is None else taking.num_rows + 1)
        found: Row | None = None
        first: tuple[bool, float, int, int] | None = None
        # Among the other accounts the one with the largest excess comes first, for every taker.
        for account in (self._first_account(), taker, PUBLIC):
            holding = None if account is None else self._holdings.get(account)
            if account is None or holding is None or (head := self._head(holding)) is None:
                continue
            excess = self._excess(account, holding.num_rows)
            is_poorer = account != taker and excess < level
            if is_poorer and sparing and excess > -inf:
                continue
            place = (is_poorer, -excess, head[0], head[1])
            if first is None or place < first:
                found, first = head[2], place
        return found

    def evict(self, row: Row) -> None:
        """Take the first row out of the queue, whose worth becomes the age."""
        self.age = max(self.age, self._entries[row][1])
        self.discard(row)

    def check(self, num_rows: dict[str, int]) -> None:
        """Raise InvariantError unless the accounts hold these numbers of rows, or if dead entries pile up."""
        require({name: one.num_rows for name, one in self._holdings.items()} == num_rows, "rows are miscounted")
        num_worthless = sum(self._is_live(*one) for one in self._worthless)
        for holding in self._holdings.values():
            num_live = sum(self._is_live(entry, row) for _, entry, row in holding.queue)
            require(num_live == holding.num_queued, "a row is not where the queue looks for it")
            require(len(holding.queue) <= 2 * holding.num_queued + _HEAP_SLACK, "a queue outgrew its rows")
        num_queued = sum(one.num_queued for one in self._holdings.values())
        require(num_queued + num_worthless == len(self), "queued rows are miscounted")
        require(len(self._order) <= 2 * len(self._holdings) + _HEAP_SLACK, "the order of accounts outgrew them")

    def _put_account(self, account: str, holding: _Holding[Row]) -> None:
        """Put an account where it belongs in the order, if it has a row with a worth."""
        holding.order = 0
        if (head := self._head(holding)) is None:
            return
        self._next_entry += 1
        holding.order = self._next_entry
        excess = self._excess(account, holding.num_rows)
        heappush(self._order, (-excess, head[0], head[1], holding.order, account))
        self._drop_dead_accounts()

    def _drop_dead_accounts(self) -> None:
        """Keep the order of accounts in proportion to them."""
        if len(self._order) > 2 * len(self._holdings) + _HEAP_SLACK:
            self._order = [one for one in self._order if self._is_in_order(one[4], one[3])]
            heapify(self._order)

    def _first_account(self) -> str | None:
        """Return the account with the largest excess among accounts that have a row with a worth, None without any."""
        while self._order:
            negative, worth, entry, number, account = self._order[0]
            if not self._is_in_order(account, number):
                heappop(self._order)
                continue
            holding = self._holdings[account]
            head = self._head(holding)
            if head is not None and (worth, entry) == head[:2] and -negative == self._excess(account, holding.num_rows):
                return account
            heappop(self._order)
            self._put_account(account, holding)
        return None

    def _is_in_order(self, account: str, number: int) -> bool:
        holding = self._holdings.get(account)
        return holding is not None and holding.order == number

    def _head(self, holding: _Holding[Row]) -> tuple[int, int, Row] | None:
        """Return the first live entry of an account, None without any. Forgets dead ones."""
        while holding.queue:
            if self._is_live(holding.queue[0][1], holding.queue[0][2]):
                return holding.queue[0]
            heappop(holding.queue)
        return None

    def _is_live(self, entry: int, row: Row) -> bool:
        return self._entries.get(row, ("", 0, 0))[2] == entry
