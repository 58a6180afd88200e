"""How many KV blocks of a rank are free, cached and leased, and so how many a lease can get."""

from __future__ import annotations

from collections.abc import Sequence

from radix_cache.block_allocator import BlockAllocator
from radix_cache.block_copies import BlockCopies
from radix_cache.errors import require
from radix_cache.needs import Need
from radix_cache.retention import account_of
from radix_cache.room import Room
from radix_cache.tree import RadixTree

# The share of all blocks that `PrefixCache.extend` with `sparing` leaves to accounts that hold less.
_SPARED_SHARE = 0.25


class BlockCounts:
    """Counts the blocks of a `PrefixCache`: each is free, cached, leased, in copy, or a duplicate.

    `duplicates`: the blocks that `publish` has returned and `free` has not received yet. `num_private`: the number of
    blocks of leases that are not in the tree.
    """

    def __init__(
        self, num_blocks: int, allocator: BlockAllocator, tree: RadixTree, copies: BlockCopies, needs: Sequence[Need]
    ) -> None:
        self.duplicates: set[int] = set()
        self._num_blocks = num_blocks
        self.allocator = allocator
        self._tree = tree
        self._copies = copies
        self._needs = needs
        self.num_private = 0
        self._num_changes = 0

    @property
    def num_free(self) -> int:
        """The number of blocks that hold nothing."""
        return self.allocator.num_free

    @property
    def num_cached(self) -> int:
        """The number of blocks that hold a cached prefix and are evictable: no lease protects them."""
        return self._tree.num_evictable_blocks

    @property
    def num_leased(self) -> int:
        """The number of blocks that at least one lease holds, a shared block counted once."""
        return self._tree.num_pinned_blocks + self.num_private

    @property
    def num_available(self) -> int:
        """The number of blocks that `extend` can give to a lease now. While blocks are copied it may be too low."""
        return self.allocator.num_free + max(0, self._tree.num_evictable_blocks - self._copies.num_copied)

    def num_available_to(self, namespace: str, enough: int | None = None) -> int:
        """Count the blocks that `extend` with `sparing` could give to a lease of a namespace now.

        enough: stop counting here; the result is then a lower bound.
        """
        num_spared, account = int(_SPARED_SHARE * self._num_blocks), account_of(namespace)
        if enough is not None:
            num_own = self._tree.victims.num_evictable(account)
            num_evictable = max(self._tree.num_evictable_blocks - num_spared, num_own)
            num_sure = self.allocator.num_free + max(0, num_evictable - self._copies.num_copied)
            if num_sure >= enough:
                return num_sure
        return max(self.allocator.num_free, self.num_available - self._tree.num_to_spare(account, num_spared))

    def excess(self, account: str, num_blocks: int | None = None) -> float:
        """Return a measure of an account's holding for its weight, for comparisons.

        num_blocks: the blocks that it holds; None for all that its leases have.
        """
        victims = self._tree.victims
        return victims.excess_of(account, victims.num_in_use(account) if num_blocks is None else num_blocks)

    def room(self, num_spoken_for: int) -> Room | None:
        """Return the room that a waiting request finds now, None where prefixes need more than KV blocks.

        num_spoken_for: available blocks that other requests will need.
        """
        return None if self._needs else Room(self, self._num_changes, self.num_available - num_spoken_for)

    def record_change(self) -> None:
        """Record that a request that waits may need less room: a part of a prompt was published, or a lease with blocks
        of its own has ended (`Room`)."""
        self._num_changes += 1

    def add_private(self, namespace: str, change: int) -> None:
        """Count blocks of a lease that are not in the tree, fewer of them if `change` is negative."""
        self.num_private += change
        self._tree.victims.count_private(namespace, change)

    def check(self) -> None:
        """Raise InvariantError unless free + cached + leased + duplicates + in copy = all blocks. O(1)."""
        total = self.num_free + self.num_cached + self.num_leased + len(self.duplicates) + self._copies.num_in_copy
        require(total == self._num_blocks, f"{total} of {self._num_blocks} blocks accounted for")
        for need in self._needs:
            need.check_counts(self.duplicates)
