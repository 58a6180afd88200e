"""Which prefixes were evicted: a bounded record, so that a miss can be told from a prompt that was never seen.

Hashing evicted blocks costs as much as evicting them, so the record of an account begins when it first asks.

The digest of a prefix is chained block by block from the name of its namespace. It is a `hash()`, the cheapest digest,
and differs from process to process: digests serve only reports, no decision depends on them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

from radix_cache.nodes import Node
from radix_cache.retention import account_of

MAX_RECORDED_BLOCKS = 16_384


class EvictionRecord:
    """The digests of the prefixes that were evicted last of each account that has asked, at most `limit` of them."""

    __slots__ = ("_block_bytes", "_evicted", "_incomplete", "_limit")

    def __init__(self, block_bytes: int, limit: int) -> None:
        self._block_bytes = block_bytes
        self._limit = limit
        self._evicted: dict[str, OrderedDict[int, None]] = {}
        self._incomplete: set[str] = set()

    def begin(self, account: str) -> None:
        """Record the evictions of an account from now on."""
        self._evicted.setdefault(account, OrderedDict())

    def add(self, node: Node, count: int) -> None:
        """Note that the last `count` blocks of a node are about to be evicted."""
        account = account_of(node.namespace)
        record = self._evicted.get(account)
        if record is None:
            self._incomplete.add(account)
            return
        digests = self.digests(node)
        # The tail first: the head of a prefix is remembered longest.
        record.update(dict.fromkeys(reversed(digests[len(digests) - count :])))
        while len(record) > self._limit:
            record.popitem(last=False)
            self._incomplete.add(account)
        del digests[len(digests) - count :]

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
        """Return the digest of the prefix that ends with `node`."""
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
