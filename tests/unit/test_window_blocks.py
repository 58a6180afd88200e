"""Window blocks of the prefix cache: what a match needs, what goes first, and a plain model under random operations."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random

import pytest

from radix_cache import BudgetError, Lease, MissReason, PrefixCache, Shares
from radix_cache.window_blocks import AT_END, INSIDE, RETAINED, blocks_before, least_window_blocks
from tests.support.cache_invariants import check_invariants, evict_all

SIZE, WINDOW, SPAN = 4, 9, 2


def make(num_window_blocks: int = 40, num_blocks: int = 64, *, caching: bool = True) -> PrefixCache:
    return PrefixCache(num_blocks, SIZE, caching=caching, num_window_blocks=num_window_blocks, window=WINDOW)


def tokens(count: int, start: int = 0) -> array[int]:
    return array("i", range(start, start + count))


def compute(cache: PrefixCache, lease: Lease, ids: array[int], chunk: int = SIZE) -> None:
    """Compute all tokens as a request does: chunk by chunk, each published when it is done."""
    done = lease.num_published_tokens
    while done < len(ids):
        end = min(len(ids), done + chunk)
        assert cache.extend(lease, -(-end // SIZE) - len(lease.block_ids)) is not None
        cache.free(cache.publish(lease, ids, end))
        done = end


def use(cache: PrefixCache, ids: array[int], namespace: str = "") -> int:
    """Compute a prompt to its end; return how many of its tokens were cached."""
    lease = cache.match(ids, namespace)
    num_cached = lease.num_cached_tokens
    compute(cache, lease, ids)
    cache.release(lease)
    check_invariants(cache)
    return num_cached


def blocks_of(cache: PrefixCache, ids: array[int], namespace: str = "") -> array[int]:
    """Return the KV blocks of the cached whole blocks of `ids`."""
    node, _, depth = cache.tree.locate(namespace, ids[: len(ids) // SIZE * SIZE].tobytes())
    return cache.tree.path(node)[:depth]


@pytest.mark.parametrize(("window", "size", "before"), [(1, 4, 0), (2, 4, 1), (5, 4, 1), (6, 4, 2), (128, 16, 8)])
def test_a_token_behind_a_boundary_sees_one_token_less_than_the_window_before_it(
    window: int, size: int, before: int
) -> None:
    assert blocks_before(window, size) == before
    assert least_window_blocks(window, size) == before + 2


def test_fewer_window_blocks_than_one_request_needs_are_refused() -> None:
    with pytest.raises(ValueError, match="3 window blocks are too few for a window of 9 tokens"):
        make(3)
    assert use(make(4), tokens(50)) == 0


def test_a_lease_keeps_the_window_blocks_of_its_window_alone() -> None:
    cache = make()
    windows, lease = cache.windows, cache.match(tokens(41))
    compute(cache, lease, tokens(41))
    assert lease.first_window == 10 - SPAN
    assert windows.num_held == SPAN + 1
    assert windows.num_cached == 8
    first, table = windows.table(lease, 41)
    assert (first, len(table)) == (8, 3)
    cache.release(lease)
    assert (windows.num_held, windows.num_cached) == (0, 10)


def test_without_caching_a_block_behind_the_window_is_free_at_once() -> None:
    cache = make(caching=False)
    windows, lease = cache.windows, cache.match(tokens(41))
    compute(cache, lease, tokens(41))
    assert (windows.num_held, windows.num_cached, windows.num_free) == (SPAN + 1, 0, 40 - SPAN - 1)
    check_invariants(cache)
    cache.release(lease)
    assert windows.num_free == 40


def test_a_match_ends_at_the_last_boundary_with_a_complete_window() -> None:
    cache = make()
    windows = cache.windows
    use(cache, tokens(41))
    blocks = blocks_of(cache, tokens(41))
    for lost, depth in ((9, 9), (7, 7), (3, 7), (6, 6), (5, 3), (0, 3), (2, 0)):
        windows.drop([blocks[lost]])
        assert cache.peek(tokens(41)) == depth * SIZE
        lease = cache.match(tokens(41))
        assert lease.num_cached_tokens == depth * SIZE
        assert lease.num_known_tokens == 40
        assert cache.explain(lease, tokens(41)).reason is MissReason.NO_WINDOW
        cache.release(lease)
        check_invariants(cache)


def test_window_blocks_inside_a_run_go_before_those_at_its_end() -> None:
    # Three prompts of 11 blocks leave room for the ends of all, once what lies inside has gone.
    cache = make(12, 200)
    prompts = [tokens(45, 100 * number) for number in range(3)]
    for ids in prompts:
        use(cache, ids)
    for ids in prompts:
        assert use(cache, array("i", [*ids, 1, 2, 3, 4, 5])) == 44
    assert cache.windows.num_evicted > 0


def test_a_place_where_others_are_expected_to_leave_is_kept_as_an_end_is() -> None:
    for is_expected in (False, True):
        cache = make(8, 200)
        lease = cache.match(tokens(81))
        if is_expected:
            cache.windows.expect(lease, 40)
        compute(cache, lease, tokens(81))
        cache.release(lease)
        assert use(cache, array("i", [*range(40), 7, 7, 7, 7, 7])) == (40 if is_expected else 0)


def test_a_retained_prefix_keeps_its_window_while_others_come_and_go() -> None:
    cache = make(10, 400)
    lease = cache.match(tokens(45))
    compute(cache, lease, tokens(45))
    cache.retentions.retain(lease, 44, 60.0)
    cache.release(lease)
    for number in range(1, 12):
        use(cache, tokens(13, 100 * number))
    assert cache.peek(tokens(46)) == 44
    assert cache.peek(tokens(14, 100)) == 0


def test_an_account_that_fills_the_window_blocks_evicts_its_own() -> None:
    cache = make(num_window_blocks=12, num_blocks=200)
    use(cache, tokens(17), "mine")
    for number in range(20):
        use(cache, tokens(17, 100 * number), "flood/chat")
    assert use(cache, tokens(17), "mine") == 16
    assert sum(cache.peek(tokens(17, 100 * number), "flood/chat") > 0 for number in range(20)) >= 2


def test_a_prefix_without_its_window_is_not_cached_to_be_pinned() -> None:
    cache = make(10, 400)
    use(cache, tokens(45))
    for number in range(1, 12):
        use(cache, tokens(13, 100 * number))
    assert cache.retentions.pin(tokens(45)) < 44
    assert cache.retentions.num_pins == 0
    assert use(cache, tokens(45)) == 0
    assert cache.retentions.pin(tokens(45)) == 44
    for number in range(1, 9):
        use(cache, tokens(13, 100 * number))
    assert use(cache, tokens(46)) == 44
    with pytest.raises(BudgetError):
        cache.retentions.pin(tokens(4000))


def test_two_requests_that_compute_the_same_share_a_window_block_in_the_end() -> None:
    cache = make()
    windows, ids = cache.windows, tokens(17)
    leases = [cache.match(ids) for _ in range(2)]
    duplicates = []
    for lease in leases:
        cache.extend(lease, 5)
        duplicates += cache.publish(lease, ids, 17)
    assert len(duplicates) == 4
    check_invariants(cache)
    cache.free(duplicates)
    assert windows.num_free + windows.num_cached + windows.num_held == 40
    assert windows.num_cached + windows.num_held == 4 + 2
    for lease in leases:
        cache.release(lease)
    check_invariants(cache)


def test_a_block_in_the_tree_without_a_window_block_takes_that_of_its_duplicate() -> None:
    cache = make()
    windows, ids = cache.windows, tokens(17)
    use(cache, ids)
    blocks = blocks_of(cache, ids)
    windows.drop(blocks)
    assert cache.peek(ids) == 0
    assert use(cache, ids) == 0
    assert cache.peek(ids) == 16
    assert blocks_of(cache, ids) == blocks


ACCOUNTS = ("", "a")
Prefix = tuple[str, tuple[int, ...]]


@dataclass
class Running:
    lease: Lease
    account: str
    ids: array[int]
    num_computed: int
    end: int = 0  # in blocks, of a prefix that was retained


class World:
    """A plain model beside the cache: which prefixes have a window block that nobody needs, and what each is worth.

    A prefix of an account stands for its last block. The tree's content is observed; other tests cover
    which KV block is evicted.
    """

    def __init__(self, random: Random, num_blocks: int, num_window_blocks: int) -> None:
        self.random = random
        self.cache = PrefixCache(
            num_blocks, SIZE, shares=Shares(retained=1.0), num_window_blocks=num_window_blocks, window=WINDOW
        )
        self.running: list[Running] = []
        self.queue: dict[Prefix, tuple[int, int]] = {}
        self.age = self.order = 0

    def prefix(self, account: str, ids: array[int], block: int) -> Prefix:
        return account, tuple(ids[: (block + 1) * SIZE])

    def needed(self) -> set[Prefix]:
        """The published prefixes whose window blocks leases need."""
        return {
            self.prefix(one.account, one.ids, block)
            for one in self.running
            for block in range(max(0, one.num_computed // SIZE - SPAN), one.num_computed // SIZE)
        }

    def num_held(self, account: str) -> int:
        """Count the window blocks of an account: of prefixes, and unpublished ones of leases."""
        own = [one for one in self.running if one.account == account]
        num_private = sum(len(one.lease.block_ids) - one.lease.num_published_tokens // SIZE for one in own)
        return num_private + sum(key[0] == account for key in self.queue.keys() | self.needed())

    def depth(self, account: str, ids: array[int]) -> int:
        known = (len(ids) - 1) // SIZE
        while known and self.cache.tree.depth(account, ids[: known * SIZE].tobytes()) < known:
            known -= 1
        there = self.queue.keys() | self.needed()
        return max(
            border
            for border in range(known + 1)
            if all(self.prefix(account, ids, block) in there for block in range(max(0, border - SPAN), border))
        )

    def let_go(self, one: Running, first: int, stop: int, gain: int) -> None:
        """`one` has advanced, or ended, and no longer needs the window blocks of these blocks."""
        for block in range(first, stop):
            key = self.prefix(one.account, one.ids, block)
            if key not in self.needed():
                self.put(key, RETAINED if one.end - SPAN <= block < one.end else gain)

    def put(self, key: Prefix, gain: int) -> None:
        self.order += 1
        self.queue[key] = (self.age + gain if gain else 0, self.order)

    def retain(self, one: Running) -> None:
        num_published = one.num_computed // SIZE
        wanted = self.random.randrange(num_published + 1)
        self.cache.retentions.retain(one.lease, wanted * SIZE, 9.0)
        for block in range(max(0, wanted - SPAN), wanted):
            if (key := self.prefix(one.account, one.ids, block)) in self.queue:
                self.put(key, RETAINED)
        one.end = wanted

    def make_room(self, count: int, account: str) -> None:
        """Worthless blocks go first, the oldest first; then the least worthy of the account that holds most."""
        windows = self.cache.windows
        for _ in range(count - windows.num_free):
            held = {name: self.num_held(name) for name in ACCOUNTS}

            def place(key: Prefix, held: dict[str, int] = held) -> tuple[int, int, int, int]:
                worth, order = self.queue[key]
                is_poorer = key[0] != account and held[key[0]] <= held[account]
                return (1 + is_poorer, -held[key[0]], worth, order) if worth else (0, 0, 0, order)

            key = min(self.queue, key=place)
            self.age = max(self.age, self.queue.pop(key)[0])

    def start(self) -> None:
        base = [self.random.randrange(2) for _ in range(self.random.randrange(1, 30))]
        if self.running and self.random.random() < 0.7:
            other = self.random.choice(self.running).ids
            base = [*other[: self.random.randrange(len(other) + 1)], *base][:40]
        ids, account = array("i", base), self.random.choice(ACCOUNTS)
        expected = self.depth(account, ids)
        assert self.cache.peek(ids, account) == expected * SIZE
        lease = self.cache.match(ids, account)
        assert lease.num_cached_tokens == expected * SIZE
        self.running.append(Running(lease, account, ids, expected * SIZE))
        for key in self.needed():
            self.queue.pop(key, None)

    def advance(self) -> None:
        one = self.random.choice(self.running)
        end = min(len(one.ids), one.num_computed + self.random.randrange(1, 9))
        count = -(-end // SIZE) - len(one.lease.block_ids)
        windows = self.cache.windows
        num_needed = sum(len(other.lease.block_ids) - other.lease.first_window for other in self.running)
        assert windows.num_available == windows.num_blocks - windows.num_held >= windows.num_blocks - num_needed
        if count > min(self.cache.counts.num_available, windows.num_available):
            assert self.cache.extend(one.lease, count) is None
            return
        self.evict_blocks(max(0, count - self.cache.counts.num_free))
        self.make_room(count, one.account)
        assert self.cache.extend(one.lease, count) is not None
        before, one.num_computed = one.num_computed // SIZE, end
        self.cache.free(self.cache.publish(one.lease, one.ids, end))
        for key in self.needed():
            self.queue.pop(key, None)
        first = max(0, before - SPAN)
        self.let_go(one, first, max(first, end // SIZE - SPAN), INSIDE)

    def evict_blocks(self, count: int) -> None:
        """Have KV blocks evicted now, so that their window blocks are free before the model makes room."""
        self.cache.evict(count, "")
        self.forget_what_left_the_tree()

    def forget_what_left_the_tree(self) -> None:
        for key in list(self.queue):
            account, data = key[0], array("i", key[1])
            if self.cache.tree.depth(account, data.tobytes()) * SIZE < len(data):
                del self.queue[key]

    def end(self) -> None:
        one = self.running.pop(self.random.randrange(len(self.running)))
        stop = one.num_computed // SIZE
        keep = self.random.choice([None, None, 0, one.num_computed // 2])
        if self.random.random() < 0.4:
            self.retain(one)
        gain = RETAINED if one.lease.node.keeps else AT_END
        self.cache.release(one.lease, keep)
        self.let_go(one, max(0, stop - SPAN), stop, gain)
        self.forget_what_left_the_tree()

    def check(self) -> None:
        check_invariants(self.cache)
        windows = self.cache.windows
        there = {self.place(key) for key in self.queue}
        assert windows.num_cached == len(self.queue) == len(there)
        for one in self.running:
            assert all(windows.has(block) for block in one.lease.block_ids[one.lease.first_window :])
            assert one.lease.first_window <= max(0, one.num_computed // SIZE - SPAN)

    def place(self, key: Prefix) -> int:
        """Return the window block of a cached prefix."""
        windows = self.cache.windows
        return windows.of(blocks_of(self.cache, array("i", key[1]), key[0])[-1:])[0]


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_agree_with_a_plain_model(seed: int) -> None:
    random = Random(seed)
    world = World(random, random.choice([24, 60]), random.choice([6, 10, 24]))
    for _ in range(500):
        action = random.choices(["start", "advance", "end"], [2, 8, 1.5])[0]
        if action == "start" and len(world.running) < 4:
            world.start()
        elif world.running and action == "advance":
            world.advance()
        elif world.running and action == "end":
            world.end()
        world.check()
    while world.running:
        world.end()
    evict_all(world.cache)
    assert world.cache.windows.num_free == world.cache.windows.num_blocks
