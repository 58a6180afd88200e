"""The window blocks and snapshots that are copied to the lower tier, or wait for it, beside the KV blocks.

A prefix of a model with windows or recurrent states serves only up to a boundary with a complete window and a snapshot,
its *border*. There a border is stored beside the KV blocks: a window block is named after its KV block, and a
snapshot after the KV block that it follows. A window block or snapshot that waits may be evicted, and is then not
written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from radix_cache.block_copies import BlockCopy, Kind, WriteQueue
from radix_cache.nodes import Snapshot
from radix_cache.snapshots import SnapshotTable
from radix_cache.window_blocks import Windows

# The KV block that has a window block, or a snapshot.
_Owner = int | Snapshot


class BorderCopies:
    """The window blocks and snapshots that are being written, and the `queue` of copies that wait.

    A copy borrows them: they are not evicted meanwhile. If their KV block leaves the tree, they are free once the copy
    has ended.
    """

    def __init__(self, windows: Windows, snapshots: SnapshotTable) -> None:
        self._windows, self._snapshots = windows, snapshots
        # `BlockCopy.block` is set when they are taken.
        self.queue: WriteQueue[_Owner] = WriteQueue()
        self._lent: dict[bytes, _Owner] = {}

    def take(self, most: int) -> list[BlockCopy]:
        """Begin the copies that have waited longest, at most `most`. Of snapshots only one: there are few rows."""
        taken: list[BlockCopy] = []
        while self.queue and len(taken) < most and not (taken and taken[-1].kind is Kind.STATE):
            owner, copy = self.queue.begin()
            if (place := self._lend(owner)) is None:
                self.queue.end(copy.name)
            else:
                self._lent[copy.name] = owner
                taken.append(replace(copy, block=place))
        return taken

    def end(self, copy: BlockCopy) -> bool:
        """Record the end of a copy. Return whether its file may stay."""
        owner = self._lent.pop(copy.name)
        if isinstance(owner, Snapshot):
            self._snapshots.take_back(copy.block)
        else:
            self._windows.take_back(owner, copy.block)
        return self.queue.end(copy.name)

    def let_go(self, blocks: Iterable[int]) -> None:
        """Write no window blocks of KV blocks that leave the tree."""
        for block in blocks if self.queue else ():
            self.queue.forget(block)

    def _lend(self, owner: _Owner) -> int | None:
        """Return the number of the window block, or the row, that is lent now; None if it has been evicted."""
        if isinstance(owner, Snapshot):
            if owner.node is None:
                return None
            self._snapshots.lend(owner)
            return owner.row
        return self._windows.lend(owner) if self._windows.has(owner) else None
