"""The prefix cache: leases on KV blocks, shared between requests whose prompts begin alike."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from radix_cache.block_allocator import BlockAllocator
from radix_cache.errors import LeaseError, require
from radix_cache.invariants import check_tree
from radix_cache.tree import Lease, Node, RadixTree


class PrefixCache:
    """All KV blocks of one rank: every one is free, cached, leased or a duplicate that waits for its `free`.

    Tokens are ``array('i')`` (int32). Equal tokens in different namespaces never share blocks. With ``caching=False``
    nothing is shared or kept: `match` finds nothing, `publish` and `advance` do nothing, `release` frees every block.

    The caller's part: it returns blocks (`release`, `free`) only when no plan in flight names them, and calls `publish`
    only for tokens whose forward has completed. Every method that takes a lease raises LeaseError for one that was
    released or belongs to another cache. All decisions are deterministic: the same calls yield the same ids.
    """

    __slots__ = (
        "_allocator",
        "_caching",
        "_duplicates",
        "_leases",
        "_next_number",
        "_num_private_blocks",
        "_tree",
        "block_size",
        "num_blocks",
    )

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True) -> None:
        if block_size <= 0:
            raise ValueError(f"block_size must be positive, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caching = caching
        self._allocator = BlockAllocator(num_blocks)
        self._tree = RadixTree(block_size)
        self._leases: dict[int, Lease] = {}
        self._next_number = 0
        self._num_private_blocks = 0
        self._duplicates: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that hold a cached prefix and are evictable: no lease protects them."""
        return self._tree.num_evictable_blocks

    @property
    def num_available(self) -> int:
        """Blocks that `extend` could give to a lease now."""
        return self._allocator.num_free + self._tree.num_evictable_blocks

    @property
    def num_leased(self) -> int:
        """Blocks that at least one lease holds, a shared one counted once."""
        return self._tree.num_pinned_blocks + self._num_private_blocks

    @property
    def num_duplicates(self) -> int:
        """Blocks that `publish` has returned and that were not given to `free` yet."""
        return len(self._duplicates)

    def match(self, tokens: array[int], namespace: str = "", *, use_cache: bool = True) -> Lease:
        """Lease the longest cached prefix of `tokens` in whole blocks, but never the last token: its logits are needed.

        With ``use_cache=False`` the lease starts empty and `advance` adopts nothing, but its blocks may be published.
        Raises ValueError if `tokens` are not ``array('i')``.
        """
        if tokens.typecode != "i":
            raise ValueError(f"tokens must be array('i'), got typecode {tokens.typecode!r}")
        use_cache = use_cache and self._caching
        node = self._tree.root(namespace)
        number = self._next_number
        lease = Lease(self, number, namespace, node, use_cache)
        if use_cache and node.children:
            node = self._tree.descend(node, self._reusable(tokens, 0), lease.block_ids)
            lease.node = node
            lease.num_published_tokens = lease.num_cached_tokens = len(lease.block_ids) * self.block_size
        self._tree.acquire(node)
        self._leases[number] = lease
        self._next_number = number + 1
        return lease

    def advance(self, lease: Lease, tokens: array[int]) -> int:
        """Match again: adopt blocks of `tokens` that other leases have published behind this lease's published ones.

        An adopted id replaces the lease's own id at the same place, which is freed, or is appended. So the lease must
        have published every full block it has computed (a partly computed block is given up for the full one), and no
        plan in flight may name its other blocks. Never covers the last token. Return the number of tokens that the
        tree now covers for this lease.
        """
        if lease.owner is not self:
            raise _not_leased()
        num_published = lease.num_published_tokens
        if not lease.node.children or not lease.use_cache:
            return num_published
        adopted: array[int] = array("i")
        node = self._tree.descend(lease.node, self._reusable(tokens, num_published), adopted)
        if not adopted:
            return num_published
        first = num_published // self.block_size
        replaced = lease.block_ids[first : first + len(adopted)]
        lease.block_ids[first : first + len(adopted)] = adopted
        self._allocator.free(replaced)
        self._num_private_blocks -= len(replaced)
        self._tree.move(lease.node, node)
        lease.node = node
        lease.num_cached_tokens += len(adopted) * self.block_size
        lease.num_published_tokens = num_published + len(adopted) * self.block_size
        return lease.num_published_tokens

    def extend(self, lease: Lease, count: int) -> list[int] | None:
        """Append `count` blocks to the lease, evicting the least recently used cached ones as needed.

        Return the new ids, or None with nothing changed if fewer than `count` are available. Raises ValueError if
        `count` is negative.
        """
        if lease.owner is not self:
            raise _not_leased()
        allocator = self._allocator
        num_missing = count - allocator.num_free
        if num_missing > 0:
            if num_missing > self._tree.num_evictable_blocks:
                return None
            allocator.free(self._tree.evict(num_missing))
        block_ids = lease.block_ids
        new = allocator.allocate(count, block_ids[-1] if block_ids else None)
        if new is not None:
            block_ids.extend(new)
            self._num_private_blocks += count
        return new

    def publish(self, lease: Lease, tokens: array[int], num_computed_tokens: int) -> list[int]:
        """Insert the full blocks of ``tokens[:num_computed_tokens]`` into the tree, after the forward that wrote them.

        Where another request was faster, the id in the tree replaces the lease's own one. Return the replaced ids; the
        caller passes them to `free` once no plan in flight names them. Tokens that must not be cached (those after a
        stop string, say) are excluded by a smaller `num_computed_tokens`. Raises ValueError if `tokens` or the leased
        blocks are fewer than that.
        """
        if lease.owner is not self:
            raise _not_leased()
        size = self.block_size
        first, stop = lease.num_published_tokens // size, num_computed_tokens // size
        if stop <= first or not self._caching:
            return []
        if num_computed_tokens > len(tokens) or stop > len(lease.block_ids):
            raise ValueError(
                f"{num_computed_tokens} computed tokens, but {len(tokens)} tokens and {len(lease.block_ids)} blocks"
            )
        own = lease.block_ids[first:stop]
        node, canonical = self._tree.insert(lease.node, tokens[first * size : stop * size].tobytes(), own)
        self._tree.move(lease.node, node)
        lease.node = node
        lease.num_published_tokens = stop * size
        self._num_private_blocks -= len(own)
        if not canonical:
            return []
        lease.block_ids[first : first + len(canonical)] = canonical
        duplicates = own[: len(canonical)].tolist()
        self._duplicates.update(duplicates)
        return duplicates

    def free(self, ids: Sequence[int]) -> None:
        """Free duplicates that `publish` returned. Raises ValueError, with nothing changed, if an id is not one."""
        unique = set(ids)
        if len(unique) != len(ids) or not unique <= self._duplicates:
            raise ValueError(f"not all of {list(ids)} are duplicates that wait for their release")
        self._duplicates -= unique
        self._allocator.free(ids)

    def release(self, lease: Lease, keep_tokens: int | None = None) -> None:
        """End the lease: free its unpublished blocks; the published ones stay cached and become evictable.

        With `keep_tokens`, published blocks that reach beyond that many tokens are freed too, as far as no other lease
        and no cached continuation needs them: tokens behind a stop string, or KV that cannot be trusted (0).
        """
        if lease.owner is not self:
            raise _not_leased()
        lease.owner = None
        del self._leases[lease.number]
        num_published = lease.num_published_tokens // self.block_size
        private = lease.block_ids[num_published:]
        self._num_private_blocks -= len(private)
        self._tree.release(lease.node)
        if keep_tokens is not None:
            num_dropped = num_published - max(0, keep_tokens) // self.block_size
            if num_dropped > 0:
                private.extend(self._tree.trim(lease.node, num_dropped))
        self._allocator.free(private)

    def annotate(self, lease: Lease, annotation: bytes) -> None:
        """Attach `annotation` to the run of tokens that ends the lease's published tokens, while the run is cached.

        The run begins at the last branch or annotated end before. A former annotation is replaced, and the run does
        not grow any more; if it is split later, both parts have the annotation. Does nothing without a published token.
        """
        if lease.owner is not self:
            raise _not_leased()
        if lease.node.parent is not None:
            lease.node.annotation = annotation

    def annotations(self, lease: Lease) -> list[tuple[int, bytes]]:
        """Return (tokens of the run, annotation) of every annotated run of the lease's published tokens, in order."""
        if lease.owner is not self:
            raise _not_leased()
        found = []
        node: Node | None = lease.node
        while node is not None:
            if node.annotation:
                found.append((len(node.blocks) * self.block_size, node.annotation))
            node = node.parent
        return found[::-1]

    def peek(self, tokens: array[int], namespace: str = "") -> int:
        """Count the tokens that `match` would find in the cache now. Changes nothing, not even their recency."""
        return self._tree.depth(namespace, self._reusable(tokens, 0)) * self.block_size

    def reset(self) -> int:
        """Evict all blocks that no lease protects. Return their number."""
        evicted = self._tree.evict(self._tree.num_evictable_blocks)
        self._allocator.free(evicted)
        return len(evicted)

    def check_counts(self) -> None:
        """Raise InvariantError unless free + cached + leased + duplicates = all blocks. O(1)."""
        total = self.num_free + self.num_cached + self.num_leased + self.num_duplicates
        require(total == self.num_blocks, f"{total} of {self.num_blocks} blocks accounted for")

    def check_invariants(self) -> None:
        """Raise InvariantError unless every block is in exactly one place and all counters agree. O(blocks)."""
        self.check_counts()
        self._allocator.check_invariants()
        places = ["free" if not self._allocator.is_allocated(block) else "" for block in range(self.num_blocks)]

        def put(block: int, place: str) -> None:
            require(0 <= block < self.num_blocks, f"block {block} does not exist")
            require(not places[block], f"block {block} is both {places[block]} and {place}")
            places[block] = place

        for block in check_tree(self._tree, self._leases.values(), self.block_size):
            put(block, "in the tree")
        num_private = 0
        for lease in self._leases.values():
            private = lease.block_ids[lease.num_published_tokens // self.block_size :]
            num_private += len(private)
            for block in private:
                put(block, f"leased by {lease.number}")
        for block in self._duplicates:
            put(block, "a duplicate")
        require(num_private == self._num_private_blocks, "the number of unpublished blocks is wrong")
        require(all(places), "a block is lost")

    def _reusable(self, tokens: array[int], start: int) -> bytes:
        """Return the bytes of the ids from `start`, a block boundary, in whole blocks without the last token."""
        stop = (len(tokens) - 1) // self.block_size * self.block_size
        return tokens[start : max(start, stop)].tobytes()


def _not_leased() -> LeaseError:
    return LeaseError("the lease was released before, or belongs to another cache")
