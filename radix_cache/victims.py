"""Which leaf of the tree is evicted next: of the account that holds most beyond its share, the oldest.

An account that fills the cache with prompts that are never used again evicts its own. The next victim belongs to the
account that holds most blocks in proportion to its weight, so an account never loses a block while it holds less than
its share and another account holds more. This is max-min fairness over all blocks, with the running requests' blocks.
Accounts without further requests would hold their shares for ever, so the blocks of an account count double for every
`HALF_LIFE_S` since its last request. With one account the oldest block goes first.

The accounts lie in heaps, ordered by their holdings. The decay is the same for all, so an account's place changes only
when the account is touched, and an eviction costs O(log accounts).

Blocks are evicted for an account, the taker. Its own leaves, and leaves of accounts that hold as much or more, come
before leaves of accounts that hold less; a part of the latter can be spared (`num_to_spare`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush
from math import inf, log2

from radix_cache.errors import InvariantError, require
from radix_cache.nodes import PUBLIC, Node
from radix_cache.retention import account_of

HALF_LIFE_S = 600.0
_HEAP_SLACK = 64  # a heap is rebuilt once it has more entries than twice the live ones and this
_USUAL = (1.0, inf)  # weight and limit of an account without terms of its own

# (tier, rank of the retention, excess of the account with its sign turned, stamp, serial): the first victim has the
# lowest. Tier 1: leaves of accounts that hold less than the taker. Tier 2: pinned leaves.
Place = tuple[int, int, float, int, int]
_Entry = tuple[float, int, int, int, "Holding"]

_PINNED = 2


class Holding:
    """The blocks of an account.

    `num_blocks` are in the tree, `num_leased` of them protected by leases; its leases have `num_private` beside the
    tree. `queue`: its leaves that may go, the first victim first, as (rank of the retention, stamp, serial, entry,
    node). Entries have numbers; an entry whose number is not the node's `queued` is dead. `used_at`: when a request of
    the account last began, published or ended. An account beyond `limit` blocks comes before all accounts within their
    limits.
    """

    __slots__ = ("limit", "num_blocks", "num_leased", "num_private", "queue", "used_at", "weight")

    def __init__(self, weight: float, limit: float, now: float) -> None:
        self.weight = weight
        self.limit = limit
        self.num_blocks = 0
        self.num_leased = 0
        self.num_private = 0
        self.queue: list[tuple[int, int, int, int, Node]] = []
        self.used_at = now

    def count(self, blocks: int = 0, leased: int = 0, private: int = 0) -> None:
        """Add to the three numbers of blocks."""
        self.num_blocks += blocks
        self.num_leased += leased
        self.num_private += private
        self.bound_queue()

    def first(self) -> Node | None:
        """Return the next victim of the account, None without any. Forgets dead entries."""
        queue = self.queue
        while queue:
            *_, entry, node = queue[0]
            if node.queued == entry:
                return node
            heappop(queue)
        return None

    def excess(self, num_cut: int = 0) -> float:
        """Return a measure of the account's holding once `num_cut` blocks are gone: a logarithm, for comparisons."""
        num_held = self.num_blocks + self.num_private - num_cut
        return inf if num_held > self.limit else _excess(num_held, self.weight, self.used_at)

    def num_beyond(self, excess: float) -> int:
        """Count the blocks that the account could lose one after another while its excess is at least `excess`."""
        num_held = self.num_blocks + self.num_private
        over_limit = min(max(0, num_held - int(min(self.limit, num_held))), self.num_blocks)
        level = excess + self.used_at / HALF_LIFE_S + log2(self.weight)
        if level > log2(num_held) + 1:
            return over_limit
        count = min(max(over_limit, int(num_held + 1 - 2.0**level)), self.num_blocks)
        # The power is rounded, so the comparison decides.
        while count < self.num_blocks and self.excess(count) >= excess:
            count += 1
        while count > over_limit and self.excess(count - 1) < excess:
            count -= 1
        return count

    def place(self, taker: Taker, num_cut: int = 0) -> Place:
        """Return the place of the account's next victim among all accounts', once `num_cut` blocks are gone.

        To be called after `first`, which found the victim.
        """
        rank, last_used, serial, *_ = self.queue[0]
        excess = self.excess(num_cut)
        tier = 2 if rank == _PINNED else 0 if self is taker.holding or excess >= taker.excess else 1
        return tier, rank, -excess, last_used, serial

    def bound_queue(self) -> None:
        """Drop dead entries at the top, and all of them when there are more of them than of blocks."""
        self.first()
        if len(self.queue) > 2 * self.num_blocks + _HEAP_SLACK:
            self.queue = [entry for entry in self.queue if entry[4].queued == entry[3]]
            heapify(self.queue)


