"""Window blocks: the KV of layers that see only the last tokens, and the map from KV blocks to them.

After a block boundary a layer with a sliding window needs only the KV of the `span` blocks before it. So the KV of such
layers lies in blocks of its own, fewer than the KV blocks of the other layers, and this map tells which KV block has
one. A lease needs only the window blocks of its last KV blocks. A KV block without a window block stays cached for the
other layers; a prefix serves up to a boundary after `span` blocks with window blocks (compare the tombstones of
SGLang's cache for sliding windows, and vLLM's hybrid KV cache manager).

Of window blocks that no lease needs, those inside a run of tokens go first, the oldest first: a match ends there only
if a prompt leaves the run at that place. Window blocks before the end of a run go as snapshots do, by account and worth
(`radix_cache.worth_queue`); a block that a client retains stays about eight times as long.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf

from radix_cache.block_allocator import BlockAllocator
from radix_cache.errors import require
from radix_cache.misses import MissReason
from radix_cache.needs import Need
from radix_cache.nodes import Lease, Node
from radix_cache.retention import account_of
from radix_cache.worth_queue import WorthQueue

# The gain of a window block that no lease needs any more: inside a run, at its end, at the end of a retained prefix.
INSIDE, AT_END, RETAINED = 0, 1, 8

_NONE = -1


def blocks_before(window: int, block_size: int) -> int:
    """Return the number of blocks before a boundary that a token after it sees. window: in tokens, its own included."""
    return -(-(window - 1) // block_size)


def least_window_blocks(window: int, block_size: int) -> int:
    """Return the window blocks that a single request needs: those before its token, the token's, and the next."""
    return blocks_before(window, block_size) + 2


class Windows(Need):
    """The window blocks of a cache whose layers all keep their KV in the same blocks: there are none."""

    @property
    def num_blocks(self) -> int:
        return 0

    @property
    def num_free(self) -> int:
        """The number of window blocks that hold nothing."""
        return 0

    @property
    def num_cached(self) -> int:
        """The number of window blocks that no lease needs."""
        return 0

    @property
    def num_held(self) -> int:
        """The number of window blocks that leases need."""
        return 0

    @property
    def num_evicted(self) -> int:
        """The number of window blocks that were evicted since the start."""
        return 0

    @property
    def num_available(self) -> float:
        """The number of window blocks that `grow` could give now; no bound where none are needed."""
        return inf

    @property
    def span(self) -> int:
        """The number of blocks before a boundary that are within the window there."""
        return 0

    @property
    def num_needed(self) -> int:
        """The number of window blocks that a request needs to be computed step by step."""
        return 0

    def num_missing(self, lease: Lease, num_blocks: int) -> int:
        """Count the window blocks that a lease of `num_blocks` in the end lacks to be computed step by step."""
        return 0

    def of(self, blocks: Iterable[int]) -> Sequence[int]:
        """Return the window blocks of KV blocks."""
        return ()

    def has(self, block: int) -> bool:
        """Return whether a KV block has a window block."""
        return False

    def table(self, lease: Lease, num_tokens: int) -> tuple[int, array[int]] | None:
        """Return the window table that layers with windows need for the lease's tokens from number `num_tokens` on.

        It is the number of leading blocks that such a token does not see, and the window blocks of the blocks after
        them.
        """
        return None

    def expect(self, lease: Lease, num_tokens: int) -> None:
        """Record that other prompts are likely to diverge from the lease's prompt after its first `num_tokens`.

        Window blocks are kept there as at the end of a prompt.
        """

    def jump(self, lease: Lease, index: int) -> None:
        """Let go all window blocks of a lease, whose next blocks up to number `index` will have none."""

    def forsake(self, lease: Lease, first: int) -> None:
        """Let go all window blocks of a lease. Free the ones of unpublished blocks from number `first` on."""

    def lend(self, block: int) -> int:
        """Return the window block of a KV block, which is being copied from now on, until `take_back`."""
        raise KeyError(block)

    def take_back(self, block: int, window_block: int) -> None:
        """Record the end of a copy. block: the KV block that lent its window block."""


