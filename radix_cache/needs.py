"""A request goes on from a block boundary if the prefix has, beside KV blocks, the needs of the model there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from radix_cache.misses import MissReason
from radix_cache.nodes import Lease, Node


class Need:
    """One such need: window blocks for layers with a sliding window, a snapshot for recurrent layers.

    `PrefixCache` asks each of its needs where prefixes serve, and tells it what becomes of leases and blocks. Every
    method does nothing; a need overrides the ones that concern it.
    """

    lacking: MissReason  # why a prefix serves no further
    reads_blocks = False  # whether `last` needs the blocks of a prefix

    @property
    def num_lent(self) -> int:
        """The number of its places that are being copied to or from the lower tier."""
        return 0

    def last(self, node: Node | None, depth: int, limit: int, path: Sequence[int]) -> int:
        """Return the last boundary within the first `limit` blocks of a prefix at which a request can go on.

        node, depth: the prefix ends within the run of `node`, whose end is that deep. path: its blocks. 0 is always
        such a boundary.
        """
        return limit

    def has_room(self, lease: Lease, count: int) -> bool:
        """Return whether a lease can have `count` more blocks."""
        return True

    def grow(self, lease: Lease, blocks: Sequence[int]) -> None:
        """Give a lease what it needs for new blocks, which it does not have yet. There must be room."""

    def adopt(self, lease: Lease, first: int) -> None:
        """Hold what a lease needs at the end of its published blocks; blocks from number `first` on are new."""

    def give_up(self, blocks: Iterable[int]) -> None:
        """Let go what a lease had for blocks that it has not published and is about to free."""

    def publish(self, lease: Lease, num_tokens: int, replaced: Iterable[tuple[int, int, int]] = ()) -> None:
        """Let go what a lease needs no longer once `num_tokens` are computed.

        replaced: (number, own, tree's) of its blocks that the tree had already.
        """

    def release(self, lease: Lease) -> None:
        """Let go all that a lease holds."""

    def drop(self, blocks: Iterable[int]) -> None:
        """Free what belongs to KV blocks that are freed."""

    def retain(self, path: Sequence[int]) -> None:
        """Keep longer what is needed at the end of a prefix. path: its blocks."""

    def reorder(self) -> None:
        """Heed that the weight of an account has changed."""

    def check_counts(self, duplicates: Collection[int]) -> None:
        """Raise InvariantError unless all places are accounted for. duplicates: blocks that wait to be freed."""
