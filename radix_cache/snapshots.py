"""Snapshots of recurrent states at block boundaries of the tree, and which of them is evicted for a new one.

A hybrid model continues from a prefix only where both its KV and its recurrent state are cached. A snapshot is one
state, a row of the rank's pool of states. Rows are a budget apart from blocks: all cost the same, so the worth of a
snapshot is the number of blocks that a request would compute again without it, and how recently it was used; accounts
share the rows (`radix_cache.worth_queue`). A snapshot that a conversation has left behind is worth nothing, and a
snapshot that a client retains counts several times. It still gives way in the end, so that retentions cannot take all
rows for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from radix_cache.errors import require
from radix_cache.nodes import Node, Snapshot
from radix_cache.retention import account_of
from radix_cache.worth_queue import WorthQueue

# A snapshot under a prefix that a client retains stays about this many times as long.
_RETAINED_WEIGHT = 8


class SnapshotTable:
    """The rows for snapshots: each row is free, being written, or a snapshot in the tree.

    A snapshot leaves the tree when its row is wanted or when the block before its boundary goes. While it is pinned
    neither happens, because its user also holds a lease on its prefix. Gains and depths are in blocks.
    """

    def __init__(self, rows: range, excess: Callable[[str, int], float]) -> None:
        """rows: the numbers of the rows, empty if states are not kept. excess: as for `WorthQueue`."""
        self.rows = rows
        self._free = list(reversed(rows))
        # By row that is being copied to the lower tier: its snapshot, None once that has left the tree.
        self._lent: dict[int, Snapshot | None] = {}
        # By row: the account that will have the snapshot.
        self._written: dict[int, str] = {}
        # The snapshots that are not pinned.
        self._queue: WorthQueue[Snapshot] = WorthQueue(excess)
        self.num_cached = 0
        self.num_used = 0
        self.num_placed = 0
        self.num_evicted = 0

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_lent(self) -> int:
        """The number of rows that are being copied to the lower tier."""
        return len(self._lent)

    @property
    def num_lent_alone(self) -> int:
        """The number of rows that are being copied to the lower tier and whose snapshots have left the tree."""
        return sum(snapshot is None for snapshot in self._lent.values())

    @property
    def num_written(self) -> int:
        """The number of rows that were taken and neither placed nor given back."""
        return len(self._written)

    def take(self, gain: int, account: str) -> int | None:
        """Return a row for a new snapshot of an account that will save `gain` blocks.

        Return None if all others are worth more, or belong to accounts that hold fewer.
        """
        if not self._free:
            victim = self._first(account)
            if victim is None:
                return None
            if _account(victim) == account and victim.worth > self._queue.age + gain:
                return None
            self._queue.evict(victim)
            self.num_evicted += 1
            self.remove(victim)
        row = self._free.pop()
        self._written[row] = account
        self._queue.count(account, 1)
        return row

    def give_back(self, row: int) -> None:
        """Free a row that was taken. Raise KeyError if it was not."""
        self._queue.count(self._written.pop(row), -1)
        self._free.append(row)

    def place(self, row: int, node: Node) -> Snapshot:
        """Put the state in a taken row at the end of `node`, a run of blocks. An older snapshot there stays instead."""
        at = len(node.blocks)
        if node.snapshots and node.snapshots[-1].offset == at:
            self.give_back(row)
            return node.snapshots[-1]
        snapshot = Snapshot(row, node, at)
        node.snapshots.append(snapshot)
        self._queue.count(_account(snapshot), 1)
        self._queue.count(self._written.pop(row), -1)
        self.num_cached += 1
        self.num_placed += 1
        snapshot.since = self._queue.age
        self._enqueue(snapshot)
        return snapshot

    def pin(self, snapshot: Snapshot) -> None:
        """Keep a snapshot in the tree until `unpin`."""
        snapshot.pins += 1
        self._queue.discard(snapshot)

    def unpin(self, snapshot: Snapshot) -> None:
        snapshot.pins -= 1
        if not snapshot.pins:
            self._enqueue(snapshot)

    def lend(self, snapshot: Snapshot) -> None:
        """Let a snapshot's row be copied down, until `take_back`. It is pinned but for the end of its prefix."""
        self.pin(snapshot)
        self._lent[snapshot.row] = snapshot

    def take_back(self, row: int) -> None:
        """Record that a row has been copied."""
        snapshot = self._lent.pop(row)
        if snapshot is None:
            self._free.append(row)
        else:
            self.unpin(snapshot)

    def is_lent(self, row: int) -> bool:
        """Return whether a row is being copied to the lower tier."""
        return row in self._lent

    def record_use(self, snapshot: Snapshot) -> None:
        """Count that a request continues from a pinned snapshot, which makes it recent."""
        snapshot.uses += 1
        self.num_used += 1
        snapshot.since = self._queue.age
        snapshot.is_superseded = False

    def supersede(self, snapshot: Snapshot) -> None:
        """Let a snapshot go early, with those before it: its only user has saved a later one. Do nothing if it is gone.

        This holds back to the last place where prompts branch, whose snapshot may serve further prompts. It does not
        hold for snapshots that several requests have used, or in a retained run.
        """
        found: list[Snapshot] = []
        node: Node | None = snapshot.node
        offset = snapshot.offset
        while node is not None and not node.keeps and (offset < len(node.blocks) or len(node.children) < 2):
            found.extend(one for one in reversed(node.snapshots) if one.offset <= offset and one.uses < 2)
            node = node.parent
            offset = 0 if node is None else len(node.blocks)
        # The shortest prefix goes first.
        for one in reversed(found):
            one.is_superseded = True
            if not one.pins:
                self._enqueue(one)

    def remove(self, snapshot: Snapshot) -> None:
        """Take a snapshot that is not pinned out of the tree, and free its row."""
        node = snapshot.node
        assert node is not None
        is_lent = snapshot.row in self._lent
        require(snapshot.pins == is_lent, f"snapshot {snapshot.row} leaves the tree while a request needs it")
        self._queue.discard(snapshot)
        self._queue.count(_account(snapshot), -1)
        node.snapshots.remove(snapshot)
        snapshot.node = None
        self.num_cached -= 1
        if is_lent:
            self._lent[snapshot.row] = None
        else:
            self._free.append(snapshot.row)

    def cut(self, node: Node, num_left: int) -> None:
        """Remove the snapshots of a node after its first `num_left` blocks; only these blocks stay."""
        while node.snapshots and node.snapshots[-1].offset > num_left:
            self.remove(node.snapshots[-1])

    def reorder(self) -> None:
        """Heed that the weight of an account has changed."""
        self._queue.reorder()

    def check(self, snapshots: list[Snapshot]) -> None:
        """Raise InvariantError unless these are the snapshots in the tree, and all that are not pinned may go."""
        require(len(snapshots) == self.num_cached, "num_cached is wrong")
        alone = [row for row, snapshot in self._lent.items() if snapshot is None]
        used = [*(snapshot.row for snapshot in snapshots), *self._free, *self._written, *alone]
        require(sorted(used) == list(self.rows), "a row for snapshots is lost or has two uses")
        self._queue.check(Counter([*map(_account, snapshots), *self._written.values()]))
        expected = {snapshot for snapshot in snapshots if not snapshot.pins}
        require(set(self._queue) == expected, "the queue differs from the snapshots that may go")

    def _first(self, account: str) -> Snapshot | None:
        """Return the snapshot that gives its row to an account, None without any."""
        while (snapshot := self._queue.first(account, sparing=True)) is not None:
            if _worth(snapshot) <= snapshot.worth:
                return snapshot
            # It is worth more than when it was queued.
            self._enqueue(snapshot)
        return None

    def _enqueue(self, snapshot: Snapshot) -> None:
        snapshot.worth = _worth(snapshot)
        self._queue.put(snapshot, _account(snapshot), snapshot.worth)


