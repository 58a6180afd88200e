"""A radix tree from token prefixes to KV blocks, cut at block boundaries.

An edge and the node below it are one object: a run of whole blocks. The idea of a radix tree over paged KV with LRU
eviction of its leaves is RadixAttention (Zheng et al., SGLang, 2024). Here a lease counts on its deepest node only; the
nodes above are protected because a protected child protects its parent. A hit is an equality of token ids: the children
of a node are found by the ids of their first block, and the rest of a run is compared id by id.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from itertools import islice

from radix_cache.evictions import EvictionRecord
from radix_cache.facts import Evicted, Facts, Published
from radix_cache.nodes import NOT_QUEUED, PUBLIC, Node
from radix_cache.retention import RetentionLedger, account_of
from radix_cache.snapshots import SnapshotTable, split_snapshots
from radix_cache.victims import Victims

_DROPPED_AT_ONCE = 128  # blocks, about half a millisecond's work
_NEWEST_CHILDREN = 32  # of a node, among which `continuation` looks


class RadixTree:
    """The cached prefixes of all namespaces. It neither allocates nor frees block ids: `evict` and `trim` return them.

    Invariants: a lease's node ends exactly where the lease's published tokens end (a partly matched run is split); an
    unreferenced leaf is queued once among the victims; a root lives as long as it has children or references.

    Recency: the release of a lease sets a stamp, on its deepest node alone, and `place` another one. A node becomes a
    leaf only after its children are gone, and one that vanishes passes its stamp up if it is the newer one.

    A namespace's prefixes lie below its root, or below a prefix of the namespace PUBLIC that they begin with: a match
    follows public runs as far as it can, then the namespace's own runs.

    Retention (`ledger`) and the shares of accounts (`victims`) come before recency. `now` is the caller's time, set by
    `set_time`. `branches`: by namespace, the newest last, its runs right below runs of PUBLIC. `facts`: the additions
    and removals.
    """

    def __init__(self, block_size: int, snapshot_rows: range = range(0)) -> None:
        self.block_size = block_size
        self._block_bytes = 4 * block_size
        self._clock = 0
        self._serial = 0
        self.victims = Victims()
        self.ledger = RetentionLedger()
        self.evictions = EvictionRecord(4 * block_size)
        self.snapshots = SnapshotTable(snapshot_rows, self.victims.excess_of)
        self.now = 0.0
        self.roots: dict[str, Node] = {}
        self.facts = Facts(self.roots)
        self.branches: dict[str, dict[Node, None]] = {}
        self.num_nodes = 0
        self.num_blocks = 0
        self.num_pinned_blocks = 0

    @property
    def num_evictable_blocks(self) -> int:
        return self.num_blocks - self.num_pinned_blocks

    @property
    def age(self) -> float:
        """The time since the last use of the prefix that would be evicted next; 0 without any."""
        leaf = self.victims.next_leaf()
        return 0.0 if leaf is None else max(0.0, self.now - leaf.used_at)

    def root(self, namespace: str) -> Node:
        """Return the root of `namespace`, created if needed. The caller acquires it or a node below it at once."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = self._new_node(namespace, None, bytearray(), array("i"))
        return root

    def start(self, namespace: str, data: bytes) -> Node | None:
        """Return the root below which `data` (int32 ids) is looked up; None if the namespace has none yet."""
        public = self.roots.get(PUBLIC)
        if public is not None and data[: self._block_bytes] in public.children:
            return public
        return self.roots.get(namespace)

    def depth(self, namespace: str, data: bytes) -> int:
        """Count the leading blocks of `data` (int32 ids, whole blocks) that are cached. Change nothing."""
        return self.locate(namespace, data)[2]

    def locate(self, namespace: str, data: bytes) -> tuple[Node | None, int, int]:
        """Return the last node that `data` reaches, the depth of its end, and the number of cached blocks of `data`.

        Change nothing.
        """
        node = last = self.start(namespace, data)
        size, position, end = self._block_bytes, 0, len(data)
        while node is not None and position < end:
            child = node.children.get(data[position : position + size])
            if child is None and node.namespace != namespace:
                child = node.children.get(_foreign_key(data[position : position + size], namespace))
            if child is not None and not data.startswith(child.tokens, position):
                first = position // size
                return child, first + len(child.blocks), first + self._num_common_blocks(child.tokens, data, position)
            node = child
            if child is not None:
                last = child
                position += len(child.tokens)
        return last, position // size, position // size

    def descend(self, node: Node, data: bytes, blocks: array[int], namespace: str) -> Node:
        """Follow `data` (int32 ids, whole blocks) from the end of `node` as far as it is cached for a namespace.

        Append the ids of the matched blocks to `blocks` and return the node that ends with the last of them; a run
        that matches only in part is split there.
        """
        size, position, end = self._block_bytes, 0, len(data)
        while position < end:
            child = node.children.get(data[position : position + size])
            if child is None and node.namespace != namespace:
                child = node.children.get(_foreign_key(data[position : position + size], namespace))
            if child is None:
                break
            if not data.startswith(child.tokens, position):
                child = self._split(child, self._num_common_blocks(child.tokens, data, position))
            position += len(child.tokens)
            blocks.extend(child.blocks)
            node = child
        return node

    def continuation(self, node: Node, expected: bytes, most: int, namespace: str) -> bytes:
        """Return up to `most` bytes of tokens (int32 ids) that are cached behind `node` and the `expected` tokens.

        Of several continuations that the namespace may see it is the one that was released last, as far as few are
        beside it. Change nothing.
        """
        found, end = bytearray(), len(expected) + most
        while len(found) < end and (child := self._latest_child(node, expected[len(found) :], namespace)) is not None:
            found += child.tokens
            node = child
        return bytes(found[len(expected) : end])

    def _latest_child(self, node: Node, data: bytes, namespace: str) -> Node | None:
        """Return the child whose run begins with `data`, or is the beginning of it, and that was released last.

        Only the newest children that the namespace may see are looked at. Return None if none of them fits.
        """
        newest = islice(reversed(node.children.values()), _NEWEST_CHILDREN)
        seen = (child for child in newest if child.namespace in (node.namespace, namespace))
        fitting = (child for child in seen if child.tokens.startswith(data[: len(child.tokens)]))
        # Among equals the newest comes first, and stays.
        return max(fitting, key=lambda child: child.last_used, default=None)

    def insert(self, start: Node, data: bytes, blocks: array[int], namespace: str) -> tuple[Node, array[int]]:
        """Insert `data` (int32 ids, whole blocks, one id in `blocks` each) below `start`, which one lease references.

        namespace: of the lease; only its requests, or with PUBLIC all requests, will find the new blocks. Return the
        node that ends with `data`, and the ids that the tree already had for its first blocks; as many leading `blocks`
        were not inserted. The caller moves its reference to the node at once.
        """
        canonical: array[int] = array("i")
        node = self.descend(start, data, canonical, namespace)
        num_known = len(canonical)
        if num_known == len(blocks):
            return node, canonical
        tokens, added = data[num_known * self._block_bytes :], blocks[num_known:]
        self.num_blocks += len(added)
        if self.facts.are_noted:
            self.facts.note(Published(namespace, node.blocks[-1] if node.blocks else None, added[:], tokens))
        self.victims.count(namespace, len(added))
        self.victims.use(namespace)
        num_other_refs = node.refs - 1 if node is start else node.refs
        is_alone = not node.children and num_other_refs == 0 and node.retention is None
        if node.parent is not None and is_alone and node.namespace == namespace:
            # No other lease ends here, so the run can grow in place: a decoding request stays one node. A run does
            # not grow where a retention ends.
            node.tokens += tokens
            node.blocks.extend(added)
            if node.pins:
                self._protect(node, len(added))
            return node, canonical
        # A retained run that no lease refers to is a leaf in the eviction queue until now.
        node.queued = NOT_QUEUED
        child = self._new_node(namespace, node, bytearray(tokens), added)
        self._hang(child, node)
        return child, canonical

    def acquire(self, node: Node) -> None:
        """Add a reference to `node`, which protects it and all nodes above it from eviction."""
        node.refs += 1
        if node.refs > 1:
            return
        node.queued = NOT_QUEUED
        current: Node | None = node
        while current is not None:
            current.pins += 1
            if current.pins > 1:
                return
            self._protect(current, len(current.blocks))
            current = current.parent

    def move(self, source: Node, target: Node) -> None:
        """Move one reference from `source` to `target`, which is the same node or below it."""
        if target is not source:
            self.acquire(target)
            self._drop_reference(source)

    def release(self, node: Node, namespace: str) -> None:
        """Drop the reference that `acquire` added for a namespace's lease, and make the node the most recently used."""
        self.victims.use(namespace)
        self._clock += 1
        node.last_used = self._clock
        node.used_at = self.now
        self._drop_reference(node)

    def num_to_spare(self, account: str, most: int) -> int:
        """Count, up to `most`, the evictable blocks that an account would take from accounts that hold less than it."""
        accounts = self.ledger.accounts() if self.ledger.num_pins else {}
        pinned = {name: one.num_pinned_blocks for name, one in accounts.items()}
        return self.victims.num_to_spare(account, pinned, most)

    def evict(self, count: int, account: str | None = None) -> array[int]:
        """Remove `count` blocks, at most `num_evictable_blocks`, from the tails of leaves that no lease needs.

        account: the account that takes them, None without one. See `Victims` for the order. Return the ids, which the
        caller owns from now on.
        """
        evicted: array[int] = array("i")
        for node, cut in self.victims.choose(count, account):
            self.evictions.add(node, cut)
            evicted.extend(self._cut_tail(node, cut, lost=True))
        return evicted

    def trim(self, node: Node, count: int, namespace: str) -> array[int]:
        """Remove up to `count` blocks upwards from the end of `node`, as far as no lease or child node needs them.

        Blocks of another namespace stay: they are public. Return the ids of the removed blocks, which the caller owns
        from now on.
        """
        removed: array[int] = array("i")
        current: Node | None = node
        while current is not None and current.queued != NOT_QUEUED and len(removed) < count:
            if current.namespace != namespace:
                break
            parent = current.parent
            removed.extend(self._cut_tail(current, min(count - len(removed), len(current.blocks)), lost=False))
            current = parent
        return removed

    def path(self, node: Node | None) -> array[int]:
        """Return the blocks of the prefix that ends with `node`."""
        runs = []
        while node is not None:
            runs.append(node.blocks)
            node = node.parent
        blocks: array[int] = array("i")
        for run in reversed(runs):
            blocks.extend(run)
        return blocks

    def node_at(self, node: Node, depth: int, wanted: int) -> Node:
        """Return the node that ends with the first `wanted` blocks of the prefix that ends with `node`.

        depth: the blocks of that prefix, at least `wanted`. A run that reaches beyond is split there.
        """
        while depth - len(node.blocks) >= wanted and node.parent is not None:
            depth -= len(node.blocks)
            node = node.parent
        return node if depth == wanted else self._split(node, len(node.blocks) - (depth - wanted))

    def retain(self, node: Node, ttl: float, limit: int, *, yields: bool = False) -> None:
        """Retain the prefix that ends with `node` for `ttl` from now on, within `limit` blocks of its account.

        The account's retentions that were refreshed longest ago give way, those that yield first. A retention that
        `yields` makes no others give way. If what stays leaves too little room, only the head of the prefix is
        retained.
        """
        if node.parent is None or limit <= 0:
            return
        ledger, account = self.ledger, account_of(node.namespace)
        ledger.place(node, ttl, self.now, yields=yields)
        self._requeue(node)
        self.make_room(node, limit, yielding=yields)
        excess = ledger.account(account).num_blocks - limit
        if excess <= 0 or node.retention is None or node.retention.is_pinned or yields != ledger.yields(node):
            return
        # All that is left stays, but for this retention: its tail is what the others do not cover.
        self._requeue(ledger.drop(node.retention))
        num_own = 0
        current: Node | None = node
        depth = 0
        while current is not None:
            num_own += 0 if current.keeps or current.namespace != node.namespace else len(current.blocks)
            depth += len(current.blocks)
            current = current.parent
        if num_own > excess:
            head = self.node_at(node, depth, depth - excess)
            ledger.place(head, ttl, self.now, yields=yields)
            self._requeue(head)

    def make_room(self, node: Node, limit: int, *, yielding: bool = False) -> None:
        """End retentions of the account of `node`, except at `node`, while they cover more than `limit` blocks.

        yielding: end only retentions that yield. For the order see `RetentionLedger.oldest`.
        """
        ledger, account = self.ledger, account_of(node.namespace)
        while ledger.account(account).num_blocks > limit:
            oldest = ledger.oldest(account, node, yielding=yielding)
            if oldest is None:
                return
            self._requeue(ledger.drop(oldest))

    def prefix(self, node: Node) -> bytes:
        """Return the tokens (int32 ids) of the prefix that ends with `node`."""
        runs = []
        current: Node | None = node
        while current is not None:
            runs.append(bytes(current.tokens))
            current = current.parent
        return b"".join(reversed(runs))

    def drop(self, namespaces: Collection[str] | None) -> Iterator[array[int]]:
        """Remove the evictable blocks of namespaces (None: of all), retained ones too.

        Yield their ids, which the caller owns, some at a time. The tree may change meanwhile: blocks in use again stay.
        """
        removed: array[int] = array("i")
        accounts = None if namespaces is None else {account_of(name) for name in namespaces}
        for leaf in self.victims.leaves(accounts):
            node: Node | None = leaf
            while node is not None and node.queued != NOT_QUEUED:
                if namespaces is not None and node.namespace not in namespaces:
                    break
                parent, cut = node.parent, min(len(node.blocks), _DROPPED_AT_ONCE - len(removed))
                self.evictions.add(node, cut)
                removed.extend(self._cut_tail(node, cut, lost=False))
                if len(removed) == _DROPPED_AT_ONCE:
                    yield removed
                    removed = array("i")
                if node.parent is None:
                    node = parent
        yield removed

    def pin(self, node: Node) -> None:
        """Retain the prefix that ends with `node`, without end."""
        self.ledger.place(node, 0.0, self.now, pin=True)
        self._requeue(node)

    def unpin(self, node: Node) -> None:
        """End the pin at `node`; a retention with a deadline stays."""
        self.ledger.unpin(node, self.now)
        self._requeue(node)

    def set_time(self, now: float) -> None:
        """Set the time, which never goes back, and end overdue retentions."""
        self.now = now
        self.victims.set_time(now)
        self.evictions.set_time(now)
        for node in self.ledger.end_overdue(now):
            self._requeue(node)

    def record_hit(self, node: Node, num_tokens: int) -> None:
        """Count `num_tokens` that a match found in the prefix that ends with `node`, and refresh its retentions."""
        node.hits += 1
        node.saved_tokens += num_tokens
        if self.ledger.num_retentions:
            self.ledger.refresh(node, self.now)

    def key(self, node: Node) -> bytes:
        """Return the key of a node among its parent's children: its first block, and a namespace of its own."""
        assert node.parent is not None
        first = bytes(node.tokens[: self._block_bytes])
        return first if node.namespace == node.parent.namespace else _foreign_key(first, node.namespace)

    def _new_node(self, namespace: str, parent: Node | None, tokens: bytearray, blocks: array[int]) -> Node:
        self._serial += 1
        self.num_nodes += 1
        return Node(namespace, self._serial, parent, tokens, blocks)

    def _hang(self, node: Node, parent: Node) -> None:
        """Enter a node among the children of its parent, in place of a child that begins alike."""
        parent.children[self.key(node)] = node
        if node.namespace != parent.namespace:
            self.branches.setdefault(node.namespace, {})[node] = None

    def _forget_branch(self, node: Node) -> None:
        own = self.branches[node.namespace]
        del own[node]
        if not own:
            del self.branches[node.namespace]

    def _num_common_blocks(self, run: bytearray, data: bytes, position: int) -> int:
        """Count the blocks of `run` that equal `data` from `position` on; the first is known to. Bisects memcmp."""
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
        if node.namespace != parent.namespace:
            self._forget_branch(node)
        self._hang(upper, parent)
        node.parent = upper
        upper.children[self.key(node)] = node
        upper.last_used = node.last_used
        upper.used_at = node.used_at
        upper.pins = 1 if node.pins else 0
        upper.keeps = 1 if node.keeps else 0
        upper.holds = 1 if node.holds else 0
        upper.digests = node.digests[:count]
        del node.digests[:count]
        if node.snapshots:
            split_snapshots(node, upper)
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
            self._protect(current, -len(current.blocks))
            current = current.parent
        if not node.children:
            self._became_leaf(node)

    def _protect(self, node: Node, change: int) -> None:
        """Count blocks of a node that a lease protects from now on; negative if no lease protects them any more."""
        if change:
            self.num_pinned_blocks += change
            self.victims.count_leased(node.namespace, change)

    def _became_leaf(self, node: Node) -> None:
        """Queue `node`, which has neither children nor references, for eviction; drop it if it is a root."""
        if node.parent is None:
            del self.roots[node.namespace]
            self.num_nodes -= 1
            return
        self.victims.add(node)

    def _requeue(self, node: Node) -> None:
        """Move a node in the eviction queue to the place that its retention now gives it."""
        if node.queued != NOT_QUEUED:
            self.victims.add(node)

    def _cut_tail(self, node: Node, count: int, *, lost: bool) -> array[int]:
        """Remove the last `count` blocks of the unreferenced leaf `node`, and the node itself if it is empty then.

        A retention of the node then ends at its parent. lost: whether retained blocks count as lost.
        """
        keep = len(node.blocks) - count
        removed = node.blocks[keep:]
        self.num_blocks -= count
        if self.facts.are_noted:
            self.facts.note(Evicted(removed[:]))
        self.victims.count(node.namespace, -count)
        if node.keeps:
            self.ledger.shrink(node, count, lost=lost)
        if node.snapshots:
            self.snapshots.cut(node, keep)
        if keep:
            del node.blocks[keep:]
            del node.tokens[keep * self._block_bytes :]
            del node.digests[keep:]
            return removed
        parent = node.parent
        assert parent is not None
        if node.keeps:
            self.ledger.move_up(node)
        del parent.children[self.key(node)]
        if node.namespace != parent.namespace:
            self._forget_branch(node)
        node.queued = NOT_QUEUED
        node.parent = None
        self.num_nodes -= 1
        if node.last_used > parent.last_used:
            parent.last_used = node.last_used
            parent.used_at = node.used_at
        parent.hits += node.hits
        parent.saved_tokens += node.saved_tokens
        if not parent.children and not parent.refs:
            self._became_leaf(parent)
        return removed


def _foreign_key(first: bytes, namespace: str) -> bytes:
    """Return the key of a child of another namespace: longer than a block, also for the namespace without a name."""
    return first + b"/" + namespace.encode()
