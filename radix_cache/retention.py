"""Retention: prefixes that clients wish to keep, within a budget of blocks per account.

A retained block is evicted only when no other block is left, a pinned block only after all others. So a retention is a
preference among victims and never keeps a request from its memory. It covers the whole prefix up to the node where it
ends; a node is retained if a retention ends at it or below it.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from itertools import chain

from radix_cache.nodes import Node, Retention

_HEAP_SLACK = 64  # a heap is rebuilt once it has more entries than twice the live ones and this


def account_of(namespace: str) -> str:
    """Return the account of a namespace, which is named `ACCOUNT` or `ACCOUNT/NAME`."""
    return namespace.partition("/")[0]


class Account:
    """The retentions of one account by number, the one refreshed longest ago first.

    `yielding`: the retentions among them that no client has asked for. `num_blocks`: the number of blocks that all of
    them cover, each counted once. `num_pinned_blocks`: the number of the account's own blocks that pins cover.
    """

    __slots__ = ("num_blocks", "num_pinned_blocks", "retentions", "yielding")

    def __init__(self) -> None:
        self.num_blocks = 0
        self.num_pinned_blocks = 0
        self.retentions: OrderedDict[int, Retention] = OrderedDict()
        self.yielding: OrderedDict[int, Retention] = OrderedDict()


def num_unpinned_blocks(node: Node) -> int:
    """Count the blocks up to the end of `node` that no pin covers, except public ones above it."""
    found = 0
    current: Node | None = node
    while current is not None and current.namespace == node.namespace and not current.holds:
        found += len(current.blocks)
        current = current.parent
    return found


class RetentionLedger:
    """All retentions of a tree and the blocks that each account retains. It neither splits nor removes nodes.

    Time is the caller's, an argument of `end_overdue`. `num_lost_blocks` counts retained blocks that were evicted,
    since the start.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        # (deadline, number, retention): one entry for each retention with a deadline, at or before its deadline.
        self._deadlines: list[tuple[float, int, Retention]] = []
        self._number = 0
        self._num_refreshes = 0
        self.num_blocks = 0
        self.num_lost_blocks = 0
        self.num_pins = 0
        self.num_retentions = 0

    def account(self, name: str) -> Account:
        """Return an account to read, an empty one if it retains nothing."""
        return self._accounts.get(name) or Account()

    def accounts(self) -> dict[str, Account]:
        """Return the accounts that retain something."""
        return self._accounts

    def place(self, node: Node, ttl: float, now: float, *, pin: bool = False, yields: bool = False) -> None:
        """Retain the prefix that ends with `node` until `now + ttl`, or pin it. A longer earlier grant stays.

        yields: see `RadixTree.retain`.
        """
        retention = node.retention
        account = self._accounts.setdefault(account_of(node.namespace), Account())
        if retention is None:
            self._number += 1
            retention = Retention(self._number, node)
            self.num_retentions += 1
            self._attach(retention, node, account)
            if yields:
                account.yielding[retention.number] = retention
        elif not yields:
            account.yielding.pop(retention.number, None)
        if pin and not retention.is_pinned:
            retention.is_pinned = True
            self.num_pins += 1
            self._hold(node, 1)
        if ttl > 0 and now + ttl >= retention.until:
            retention.ttl = ttl
            self._extend(retention, now + ttl)
        self._make_newest(retention, account)

    def refresh(self, node: Node, now: float) -> None:
        """Begin every retention anew that ends at `node` or above it: its prefix was hit."""
        current: Node | None = node
        while current is not None:
            retention = current.retention
            if retention is not None:
                if retention.until > 0:
                    retention.until = max(retention.until, now + retention.ttl)
                self._make_newest(retention, self._accounts[account_of(current.namespace)])
            current = current.parent

    def unpin(self, node: Node, now: float) -> Node | None:
        """Let a pinned retention end with its deadline. Return the node where it ended now, None if it continues."""
        retention = node.retention
        assert retention is not None
        retention.is_pinned = False
        self.num_pins -= 1
        self._hold(node, -1)
        return self.drop(retention) if retention.until <= now else None

    def drop(self, retention: Retention) -> Node:
        """End a retention. Return the node where it ended, whose place in the eviction queue may have changed."""
        node = retention.node
        assert node is not None
        if retention.is_pinned:
            self._hold(node, -1)
        self._forget(retention, node)
        self._release(node)
        return node

    def oldest(self, account: str, spared: Node, *, yielding: bool) -> Retention | None:
        """Return the retention of an account that gives way next, except pins and that of `spared`.

        Retentions that yield come first, and with `yielding` no others; then the one that was refreshed longest ago.
        """
        own = self.account(account)
        retentions = chain(own.yielding.values(), () if yielding else own.retentions.values())
        return next((one for one in retentions if not one.is_pinned and one.node is not spared), None)

    def yields(self, node: Node) -> bool:
        """Return whether the retention that ends at `node`, if there is one, yields."""
        retention = node.retention
        return retention is not None and retention.number in self.account(account_of(node.namespace)).yielding

    def end_overdue(self, now: float) -> list[Node]:
        """End the retentions whose time is over. Return the nodes where they ended."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number, retention = heappop(self._deadlines)
            if retention.node is None:
                continue
            if retention.until > now:
                heappush(self._deadlines, (retention.until, number, retention))
            else:
                retention.until = 0.0
                if not retention.is_pinned:
                    ended.append(self.drop(retention))
        return ended

    def shrink(self, node: Node, count: int, *, lost: bool) -> None:
        """Record that the last `count` blocks of a retained node are removed, evicted if `lost`."""
        account = self._accounts[account_of(node.namespace)]
        self.num_blocks -= count
        account.num_blocks -= count
        if node.holds:
            account.num_pinned_blocks -= count
        if lost:
            self.num_lost_blocks += count

    def move_up(self, node: Node) -> None:
        """Move the retention of `node`, which has lost its last block, to its parent, merged with the parent's.

        To be called while `node.parent` is set. A retention without a block left ends. Of two retentions the one
        refreshed last stays, with the larger of both grants, so the order in which they meet does not matter.
        """
        retention, parent = node.retention, node.parent
        assert retention is not None
        assert parent is not None
        account = self._accounts[account_of(node.namespace)]
        was_pinned = parent.retention is not None and parent.retention.is_pinned
        if node.holds and parent.namespace == node.namespace:
            self._hold(parent, -1)
        node.holds = 0
        if parent.parent is None or parent.namespace != node.namespace:
            self._forget(retention, node)
        elif parent.retention is not None and parent.retention.refreshed > retention.refreshed:
            self._merge(retention, parent.retention, account)
            self._forget(retention, node)
        else:
            if parent.retention is not None:
                self._merge(parent.retention, retention, account)
                self._forget(parent.retention, parent)
            else:
                parent.keeps += 1
            node.retention, retention.node, parent.retention = None, parent, retention
        if parent.retention is not None and parent.retention.is_pinned and not was_pinned:
            self._hold(parent, 1)
        node.keeps = 0
        self._release(parent)
        self._close(account_of(node.namespace))

    def _make_newest(self, retention: Retention, account: Account) -> None:
        self._num_refreshes += 1
        retention.refreshed = self._num_refreshes
        account.retentions.move_to_end(retention.number)
        if retention.number in account.yielding:
            account.yielding.move_to_end(retention.number)

    def _merge(self, source: Retention, target: Retention, account: Account) -> None:
        if source.number not in account.yielding:
            account.yielding.pop(target.number, None)
        if source.is_pinned and not target.is_pinned:
            target.is_pinned = True
            self.num_pins += 1
        if source.until > 0 and (source.until, source.ttl) > (target.until, target.ttl):
            target.ttl = source.ttl
            self._extend(target, source.until)

    def _extend(self, retention: Retention, until: float) -> None:
        """Set a later deadline. An entry in the heap is moved when it is due."""
        if retention.until == 0:
            if len(self._deadlines) > 2 * self.num_retentions + _HEAP_SLACK:
                self._deadlines = [entry for entry in self._deadlines if entry[2].node is not None]
                heapify(self._deadlines)
            heappush(self._deadlines, (until, retention.number, retention))
        retention.until = until

    def _attach(self, retention: Retention, node: Node, account: Account) -> None:
        """Count the retention at its node and the nodes above, each for the account that it belongs to."""
        node.retention = retention
        account.retentions[retention.number] = retention
        current: Node | None = node
        while current is not None:
            current.keeps += 1
            if current.keeps > 1:
                return
            if current.blocks:
                owner = self._accounts.setdefault(account_of(current.namespace), Account())
                owner.num_blocks += len(current.blocks)
            self.num_blocks += len(current.blocks)
            current = current.parent

    def _hold(self, node: Node, change: int) -> None:
        """Count a pin of the prefix that ends with `node`, or with -1 its end, for the node's account."""
        account = self._accounts[account_of(node.namespace)]
        current: Node | None = node
        while current is not None and current.namespace == node.namespace:
            current.holds += change
            if current.holds != max(0, change):
                return  # it is held anyway
            account.num_pinned_blocks += change * len(current.blocks)
            current = current.parent

    def _forget(self, retention: Retention, node: Node) -> None:
        if retention.is_pinned:
            self.num_pins -= 1
        self.num_retentions -= 1
        retention.node = node.retention = None
        account = self._accounts[account_of(node.namespace)]
        del account.retentions[retention.number]
        account.yielding.pop(retention.number, None)

    def _release(self, node: Node) -> None:
        """Take back one of the `keeps` of a node, whose account may have no retention left."""
        self._close(account_of(node.namespace))
        current: Node | None = node
        while current is not None:
            current.keeps -= 1
            if current.keeps:
                break
            if current.blocks:
                name = account_of(current.namespace)
                self._accounts[name].num_blocks -= len(current.blocks)
                self._close(name)
            self.num_blocks -= len(current.blocks)
            current = current.parent

    def _close(self, name: str) -> None:
        """Forget an account that has neither retentions nor blocks."""
        account = self._accounts.get(name)
        if account is not None and not account.retentions and not account.num_blocks:
            del self._accounts[name]