def _account(snapshot: Snapshot) -> str:
    assert snapshot.node is not None
    return account_of(snapshot.node.namespace)


def _worth(snapshot: Snapshot) -> int:
    """Return the worth of a snapshot now. It grows when the previous snapshot goes, or when its prefix is retained."""
    node = snapshot.node
    assert node is not None
    if node.keeps:
        return snapshot.since + _RETAINED_WEIGHT * gain_of(snapshot)
    return 0 if snapshot.is_superseded else snapshot.since + gain_of(snapshot)


def split_snapshots(node: Node, upper: Node) -> None:
    """Give the new parent `upper` of `node`, which has its former first blocks, the snapshots at their ends."""
    count = len(upper.blocks)
    for snapshot in node.snapshots:
        if snapshot.offset <= count:
            snapshot.node = upper
            upper.snapshots.append(snapshot)
        else:
            snapshot.offset -= count
    del node.snapshots[: len(upper.snapshots)]


def deepest_snapshot(node: Node | None, depth: int, limit: int) -> tuple[Snapshot | None, int]:
    """Return the last snapshot within the first `limit` blocks of the prefix that ends with `node`, and its depth.

    depth: of the end of `node`. (None, 0) without a snapshot.
    """
    while node is not None:
        depth -= len(node.blocks)
        for snapshot in reversed(node.snapshots):
            if depth + snapshot.offset <= limit:
                return snapshot, depth + snapshot.offset
        node = node.parent
    return None, 0


def gain_of(snapshot: Snapshot) -> int:
    """Count the blocks between a snapshot in the tree and the previous snapshot of its prefix."""
    node = snapshot.node
    assert node is not None
    place = node.snapshots.index(snapshot)
    if place:
        return snapshot.offset - node.snapshots[place - 1].offset
    gain, above = snapshot.offset, node.parent
    while above is not None and not above.snapshots:
        gain += len(above.blocks)
        above = above.parent
    return gain if above is None else gain + len(above.blocks) - above.snapshots[-1].offset
