"""The free block ids, kept as maximal runs (extents) of consecutive ids.

Attention reads a request's blocks without a copy when they form one run, so the allocator prefers contiguity:

- A growing request (``after`` given) takes the ids right behind its last block while they are free.
- The remaining ids come from the largest free extent (the lowest among equals), so that the new run can grow.
  It starts in the middle of that extent: the owner of the block just before the extent keeps half of the room to grow
  into, the new run gets the other half. An extent that starts at block 0 has no such owner: it is filled from there.
- If no extent is large enough, the largest are used up one after another.

The outcome depends only on the set of free ids and the arguments.
"""

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from radix_cache.errors import require

_HEAP_SLACK = 64  # the heap is rebuilt once it has more entries than twice the extents and this


class BlockAllocator:
    """Free block ids ``0 .. num_blocks - 1``. Memory is bounded by the number of extents."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks <= 0:
            raise ValueError(f"num_blocks must be positive, got {num_blocks}")
        self.num_blocks = num_blocks
        self._num_free = num_blocks
        self._used = bytearray(num_blocks)
        # The same extents [start, end) under both of their bounds.
        self._end_of = {0: num_blocks}
        self._start_of = {num_blocks: 0}
        # Entries (-length, end), upper bounds of the extent with that end. Allocation behind a block shrinks an extent
        # at its start, the most frequent case, and so leaves the heap alone.
        self._largest = [(-num_blocks, num_blocks)]

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Take `count` free ids, if possible the ones that follow the allocated id `after`.

        Return the ids in the order in which the caller should use them, or None, with nothing changed, if fewer than
        `count` are free. Raise ValueError if `count` is negative or `after` is not an allocated id.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if after is not None and not (0 <= after < self.num_blocks and self._used[after]):
            raise ValueError(f"block {after} is not allocated")
        if count > self._num_free:
            return None
        ids: list[int] = []
        if after is not None and count:
            start = after + 1
            end = self._end_of.get(start)
            if end is not None:
                ids += self._take(start, end, start, min(count, end - start))
        while len(ids) < count:
            start, end = self._largest_extent()
            size = min(count - len(ids), end - start)
            first = start + (end - start - size) // 2 if start else 0
            ids += self._take(start, end, first, size)
        return ids

    def free(self, ids: Sequence[int]) -> None:
        """Return `ids` to the pool, in any order. Raise ValueError, with nothing changed, if an id is free."""
        used = self._used
        for index, block in enumerate(ids):
            if not (0 <= block < self.num_blocks and used[block]):
                for earlier in ids[:index]:
                    used[earlier] = 1
                raise ValueError(f"block {block} is not allocated")
            used[block] = 0
        self._num_free += len(ids)
        start = end = -1
        for block in sorted(ids):
            if block != end:
                if end >= 0:
                    self._add_extent(start, end)
                start = block
            end = block + 1
        if end >= 0:
            self._add_extent(start, end)

    def is_allocated(self, block: int) -> bool:
        return bool(self._used[block])

    def check_invariants(self) -> None:
        """Raise InvariantError unless extents, their mirror, the heap and the counters describe the same free ids."""
        covered = bytearray(b"\x01") * self.num_blocks
        previous_end = -1
        bounds: dict[int, int] = {}
        for negative, end in self._largest:
            bounds[end] = max(bounds.get(end, 0), -negative)
        for start, end in sorted(self._end_of.items()):
            require(
                previous_end < start < end <= self.num_blocks, f"extent [{start}, {end}) overlaps or touches another"
            )
            require(self._start_of.get(end) == start, f"extent [{start}, {end}) is not mirrored")
            require(bounds.get(end, 0) >= end - start, f"extent [{start}, {end}) is missing from the heap")
            covered[start:end] = bytes(end - start)
            previous_end = end
        require(len(self._start_of) == len(self._end_of), "stray extent bound")
        require(covered == self._used, "extents and allocation marks differ")
        require(self._used.count(0) == self._num_free, "num_free is wrong")
        require(len(self._largest) <= 2 * len(self._end_of) + _HEAP_SLACK, "heap outgrew the extents")

    def check_allocated(self, blocks: Collection[int]) -> None:
        """Raise InvariantError unless exactly these blocks are allocated."""
        require(not blocks or 0 <= min(blocks) <= max(blocks) < self.num_blocks, "a block does not exist")
        found = bytearray(self.num_blocks)
        for block in blocks:
            found[block] = 1
        require(found == self._used, "a block is lost, or in use while it is free")

    def _largest_extent(self) -> tuple[int, int]:
        heap = self._largest
        while True:
            negative, end = heap[0]
            start = self._start_of.get(end)
            if start is None:
                heappop(heap)
            elif start - end == negative:
                return start, end
            else:
                heapreplace(heap, (start - end, end))

    def _take(self, start: int, end: int, first: int, size: int) -> range:
        """Cut ``[first, first + size)`` out of the extent ``[start, end)``."""
        stop = first + size
        if first > start:
            self._end_of[start] = first
            self._start_of[first] = start
            self._push(start, first)
        else:
            del self._end_of[start]
        if stop < end:
            self._end_of[stop] = end
            self._start_of[end] = stop
        else:
            del self._start_of[end]
            self._bound_heap()
        self._used[first:stop] = b"\x01" * size
        self._num_free -= size
        return range(first, stop)

    def _add_extent(self, start: int, end: int) -> None:
        """Insert the extent ``[start, end)``, joined with its free neighbours."""
        left = self._start_of.pop(start, None)
        if left is not None:
            start = left
        right = self._end_of.pop(end, None)
        if right is not None:
            end = right
        self._end_of[start] = end
        self._start_of[end] = start
        self._push(start, end)

    def _push(self, start: int, end: int) -> None:
        heappush(self._largest, (start - end, end))
        self._bound_heap()

    def _bound_heap(self) -> None:
        if len(self._largest) > 2 * len(self._start_of) + _HEAP_SLACK:
            self._largest = [(start - end, end) for end, start in self._start_of.items()]
            heapify(self._largest)
