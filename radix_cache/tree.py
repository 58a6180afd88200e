"""A radix tree from token prefixes to KV blocks, cut at block boundaries, and the leases on its nodes.

An edge and the node below it are one object: a run of whole blocks. The idea of a radix tree over paged KV with LRU
eviction of its leaves is RadixAttention (Zheng et al., SGLang, 2024). Here a lease counts on its deepest node only; the
nodes above are protected because a protected child protects its parent. A hit is an equality of token ids: the children
of a node are found by the ids of their first block, and the rest of a run is compared id by id.
"""

from __future__ import annotations

from array import array
from heapq import heapify, heappop, heappush

from radix_cache.errors import require

_HEAP_SLACK = 64
_NOT_QUEUED = -1


class RadixTree:
    """The cached prefixes of all namespaces. It neither allocates nor frees block ids: `evict` and `trim` return them.

    Invariants: a lease's node ends exactly where the lease's published tokens end (a partly matched run is split); an
    unreferenced leaf has exactly one live entry in the queue; a root lives as long as it has children or references.

    Recency: only the release of a lease sets a stamp, and only on its deepest node. A node was used at least as
    recently as its children and becomes a leaf only after they are gone, so a node that vanishes passes its stamp up.
    """

    __slots__ = ("_block_bytes", "_clock", "_queue", "_serial", "num_blocks", "num_nodes", "num_pinned_blocks", "roots")

    def __init__(self, block_size: int) -> None:
        self._block_bytes = 4 * block_size
        self._clock = 0
        self._serial = 0
        # (stamp, serial, node), oldest first; an entry whose stamp is not the node's `queued` is dead.
        self._queue: list[tuple[int, int, Node]] = []
        self.roots: dict[str, Node] = {}
        self.num_nodes = 0
        self.num_blocks = 0
        self.num_pinned_blocks = 0

    @property
    def num_evictable_blocks(self) -> int:
        return self.num_blocks - self.num_pinned_blocks

    def root(self, namespace: str) -> Node:
        """Return the root of `namespace`, created if need be. The caller acquires it or a node below it at once."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = self._new_node(namespace, None, bytearray(), array("i"))
        return root

    def depth(self, namespace: str, data: bytes) -> int:
        """Count the leading blocks of `data` (int32 ids, whole blocks) that are cached. Changes nothing."""
        node = self.roots.get(namespace)
        size, position, end = self._block_bytes, 0, len(data)
        while node is not None and position < end:
            node = node.children.get(data[position : position + size])
            if node is not None:
                if not data.startswith(node.tokens, position):
                    return position // size + self._num_common_blocks(node.tokens, data, position)
                position += len(node.tokens)
        return position // size

    def descend(self, node: Node, data: bytes, blocks: array[int]) -> Node:
        """Follow `data` (int32 ids, whole blocks) from the end of `node` as far as it is cached.

        Append the ids of the matched blocks to `blocks` and return the node that ends with the last of them; a run
        that matches only in part is split there.
        """
        size, position, end = self._block_bytes, 0, len(data)
        while position < end:
            child = node.children.get(data[position : position + size])
            if child is None:
                break
            if not data.startswith(child.tokens, position):
                child = self._split(child, self._num_common_blocks(child.tokens, data, position))
            position += len(child.tokens)
            blocks.extend(child.blocks)
            node = child
        return node

    def insert(self, start: Node, data: bytes, blocks: array[int]) -> tuple[Node, array[int]]:
        """Insert `data` (int32 ids, whole blocks, one id in `blocks` each) below `start`, which one lease references.

        Return the node that ends with `data`, and the ids that the tree already had for its first blocks; as many
        leading `blocks` were not inserted. The caller moves its reference to the node at once.
        """
        canonical: array[int] = array("i")
        node = self.descend(start, data, canonical)
        num_known = len(canonical)
        if num_known == len(blocks):
            return node, canonical
        tokens, added = data[num_known * self._block_bytes :], blocks[num_known:]
        self.num_blocks += len(added)
        num_other_refs = node.refs - 1 if node is start else node.refs
        if node.parent is not None and not node.children and num_other_refs == 0 and not node.annotation:
            # No other lease ends here, so the run can grow in place: a decoding request stays one node. An annotated
            # run does not grow, since its annotation describes exactly its tokens.
            node.tokens += tokens
            node.blocks.extend(added)
            if node.pins:
                self.num_pinned_blocks += len(added)
            return node, canonical
        child = self._new_node(node.namespace, node, bytearray(tokens), added)
        node.children[tokens[: self._block_bytes]] = child
        return child, canonical

    def acquire(self, node: Node) -> None:
        """Add a reference to `node`, which protects it and all nodes above it from eviction."""
        node.refs += 1
        if node.refs > 1:
            return
        node.queued = _NOT_QUEUED
        current: Node | None = node
        while current is not None:
            current.pins += 1
            if current.pins > 1:
                return
            self.num_pinned_blocks += len(current.blocks)
            current = current.parent

    def move(self, source: Node, target: Node) -> None:
        """Move one reference from `source` to `target`, which is the same node or below it."""
        if target is not source:
            self.acquire(target)
            self._drop_reference(source)

    def release(self, node: Node) -> None:
        """Drop the reference that `acquire` added, and make the node the most recently used one."""
        self._clock += 1
        node.last_used = self._clock
        self._drop_reference(node)

    def evict(self, count: int) -> array[int]:
        """Remove `count` blocks, at most `num_evictable_blocks`, from the tails of the least recently used leaves.

        Return their ids, which the caller owns from now on.
        """
        evicted: array[int] = array("i")
        while len(evicted) < count:
            stamp, _, node = self._queue[0]
            if node.queued == stamp:
                evicted.extend(self._cut_tail(node, min(count - len(evicted), len(node.blocks))))
            else:
                heappop(self._queue)
        self._bound_queue()
        return evicted

    def trim(self, node: Node, count: int) -> array[int]:
        """Remove up to `count` blocks upwards from the end of `node`, as far as no lease or child node needs them.

        Return their ids, which the caller owns from now on.
        """
        removed: array[int] = array("i")
        current: Node | None = node
        while current is not None and current.queued != _NOT_QUEUED and len(removed) < count:
            parent = current.parent
            removed.extend(self._cut_tail(current, min(count - len(removed), len(current.blocks))))
            current = parent
        self._bound_queue()
        return removed

    def queued_serials(self) -> list[int]:
        """Return the serials of the nodes in the eviction queue. Raises InvariantError if dead entries pile up."""
        require(len(self._queue) <= 2 * self.num_nodes + _HEAP_SLACK, "the eviction queue outgrew the tree")
        return [serial for stamp, serial, node in self._queue if node.queued == stamp]

    def _new_node(self, namespace: str, parent: Node | None, tokens: bytearray, blocks: array[int]) -> Node:
        self._serial += 1
        self.num_nodes += 1
        return Node(namespace, self._serial, parent, tokens, blocks)

    def _num_common_blocks(self, run: bytearray, data: bytes, position: int) -> int:
        """Count the blocks of `run` that equal `data` from `position` on; the first one is known to. Bisects memcmp."""
        size = self._block_bytes
        low, high = 1, min(len(run), len(data) - position) // size
        while low < high:
            middle = (low + high + 1) // 2
            begin, end = low * size, middle * size
            if data[position + begin : position + end] == run[begin:end]:
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, node: Node, count: int) -> Node:
        """Move the first `count` blocks of `node` to a new parent and return the parent.

        The object `node` stays the lower part: leases that reference it still end where it ends.
        """
        size, parent = self._block_bytes, node.parent
        assert parent is not None
        upper = self._new_node(node.namespace, parent, node.tokens[: count * size], node.blocks[:count])
        del node.tokens[: count * size]
        del node.blocks[:count]
        parent.children[bytes(upper.tokens[:size])] = upper
        upper.children[bytes(node.tokens[:size])] = node
        node.parent = upper
        upper.last_used = node.last_used
        upper.annotation = node.annotation
        upper.pins = 1 if node.pins else 0
        return upper

    def _drop_reference(self, node: Node) -> None:
        node.refs -= 1
        if node.refs:
            return
        current: Node | None = node
        while current is not None:
            current.pins -= 1
            if current.pins:
                break
            self.num_pinned_blocks -= len(current.blocks)
            current = current.parent
        if not node.children:
            self._became_leaf(node)

    def _became_leaf(self, node: Node) -> None:
        """Queue `node`, which has neither children nor references, for eviction; drop it if it is a root."""
        if node.parent is None:
            del self.roots[node.namespace]
            self.num_nodes -= 1
            return
        node.queued = node.last_used
        heappush(self._queue, (node.last_used, node.serial, node))
        self._bound_queue()

    def _cut_tail(self, node: Node, count: int) -> array[int]:
        """Remove the last `count` blocks of the unreferenced leaf `node`, and the node itself if it is empty then."""
        keep = len(node.blocks) - count
        removed = node.blocks[keep:]
        self.num_blocks -= count
        if keep:
            del node.blocks[keep:]
            del node.tokens[keep * self._block_bytes :]
            return removed
        parent = node.parent
        assert parent is not None
        del parent.children[bytes(node.tokens[: self._block_bytes])]
        node.queued = _NOT_QUEUED
        node.parent = None
        self.num_nodes -= 1
        if node.last_used > parent.last_used:
            parent.last_used = node.last_used
        if not parent.children and not parent.refs:
            self._became_leaf(parent)
        return removed

    def _bound_queue(self) -> None:
        if len(self._queue) > 2 * self.num_nodes + _HEAP_SLACK:
            self._queue = [entry for entry in self._queue if entry[2].queued == entry[0]]
            heapify(self._queue)


class Node:
    """A run of whole blocks under a prefix, or the root of a namespace (no parent, no blocks).

    `tokens` are native int32 ids as bytes, `blocks` the ids of the blocks that hold their KV. `refs` counts the leases
    that end here; `pins` is the number of pinned children, plus one if `refs` is not 0, so a node and its whole subtree
    are evictable exactly if `pins` is 0. `queued` is the stamp of the node's entry in the eviction queue. `annotation`
    is opaque to the tree and empty if there is none.
    """

    __slots__ = (
        "annotation",
        "blocks",
        "children",
        "last_used",
        "namespace",
        "parent",
        "pins",
        "queued",
        "refs",
        "serial",
        "tokens",
    )

    def __init__(self, namespace: str, serial: int, parent: Node | None, tokens: bytearray, blocks: array[int]):
        self.namespace = namespace
        self.serial = serial
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[bytes, Node] = {}
        self.refs = 0
        self.pins = 0
        self.last_used = 0
        self.queued = _NOT_QUEUED
        self.annotation = b""


class Lease:
    """One request's reference to KV blocks, made by `PrefixCache.match` and released exactly once.

    `block_ids` (int32) is the request's block table: block i holds tokens ``[i * block_size, (i + 1) * block_size)``.
    It only grows, except that `publish` and `advance` may replace an id by another one of the same content. Its first
    `num_published_tokens` tokens are in the tree. `num_cached_tokens` counts the tokens whose KV this request found in
    the cache instead of computing it. `owner` is the cache that made it, None once it was released. Only that cache
    writes the fields; copy `block_ids` rather than keep a view.
    """

    __slots__ = (
        "block_ids",
        "namespace",
        "node",
        "num_cached_tokens",
        "num_published_tokens",
        "number",
        "owner",
        "use_cache",
    )

    def __init__(self, owner: object, number: int, namespace: str, node: Node, use_cache: bool) -> None:
        self.owner: object | None = owner
        self.number = number
        self.namespace = namespace
        self.node = node
        self.use_cache = use_cache
        self.block_ids: array[int] = array("i")
        self.num_published_tokens = 0
        self.num_cached_tokens = 0