class WindowBlocks(Windows):
    """The window block of each KV block, the number of leases that need it, and the queue of evictable window blocks.

    A window block is free, held (leases need it), cached (none does), or waits with a duplicate for its `free`. All
    blocks of a lease from number `Lease.first_window` on have window blocks, which the lease holds. A *lent* window
    block is being copied up or down. It is held until `take_back`, and free after it if its KV block has gone.
    """

    lacking = MissReason.NO_WINDOW
    reads_blocks = True

    def __init__(
        self, num_blocks: int, num_window_blocks: int, block_size: int, window: int, excess: Callable[[str, int], float]
    ) -> None:
        """num_blocks: of the KV blocks. window: in tokens, the new one included. excess: as for `WorthQueue`.

        Raise ValueError if a single request would not find enough window blocks.
        """
        self._window = window
        self._block_size = block_size
        if num_window_blocks < self.num_needed:
            raise ValueError(f"{num_window_blocks} window blocks are too few for a window of {window} tokens")
        self._allocator = BlockAllocator(num_window_blocks)
        self._of = array("i", [_NONE]) * num_blocks
        self._holds = array("i", [0]) * num_blocks
        # The window blocks that are being copied: True while their KV block has them.
        self._lent: dict[int, bool] = {}
        # By KV block that has a window block: the account for which it was made.
        self._account: dict[int, str] = {}
        # The KV blocks whose window blocks are cached.
        self._queue: WorthQueue[int] = WorthQueue(excess)
        self._num_held = 0
        self._num_evicted = 0

    @property
    def num_blocks(self) -> int:
        return self._allocator.num_blocks

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        return len(self._queue)

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def num_evicted(self) -> int:
        return self._num_evicted

    @property
    def num_lent(self) -> int:
        """The number of window blocks that are being copied to or from the lower tier."""
        return len(self._lent)

    @property
    def num_lent_alone(self) -> int:
        """The number of window blocks that nothing holds any more but a copy to or from the lower tier."""
        return len(self._lent) - sum(self._lent.values())

    @property
    def num_available(self) -> int:
        return self._allocator.num_free + self.num_cached

    @property
    def span(self) -> int:
        return blocks_before(self._window, self._block_size)

    @property
    def num_needed(self) -> int:
        return least_window_blocks(self._window, self._block_size)

    def num_missing(self, lease: Lease, num_blocks: int) -> int:
        return max(0, min(self.num_needed, num_blocks) - (len(lease.block_ids) - lease.first_window))

    def of(self, blocks: Iterable[int]) -> array[int]:
        return array("i", map(self._of.__getitem__, blocks))

    def has(self, block: int) -> bool:
        return self._of[block] != _NONE

    def last(self, node: Node | None, depth: int, limit: int, path: Sequence[int]) -> int:
        border, index, span = limit, limit - 1, self.span
        while index >= max(0, border - span):
            if self._of[path[index]] == _NONE:
                border = index
            index -= 1
        return border

    def table(self, lease: Lease, num_tokens: int) -> tuple[int, array[int]]:
        first = max(0, num_tokens // self._block_size - self.span)
        return first, self.of(lease.block_ids[first:])

    def has_room(self, lease: Lease, count: int) -> bool:
        return min(count, len(lease.block_ids) + count - lease.first_window) <= self.num_available

    def expect(self, lease: Lease, num_tokens: int) -> None:
        lease.ends.setdefault(num_tokens // self._block_size, AT_END)

    def grow(self, lease: Lease, blocks: Sequence[int]) -> None:
        """Give new KV blocks of a lease window blocks, but for blocks before number `Lease.first_window`."""
        after, account = lease.block_ids[-1] if lease.block_ids else None, account_of(lease.namespace)
        blocks = blocks[max(0, lease.first_window - len(lease.block_ids)) :]
        missing = len(blocks) - self._allocator.num_free
        if missing > 0:
            self.evict(missing, account)
        place = None if after is None or not self.has(after) else self._of[after]
        new = self._allocator.allocate(len(blocks), place)
        assert new is not None
        for block, window_block in zip(blocks, new, strict=True):
            self._of[block] = window_block
            self._holds[block] = 1
            self._account[block] = account
        self._queue.count(account, len(blocks))
        self._num_held += len(blocks)

    def evict(self, count: int, account: str) -> None:
        """Free cached window blocks for an account."""
        for _ in range(count):
            block = self._queue.first(account)
            assert block is not None
            self._queue.evict(block)
            self.drop((block,))
        self._num_evicted += count

    def adopt(self, lease: Lease, first: int) -> None:
        stop = lease.num_published_tokens // self._block_size
        first_window = max(lease.first_window, stop - self.span)
        self._hold(lease.block_ids[max(first, first_window) : stop])
        self._let_go(lease, min(first, first_window), INSIDE)
        lease.first_window = first_window

    def give_up(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._count_out(block)

    def publish(self, lease: Lease, num_tokens: int, replaced: Iterable[tuple[int, int, int]] = ()) -> None:
        """Let go the window blocks that the lease's tokens from number `num_tokens` on do not see."""
        for index, own, canonical in replaced:
            if index >= lease.first_window:
                self._exchange(own, canonical)
        self._let_go(lease, num_tokens // self._block_size - self.span, INSIDE)

    def _exchange(self, duplicate: int, canonical: int) -> None:
        """Let a lease need the window block of the tree's block instead of that of its own duplicate.

        If the tree's block has no window block, it gets that of the duplicate, whose content is the same.
        """
        self._count_out(duplicate)
        if not self.has(canonical):
            self._of[canonical], self._of[duplicate] = self._of[duplicate], _NONE
            self._account[canonical] = self._account.pop(duplicate)
        self._hold((canonical,))

    def release(self, lease: Lease) -> None:
        self._let_go(lease, len(lease.block_ids), RETAINED if lease.node.keeps else AT_END)

    def jump(self, lease: Lease, index: int) -> None:
        self._let_go(lease, len(lease.block_ids), INSIDE)
        lease.first_window = index

    def forsake(self, lease: Lease, first: int) -> None:
        self._let_go(lease, first, AT_END)
        for block in lease.block_ids[max(first, lease.first_window) :]:
            self._count_out(block)
            self.drop((block,))
        lease.first_window = len(lease.block_ids)

    def lend(self, block: int) -> int:
        self._hold((block,))
        self._lent[self._of[block]] = True
        return self._of[block]

    def take_back(self, block: int, window_block: int) -> None:
        if not self._lent.pop(window_block):
            self._allocator.free((window_block,))
        elif self._count_out(block):
            self._enqueue(block, AT_END)

    def retain(self, path: Sequence[int]) -> None:
        for block in path[max(0, len(path) - self.span) :]:
            if block in self._queue:
                self._enqueue(block, RETAINED)

    def drop(self, blocks: Iterable[int]) -> None:
        freed = []
        for block in blocks:
            if not self.has(block):
                continue
            window_block = self._of[block]
            if window_block in self._lent:
                self._lent[window_block] = False
                self._count_out(block)
            else:
                freed.append(window_block)
            require(not self._holds[block], f"the window block of block {block} is freed while a lease needs it")
            self._queue.discard(block)
            self._queue.count(self._account.pop(block), -1)
            self._of[block] = _NONE
        self._allocator.free(freed)

    def reorder(self) -> None:
        self._queue.reorder()

    def check_counts(self, duplicates: Collection[int]) -> None:
        total = self.num_free + self.num_cached + self.num_held + self.num_lent_alone
        total += sum(map(self.has, duplicates))
        require(total == self.num_blocks, f"{total} of {self.num_blocks} window blocks accounted for")

    def check(self, num_holds: dict[int, int], waiting: set[int]) -> None:
        """Raise InvariantError unless every window block is in one place. O(blocks).

        num_holds: the leases that need the window block of each KV block. waiting: duplicates, which are to be freed.
        """
        self._allocator.check_invariants()
        having = [block for block, window_block in enumerate(self._of) if window_block != _NONE]
        own = self.of(having)
        require(len(set(own)) == len(own), "two blocks have the same window block")
        require(all(map(self._allocator.is_allocated, own)), "a window block is free and in use")
        alone = [window_block for window_block, is_had in self._lent.items() if not is_had]
        require(set(own).isdisjoint(alone), "a window block that is being copied has changed hands")
        require(all(map(self._allocator.is_allocated, alone)), "a window block is free and being copied")
        require(len(own) + self.num_free + len(alone) == self.num_blocks, "a window block is lost")
        held = {block: holds for block, holds in enumerate(self._holds) if holds}
        lent = Counter(block for block in having if self._of[block] in self._lent)
        require(held == +(Counter(num_holds) + lent), "the leases need other window blocks than are held")
        require(held.keys() <= set(having), "a lease needs a window block that is gone")
        require(len(held) == self.num_held, "the number of held window blocks is wrong")
        require(sorted(self._account) == having, "a window block has no account, or one that is gone has")
        self._queue.check(Counter(self._account.values()))
        expected = [block for block in having if block not in held and block not in waiting]
        require(sorted(self._queue) == expected, "the queue differs from the window blocks that may go")

    def _hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._queue.discard(block)
            self._num_held += not self._holds[block]
            self._holds[block] += 1

    def _let_go(self, lease: Lease, stop: int, gain: int) -> None:
        """Let go the window blocks of the lease's blocks before number `stop`.

        Window blocks of blocks in the tree become evictable, others are freed at once. gain: of the window blocks that
        lie before no expected end.
        """
        num_published = lease.num_published_tokens // self._block_size
        for index in range(lease.first_window, stop):
            block = lease.block_ids[index]
            is_last = self._count_out(block)
            if index >= num_published:
                self.drop((block,))
            elif is_last:
                ends = (worth for end, worth in lease.ends.items() if end - self.span <= index < end)
                self._enqueue(block, max((gain, *ends)))
        lease.first_window = max(lease.first_window, stop)

    def _count_out(self, block: int) -> bool:
        """Count one lease less that needs the window block of a KV block. Return whether it was the last lease."""
        self._holds[block] -= 1
        is_last = not self._holds[block]
        self._num_held -= is_last
        return is_last

    def _enqueue(self, block: int, gain: int) -> None:
        self._queue.put(block, self._account[block], self._queue.age + gain if gain else 0)
