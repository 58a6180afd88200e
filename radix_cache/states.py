"""The recurrent states that requests go on from: snapshots at block boundaries, for those who hold leases."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from radix_cache.errors import require
from radix_cache.misses import MissReason
from radix_cache.needs import Need
from radix_cache.nodes import Lease, Node, Snapshot
from radix_cache.retention import account_of
from radix_cache.snapshots import SnapshotTable, deepest_snapshot
from radix_cache.stored_tree import StoredTree


class States(Need):
    """Where layers are recurrent, a prefix serves only up to a boundary with a snapshot; KV after it is computed again.

    The caller takes a row when it plans a chunk that saves the state at a block boundary, and hands it over with that
    chunk's commit, after `PrefixCache.publish`. `table`: the rows, read-only.
    """

    lacking = MissReason.NO_STATE

    def __init__(
        self, table: SnapshotTable, block_size: int, check: Callable[[Lease], None], lower: StoredTree | None
    ) -> None:
        """check: raises LeaseError for a lease that was released. lower: None without a lower tier."""
        self.table = table
        self._block_size = block_size
        self._check = check
        self._lower = lower

    @property
    def are_kept(self) -> bool:
        """True if there are rows for snapshots."""
        return self.table.num_rows > 0

    @property
    def num_lent(self) -> int:
        return self.table.num_lent

    def begin_load(self, lease: Lease) -> int | None:
        """Return the row of the lease's snapshot, which the next plan loads; None without one. It stays pinned."""
        self._check(lease)
        if lease.snapshot is None:
            return None
        self.table.record_use(lease.snapshot)
        return lease.snapshot.row

    def end_load(self, lease: Lease) -> None:
        """Unpin the lease's snapshot, if it has one: the plan that loads it is committed, or no plan will load it."""
        self._check(lease)
        if lease.snapshot is not None:
            self.table.unpin(lease.snapshot)
            lease.snapshot = None

    def take(self, lease: Lease, num_tokens: int) -> int | None:
        """Return a row for the state after the first `num_tokens` of a lease, an unpublished block boundary.

        Return None if every other snapshot is pinned, worth more, or of an account that holds fewer. The row is to be
        given to `keep` or `drop_row`.
        """
        self._check(lease)
        depth = lease.num_published_tokens // self._block_size
        _, above = deepest_snapshot(lease.node, depth, depth)
        return self.table.take(num_tokens // self._block_size - above, account_of(lease.namespace))

    def keep(self, lease: Lease, row: int, num_tokens: int, *, to_lower: bool = False) -> Snapshot | None:
        """Put the state in `row` at the end of the lease's published tokens, which are the first `num_tokens`.

        to_lower: whether prompts are likely to go on from there, so that it is stored too, if blocks are.
        If they are not, or none are published, free the row and return None. To be called after the forward that wrote
        the row. Return the snapshot, or the older one if the boundary already has one.
        """
        self._check(lease)
        if not num_tokens or lease.num_published_tokens != num_tokens:
            self.drop_row(row)
            return None
        snapshot = self.table.place(row, lease.node)
        if to_lower and self._lower is not None:
            self._lower.keep_snapshot(lease, snapshot)
        return snapshot

    def drop_row(self, row: int) -> None:
        """Free a row that `take` returned. Raise KeyError if it did not."""
        self.table.give_back(row)

    def supersede(self, snapshot: Snapshot) -> None:
        """Let a snapshot be evicted soon: its only user has saved a later one. Do nothing if it is gone."""
        self.table.supersede(snapshot)

    def drop_unused(self, snapshot: Snapshot) -> None:
        """Remove a snapshot from the tree unless it is gone, pinned, or has been of use."""
        if snapshot.node is not None and not snapshot.pins and not snapshot.uses:
            self.table.remove(snapshot)

    def last(self, node: Node | None, depth: int, limit: int, path: Sequence[int]) -> int:
        return deepest_snapshot(node, depth, limit)[1]

    def adopt(self, lease: Lease, first: int) -> None:
        """Pin the snapshot at the end of a lease's published tokens, until `end_load`."""
        if lease.num_published_tokens:
            self.end_load(lease)
            lease.snapshot = lease.node.snapshots[-1]
            self.table.pin(lease.snapshot)

    def release(self, lease: Lease) -> None:
        if lease.snapshot is not None:
            self.table.unpin(lease.snapshot)
            lease.snapshot = None

    def reorder(self) -> None:
        self.table.reorder()

    def check_counts(self, duplicates: Collection[int]) -> None:
        rows = self.table
        total = rows.num_free + rows.num_cached + rows.num_written + rows.num_lent_alone
        require(total == rows.num_rows, f"{total} of {rows.num_rows} rows for snapshots accounted for")
