"""Which leaf of the tree is evicted next: what accounts hold beyond their shares first, and of an account the oldest.

An account that fills the cache with prompts that nobody asks for again evicts its own. The next victim belongs to the
account that holds most blocks, weight for weight, so an account never loses a block while it holds less than its share
and another one holds more. This is max-min fairness over the blocks in the tree, leased ones included. Accounts that
come no more would hold their shares for ever, so what an account holds counts double for every `HALF_LIFE_S` since its
last request. With one account the order is that of age alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, log2

from radix_cache.errors import require
from radix_cache.nodes import Node
from radix_cache.retention import account_of

HALF_LIFE_S = 600.0
_HEAP_SLACK = 64
_USUAL = (1.0, inf)

# (rank of the retention, excess of the account with its sign turned, stamp, serial): the first victim has the lowest.
Place = tuple[int, float, int, int]


class Holding:
    """What an account holds: `num_blocks` in the tree, and in `queue` its leaves that may go, the first victim first.

    Entries of the queue are (rank of the retention, stamp, serial, entry, node). They have numbers; one whose number is
    not the node's `queued` is dead. `used_at`: when a request of the account published or ended last. Beyond `limit`
    blocks the account comes before all that are within theirs.
    """

    __slots__ = ("limit", "num_blocks", "queue", "used_at", "weight")

    def __init__(self, weight: float, limit: float) -> None:
        self.weight = weight
        self.limit = limit
        self.num_blocks = 0
        self.queue: list[tuple[int, int, int, int, Node]] = []
        self.used_at = 0.0

    def first(self) -> Node | None:
        """Return the next victim of the account, None without any. Forgets dead entries."""
        queue = self.queue
        while queue:
            *_, entry, node = queue[0]
            if node.queued == entry:
                return node
            heappop(queue)
        return None

    def place(self, node: Node, num_cut: int = 0) -> Place:
        """Return the place of the account's next victim among all accounts', once `num_cut` blocks are gone."""
        num_blocks = self.num_blocks - num_cut
        # The factor 2 ** ((now - used_at) / HALF_LIFE_S) without `now`, which is the same for all.
        excess = inf if num_blocks > self.limit else log2(num_blocks / self.weight) - self.used_at / HALF_LIFE_S
        return self.queue[0][0], -excess, node.last_used, node.serial

    def bound_queue(self) -> None:
        """Drop dead entries when there are more of them than of blocks."""
        if len(self.queue) > 2 * self.num_blocks + _HEAP_SLACK:
            self.queue = [entry for entry in self.queue if entry[4].queued == entry[3]]
            heapify(self.queue)


class Victims:
    """The holdings of the accounts that have blocks in the tree. It removes no node from the tree."""

    __slots__ = ("_holdings", "_next_entry", "_terms")

    def __init__(self) -> None:
        self._holdings: dict[str, Holding] = {}
        # (weight, limit) of the accounts that have others than _USUAL.
        self._terms: dict[str, tuple[float, float]] = {}
        self._next_entry = 0

    def share(self, account: str, weight: float, limit: float) -> None:
        """Set an account's weight among all, and how many blocks it may hold before it comes first."""
        if (weight, limit) == self._terms.get(account, _USUAL):
            return
        self._terms[account] = (weight, limit)
        if (weight, limit) == _USUAL:
            del self._terms[account]
        if (holding := self._holdings.get(account)) is not None:
            holding.weight, holding.limit = weight, limit

    def use(self, namespace: str, now: float) -> None:
        """Note that a request of a namespace has published or ended."""
        if (holding := self._holdings.get(account_of(namespace))) is not None:
            holding.used_at = now

    def count(self, namespace: str, change: int) -> None:
        """Note how many blocks a namespace has more, or fewer, in the tree."""
        account = account_of(namespace)
        holding = self._holdings.get(account)
        if holding is None:
            holding = self._holdings[account] = Holding(*self._terms.get(account, _USUAL))
        holding.num_blocks += change
        holding.bound_queue()
        if not holding.num_blocks:
            del self._holdings[account]

    def add(self, node: Node) -> None:
        """Queue an unreferenced leaf, or queue it anew: its retention has changed."""
        retention = node.retention
        rank = 0 if retention is None else 2 if retention.is_pinned else 1
        self._next_entry += 1
        node.queued = self._next_entry
        holding = self._holdings[account_of(node.namespace)]
        heappush(holding.queue, (rank, node.last_used, node.serial, node.queued, node))
        holding.bound_queue()

    def choose(self, count: int) -> Iterator[tuple[Node, int]]:
        """Yield (leaf, number of blocks to remove from its tail), `count` blocks in all.

        The caller removes them, with `count`, before it asks for the next. There must be as many that may go.
        """
        while count:
            turns = [(holding.place(node), holding) for holding in self._holdings.values() if (node := holding.first())]
            require(bool(turns), f"{count} blocks are to be evicted, but none may go")
            # Places differ in their serials, so holdings are never compared.
            heapify(turns)
            while count and turns:
                holding = turns[0][1]
                node = holding.first()
                assert node is not None
                parent = node.parent
                assert parent is not None
                cut = _num_blocks_to_cut(holding, node, count, min(turns[1:3], default=None))
                yield node, cut
                count -= cut
                if node.parent is None and parent.namespace != node.namespace:
                    break  # the parent, of another account, may be a leaf now
                if (following := holding.first()) is not None:
                    heapreplace(turns, (holding.place(following), holding))
                else:
                    heappop(turns)

    def of(self, account: str) -> list[Node]:
        """Return the leaves of an account that may go, in no particular order."""
        holding = self._holdings.get(account)
        return [] if holding is None else [node for *_, entry, node in holding.queue if node.queued == entry]

    def num_blocks(self) -> dict[str, int]:
        """Return how many blocks of the tree each account holds."""
        return {account: holding.num_blocks for account, holding in self._holdings.items()}

    def queued_serials(self) -> list[int]:
        """Return the serials of the leaves that may go. Raises InvariantError if dead entries pile up."""
        for holding in self._holdings.values():
            require(len(holding.queue) <= 2 * holding.num_blocks + _HEAP_SLACK, "a queue of victims outgrew its blocks")
        return [node.serial for account in self._holdings for node in self.of(account)]


def _num_blocks_to_cut(holding: Holding, node: Node, count: int, following: tuple[Place, Holding] | None) -> int:
    """Return how many blocks of `node`, at most `count`, are removed before it is another account's turn."""
    most = min(count, len(node.blocks))
    if following is None:
        return most
    cut = 1
    while cut < most and holding.place(node, cut) < following[0]:
        cut += 1
    return cut
