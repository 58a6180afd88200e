"""The boundaries up to which prefixes serve: any block's, or a block's with a complete window and a snapshot."""

from __future__ import annotations

from array import array

from radix_cache.nodes import Node, Snapshot
from radix_cache.snapshots import deepest_snapshot
from radix_cache.tree import RadixTree
from radix_cache.window_blocks import WindowBlocks


class Borders:
    """Finds the last boundary of a prefix at which a request can go on. It changes nothing.

    `are_needed`: True if a prefix serves only up to certain boundaries of its blocks.
    """

    __slots__ = ("_stateful", "_tree", "_windows", "are_needed")

    def __init__(self, tree: RadixTree, windows: WindowBlocks | None, *, stateful: bool) -> None:
        """stateful: whether a boundary needs a snapshot. windows: None if it needs no window blocks."""
        self._tree = tree
        self._windows = windows
        self._stateful = stateful
        self.are_needed = stateful or windows is not None

    def last(self, node: Node | None, depth: int, limit: int, path: array[int]) -> tuple[Snapshot | None, int]:
        """Return the last boundary within the first `limit` blocks of a prefix up to which it serves, and its snapshot.

        node, depth: the prefix ends within the run of `node`, whose end is that deep. path: its blocks.
        """
        snapshot, at = None, limit
        while True:
            if self._windows is not None:
                at = self._windows.last_border(path, at)
            if not self._stateful:
                return None, at
            snapshot, found = deepest_snapshot(node, depth, at)
            if found == at:
                return snapshot, at
            at = found

    def depth(self, namespace: str, data: bytes) -> int:
        """Count the leading blocks of `data` (int32 ids) that would serve a request."""
        if not self.are_needed:
            return self._tree.depth(namespace, data)
        node, depth, num_cached = self._tree.locate(namespace, data)
        path = array("i") if self._windows is None else self._tree.path(node)
        return self.last(node, depth, num_cached, path)[1]
