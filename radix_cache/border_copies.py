"""The window blocks and snapshots that are copied to disk, or wait for it, beside the KV blocks. No files here.

A prefix of a model with windows or recurrent states serves only up to a boundary with a complete window and a snapshot,
its *border*. On disk a border is files beside the KV blocks' files: a window block is named after its KV block, and a
snapshot after the KV block that it follows. A window block or snapshot that waits may be evicted, and is then not
written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from radix_cache.block_copies import BlockCopy, Kind
from radix_cache.nodes import Snapshot
from radix_cache.snapshots import SnapshotTable
from radix_cache.window_blocks import WindowBlocks

# The KV block that has a window block, or a snapshot.
_Owner = int | Snapshot


class BorderCopies:
    """The window blocks and snapshots that wait to be written or are being written.

    A copy borrows them: nobody evicts them meanwhile. If their KV block goes, they are free once the copy has ended.
    """

    def __init__(self, windows: WindowBlocks | None, snapshots: SnapshotTable) -> None:
        self._windows, self._snapshots = windows, snapshots
        # `BlockCopy.block` is set when they are taken.
        self._wanted: dict[_Owner, BlockCopy] = {}
        self._written: dict[bytes, tuple[_Owner, BlockCopy]] = {}
        self._names: set[bytes] = set()
        # The names of files that are being written and are not to stay on disk.
        self._revoked: set[bytes] = set()

    @property
    def num_wanted(self) -> int:
        return len(self._wanted)

    def __contains__(self, name: bytes) -> bool:
        """Return True for a file name that is to be written or is being written."""
        return name in self._names

    def want(self, owner: _Owner, copy: BlockCopy) -> None:
        """Have the window block of a KV block, or a snapshot, written."""
        if owner not in self._wanted and copy.name not in self._names:
            self._wanted[owner] = copy
            self._names.add(copy.name)

    def take(self, most: int) -> list[BlockCopy]:
        """Begin to write what has waited longest, at most `most`, and of snapshots, which have few rows, just one."""
        taken: list[BlockCopy] = []
        while self._wanted and len(taken) < most and not (taken and taken[-1].kind is Kind.STATE):
            owner = next(iter(self._wanted))
            copy = self._wanted.pop(owner)
            place = self._lend(owner)
            if place is None:
                self._names.discard(copy.name)
            else:
                self._written[copy.name] = owner, copy
                taken.append(replace(copy, block=place))
        return taken

    def end(self, copy: BlockCopy) -> bool:
        """Note the end of a copy. Return whether its file may stay."""
        owner, _ = self._written.pop(copy.name)
        if isinstance(owner, Snapshot):
            self._snapshots.take_back(copy.block)
        elif self._windows is not None:
            self._windows.take_back(owner, copy.block)
        stays = copy.name not in self._revoked
        self._names.discard(copy.name)
        self._revoked.discard(copy.name)
        return stays

    def let_go(self, blocks: Iterable[int]) -> None:
        """Write no window blocks of KV blocks that leave the tree."""
        for block in blocks if self._wanted else ():
            if (copy := self._wanted.pop(block, None)) is not None:
                self._names.discard(copy.name)

    def revoke(self, names: Collection[bytes]) -> None:
        """Keep none of these files on disk, whether they wait or are being written."""
        if not self._names.isdisjoint(names):
            self.revoke_all(lambda copy: copy.name not in names)

    def revoke_all(self, keeps: Callable[[BlockCopy], bool]) -> None:
        """Write nothing that `keeps` is False for, and keep nothing on disk that is being written."""
        for owner, copy in [item for item in self._wanted.items() if not keeps(item[1])]:
            del self._wanted[owner]
            self._names.discard(copy.name)
        self._revoked |= {copy.name for _, copy in self._written.values() if not keeps(copy)}

    def _lend(self, owner: _Owner) -> int | None:
        """Return the number of the window block, or the row, that is lent now; None if it has been evicted."""
        if isinstance(owner, Snapshot):
            if owner.node is None:
                return None
            self._snapshots.lend(owner)
            return owner.row
        if self._windows is None or not self._windows.has(owner):
            return None
        return self._windows.lend(owner)
