"""How many blocks accounts may retain and pin."""

from __future__ import annotations

from radix_cache.retention import RetentionLedger


class RetentionBudgets:
    """The budgets of all accounts. Shares are of all blocks; see `PrefixCache`."""

    __slots__ = ("_granted", "_ledger", "_num_blocks", "_pin_share", "_retention_share")

    def __init__(self, ledger: RetentionLedger, num_blocks: int, retention_share: float, pin_share: float) -> None:
        self._ledger = ledger
        self._num_blocks = num_blocks
        self._retention_share = retention_share
        self._pin_share = pin_share
        # The accounts with a share of their own for pins. All others have a part in the cache's.
        self._granted: set[str] = set()

    def retainable(self, share: float | None) -> int:
        """Return the number of blocks that an account may retain. share: its own, None for the cache's."""
        return int((self._retention_share if share is None else share) * self._num_blocks)

    def num_left_to_pin(self, account: str, share: float | None, pin_share: float | None) -> int:
        """Count the blocks that an account may pin beside its pinned ones. For the shares see `PrefixCache.pin`."""
        num_own = self._ledger.account(account).num_pinned_blocks
        if pin_share is not None:
            return max(0, int(pin_share * self._num_blocks) - num_own)
        accounts = self._ledger.accounts().items()
        num_all = sum(one.num_pinned_blocks for name, one in accounts if name not in self._granted)
        num_common = int(self._pin_share * self._num_blocks)
        return max(0, min(self.retainable(share) - num_own, num_common // 2 - num_own, num_common - num_all))

    def grant(self, account: str, pin_share: float | None) -> None:
        """Note whether an account pins within a share of its own; None for the common one."""
        if pin_share is None:
            self._granted.discard(account)
        else:
            self._granted.add(account)
