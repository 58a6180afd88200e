"""Whose blocks and rows go next, among many accounts: against models that look at every one of them each time."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterator
from math import inf, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_cache import PUBLIC, BudgetError, Lease, PrefixCache, Shares
from radix_cache.nodes import Node
from radix_cache.retention import account_of
from radix_cache.victims import HALF_LIFE_S
from radix_cache.worth_queue import WorthQueue
from tests.support.cache_invariants import check_invariants
from tests.support.line_counts import num_lines
from tests.support.parameters import first


def nodes_of(cache: PrefixCache) -> Iterator[Node]:
    waiting = list(cache.tree.roots.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()


def expected_victims(cache: PrefixCache, taker: str, count: int) -> list[int]:
    """Return the blocks that go one after another, found by a look at every leaf each time."""
    nodes = list(nodes_of(cache))
    left = {node: len(node.blocks) for node in nodes}
    below = {node: len(node.children) for node in nodes}
    used = {node: node.last_used for node in nodes}
    rank = {node: 0 if node.retention is None else 1 + node.retention.is_pinned for node in nodes}
    held = Counter(dict.fromkeys(map(account_of, cache.tree.roots), 0))
    for node in nodes:
        held[account_of(node.namespace)] += len(node.blocks)
    for lease in cache.leases.values():
        held[account_of(lease.namespace)] += len(lease.block_ids) - lease.num_published_tokens
    holdings = cache.tree.victims.holdings

    def excess(account: str) -> float:
        holding = holdings[account]
        if held[account] > holding.limit:
            return inf
        return log2(held[account] / holding.weight) - holding.used_at / HALF_LIFE_S

    taken = excess(taker) if taker in holdings else -inf

    def place(node: Node) -> tuple[int, int, float, int, int]:
        account = account_of(node.namespace)
        tier = 2 if rank[node] == 2 else int(account != taker and excess(account) < taken)
        return tier, rank[node], -excess(account), used[node], node.serial

    victims = []
    for _ in range(count):
        leaves = (node for node in nodes if node.parent is not None and left[node] and not below[node])
        node = min((node for node in leaves if not node.pins), key=place)
        left[node] -= 1
        victims.append(node.blocks[left[node]])
        held[account_of(node.namespace)] -= 1
        if not left[node]:
            parent = node.parent
            assert parent is not None
            below[parent] -= 1
            used[parent] = max(used[parent], used[node])
            if parent.parent is not None and parent.namespace == node.namespace:
                rank[parent] = max(rank[parent], rank[node])
    return victims


@pytest.mark.parametrize("seed", first(6, range(12)))
def test_blocks_go_as_if_every_leaf_was_looked_at(seed: int) -> None:
    draw = random.Random(seed)
    cache = PrefixCache(120, 1, shares=Shares(retained=0.2))
    names = [PUBLIC, *(f"k{number}" for number in range(15)), "k1/salt", "k2/salt"]
    running: list[Lease] = []
    now, num_evicted = 0.0, 0
    for _ in range(700):
        now += draw.choice((0.0, 1.0, 50.0))
        cache.set_time(now)
        kind, name = draw.random(), draw.choice(names)
        if kind < 0.08:
            cache.share(name, draw.choice((0.5, 1.0, 3.0)), draw.choice((0.05, 0.5, 1.0)))
        elif kind < 0.16:
            try:
                cache.retentions.pin(array("i", [draw.randrange(6) for _ in range(3)]), name)
            except BudgetError:
                continue
        elif kind < 0.2:
            sum(cache.drop((name,)))
        elif kind < 0.5 and running:
            lease = running.pop(draw.randrange(len(running)))
            if draw.random() < 0.3:
                cache.retentions.retain(lease, draw.randint(1, 4), 100.0)
            cache.release(lease)
        elif len(running) < 6:
            tokens = array("i", [draw.randrange(6) for _ in range(draw.randint(2, 14))])
            lease = cache.match(tokens, name)
            wanted = len(tokens) - len(lease.block_ids)
            missing = wanted - cache.counts.num_free
            expected: list[int] = []
            if 0 < missing <= cache.counts.num_cached:
                expected = expected_victims(cache, account_of(name), missing)
            free_before = {block for block in range(120) if not cache.counts.allocator.is_allocated(block)}
            new = cache.extend(lease, wanted)
            if new is None:
                cache.release(lease)
                continue
            assert set(new) - free_before == set(expected)
            num_evicted += len(expected)
            cache.free(cache.publish(lease, tokens, draw.randint(0, len(tokens))))
            running.append(lease)
        check_invariants(cache)
    assert num_evicted > 200


class PlainWorth:
    """Rows of accounts as lists, with the rule of `WorthQueue` applied to all of them."""

    def __init__(self) -> None:
        self.terms: dict[str, tuple[float, float]] = {}
        self.num_rows: Counter[str] = Counter()
        self.queued: dict[int, tuple[str, int, int]] = {}
        self.number = 0

    def excess(self, account: str, num_held: int) -> float:
        if account == PUBLIC:
            return -inf
        weight, used_at = self.terms.get(account, (1.0, 0.0))
        return log2(num_held / weight) - used_at if num_held else -inf

    def first(self, taker: str, sparing: bool) -> int | None:
        level = self.excess(taker, self.num_rows[taker] + 1)
        places = []
        for row, (account, worth, number) in self.queued.items():
            excess = self.excess(account, self.num_rows[account])
            is_poorer = account != taker and excess < level
            if not worth:
                places.append((0, 0.0, 0, number, row))
            elif not (is_poorer and sparing and excess > -inf):
                places.append((1 + is_poorer, -excess, worth, number, row))
        return min(places)[-1] if places else None


ACCOUNTS = [PUBLIC, *(f"k{number}" for number in range(8))]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "put", "discard", "take", "take", "use", "weigh", "requeue"]),
            st.sampled_from(ACCOUNTS),
            st.integers(0, 40),
            st.integers(0, 5),
        ),
        max_size=150,
    )
)
def test_rows_go_as_if_every_row_was_looked_at(actions: list[tuple[str, str, int, int]]) -> None:
    plain = PlainWorth()
    queue: WorthQueue[int] = WorthQueue(plain.excess)
    owner: dict[int, str] = {}
    for action, account, row, worth in actions:
        if action == "put" and row not in owner:
            owner[row] = account
            plain.num_rows[account] += 1
            queue.count(account, 1)
        if action in ("put", "requeue") and row in owner:
            plain.number += 1
            plain.queued[row] = (owner[row], worth, plain.number)
            queue.put(row, owner[row], worth)
        elif action == "discard" and row in plain.queued:
            del plain.queued[row]
            queue.discard(row)
        elif action == "use":
            weight, used_at = plain.terms.get(account, (1.0, 0.0))
            plain.terms[account] = (weight, used_at + worth)
        elif action == "weigh":
            plain.terms[account] = (0.5 + worth, plain.terms.get(account, (1.0, 0.0))[1])
            queue.reorder()
        elif action == "take":
            for sparing in (True, False):
                assert queue.first(account, sparing=sparing) == plain.first(account, sparing)
            victim = queue.first(account)
            if victim is not None and worth:
                queue.evict(victim)
                assert queue.age >= plain.queued.pop(victim)[1]
                plain.num_rows[owner[victim]] -= 1
                queue.count(owner.pop(victim), -1)
        queue.check({name: count for name, count in plain.num_rows.items() if count})


def filled(num_accounts: int, num_window_blocks: int = 0) -> tuple[PrefixCache, Lease]:
    """Return a cache that is full of eight blocks of each account, and a lease that wants more."""
    window = {"num_window_blocks": num_window_blocks, "window": 9} if num_window_blocks else {}
    cache = PrefixCache(8 * num_accounts, 4, **window)
    for number in range(8 * num_accounts):
        tokens = array("i", [number] * 4)
        lease = cache.match(tokens, f"k{number % num_accounts}")
        cache.extend(lease, 1)
        cache.publish(lease, tokens, 4)
        cache.release(lease)
    lease = cache.match(array("i", [-1] * 5), "k0")
    assert cache.extend(lease, 1, sparing=True) is not None
    return cache, lease


@pytest.mark.parametrize("has_windows", [False, True])
def test_the_work_of_an_eviction_does_not_grow_with_the_number_of_accounts(has_windows: bool) -> None:
    counts = []
    for num_accounts in (10, 400):
        cache, lease = filled(num_accounts, 8 * num_accounts if has_windows else 0)
        lines = num_lines(lambda: [cache.extend(lease, 1, sparing=True) for _ in range(20)])  # noqa: B023
        counts.append(lines / 20)
    assert counts[1] <= 1.5 * counts[0]
    assert counts[1] < (600 if has_windows else 400)


def test_room_that_is_sure_is_seen_without_a_look_at_every_account() -> None:
    cache, _ = filled(400)
    assert num_lines(lambda: cache.counts.num_available_to("k7", enough=1000)) < 40
    assert cache.counts.num_available_to("k7", enough=1000) >= 1000
    assert cache.counts.num_available_to("k7") == cache.counts.num_available - 800
