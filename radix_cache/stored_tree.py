"""The blocks of one tree that are in the lower tier too: which are written, and which continue a prefix of the tree.

Where prefixes serve only up to a border, its window blocks and its snapshot are written too, at the places that prompts
are likely to go on from: the end of a prompt, where prompts diverge, and the end of a request. A stored prefix then
serves up to its last border there.

Below a GPU blocks *move*: each is written when it is about to leave the tree (`StoredTree.demote`). A border may leave
memory before the KV blocks of its prefix, which are then needed beside it, so where there are borders blocks are
written soon after they have entered the tree, as they are on a disk.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from radix_cache.block_allocator import BlockAllocator
from radix_cache.block_copies import BlockCopies, BlockCopy, Kind, border_name
from radix_cache.border_copies import BorderCopies
from radix_cache.nodes import Lease, Node, Snapshot
from radix_cache.snapshots import deepest_snapshot
from radix_cache.stored import StoredBlock, StoredBlocks, Tier, used_at
from radix_cache.tree import RadixTree
from radix_cache.window_blocks import Windows


class StoredTree:
    """Has the blocks of leases written as they enter the tree, or leave it. It moves no block within memory."""

    def __init__(
        self,
        stored: StoredBlocks,
        copies: BlockCopies,
        tree: RadixTree,
        windows: Windows,
        allocator: BlockAllocator,
        free: Callable[[Sequence[int]], None],
        *,
        has_states: bool,
    ) -> None:
        """allocator: of the tree's blocks. free: frees blocks that have left the tree. has_states: whether prefixes
        serve only up to a snapshot."""
        self.stored = stored
        self.borders = BorderCopies(windows, tree.snapshots)
        self._copies = copies
        self._tree = tree
        self._size = tree.block_size
        self._windows = windows
        self._allocator = allocator
        self._free = free
        # The kinds of the files beside a KV block's file.
        self._kinds = (*((Kind.WINDOW,) if windows.num_blocks else ()), *((Kind.STATE,) if has_states else ()))

    @property
    def has_states(self) -> bool:
        """True if prefixes serve only up to a snapshot."""
        return Kind.STATE in self._kinds

    @property
    def moves(self) -> bool:
        """True if blocks are written when they are about to leave the tree, False if soon after they have entered."""
        return self.stored.tier is Tier.HOST and not self._kinds

    @property
    def num_wanted(self) -> int:
        """The number of blocks, window blocks and snapshots that wait to be written now."""
        return len(self.borders.queue) + (0 if self.moves else len(self._copies.queue))

    def take(self, most: int) -> list[BlockCopy]:
        """Return the blocks that are to be written next, at most `most`. `end_write` ends each.

        Window blocks and snapshots come first: memory has few of them, and others may take them any time.
        """
        beside = self.borders.take(most)
        return beside + self._copies.take(most - len(beside))

    def demote(self, num_free: int) -> list[BlockCopy]:
        """Let cached blocks leave memory, in the order of eviction, until `num_free` blocks are free.

        Retained ones stay, and half of all that could be evicted: a request may need them before they are copied.
        Return the copies of the blocks that are not stored yet; they are in copy until `end_write`.
        """
        tree, copies = self._tree, list[BlockCopy]()
        missing = num_free - self._allocator.num_free - self._copies.num_in_copy
        count = min(missing, tree.num_evictable_blocks // 2)
        while count > 0 and (leaf := tree.victims.next_leaf()) is not None and leaf.retention is None:
            evicted = tree.evict(min(count, len(leaf.blocks)))
            copies += self._copies.take_of(evicted)
            self._free(evicted)
            count -= len(evicted)
        return copies

    def hurry(self, names: Sequence[bytes]) -> None:
        """Let blocks that wait to be written come before all others."""
        self._copies.queue.hurry(names)

    def publish(self, lease: Lease, tokens: array[int], first: int, stop: int) -> None:
        """Have the lease's blocks number `first` to `stop`, which have entered the tree, written."""
        self.stored.name(lease.names, lease.namespace, tokens, stop, self._size)
        self._write(lease, tokens, first, stop)
        for end in lease.ends:
            if first < end <= stop:
                self._write_window(lease, tokens, end)

    def keep_snapshot(self, lease: Lease, snapshot: Snapshot) -> None:
        """Have a snapshot at the end of the lease's published tokens written."""
        depth = lease.num_published_tokens // self._size
        if 0 < depth <= len(lease.names):
            self._write_state(lease, snapshot, depth, bytes(lease.node.tokens[-4 * self._size :]))

    def release(self, lease: Lease, keep_tokens: int | None) -> None:
        """Record that the lease's prefix was used, and have its missing blocks written.

        Public blocks have been written for the namespace that published them. keep_tokens: see `PrefixCache.release`.
        """
        stored, size = self.stored, self._size
        num_published = lease.num_published_tokens // size
        stop = num_published if keep_tokens is None else min(num_published, max(0, keep_tokens) // size)
        if not stop:
            return
        tokens, queue = array("i"), self._copies.queue
        if len(lease.names) < stop or not all(name in stored or name in queue for name in lease.names[:stop]):
            tokens.frombytes(self._tree.prefix(lease.node))
            stored.name(lease.names, lease.namespace, tokens, stop, size)
            node: Node | None = lease.node
            first = num_published
            while node is not None and node.namespace == lease.namespace:
                first -= len(node.blocks)
                node = node.parent
            self._write(lease, tokens, first, stop)
        self._write_border(lease, tokens, stop)
        stored.touch(lease.names[:stop], self._kinds)

    def forget(self, names: Sequence[bytes]) -> None:
        """Let blocks not be, or not come, in the lower tier."""
        self._copies.queue.revoke(names)
        beside = {border_name(name, kind) for name in names for kind in self._kinds}
        self.borders.queue.revoke(beside)
        for name in (*names, *beside):
            self.stored.discard(name)

    def drop(self, namespaces: Collection[str] | None) -> None:
        """Let no block of namespaces (None: of all) be, or come, there."""
        folders = None if namespaces is None else {self.stored.folder_of(namespace) for namespace in namespaces}
        for queue in (self._copies.queue, self.borders.queue):
            queue.revoke_all(lambda copy: folders is not None and copy.folder not in folders)
        self.stored.drop(namespaces)

    def end_write(self, copy: BlockCopy, num_bytes: int, now: float) -> None:
        """Record that a block of `take` or `demote` is written. num_bytes: of its file, 0 if it could not be written.

        now: in seconds since the epoch.
        """
        stays = self._copies.end(copy.block) if copy.kind is Kind.KV else self.borders.end(copy)
        if num_bytes and stays:
            self.stored.put(StoredBlock(copy.name, copy.folder, num_bytes, used_at(now, copy.depth)))
        elif num_bytes:
            self.stored.remove(copy.path)

    def num_stored(self, tokens: array[int], namespace: str, names: list[bytes], first: int) -> int:
        """Return the number of the first block from number `first` on that is not stored, or holds the last token.

        names: of the tokens' first blocks; names are added as far as they are needed.
        """
        stop = (len(tokens) - 1) // self._size
        if first >= stop or not self.stored.has_any(namespace):
            return first
        self.stored.name(names, namespace, tokens, stop, self._size)
        return self._last_border(names, first, min(stop, self.stored.depth(names, first)))

    def unknown(
        self, tokens: array[int], namespace: str, names: list[bytes], first: int
    ) -> Iterator[list[StoredBlock]] | None:
        """Return the whole blocks of `tokens` that are neither in memory nor stored, without size and time of use; None
        without any.

        Each is a list, of the KV block and of its window block and snapshot, which it may have, too. They are made one
        by one, on any thread: most searches end with the first.
        Other services that share the folder may have written their files. first: the number of the first block that is
        not in memory. For `names` see `num_stored`.
        """
        stop = (len(tokens) - 1) // self._size
        if first >= stop:
            return None
        self.stored.name(names, namespace, tokens, stop, self._size)
        left = names[self.stored.depth(names[:stop], first) : stop]
        return self._rows(left, self.stored.folder_of(namespace), self.stored.going) if left else None

    def _rows(self, names: Sequence[bytes], folder: str, going: Collection[str]) -> Iterator[list[StoredBlock]]:
        """going: the paths of files that are being removed."""
        for name in names:
            of_block = (name, *(border_name(name, kind) for kind in self._kinds))
            row = [StoredBlock(one, folder, 0, 0.0) for one in of_block]
            if row[0].path in going:
                return
            yield [block for block in row if block.path not in going]

    def copies_of(self, blocks: Iterable[int], lease: Lease, tokens: array[int], first: int) -> list[BlockCopy]:
        """Return the copies of blocks of a lease, numbers `first` and so on, whose names are known."""
        folder = self.stored.folder_of(lease.namespace)
        return [self._copy(block, lease, tokens, index, folder) for index, block in enumerate(blocks, first)]

    def border_copies(self, lease: Lease, tokens: array[int], first: int, row: int | None) -> list[BlockCopy]:
        """Return the copies of the window blocks of a lease's new blocks, and of the snapshot at their end.

        The window blocks, of blocks from number `first` on, are lent. row: for the snapshot, None for none.
        """
        folder, copies = self.stored.folder_of(lease.namespace), list[BlockCopy]()
        if Kind.WINDOW in self._kinds:
            for index in range(max(first, lease.first_window), len(lease.block_ids)):
                place = self._windows.lend(lease.block_ids[index])
                copies.append(self._copy(place, lease, tokens, index, folder, Kind.WINDOW))
        if row is not None:
            copies.append(self._copy(row, lease, tokens, len(lease.block_ids) - 1, folder, Kind.STATE))
        return copies

    def _write(self, lease: Lease, tokens: array[int], first: int, stop: int) -> None:
        """Have the lease's blocks number `first` to `stop`, which are in the tree, written unless they are stored."""
        folder = self.stored.folder_of(lease.namespace)
        for index in range(first, stop):
            name = lease.names[index]
            if name not in self.stored and name not in self._copies.queue:
                self._copies.want(self._copy(lease.block_ids[index], lease, tokens, index, folder))

    def _write_border(self, lease: Lease, tokens: array[int], stop: int) -> None:
        """Have the last border within the lease's first `stop` blocks written.

        tokens: its published tokens, or none if they are not at hand; they are then filled in.
        """
        if not self._kinds:
            return
        if not tokens:
            tokens.frombytes(self._tree.prefix(lease.node))
        if Kind.STATE in self._kinds:
            snapshot, stop = deepest_snapshot(lease.node, lease.num_published_tokens // self._size, stop)
            if snapshot is not None:
                data = tokens[(stop - 1) * self._size : stop * self._size].tobytes()
                self._write_state(lease, snapshot, stop, data)
        self._write_window(lease, tokens, stop)

    def _write_window(self, lease: Lease, tokens: array[int], end: int) -> None:
        """Have the window blocks before block number `end` of the lease written, if all are there."""
        blocks = range(max(0, end - self._windows.span), end)
        if not all(self._windows.has(lease.block_ids[index]) for index in blocks):
            return
        folder = self.stored.folder_of(lease.namespace)
        for index in blocks:
            if self._is_missing(lease.names[index], Kind.WINDOW):
                block = lease.block_ids[index]
                self.borders.queue.want(block, self._copy(block, lease, tokens, index, folder, Kind.WINDOW))

    def _write_state(self, lease: Lease, snapshot: Snapshot, depth: int, data: bytes) -> None:
        if self._is_missing(lease.names[depth - 1], Kind.STATE):
            name, folder = border_name(lease.names[depth - 1], Kind.STATE), self.stored.folder_of(lease.namespace)
            self.borders.queue.want(snapshot, BlockCopy(0, name, folder, depth - 1, data, Kind.STATE))

    def _is_missing(self, name: bytes, kind: Kind) -> bool:
        """Return whether a KV block is, or comes, in the lower tier, and the file beside it is not and does not.

        Public KV blocks are there under the names of the namespace that published them.
        """
        beside = border_name(name, kind)
        is_coming = name in self.stored or name in self._copies.queue
        return is_coming and beside not in self.stored and beside not in self.borders.queue

    def _last_border(self, names: Sequence[bytes], first: int, depth: int) -> int:
        """Return the last boundary up to block number `depth` at which a prefix serves that is stored from `first` on.

        It is `first`, up to which the prefix serves in memory, if there is none behind it.
        """
        at = depth
        while at > first and self._kinds:
            at = self._last_window(names, first, at)
            if at <= first or Kind.STATE not in self._kinds or border_name(names[at - 1], Kind.STATE) in self.stored:
                break
            at -= 1
        return max(first, at)

    def _last_window(self, names: Sequence[bytes], first: int, limit: int) -> int:
        """Return the last boundary up to `limit` whose window blocks from number `first` on are in the lower tier."""
        border, index = limit, limit - 1
        while index >= max(first, border - self._windows.span):
            if border_name(names[index], Kind.WINDOW) not in self.stored:
                border = index
            index -= 1
        return border

    def _copy(
        self, block: int, lease: Lease, tokens: array[int], index: int, folder: str, kind: Kind = Kind.KV
    ) -> BlockCopy:
        data = tokens[index * self._size : (index + 1) * self._size].tobytes()
        name = lease.names[index] if kind is Kind.KV else border_name(lease.names[index], kind)
        return BlockCopy(block, name, folder, index, data, kind)
