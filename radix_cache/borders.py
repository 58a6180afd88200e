"""The boundaries up to which prefixes serve: any block's, or a block's where all is there that a request needs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import cycle

from radix_cache.needs import Need
from radix_cache.nodes import Node
from radix_cache.tree import RadixTree


class Borders:
    """Finds the last boundary of a prefix at which a request can go on. It changes nothing.

    `are_needed`: True if a prefix serves only up to certain boundaries of its blocks.
    """

    __slots__ = ("_needs", "_reads_blocks", "_tree", "are_needed")

    def __init__(self, tree: RadixTree, needs: Sequence[Need]) -> None:
        self._tree = tree
        self._needs = needs
        self._reads_blocks = any(need.reads_blocks for need in needs)
        self.are_needed = bool(needs)

    def last(self, node: Node | None, depth: int, limit: int, path: Sequence[int]) -> int:
        """Return the last boundary within the first `limit` blocks of a prefix that meets every need. See `Need`."""
        at, num_met = limit, 0
        for need in cycle(self._needs):
            found = need.last(node, depth, at, path)
            num_met = num_met + 1 if found == at else 1
            at = found
            if num_met == len(self._needs):
                break
        return at

    def depth(self, namespace: str, data: bytes) -> int:
        """Count the leading blocks of `data` (int32 ids) that would serve a request."""
        if not self.are_needed:
            return self._tree.depth(namespace, data)
        node, depth, num_cached = self._tree.locate(namespace, data)
        path = self._tree.path(node) if self._reads_blocks else array("i")
        return self.last(node, depth, num_cached, path)