class Taker:
    """The account for which blocks are evicted; `excess` is its measure before. It may hold nothing yet."""

    __slots__ = ("excess", "holding")

    def __init__(self, holding: Holding | None) -> None:
        self.holding = holding
        self.excess = -inf if holding is None else holding.excess()


class Victims:
    """The holdings of the accounts that have blocks. It removes no node from the tree."""

    def __init__(self) -> None:
        self.holdings: dict[str, Holding] = {}  # by account
        # By the rank of their next victims, the accounts that have one: (excess with its sign turned, stamp and serial
        # of the victim, entry, account). A victim may be gone: the account then belongs further behind.
        self._orders: tuple[list[_Entry], ...] = ([], [], [])
        # The numbers of the accounts' entries there. Entries with other numbers are dead.
        self._entries: dict[Holding, int] = {}
        # The accounts whose excess or victim has changed since they were put into the heaps.
        self._touched: dict[Holding, None] = {}
        # (weight, limit) of the accounts whose terms are not _USUAL.
        self._terms: dict[str, tuple[float, float]] = {}
        self._next_entry = 0
        self.now = 0.0

    def set_time(self, now: float) -> None:
        """Set the time, which never goes back, in seconds."""
        self.now = now

    def share(self, account: str, weight: float, limit: float) -> bool:
        """Set an account's weight among all, and the number of blocks beyond which it comes first.

        Return whether they were others before.
        """
        if (weight, limit) == self._terms.get(account, _USUAL):
            return False
        self._terms[account] = (weight, limit)
        if (weight, limit) == _USUAL:
            del self._terms[account]
        if (holding := self.holdings.get(account)) is not None:
            holding.weight, holding.limit = weight, limit
            self._touched[holding] = None
        return True

    def use(self, namespace: str) -> None:
        """Record that a request of a namespace has published or ended."""
        if (holding := self.holdings.get(account_of(namespace))) is not None:
            holding.used_at = self.now
            self._touched[holding] = None

    def count(self, namespace: str, change: int) -> None:
        """Record that a namespace has `change` more blocks, or fewer, in the tree."""
        holding = self._of(namespace)
        holding.count(blocks=change)
        self._close(namespace, holding)

    def count_private(self, namespace: str, change: int) -> None:
        """Record that leases of a namespace have `change` more blocks, or fewer, beside the tree."""
        if change:
            holding = self._of(namespace)
            holding.count(private=change)
            self._close(namespace, holding)

    def count_leased(self, namespace: str, change: int) -> None:
        """Record that leases protect `change` more, or fewer, of a namespace's blocks in the tree."""
        self.holdings[account_of(namespace)].count(leased=change)

    def add(self, node: Node) -> None:
        """Queue an unreferenced leaf, or queue it anew: its retention has changed."""
        retention = node.retention
        rank = 0 if retention is None else _PINNED if retention.is_pinned else 1
        self._next_entry += 1
        node.queued = self._next_entry
        holding = self.holdings[account_of(node.namespace)]
        heappush(holding.queue, (rank, node.last_used, node.serial, node.queued, node))
        holding.bound_queue()
        self._touched[holding] = None

    def excess_of(self, account: str, num_held: int) -> float:
        """Return a measure, as `Holding.excess`, of an account's holding of `num_held` rows that are no KV blocks.

        Public prefixes count for nobody: -inf.
        """
        if account == PUBLIC:
            return -inf
        holding = self.holdings.get(account)
        if holding is not None:
            return _excess(num_held, holding.weight, holding.used_at)
        return _excess(num_held, self._terms.get(account, _USUAL)[0], self.now)

    def num_in_use(self, account: str) -> int:
        """Return the number of blocks of an account that its leases have, in the tree and beside it."""
        holding = self.holdings.get(account)
        return 0 if holding is None else holding.num_leased + holding.num_private

    def next_leaf(self) -> Node | None:
        """Return the leaf that would be evicted next for nobody in particular, None without any."""
        holding = self._first(Taker(None))
        return None if holding is None else holding.first()

    def num_evictable(self, account: str) -> int:
        """Return the number of blocks of an account that no lease protects."""
        holding = self.holdings.get(account)
        return 0 if holding is None else holding.num_blocks - holding.num_leased

    def num_to_spare(self, account: str, pinned: Mapping[str, int], most: int) -> int:
        """Count, up to `most`, the evictable blocks left to other accounts once each has given blocks until it holds
        less than the taker.

        pinned: blocks that retentions without end cover, by account. They are not counted.
        """
        taker = Taker(self.holdings.get(account))
        found = 0
        for name, holding in self.holdings.items():
            if holding is taker.holding or holding.num_blocks == holding.num_leased:
                continue
            num_free = holding.num_blocks - holding.num_leased - pinned.get(name, 0)
            found += max(0, num_free - holding.num_beyond(taker.excess))
            if found >= most:
                return most
        return found

    def choose(self, count: int, account: str | None) -> Iterator[tuple[Node, int]]:
        """Yield (leaf, number of blocks to remove from its tail), `count` blocks in all. account: the taker, or None.

        The caller removes them, and notes it with the method `count`, before it asks for the next. Enough blocks must
        be evictable.
        """
        taker = Taker(None if account is None else self.holdings.get(account))
        while count:
            holding = self._first(taker)
            if holding is None:
                raise InvariantError(f"{count} blocks are to be evicted, but none may go")
            node = holding.first()
            assert node is not None
            cut = self._num_blocks_to_cut(holding, taker, min(count, len(node.blocks)))
            yield node, cut
            count -= cut

    def leaves(self, accounts: Collection[str] | None = None) -> Iterator[Node]:
        """Yield the leaves of some accounts (None: of all) that may go now, in no particular order.

        Leaves may come and go meanwhile: new ones are not among them, and what went may be.
        """
        names = list(self.holdings) if accounts is None else [name for name in accounts if name in self.holdings]
        for name in names:
            holding = self.holdings.get(name)
            waiting = deque(() if holding is None else holding.queue)
            while waiting:
                *_, entry, node = waiting.popleft()
                if node.queued == entry:
                    yield node

    def queued_serials(self) -> list[int]:
        """Return the serials of the leaves that may go. Raise InvariantError if dead entries pile up."""
        for holding in self.holdings.values():
            require(len(holding.queue) <= 2 * holding.num_blocks + _HEAP_SLACK, "a queue of victims outgrew its blocks")
        return [node.serial for node in self.leaves()]

    def _of(self, namespace: str) -> Holding:
        account = account_of(namespace)
        holding = self.holdings.get(account)
        if holding is None:
            holding = self.holdings[account] = Holding(*self._terms.get(account, _USUAL), self.now)
        return holding

    def _close(self, namespace: str, holding: Holding) -> None:
        """Forget an account that holds nothing."""
        if holding.num_blocks or holding.num_private:
            self._touched[holding] = None
        else:
            del self.holdings[account_of(namespace)]
            self._entries.pop(holding, None)
            self._touched.pop(holding, None)

    def _num_blocks_to_cut(self, holding: Holding, taker: Taker, most: int) -> int:
        """Return the number of blocks, at most `most`, that the first account loses before another one's turn."""
        if most == 1:
            return 1
        self._take_out(holding)
        following = self._first(taker, holding)
        if following is None:
            return most
        place, cut = following.place(taker), 1
        while cut < most and holding.place(taker, cut) < place:
            cut += 1
        return cut

    def _take_out(self, holding: Holding) -> None:
        """Let the account's entry in the heaps be dead, until it is put there anew as one that was touched."""
        self._entries.pop(holding, None)
        self._touched[holding] = None

    def _put(self, holding: Holding) -> None:
        """Put an account into the heap where its next victim belongs, if it has one."""
        if holding.first() is None:
            self._entries.pop(holding, None)
            return
        rank, last_used, serial, *_ = holding.queue[0]
        self._next_entry += 1
        self._entries[holding] = self._next_entry
        order = self._orders[rank]
        heappush(order, (-holding.excess(), last_used, serial, self._next_entry, holding))
        if len(order) > 2 * len(self.holdings) + _HEAP_SLACK:
            order[:] = [entry for entry in order if self._entries.get(entry[4]) == entry[3]]
            heapify(order)

    def _first(self, taker: Taker, but: Holding | None = None) -> Holding | None:
        """Return the account whose victim goes first, None without any. but: an account that was taken out.

        Of accounts whose victims have one rank the one with the largest excess comes first, for every taker. Only the
        taker itself has another place.
        """
        for touched in [one for one in self._touched if one is not but]:
            del self._touched[touched]
            self._put(touched)
        found = [holding for rank in range(len(self._orders)) if (holding := self._head(rank)) is not None]
        own = taker.holding
        if own is not None and own is not but and own.first() is not None:
            found.append(own)
        return min(found, key=lambda holding: holding.place(taker), default=None)

    def _head(self, rank: int) -> Holding | None:
        """Return the first account of a heap, None without any. Puts accounts right whose victims are gone."""
        order = self._orders[rank]
        while order:
            _, last_used, serial, entry, holding = order[0]
            if self._entries.get(holding) == entry:
                if holding.first() is not None and holding.queue[0][:3] == (rank, last_used, serial):
                    return holding
                heappop(order)
                self._put(holding)
            else:
                heappop(order)
        return None


def _excess(num_held: int, weight: float, used_at: float) -> float:
    # The factor 2 ** ((now - used_at) / HALF_LIFE_S) without `now`, which is the same for all.
    return log2(num_held / weight) - used_at / HALF_LIFE_S if num_held else -inf
