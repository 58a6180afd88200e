"""The prefixes that accounts retain and pin, within budgets of blocks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator
from dataclasses import dataclass

from radix_cache.borders import Borders
from radix_cache.errors import BudgetError
from radix_cache.listing import find_prefix
from radix_cache.nodes import Lease
from radix_cache.retention import account_of, num_unpinned_blocks
from radix_cache.tree import RadixTree
from radix_cache.window_blocks import RETAINED, Windows


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of all blocks that may be kept for accounts without shares of their own."""

    retained: float = 0.5  # by each account
    pinned: float = 1.0  # by all accounts together; one of them pins at most half of that


DEFAULT_SHARES = Shares()


class Retentions:
    """Retains and pins cached prefixes, and counts their use. Shares are of all blocks of the cache."""

    def __init__(
        self,
        tree: RadixTree,
        windows: Windows,
        borders: Borders,
        check: Callable[[Lease], None],
        num_blocks: int,
        shares: Shares,
    ) -> None:
        """check: raises LeaseError for a lease that was released."""
        self._tree = tree
        self._windows = windows
        self._borders = borders
        self._check = check
        self._num_blocks = num_blocks
        self._shares = shares
        # The accounts with a share of their own for pins. All others have a part in the cache's.
        self._granted: set[str] = set()

    @property
    def num_blocks(self) -> int:
        """The number of cached or leased blocks that a retention covers."""
        return self._tree.ledger.num_blocks

    @property
    def num_pins(self) -> int:
        """The number of pinned prefixes."""
        return self._tree.ledger.num_pins

    @property
    def num_lost(self) -> int:
        """The number of retained blocks evicted since the start because nothing else was left."""
        return self._tree.ledger.num_lost_blocks

    def budget(
        self, account: str, share: float | None = None, pin_share: float | None = None
    ) -> tuple[int, int, int, int]:
        """Return the numbers of blocks that an account may retain, retains, has pinned, and may pin beside these."""
        own = self._tree.ledger.account(account)
        left = self._num_left_to_pin(account, share, pin_share)
        return self._retainable(share), own.num_blocks, own.num_pinned_blocks, left

    def record_hit(self, lease: Lease, num_tokens: int) -> None:
        """Count `num_tokens` of the lease as found in the cache, and refresh the retentions along its prefix."""
        self._check(lease)
        self._tree.record_hit(lease.node, num_tokens)

    def retain(
        self, lease: Lease, num_tokens: int, ttl: float, share: float | None = None, *, yields: bool = False
    ) -> None:
        """Retain the first `num_tokens` of the lease's tokens for `ttl` from now on, as far as they are published.

        Whole blocks only. Within the account's budget the retentions refreshed longest ago give way; the rest that
        still does not fit is not retained. share: of the account, None for the cache's. yields: give way to all
        retentions of the account that do not yield.
        """
        self._check(lease)
        num_published = lease.num_published_tokens // self._tree.block_size
        wanted = min(num_tokens // self._tree.block_size, num_published)
        if wanted > 0 and ttl > 0:
            node = self._tree.node_at(lease.node, num_published, wanted)
            if node.namespace == lease.namespace:
                self._tree.retain(node, ttl, self._retainable(share), yields=yields)
                if node.keeps:
                    lease.ends[wanted] = RETAINED
                    self._windows.retain(lease.block_ids[:wanted])

    def pin(
        self, tokens: array[int], namespace: str = "", share: float | None = None, pin_share: float | None = None
    ) -> int:
        """Pin the whole blocks of `tokens`, if all of them are cached, until `unpin`.

        Return the number of cached tokens: they are pinned if this covers all whole blocks. Raise BudgetError, with
        nothing changed, if the account's pins would exceed its budget; its other retentions give way. share: as in
        `retain`. pin_share: granted to the account for its pins; None for its part in the cache's.
        """
        tree, size = self._tree, self._tree.block_size
        wanted = len(tokens) // size
        data = tokens[: wanted * size].tobytes()
        depth = self._borders.depth(namespace, data) if self._windows.num_blocks else tree.depth(namespace, data)
        account = account_of(namespace)
        num_left = self._num_left_to_pin(account, share, pin_share)
        # Blocks that are not cached are not pinned yet.
        if wanted - depth > num_left:
            raise BudgetError(wanted - depth, num_left)
        if depth < wanted or not wanted:
            return depth * size
        start = tree.start(namespace, data)
        assert start is not None
        node = tree.descend(start, data, array("i"), namespace)
        if node.namespace != namespace:
            return wanted * size  # a public prefix is not the account's to pin, and the operator has pinned it
        num_new = num_unpinned_blocks(node)
        if num_new > num_left:
            raise BudgetError(num_new, num_left)
        (self._granted.discard if pin_share is None else self._granted.add)(account)
        tree.pin(node)
        tree.make_room(node, max(self._retainable(share), tree.ledger.account(account).num_pinned_blocks))
        self._windows.retain(tree.path(node))
        return wanted * size

    def find(self, serial: int, namespace: str) -> Generator[None, None, array[int] | None]:
        """Find the tokens of a prefix that `list_prefixes` has named. See `find_prefix`."""
        return find_prefix(self._tree, (namespace,), serial)

    def unpin(self, tokens: array[int], namespace: str = "") -> bool:
        """End the pin of the whole blocks of `tokens`. Return False if there is none."""
        num_blocks = len(tokens) // self._tree.block_size
        data = tokens[: num_blocks * self._tree.block_size].tobytes()
        node, depth, num_cached = self._tree.locate(namespace, data)
        is_end = node is not None and depth == num_cached == num_blocks
        if node is None or not is_end or node.namespace != namespace:
            return False
        if node.retention is None or not node.retention.is_pinned:
            return False
        self._tree.unpin(node)
        return True

    def unpin_serial(self, serial: int, namespace: str) -> bool:
        """End the pin of the run that `PrefixCache.prefixes` names `serial`. Return False without such a pin."""
        retentions = self._tree.ledger.account(account_of(namespace)).retentions.values()
        nodes = (one.node for one in retentions if one.is_pinned and one.node is not None)
        node = next((node for node in nodes if node.serial == serial and node.namespace == namespace), None)
        if node is not None:
            self._tree.unpin(node)
        return node is not None

    def _retainable(self, share: float | None) -> int:
        """Return the number of blocks that an account may retain. share: its own, None for the cache's."""
        return int((self._shares.retained if share is None else share) * self._num_blocks)

    def _num_left_to_pin(self, account: str, share: float | None, pin_share: float | None) -> int:
        """Count the blocks that an account may pin beside its pinned ones. For the shares see `pin`."""
        ledger = self._tree.ledger
        num_own = ledger.account(account).num_pinned_blocks
        if pin_share is not None:
            return max(0, int(pin_share * self._num_blocks) - num_own)
        num_all = sum(one.num_pinned_blocks for name, one in ledger.accounts().items() if name not in self._granted)
        num_common = int(self._shares.pinned * self._num_blocks)
        return max(0, min(self._retainable(share) - num_own, num_common // 2 - num_own, num_common - num_all))
