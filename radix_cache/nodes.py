"""The records of the tree: its nodes, the leases on them and their retentions."""

from __future__ import annotations

from array import array

NOT_QUEUED = -1
# The namespace whose prefixes every other namespace may use. No account has this name: names of accounts are digests,
# or empty.
PUBLIC = "public"


class Node:
    """A run of whole blocks under a prefix, or the root of a namespace (no parent, no blocks).

    `tokens` are native int32 ids as bytes, `blocks` the ids of the blocks that hold their KV. `refs` counts the leases
    that end here; `pins` is the number of pinned children, plus one if `refs` is not 0, so a node and its whole subtree
    are evictable exactly if `pins` is 0. `keeps` counts in the same way: retained children, plus one for `retention`,
    which ends here. `holds` is the part of it that pins of the node's own namespace have. `queued` is the number of the
    node's entry in the eviction queue.

    A node of the namespace PUBLIC may have children of other namespaces, each visible to its own namespace alone.

    `hits` counts the matches that ended in this run, `saved_tokens` the tokens that they found, `used_at` is the time
    of the last release. `digests`: of the prefixes that end with the first blocks of the run (`EvictionRecord`).
    `snapshots`: in the order of `offset`, at most one per boundary.
    """

    __slots__ = (
        "blocks",
        "children",
        "digests",
        "hits",
        "holds",
        "keeps",
        "last_used",
        "namespace",
        "parent",
        "pins",
        "queued",
        "refs",
        "retention",
        "saved_tokens",
        "serial",
        "snapshots",
        "tokens",
        "used_at",
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
        self.keeps = 0
        self.holds = 0
        self.retention: Retention | None = None
        self.last_used = 0
        self.queued = NOT_QUEUED
        self.hits = 0
        self.saved_tokens = 0
        self.used_at = 0.0
        self.digests: array[int] = array("q")
        self.snapshots: list[Snapshot] = []


class Snapshot:
    """The recurrent state at a block boundary of the tree, in row `row` of the rank's pool of states.

    The boundary is the end of block number `offset - 1` of `node`, which is None once the snapshot has left the tree.
    `pins` counts the requests that will continue from it, `uses` the requests that have. `worth` places it in the queue
    of victims. It follows from `since`, the age when it was made or used last, and from `is_superseded`, True
    if its only user has saved a later one (`SnapshotTable`).
    """

    __slots__ = ("is_superseded", "node", "offset", "pins", "row", "since", "uses", "worth")

    def __init__(self, row: int, node: Node, offset: int) -> None:
        self.row = row
        self.node: Node | None = node
        self.offset = offset
        self.pins = 0
        self.uses = 0
        self.since = 0
        self.is_superseded = False
        self.worth = 0


class Retention:
    """The wish to keep the prefix that ends with `node`; `node` is None once it has ended.

    It ends at `until` (0: no deadline) and begins anew for `ttl` with every hit, both in the caller's time. With
    `is_pinned` it does not end by itself. `refreshed`: lower for retentions that were refreshed longer ago.
    """

    __slots__ = ("is_pinned", "node", "number", "refreshed", "ttl", "until")

    def __init__(self, number: int, node: Node) -> None:
        self.number = number
        self.node: Node | None = node
        self.refreshed = 0
        self.ttl = 0.0
        self.until = 0.0
        self.is_pinned = False


class Lease:
    """One request's reference to KV blocks, made by `PrefixCache.match` and released exactly once.

    `block_ids` (int32) is the request's block table: block i holds tokens ``[i * block_size, (i + 1) * block_size)``.
    It only grows, except that `publish` and `advance` may replace an id by another id of the same content. Its first
    `num_published_tokens` tokens are in the tree. `num_cached_tokens` counts the tokens whose KV this request found in
    the cache instead of computing it. `owner` is the cache that made it, None once it was released. Only that cache
    writes the fields; copy `block_ids` rather than keep a view.

    Where prefixes need states, the cached tokens end at a snapshot: `snapshot`, pinned until `PrefixCache.end_load`,
    None if the lease starts with nothing. `num_known_tokens` are the tokens whose KV the cache had at the last match,
    which may be more: prompts branch there.

    Where layers have window blocks, the lease needs the window blocks of its blocks from number `first_window` on.
    `ends`: boundaries, in blocks, where other prompts are likely to diverge from its own, with the gain of the window
    blocks before them.

    `names`: of its first blocks in the lower tier (`radix_cache.stored`), as far as they are known. They follow from
    namespace and tokens, so the list outlives the lease.
    """

    __slots__ = (
        "block_ids",
        "ends",
        "first_window",
        "names",
        "namespace",
        "node",
        "num_cached_tokens",
        "num_known_tokens",
        "num_published_tokens",
        "number",
        "owner",
        "snapshot",
        "use_cache",
    )

    def __init__(
        self, owner: object, number: int, namespace: str, node: Node, use_cache: bool, names: list[bytes]
    ) -> None:
        self.owner: object | None = owner
        self.number = number
        self.namespace = namespace
        self.names = names
        self.node = node
        self.use_cache = use_cache
        self.block_ids: array[int] = array("i")
        self.num_published_tokens = 0
        self.num_cached_tokens = 0
        self.num_known_tokens = 0
        self.snapshot: Snapshot | None = None
        self.first_window = 0
        self.ends: dict[int, int] = {}

    @property
    def is_branch(self) -> bool:
        """True if other cached prompts continue in another way where the published tokens end."""
        return self.num_known_tokens > self.num_published_tokens or bool(self.node.children)
