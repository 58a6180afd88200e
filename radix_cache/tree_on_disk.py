"""The blocks of one tree that are on disk too: which are written, and which continue a prefix of the tree."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile

from radix_cache.block_copies import BlockCopies, BlockCopy
from radix_cache.nodes import Lease, Node
from radix_cache.stored import StoredBlock, StoredBlocks, used_at
from radix_cache.tree import RadixTree


class TreeOnDisk:
    """Has the blocks of leases written to disk as they enter the tree. It moves no block within memory."""

    __slots__ = ("_copies", "_size", "_tree", "stored")

    def __init__(self, stored: StoredBlocks, copies: BlockCopies, tree: RadixTree, block_size: int) -> None:
        self.stored = stored
        self._copies = copies
        self._tree = tree
        self._size = block_size

    def publish(self, lease: Lease, tokens: array[int], first: int, stop: int) -> None:
        """Have the lease's blocks number `first` to `stop`, which have entered the tree, written."""
        self.stored.name(lease.names, lease.namespace, tokens, stop, self._size)
        self._write(lease, tokens, first, stop)

    def release(self, lease: Lease, keep_tokens: int | None) -> None:
        """Note that the lease's prefix was used, and have its missing blocks written.

        Public blocks have been written for the namespace that published them. keep_tokens: see `PrefixCache.release`.
        """
        stored, size = self.stored, self._size
        num_published = lease.num_published_tokens // size
        stop = num_published if keep_tokens is None else min(num_published, max(0, keep_tokens) // size)
        if not stop:
            return
        tokens = array("i")
        if len(lease.names) < stop or not all(name in stored or name in self._copies for name in lease.names[:stop]):
            tokens.frombytes(self._tree.prefix(lease.node))
            stored.name(lease.names, lease.namespace, tokens, stop, size)
            node: Node | None = lease.node
            first = num_published
            while node is not None and node.namespace == lease.namespace:
                first -= len(node.blocks)
                node = node.parent
            self._write(lease, tokens, first, stop)
        stored.touch(lease.names[:stop])

    def forget(self, names: Sequence[bytes]) -> None:
        """Let blocks not be, or not come, on disk."""
        self._copies.revoke(names)
        for name in names:
            self.stored.discard(name)

    def drop(self, namespaces: Collection[str] | None) -> None:
        """Let no block of namespaces (None: of all) be, or come, on disk."""
        folders = None if namespaces is None else {self.stored.folder_of(namespace) for namespace in namespaces}
        self._copies.revoke_all(lambda copy: folders is not None and copy.folder not in folders)
        self.stored.drop(namespaces)

    def end_write(self, copy: BlockCopy, num_bytes: int, now: float) -> bool:
        """Note that a block is written. Return whether it is to be freed. See `PrefixCache.end_store`."""
        is_alone, stays = self._copies.end(copy.block)
        if num_bytes and stays:
            self.stored.put(StoredBlock(copy.name, copy.folder, num_bytes, used_at(now, copy.depth)))
        elif num_bytes:
            self.stored.remove(copy.path)
        return is_alone

    def num_stored(self, tokens: array[int], namespace: str, names: list[bytes], first: int) -> int:
        """See `PrefixCache.num_stored`."""
        stop = (len(tokens) - 1) // self._size
        if first >= stop or not self.stored.has_any(namespace):
            return first
        self.stored.name(names, namespace, tokens, stop, self._size)
        return min(stop, self.stored.depth(names, first))

    def unknown(self, tokens: array[int], namespace: str, names: list[bytes], first: int) -> list[StoredBlock]:
        """See `PrefixCache.unknown`. first: the number of the first block that is not in memory."""
        stop = (len(tokens) - 1) // self._size
        if first >= stop:
            return []
        self.stored.name(names, namespace, tokens, stop, self._size)
        folder, depth = self.stored.folder_of(namespace), self.stored.depth(names[:stop], first)
        blocks = (StoredBlock(name, folder, 0, 0.0) for name in names[depth:stop])
        return list(takewhile(lambda block: not self.stored.is_going(block), blocks))

    def copies_of(self, blocks: Iterable[int], lease: Lease, tokens: array[int], first: int) -> list[BlockCopy]:
        """Return the copies of blocks of a lease, numbers `first` and so on, whose names are known."""
        folder = self.stored.folder_of(lease.namespace)
        return [self._copy(block, lease, tokens, index, folder) for index, block in enumerate(blocks, first)]

    def _write(self, lease: Lease, tokens: array[int], first: int, stop: int) -> None:
        """Have the lease's blocks number `first` to `stop`, which are in the tree, written unless they are on disk."""
        folder = self.stored.folder_of(lease.namespace)
        for index in range(first, stop):
            name = lease.names[index]
            if name not in self.stored and name not in self._copies:
                self._copies.want(self._copy(lease.block_ids[index], lease, tokens, index, folder))

    def _copy(self, block: int, lease: Lease, tokens: array[int], index: int, folder: str) -> BlockCopy:
        data = tokens[index * self._size : (index + 1) * self._size].tobytes()
        return BlockCopy(block, lease.names[index], folder, index, data)
