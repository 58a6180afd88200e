"""Prefixes whose blocks are filled from elsewhere, beside the steps: read back, or fetched from another service.

The caller fills the blocks of `Fill.copies` and ends the fill; it may release the lease before.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from radix_cache.block_copies import BlockCopy, Kind
from radix_cache.nodes import Lease
from radix_cache.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Fill:
    """A cached prefix and the blocks of its continuation that are being filled. Its lease ends with it.

    cache: has the blocks. tokens: of the prefix. Blocks from number `first` on are filled, one for each of `copies` but
    the first `num_beside`, which fill window blocks and a snapshot.
    """

    cache: PrefixCache
    lease: Lease
    tokens: array[int]
    first: int
    copies: list[BlockCopy]
    num_beside: int = 0

    def num_blocks(self, num_filled: int | None = None) -> int:
        """Count the KV blocks of all copies, or of the first `num_filled`."""
        return max(0, (len(self.copies) if num_filled is None else num_filled) - self.num_beside)

    def release(self) -> None:
        """Release the lease; no block is wanted any more."""
        self.cache.release(self.lease)

    def end(self, num_filled: int) -> None:
        """Record that the first `num_filled` copies are done, and enter their blocks into the tree."""
        cache, lease = self.cache, self.lease
        for copy in self.copies[self.num_beside :]:
            cache.copies.end(copy.block)
        is_whole = num_filled == len(self.copies)
        row = _end_beside(self, is_whole=is_whole)
        if lease.owner is cache:
            filled = (self.first + self.num_blocks(num_filled)) * cache.block_size
            if filled > lease.num_published_tokens:
                cache.free(cache.publish(lease, self.tokens, filled))
            if row is not None and is_whole:
                cache.states.keep(lease, row, filled)
                row = None
            cache.release(lease)
        if row is not None:
            cache.states.drop_row(row)


def begin_fill(
    cache: PrefixCache,
    tokens: array[int],
    namespace: str,
    stop: int,
    spare: int,
    names: list[bytes] | None = None,
) -> Fill | None:
    """Lease the cached prefix of `tokens` and blocks up to number `stop`, whose content comes from elsewhere.

    Return None, with no lease made, if nothing is to come or too few blocks are available. spare: further blocks that
    must stay available. names: of blocks that come from the lower tier, with the window blocks and the snapshot that a
    request needs there (`StoredTree.num_stored`); None for blocks from elsewhere, whose copies name memory alone.
    """
    lease, size = cache.match(tokens, namespace, names=names), cache.block_size
    first = lease.num_published_tokens // size
    below = None if names is None else cache.lower
    has_states = below is not None and below.has_states and stop > first
    row = cache.states.take(lease, stop * size) if has_states else None
    blocks = _extend_beside(cache, lease, 0 if has_states and row is None else stop - first, spare)
    if blocks is None:
        if row is not None:
            cache.states.drop_row(row)
        return None
    if below is None:
        copies = [BlockCopy(block, b"", "", index, b"") for index, block in enumerate(blocks, first)]
        return Fill(cache, lease, tokens[: stop * size], first, copies)
    beside = below.border_copies(lease, tokens, first, row)
    copies = below.copies_of(blocks, lease, tokens, first)
    return Fill(cache, lease, tokens[: stop * size], first, beside + copies, len(beside))


def _extend_beside(cache: PrefixCache, lease: Lease, count: int, spare: int) -> list[int] | None:
    """Extend a lease by blocks to be filled, if `spare` further ones stay available.

    Return None, with the lease released, if that is not possible or `count` is not positive.
    """
    windows = cache.windows
    is_room = not spare or cache.counts.num_available_to(lease.namespace, count + spare) >= count + spare
    if count > windows.span:
        # Only the last of the blocks get window blocks.
        windows.jump(lease, len(lease.block_ids) + count - windows.span)
    blocks = cache.extend(lease, count, sparing=True) if count > 0 and is_room else None
    if blocks is None:
        cache.release(lease)
    else:
        cache.copies.begin(blocks)
    return blocks


def _end_beside(fill: Fill, *, is_whole: bool) -> int | None:
    """Take back the window blocks of a fill, and return the row of its snapshot; None without one.

    is_whole: whether all is filled; else the lease loses the window blocks.
    """
    lease, windows, row = fill.lease, fill.cache.windows, None
    for copy in fill.copies[: fill.num_beside]:
        if copy.kind is Kind.STATE:
            row = copy.block
        else:
            windows.take_back(lease.block_ids[copy.depth], copy.block)
    if not is_whole and lease.owner is fill.cache:
        windows.forsake(lease, fill.first)
    return row
