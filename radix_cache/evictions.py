"""Which prefixes were evicted: a bounded record, by which a miss of an evicted prefix differs from a prompt that was
never seen.

Hashing evicted blocks costs as much as evicting them. So the record of an account begins when it first asks, and ends
when it has not asked for a while.

The digest of a prefix is chained block by block from the name of its namespace. It is a `hash()`, the cheapest digest,
and differs from process to process: digests serve only reports, no decision depends on them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from math import inf

from radix_cache.nodes import Node
from radix_cache.retention import account_of

_MAX_RECORDED = 65_536  # blocks of one rank's accounts, about 125 bytes each
_SHARE_OF_ACCOUNT = 4  # an account records at most this part of them
_UNREAD_SECONDS = 600.0  # a record ends this long after the account last asked


class EvictionRecord:
    """The digests of the prefixes that were evicted last of each account that asks, at most `limit` of all together.

    Beyond that, the record of the account that asked longest ago ends. Time is the caller's (`set_time`).
    """

    def __init__(self, block_bytes: int, limit: int = _MAX_RECORDED) -> None:
        self._block_bytes = block_bytes
        self._limit = limit
        self._evicted: dict[str, OrderedDict[int, None]] = {}
        # When each account with a record last asked, the one that asked longest ago first.
        self._read_at: OrderedDict[str, float] = OrderedDict()
        self._incomplete: set[str] = set()
        self._num_recorded = 0
        self._now = -inf

    @property
    def num_recorded(self) -> int:
        """The number of blocks that are recorded."""
        return self._num_recorded

    def begin(self, account: str) -> None:
        """Record the evictions of an account from now on: it asks."""
        self._evicted.setdefault(account, OrderedDict())
        self._read_at[account] = self._now
        self._read_at.move_to_end(account)

    def set_time(self, now: float) -> None:
        """Set the time, in seconds, which never goes back, and end the records that no account has asked for lately."""
        self._now = now
        while self._read_at:
            account, read_at = next(iter(self._read_at.items()))
            if now - read_at <= _UNREAD_SECONDS:
                return
            self._end(account)

    def add(self, node: Node, count: int) -> None:
        """Record that the last `count` blocks of a node are about to be evicted."""
        account = account_of(node.namespace)
        record = self._evicted.get(account)
        if record is None:
            self._incomplete.add(account)
            return
        digests = self.digests(node)
        self._num_recorded -= len(record)
        # The tail first: the head of a prefix is remembered longest.
        record.update(dict.fromkeys(reversed(digests[len(digests) - count :])))
        self._num_recorded += len(record)
        while len(record) > self._limit // _SHARE_OF_ACCOUNT:
            record.popitem(last=False)
            self._num_recorded -= 1
            self._incomplete.add(account)
        while self._num_recorded > self._limit:
            self._end(next(iter(self._read_at)))
        del digests[len(digests) - count :]

    def _end(self, account: str) -> None:
        record = self._evicted.pop(account)
        del self._read_at[account]
        self._num_recorded -= len(record)
        if record:
            self._incomplete.add(account)

    def is_incomplete(self, account: str) -> bool:
        """Return whether the record of an account lacks an eviction, or has forgotten one."""
        return account in self._incomplete

    def num_evicted(self, node: Node, data: bytes) -> int:
        """Count the leading blocks of `data` (int32 ids, whole blocks) after the end of `node` that were evicted."""
        size = self._block_bytes
        record = self._evicted.get(account_of(node.namespace))
        if not record:
            return 0
        digest = self.end_digest(node)
        for position in range(0, len(data), size):
            digest = hash((digest, data[position : position + size]))
            if digest not in record:
                return position // size
        return len(data) // size

    def end_digest(self, node: Node) -> int:
        return self.digests(node)[-1] if node.parent is not None else hash(node.namespace)

    def digests(self, node: Node) -> array[int]:
        """Return the node's own array with the digests of the prefixes that end with its blocks, filled in."""
        if len(node.digests) == len(node.blocks):
            return node.digests
        chain = []
        current: Node = node
        while current.parent is not None and len(current.digests) < len(current.blocks):
            chain.append(current)
            current = current.parent
        digest = current.digests[-1] if current.parent is not None else hash(current.namespace)
        size = self._block_bytes
        for current in reversed(chain):
            digests = current.digests
            if digests:
                digest = digests[-1]
            elif current.parent is not None and current.parent.namespace != current.namespace:
                digest = hash((digest, current.namespace))
            data = bytes(current.tokens)
            for position in range(len(digests) * size, len(data), size):
                digest = hash((digest, data[position : position + size]))
                digests.append(digest)
        return node.digests
