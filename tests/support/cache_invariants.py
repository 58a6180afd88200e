"""The invariants of a PrefixCache: its blocks, its tree and the leases on it. Checking them is slow and complete."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from radix_cache.errors import require
from radix_cache.nodes import PUBLIC, Lease, Node, Snapshot
from radix_cache.prefix_cache import PrefixCache
from radix_cache.retention import account_of
from radix_cache.tree import RadixTree
from radix_cache.window_blocks import WindowBlocks


def check_invariants(cache: PrefixCache) -> None:
    """Raise InvariantError unless every block is in exactly one place and all counters agree. O(blocks)."""
    cache.counts.check()
    cache.counts.allocator.check_invariants()
    leases = cache.leases.values()
    places: dict[str, Collection[int]] = {"in the tree": check_tree(cache.tree, leases)}
    num_private = 0
    for lease in leases:
        private = lease.block_ids[lease.num_published_tokens // cache.block_size :]
        num_private += len(private)
        places[f"leased by {lease.number}"] = private
    places |= {"duplicates": cache.counts.duplicates, "in copy": cache.copies.in_copy()}
    cache.counts.allocator.check_allocated(check_places(places))
    require(num_private == cache.counts.num_private, "the number of unpublished blocks is wrong")
    holdings = cache.tree.victims.holdings.values()
    require(num_private == sum(one.num_private for one in holdings), "an account's unpublished blocks are miscounted")
    check_snapshots(cache.tree, leases)
    if isinstance(cache.windows, WindowBlocks):
        held = Counter(block for lease in leases for block in lease.block_ids[lease.first_window :])
        cache.windows.check(dict(held), cache.counts.duplicates)


def evict_all(cache: PrefixCache) -> int:
    """Evict all blocks that no lease protects. Return their number."""
    return sum(cache.drop(None))


def check_places(held: Mapping[str, Collection[int]]) -> set[int]:
    """Return all blocks. Raise InvariantError if one is in two places. held: the blocks in each place."""
    seen: set[int] = set()
    for place, blocks in held.items():
        own = set(blocks)
        require(len(own) == len(blocks), f"a block is {place} twice")
        require(own.isdisjoint(seen), f"a block is {place} and elsewhere")
        seen |= own
    return seen


def check_snapshots(tree: RadixTree, leases: Iterable[Lease]) -> None:
    """Raise InvariantError unless every row for snapshots is free, being written or one snapshot in the tree."""
    num_pins: dict[int, int] = {}
    for lease in leases:
        if lease.snapshot is not None:
            require(lease.snapshot.node is not None, f"lease {lease.number} pins a snapshot that is gone")
            num_pins[lease.snapshot.row] = num_pins.get(lease.snapshot.row, 0) + 1
    found: list[Snapshot] = []
    for root in tree.roots.values():
        for node in _descendants(root):
            offsets = [snapshot.offset for snapshot in node.snapshots]
            require(offsets == sorted(set(offsets)), f"node {node.serial}: its snapshots are out of order")
            require(not offsets or 0 < offsets[0] <= offsets[-1] <= len(node.blocks), f"node {node.serial}: beyond it")
            found += node.snapshots
            for snapshot in node.snapshots:
                require(snapshot.node is node, f"snapshot {snapshot.row} is elsewhere")
                wanted = num_pins.pop(snapshot.row, 0) + tree.snapshots.is_lent(snapshot.row)
                require(snapshot.pins == wanted, f"snapshot {snapshot.row}: pins is wrong")
    require(not num_pins, "a pinned snapshot is not in the tree")
    tree.snapshots.check(found)


def check_tree(tree: RadixTree, leases: Iterable[Lease]) -> array[int]:
    """Return the ids of all blocks in the tree. Raise InvariantError at the first contradiction."""
    num_refs: dict[int, int] = {}
    for lease in leases:
        num_refs[lease.node.serial] = num_refs.get(lease.node.serial, 0) + 1
        _check_lease(tree, lease)
    nodes = [node for root in tree.roots.values() for node in _descendants(root)]
    blocks: array[int] = array("i")
    num_pinned = 0
    for node in nodes:
        _check_node(node, 4 * tree.block_size)
        require(node.refs == num_refs.pop(node.serial, 0), f"node {node.serial}: refs differ from the leases")
        blocks.extend(node.blocks)
        num_pinned += len(node.blocks) if node.pins else 0
    require(not num_refs, "a lease refers to a node outside of the tree")
    require(len(nodes) == tree.num_nodes, "num_nodes is wrong")
    require(len(blocks) == tree.num_blocks, "num_blocks is wrong")
    held: Counter[str] = Counter()
    for node in nodes:
        held[account_of(node.namespace)] += len(node.blocks)
    holdings = tree.victims.holdings
    num_blocks = Counter({account: holding.num_blocks for account, holding in holdings.items()})
    require(held == num_blocks, "the number of an account's blocks is wrong")
    num_leased = sum(holding.num_leased for holding in holdings.values())
    require(num_leased == num_pinned, "the number of an account's leased blocks is wrong")
    require(num_pinned == tree.num_pinned_blocks, "num_pinned_blocks is wrong")
    _check_ledger(tree, nodes)
    for namespace, root in tree.roots.items():
        require(root.parent is None and root.namespace == namespace, f"namespace {namespace!r} has a wrong root")
    queued = [node.serial for node in nodes if node.parent is not None and not node.children and not node.refs]
    victims = tree.victims.queued_serials()
    require(sorted(queued) == sorted(victims), "the queues of victims differ from the evictable leaves")
    return blocks


def _descendants(root: Node) -> list[Node]:
    nodes = [root]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def _check_node(node: Node, block_bytes: int) -> None:
    name = f"node {node.serial}"
    require(len(node.tokens) == len(node.blocks) * block_bytes, f"{name}: tokens and blocks differ in length")
    pins, keeps = int(node.refs > 0), int(node.retention is not None)
    holds = int(node.retention is not None and node.retention.is_pinned)
    for key, child in node.children.items():
        require(child.parent is node, f"{name}: a child has another parent")
        foreign = child.namespace != node.namespace
        require(not foreign or node.namespace == PUBLIC, f"{name}: a child is of another namespace")
        require(
            not foreign or node.parent is not None, f"{name}: a child of another namespace is below the public root"
        )
        suffix = b"/" + child.namespace.encode() if foreign else b""
        require(key == child.tokens[:block_bytes] + suffix, f"{name}: a child is filed under another key")
        pins += child.pins > 0
        keeps += child.keeps > 0
        holds += child.holds > 0 and not foreign
    require(node.pins == pins, f"{name}: pins is wrong")
    require(node.keeps == keeps, f"{name}: keeps is wrong")
    require(node.holds == holds, f"{name}: holds is wrong")
    require(len(node.digests) <= len(node.blocks), f"{name}: more digests than blocks")
    if node.parent is not None:
        require(len(node.blocks) > 0, f"{name} is empty")
    else:
        require(not node.blocks, f"{name} is a root with blocks")
        require(bool(node.children) or node.refs > 0, f"{name} is the root of an empty namespace")


def _check_ledger(tree: RadixTree, nodes: list[Node]) -> None:
    ledger = tree.ledger
    retained: dict[str, int] = {}
    pinned: Counter[str] = Counter()
    retentions = {}
    for node in nodes:
        pinned[account_of(node.namespace)] += len(node.blocks) if node.holds else 0
        if node.keeps:
            account = account_of(node.namespace)
            retained[account] = retained.get(account, 0) + len(node.blocks)
        if node.retention is not None:
            require(node.parent is not None, f"a retention ends at the root of {node.namespace!r}")
            require(node.retention.node is node, f"node {node.serial}: its retention ends elsewhere")
            retentions[node.retention.number] = account_of(node.namespace)
    accounts = ledger.accounts()
    known = {number: name for name, account in accounts.items() for number in account.retentions}
    for own in accounts.values():
        require(own.yielding.items() <= own.retentions.items(), "an ended retention yields")
        order = [one.refreshed for one in own.yielding.values()]
        require(order == sorted(order), "retentions that yield are out of order")
    pins = sum(one.is_pinned for account in accounts.values() for one in account.retentions.values())
    require(known == retentions, "the accounts' retentions differ from the nodes'")
    require({name: account.num_blocks for name, account in accounts.items()} == retained, "retained blocks are wrong")
    counted = Counter({name: account.num_pinned_blocks for name, account in accounts.items()})
    require(counted == pinned, "pinned blocks are wrong")
    require(ledger.num_blocks == sum(retained.values()), "the sum of retained blocks is wrong")
    require((ledger.num_retentions, ledger.num_pins) == (len(retentions), pins), "retentions or pins are miscounted")


def _check_lease(tree: RadixTree, lease: Lease) -> None:
    runs: list[array[int]] = []
    node: Node | None = lease.node
    top = lease.node
    while node is not None:
        runs.append(node.blocks)
        top, node = node, node.parent
    require(top in (tree.roots.get(lease.namespace), tree.roots.get(PUBLIC)), "a lease refers to another namespace")
    require(lease.node.namespace in (PUBLIC, lease.namespace), "a lease ends in another namespace")
    path = [block for run in reversed(runs) for block in run]
    require(len(path) * tree.block_size == lease.num_published_tokens, "a lease does not end where its node ends")
    require(path == list(lease.block_ids[: len(path)]), "a lease and the tree disagree about its blocks")
