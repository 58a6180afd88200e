"""The prefix cache: leases on KV blocks, shared between requests whose prompts begin alike."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from itertools import count as numbers
from math import inf

from radix_cache.block_allocator import BlockAllocator
from radix_cache.block_copies import BlockCopies
from radix_cache.block_counts import BlockCounts
from radix_cache.borders import Borders
from radix_cache.errors import LeaseError
from radix_cache.misses import Miss, MissReason, explain_miss
from radix_cache.needs import Need
from radix_cache.nodes import Lease, Node
from radix_cache.retention import account_of
from radix_cache.retentions import DEFAULT_SHARES, Retentions, Shares
from radix_cache.states import States
from radix_cache.stored import StoredBlocks
from radix_cache.stored_tree import StoredTree
from radix_cache.tree import RadixTree
from radix_cache.window_blocks import WindowBlocks, Windows


class PrefixCache:
    """All KV blocks of one rank: each is free, cached, leased, in copy, or a duplicate that waits for its `free`.

    Tokens are ``array('i')`` (int32). Equal tokens in different namespaces never share blocks. With ``caching=False``
    nothing is shared or kept: `match` finds nothing, `publish` and `advance` do nothing, `release` frees every block.

    A namespace is named `ACCOUNT` or `ACCOUNT/NAME`; prefixes published in the namespace PUBLIC serve all other
    namespaces too. Time is the caller's, set by `set_time`; there is no clock inside.

    Some models need more than KV blocks to go on from a prefix, which then serves only up to a boundary that has it
    (`radix_cache.needs`). Models with recurrent states give `snapshot_rows`, the rows of the rank's pool of states that
    hold snapshots (`states`). Models with sliding windows give `num_window_blocks` and `window`, in tokens: layers with
    a window keep their KV in window blocks, which a lease has for its new blocks and for the last blocks before them
    (`windows`).

    With `stored` there is a lower tier, too: the names of blocks follow them through `publish` and `release`. The
    caller copies the blocks of `StoredTree.take` or `demote`, and of `begin_fill`, beside the steps, and says when it
    has; a block that leaves the tree meanwhile is *in copy* and freed after that.

    `tree`, `leases` and `counts` show where every block is; only the cache changes them.

    The caller's part: it returns blocks (`release`, `free`) only when no plan in flight names them, and calls `publish`
    only for tokens whose forward has completed. Every method that takes a lease raises LeaseError for one that was
    released or belongs to another cache. All decisions are deterministic: the same calls yield the same ids.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        shares: Shares = DEFAULT_SHARES,
        snapshot_rows: range | None = None,
        num_window_blocks: int = 0,
        window: int = 0,
        stored: StoredBlocks | None = None,
    ) -> None:
        """snapshot_rows: None for models without recurrent states. num_window_blocks: 0 if all layers keep their KV in
        the same blocks. window: the number of tokens that layers with window blocks see, the new token included.
        stored: None without a lower tier."""
        if block_size <= 0:
            raise ValueError(f"block_size must be positive, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caching = caching
        allocator = BlockAllocator(num_blocks)
        stateful = snapshot_rows is not None
        rows = snapshot_rows if snapshot_rows is not None and caching else range(0)
        self.tree = RadixTree(block_size, rows)
        self.copies = BlockCopies(allocator)
        self.facts = self.tree.facts
        self.windows = Windows()
        if num_window_blocks:
            excess = self.tree.victims.excess_of
            self.windows = WindowBlocks(num_blocks, num_window_blocks, block_size, window, excess)
        self.lower: StoredTree | None = None  # the blocks in the lower tier
        if stored is not None and caching:
            self.lower = StoredTree(
                stored,
                self.copies,
                self.tree,
                self.windows,
                allocator,
                self._free,
                has_states=stateful,
            )
        self.states = States(self.tree.snapshots, block_size, self._check, self.lower)
        needed = ((self.states, stateful), (self.windows, num_window_blocks > 0))
        self._needs: list[Need] = [need for need, is_needed in needed if is_needed]
        self.counts = BlockCounts(num_blocks, allocator, self.tree, self.copies, self._needs)
        self._borders = Borders(self.tree, self._needs)
        self.retentions = Retentions(
            self.tree,
            self.windows,
            self._borders,
            self._check,
            num_blocks,
            shares,
        )
        self.leases: dict[int, Lease] = {}  # by number
        self._next_number = 0

    def match(
        self, tokens: array[int], namespace: str = "", *, use_cache: bool = True, names: list[bytes] | None = None
    ) -> Lease:
        """Lease the longest cached prefix of `tokens` in whole blocks, but never the last token: its logits are needed.

        If prefixes need more than KV blocks, it ends where that is there, and the lease holds it.

        With ``use_cache=False`` the lease starts empty and `advance` adopts nothing, but its blocks may be published.
        names: of the tokens' first blocks (`Lease.names`), to which the lease adds. Raise ValueError if `tokens` are
        not ``array('i')``.
        """
        if tokens.typecode != "i":
            raise ValueError(f"tokens must be array('i'), got typecode {tokens.typecode!r}")
        use_cache = use_cache and self._caching
        data = self._reusable(tokens, 0) if use_cache else b""
        node = self.tree.start(namespace, data) or self.tree.root(namespace)
        number = self._next_number
        lease = Lease(self, number, namespace, node, use_cache, [] if names is None else names)
        if use_cache and node.children:
            node = self.tree.descend(node, data, lease.block_ids, namespace)
            lease.num_known_tokens = len(lease.block_ids) * self.block_size
            if self._needs:
                node, depth = self._resume(lease, node, lease.block_ids)
                del lease.block_ids[depth:]
            lease.node = node
            lease.num_published_tokens = lease.num_cached_tokens = len(lease.block_ids) * self.block_size
            for need in self._needs:
                need.adopt(lease, 0)
        self.tree.acquire(node)
        self.leases[number] = lease
        self._next_number = number + 1
        return lease

    def advance(self, lease: Lease, tokens: array[int]) -> int:
        """Match again: adopt blocks of `tokens` that other leases have published after this lease's published blocks.

        An adopted id replaces the lease's own id at the same place, which is freed, or is appended. So the lease must
        have published every full block it has computed (a partly computed block is replaced by the full one), and no
        plan in flight may name its other blocks. Never covers the last token. Return the number of tokens that the
        tree now covers for this lease.
        """
        self._check(lease)
        num_published = lease.num_published_tokens
        if self._needs and not num_published:
            self._choose_root(lease, tokens)
        if not lease.node.children or not lease.use_cache:
            return num_published
        adopted: array[int] = array("i")
        node = self.tree.descend(lease.node, self._reusable(tokens, num_published), adopted, lease.namespace)
        first = num_published // self.block_size
        if adopted and self._needs:
            lease.num_known_tokens = num_published + len(adopted) * self.block_size
            node, depth = self._resume(lease, node, lease.block_ids[:first] + adopted)
            del adopted[depth - first :]
        if not adopted:
            return num_published
        replaced = lease.block_ids[first : first + len(adopted)]
        for need in self._needs:
            need.give_up(replaced)
        self._free(replaced)
        lease.block_ids[first : first + len(adopted)] = adopted
        self.counts.add_private(lease.namespace, -len(replaced))
        self.tree.move(lease.node, node)
        lease.node = node
        lease.num_cached_tokens += len(adopted) * self.block_size
        lease.num_published_tokens = num_published + len(adopted) * self.block_size
        for need in self._needs:
            need.adopt(lease, first)
        return lease.num_published_tokens

    def extend(self, lease: Lease, count: int, *, sparing: bool = False) -> list[int] | None:
        """Append `count` blocks to the lease, evicting cached blocks as needed.

        Victims come from the accounts that hold most (`share`), the least recently used first. sparing: leave a quarter
        of all blocks to cached prefixes of accounts that hold less than the lease's, as far as they have as many.

        Return the new ids, or None with nothing changed if fewer than `count` blocks, or too few window blocks, are
        available. Raise ValueError if `count` is negative.
        """
        self._check(lease)
        allocator = self.counts.allocator
        for need in self._needs:
            if not need.has_room(lease, count):
                return None
        num_missing = count - allocator.num_free
        if num_missing > 0:
            available = self.counts.num_available_to(lease.namespace, count) if sparing else self.counts.num_available
            if count > available:
                return None
            while num_missing > 0:
                # Blocks that are copied are freed only later, so others go too.
                self.evict(num_missing, account_of(lease.namespace))
                num_missing = count - allocator.num_free
        block_ids = lease.block_ids
        after = block_ids[-1] if block_ids else None
        new = allocator.allocate(count, after)
        if new is not None:
            for need in self._needs:
                need.grow(lease, new)
            block_ids.extend(new)
            self.counts.add_private(lease.namespace, count)
        return new

    def publish(self, lease: Lease, tokens: array[int], num_computed_tokens: int) -> list[int]:
        """Insert the full blocks of ``tokens[:num_computed_tokens]`` into the tree, after the forward that wrote them.

        If another request was faster, the id in the tree replaces the lease's own id. Return the replaced ids; the
        caller passes them to `free` once no plan in flight names them. A smaller `num_computed_tokens` excludes tokens
        that must not be cached (after a stop string, say). Raise ValueError if `tokens` or the leased blocks are fewer
        than that.

        What has left the windows of layers is no longer the lease's.
        """
        self._check(lease)
        size = self.block_size
        first, stop = lease.num_published_tokens // size, num_computed_tokens // size
        if stop <= first or not self._caching:
            for need in self._needs:
                need.publish(lease, num_computed_tokens)
            return []
        if num_computed_tokens > len(tokens) or stop > len(lease.block_ids):
            raise ValueError(
                f"{num_computed_tokens} computed tokens, but {len(tokens)} tokens and {len(lease.block_ids)} blocks"
            )
        if self._needs and not first:
            self._choose_root(lease, tokens)
        own = lease.block_ids[first:stop]
        data = tokens[first * size : stop * size].tobytes()
        node, canonical = self.tree.insert(lease.node, data, own, lease.namespace)
        self.tree.move(lease.node, node)
        lease.node = node
        lease.num_published_tokens = stop * size
        self.counts.add_private(lease.namespace, -len(own))
        duplicates = own[: len(canonical)].tolist()
        if canonical:
            lease.block_ids[first : first + len(canonical)] = canonical
            self.counts.duplicates.update(duplicates)
        for need in self._needs:
            need.publish(lease, num_computed_tokens, zip(numbers(first), duplicates, canonical, strict=False))
        if self.lower is not None:
            self.lower.publish(lease, tokens, first + len(canonical), stop)
        return duplicates

    def free(self, ids: Sequence[int]) -> None:
        """Free duplicates from `publish`. Raise ValueError, with nothing changed, if an id is not one of these."""
        unique = set(ids)
        if len(unique) != len(ids) or not unique <= self.counts.duplicates:
            raise ValueError(f"not all of {list(ids)} are duplicates that wait for their release")
        self.counts.duplicates.difference_update(unique)
        self._free(ids)

    def release(self, lease: Lease, keep_tokens: int | None = None) -> None:
        """End the lease: free its unpublished blocks; its published blocks stay cached and become evictable.

        With `keep_tokens`, published blocks that reach beyond that many tokens are freed too, as far as no other lease
        and no cached continuation needs them: tokens after a stop string, or KV that cannot be trusted (0). They are
        not kept in the lower tier either.
        """
        self._check(lease)
        if len(lease.block_ids) * self.block_size > lease.num_cached_tokens:
            self.counts.record_change()
        if self.lower is not None:
            self.lower.release(lease, keep_tokens)
        lease.owner = None
        del self.leases[lease.number]
        num_published = lease.num_published_tokens // self.block_size
        private = lease.block_ids[num_published:]
        self.counts.add_private(lease.namespace, -len(private))
        for need in self._needs:
            need.release(lease)
        self.tree.release(lease.node, lease.namespace)
        if keep_tokens is not None:
            num_dropped = num_published - max(0, keep_tokens) // self.block_size
            if num_dropped > 0:
                trimmed = self.tree.trim(lease.node, num_dropped, lease.namespace)
                if self.lower is not None:
                    self.lower.forget(lease.names[num_published - len(trimmed) : num_published])
                private.extend(trimmed)
        self._free(private)

    def peek(self, tokens: array[int], namespace: str = "") -> int:
        """Count the tokens that `match` would find in the cache now. Change nothing, not even their recency."""
        return self._borders.depth(namespace, self._reusable(tokens, 0)) * self.block_size

    def continuation(self, lease: Lease, tail: array[int], most: int) -> array[int]:
        """Return up to `most` tokens that are cached behind the lease's published tokens and `tail`.

        Of several continuations that the lease's namespace may see, it is the one released last, if only a few are to
        be compared. Change nothing.
        """
        self._check(lease)
        found = self.tree.continuation(lease.node, tail.tobytes(), most * tail.itemsize, lease.namespace)
        return array("i", found)

    def share(self, namespace: str, weight: float, most: float) -> None:
        """Set an account's weight among all accounts for evictions, and its limit `most`; both are 1 until then.

        The next victim is of the account that holds most blocks for its weight. Accounts with more than `most` of all
        blocks come before accounts within their limits.
        """
        limit = inf if most >= 1 else most * self.num_blocks
        if self.tree.victims.share(account_of(namespace), weight, limit):
            for need in self._needs:
                need.reorder()

    def set_time(self, now: float) -> None:
        """Set the time, which must not go back, and end overdue retentions."""
        self.tree.set_time(now)

    def evict(self, count: int, account: str | None = None) -> None:
        """Evict `count` cached blocks for an account. Blocks that are being copied are freed later."""
        self._free(self.tree.evict(count, account))

    def drop(self, namespaces: Collection[str] | None) -> Iterator[int]:
        """Evict all prefixes of namespaces (None: of all) that no lease protects, retained ones too.

        Nothing of them stays stored. Yield the numbers of blocks that went, some at a time; between two the cache may
        be used.
        """
        if self.lower is not None:
            self.lower.drop(namespaces)
        for evicted in self.tree.drop(namespaces):
            self._free(evicted)
            yield len(evicted)

    def explain(self, lease: Lease, tokens: array[int], *, tells_salts: bool = False) -> Miss:
        """Return why `match`, or `advance`, found no more of `tokens`. To be called at once after it.

        Evictions of the lease's account are recorded from the first call on, until a while after the last call.
        tells_salts: whether the answer may name other namespaces of the lease's account.
        """
        self._check(lease)
        self.tree.evictions.begin(account_of(lease.namespace))
        lacking = self._needs[0].lacking if self._needs else MissReason.NO_WINDOW
        return explain_miss(self.tree, lease, tokens, lacking, tells_salts=tells_salts)

    def _check(self, lease: Lease) -> None:
        if lease.owner is not self:
            raise LeaseError("the lease was released before, or belongs to another cache")

    def _resume(self, lease: Lease, node: Node, path: array[int]) -> tuple[Node, int]:
        """Return the node that ends where the prefix that ends with `node` last serves, and its depth in blocks.

        If that place is not after the lease's published tokens, return the end of these. path: the blocks of the
        prefix. A run that reaches beyond the place is split there.
        """
        first, depth = lease.num_published_tokens // self.block_size, len(path)
        at = self._borders.last(node, depth, depth, path)
        if at <= first:
            return (lease.node, first) if first else (self.tree.root(lease.namespace), 0)
        return self.tree.node_at(node, depth, at), at

    def _free(self, blocks: Sequence[int]) -> None:
        """Free KV blocks, and what belongs to them; blocks that are being copied are freed when the copy ends."""
        for need in self._needs:
            need.drop(blocks)
        if self.lower is not None:
            self.lower.borders.let_go(blocks)
        if self.copies.is_used:
            blocks = self.copies.let_go(blocks)
        self.counts.allocator.free(blocks)

    def _choose_root(self, lease: Lease, tokens: array[int]) -> None:
        """Let a lease without published tokens begin at the present root of its first block, which may have changed.

        A lease that starts anew below a public prefix holds none of its blocks.
        """
        first = tokens[: self.block_size].tobytes()
        root = self.tree.start(lease.namespace, first) or self.tree.root(lease.namespace)
        self.tree.move(lease.node, root)
        lease.node = root

    def _reusable(self, tokens: array[int], start: int) -> bytes:
        """Return the bytes of the ids from `start`, a block boundary, in whole blocks without the last token."""
        stop = (len(tokens) - 1) // self.block_size * self.block_size
        return tokens[start : max(start, stop)].tobytes()
