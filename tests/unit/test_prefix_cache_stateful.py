"""PrefixCache against a brute-force model.

In the model every prefix is one entry and eviction searches them all, for each block anew; a retention is a mark on the
entry where it ends, and what an account holds and retains is counted anew each time. A shadow of the KV memory holds
the tokens that were written into each block, so that every hit is read again.
"""

import random
from array import array
from dataclasses import dataclass
from math import inf

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from radix_cache import BudgetError, Lease, LeaseError, PrefixCache, Shares, account_of
from radix_cache.victims import HALF_LIFE_S
from tests.support.cache_invariants import check_invariants, evict_all
from tests.support.examples import examples

NAMESPACES = ("", "a", "a/x", "b")
ACCOUNTS = ("", "a", "b")
SHARE = 0.5
PIN_SHARE = 0.8
Key = tuple[str, tuple[int, ...]]


@dataclass(slots=True)
class Running:
    lease: Lease
    namespace: str
    tokens: "array[int]"
    use_cache: bool
    num_computed: int


@dataclass(slots=True)
class Entry:
    block: int
    stamp: int


@dataclass(slots=True)
class Mark:
    """A retention. `order`: marks that were refreshed longer ago have lower ones. `yields`: to all that do not."""

    order: int
    until: float = 0.0
    ttl: float = 0.0
    is_pinned: bool = False
    yields: bool = False


class World:
    """Drives one cache and the model beside it. Every choice comes in as an int, so any source of ints can drive it."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool = True) -> None:
        self.cache = PrefixCache(num_blocks, block_size, caching=caching, shares=Shares(SHARE, PIN_SHARE))
        self.size = block_size
        self.caching = caching
        self.running: list[Running] = []
        self.entries: dict[Key, Entry] = {}
        self.marks: dict[Key, Mark] = {}
        self.now = 0.0
        self.used_at = dict.fromkeys(ACCOUNTS, 0.0)
        self.terms = dict.fromkeys(ACCOUNTS, (1.0, 1.0))
        self.num_lost = 0
        self.num_marks_made = 0
        self.content: list[Key | None] = [None] * num_blocks
        self.free = set(range(num_blocks))
        self.duplicates: list[int] = []
        self.clock = 0
        self.log: list[object] = []

    def key(self, namespace: str, tokens: "array[int]", num_blocks: int) -> Key:
        return namespace, tuple(tokens[: num_blocks * self.size])

    def longest(self, namespace: str, tokens: "array[int]") -> int:
        blocks = 0
        while (blocks + 1) * self.size < len(tokens) and self.key(namespace, tokens, blocks + 1) in self.entries:
            blocks += 1
        return blocks

    def protected(self) -> set[Key]:
        return {
            self.key(one.namespace, one.tokens, blocks)
            for one in self.running
            for blocks in range(1, one.lease.num_published_tokens // self.size + 1)
        }

    def inner(self) -> set[Key]:
        return {(namespace, tokens[: -self.size]) for namespace, tokens in self.entries}

    def evict(self, count: int, taker: str | None) -> None:
        protected = self.protected()
        taken = self.excess(taker)
        for _ in range(count):
            inner = self.inner()
            leaves = [key for key in self.entries if key not in protected and key not in inner]
            oldest = (
                min((key for key in leaves if account_of(key[0]) == account), key=self.age, default=None)
                for account in ACCOUNTS
            )
            victim = min(
                (key for key in oldest if key is not None),
                key=lambda key: (self.tier(key, taker, taken), *self.turn(key)),
            )
            self.num_lost += victim in self.retained(account_of(victim[0]))
            self.remove(victim)

    def age(self, key: Key) -> tuple[int, int]:
        return self.rank(key), self.entries[key].stamp

    def held(self, account: str) -> int:
        """Count the blocks of an account: in the tree, and its running requests' private ones."""
        size = self.size
        private = (
            len(one.lease.block_ids) - one.lease.num_published_tokens // size
            for one in self.running
            if account_of(one.namespace) == account
        )
        return sum(account_of(key[0]) == account for key in self.entries) + sum(private)

    def turn(self, key: Key) -> tuple[int, float, int]:
        return self.rank(key), -self.excess(account_of(key[0])), self.entries[key].stamp

    def tier(self, key: Key, taker: str | None, taken: float) -> int:
        """Return 2 for pinned entries, 1 for entries of accounts that hold less than the taker, else 0."""
        account = account_of(key[0])
        return 2 if self.rank(key) == 2 else int(account != taker and self.excess(account) < taken)

    def to_spare(self, taker: str) -> int:
        """Count what others would lose, one block after another, while they hold less than the taker."""
        protected, found = self.protected(), 0
        taken = self.excess(taker)
        for account in ACCOUNTS:
            if account != taker:
                may_go = sum(account_of(key[0]) == account and key not in protected for key in self.entries)
                may_go -= len(self.retained(account, pinned=True))
                held = self.held(account)
                while may_go > 0 and held and self.excess(account, held) >= taken:
                    may_go, held = may_go - 1, held - 1
                found += max(0, may_go)
        return found

    def available_to(self, namespace: str) -> int:
        evictable = len(self.entries) - len(self.protected())
        return len(self.free) + evictable - min(self.cache.num_blocks // 4, self.to_spare(account_of(namespace)))

    def excess(self, account: str | None, held: int | None = None) -> float:
        """Return what an account holds by its weight, doubled for every half-life that it was idle."""
        if account is None:
            return 0.0
        weight, most = self.terms[account]
        held = self.held(account) if held is None else held
        if most < 1 and held > most * self.cache.num_blocks:
            return inf
        return held / weight * 2 ** ((self.now - self.used_at[account]) / HALF_LIFE_S)

    def share(self, account: str, weight: float, most: float) -> None:
        self.cache.share(account, weight, most)
        self.terms[account] = (weight, most)

    def remove(self, key: Key) -> None:
        """Free an entry; the mark on it moves to the one before."""
        self.free.add(self.entries.pop(key).block)
        mark = self.marks.pop(key, None)
        above = (key[0], key[1][: -self.size])
        if mark is not None and above[1]:
            other = self.marks.setdefault(above, mark)
            other.is_pinned |= mark.is_pinned
            other.yields &= mark.yields
            other.order = max(other.order, mark.order)
            other.until, other.ttl = max((other.until, other.ttl), (mark.until, mark.ttl))

    def rank(self, key: Key) -> int:
        mark = self.marks.get(key)
        return 0 if mark is None else 2 if mark.is_pinned else 1

    def prefixes(self, key: Key) -> set[Key]:
        return {(key[0], key[1][:end]) for end in range(self.size, len(key[1]) + 1, self.size)}

    def retained(self, account: str, pinned: bool = False) -> set[Key]:
        marked = [
            key for key, mark in self.marks.items() if account_of(key[0]) == account and (mark.is_pinned or not pinned)
        ]
        return set().union(*map(self.prefixes, marked))

    def mark(self, key: Key, ttl: float, pin: bool = False, yields: bool = False) -> Mark:
        self.num_marks_made += 1
        mark = self.marks.setdefault(key, Mark(0, yields=yields))
        mark.yields &= yields
        mark.order = self.num_marks_made
        mark.is_pinned |= pin
        if ttl and self.now + ttl >= mark.until:
            mark.until, mark.ttl = self.now + ttl, ttl
        return mark

    def make_room(self, account: str, spared: Key, limit: int, yielding: bool = False) -> None:
        while len(self.retained(account)) > limit:
            others = [
                key
                for key, mark in self.marks.items()
                if account_of(key[0]) == account
                and key != spared
                and not mark.is_pinned
                and (mark.yields or not yielding)
            ]
            if not others:
                return
            del self.marks[min(others, key=lambda key: (not self.marks[key].yields, self.marks[key].order))]

    def retain(self, which: int, num_tokens: int, ttl: int, share: float | None, yields: bool) -> None:
        one = self.pick(which)
        if one is None:
            return
        self.cache.retentions.retain(one.lease, num_tokens, ttl, share, yields=yields)
        limit = int((SHARE if share is None else share) * self.cache.num_blocks)
        blocks = min(num_tokens, one.lease.num_published_tokens) // self.size
        if not blocks or not ttl or not limit:
            return
        key, account = self.key(one.namespace, one.tokens, blocks), account_of(one.namespace)
        mark = self.mark(key, ttl, yields=yields)
        self.make_room(account, key, limit, yields)
        excess = len(self.retained(account)) - limit
        if excess > 0 and not mark.is_pinned and mark.yields == yields:
            del self.marks[key]
            if len(self.prefixes(key) - self.retained(account)) > excess:
                self.mark(self.key(one.namespace, one.tokens, blocks - excess), ttl, yields=yields)

    def hit(self, which: int) -> None:
        if one := self.pick(which):
            self.cache.retentions.record_hit(one.lease, 1)
            for blocks in range(one.lease.num_published_tokens // self.size, 0, -1):
                if mark := self.marks.get(self.key(one.namespace, one.tokens, blocks)):
                    self.num_marks_made += 1
                    mark.order = self.num_marks_made
                    if mark.until:
                        mark.until = max(mark.until, self.now + mark.ttl)

    def set_time(self, passed: int) -> None:
        self.now += passed
        self.cache.set_time(self.now)
        for key, mark in list(self.marks.items()):
            if mark.until <= self.now:
                mark.until = 0.0
                if not mark.is_pinned:
                    del self.marks[key]

    def pin(self, namespace: int, tokens: list[int], share: float | None) -> None:
        name, ids = NAMESPACES[namespace % 4], array("i", tokens)
        wanted = len(tokens) // self.size
        cached = 0
        while cached < wanted and self.key(name, ids, cached + 1) in self.entries:
            cached += 1
        pinned = self.retained(account_of(name), pinned=True)
        all_pinned = sum(len(self.retained(account, pinned=True)) for account in ACCOUNTS)
        common = int(PIN_SHARE * self.cache.num_blocks)
        limit = int((SHARE if share is None else share) * self.cache.num_blocks)
        num_left = max(0, min(limit - len(pinned), common // 2 - len(pinned), common - all_pinned))
        key = self.key(name, ids, wanted)
        new = len(self.prefixes(key) - pinned)
        least_new = new if cached == wanted else wanted - cached
        if least_new > num_left:
            with pytest.raises(BudgetError) as caught:
                self.cache.retentions.pin(ids, name, share)
            assert caught.value.num_wanted == least_new
            assert caught.value.num_free == num_left
            return
        assert self.cache.retentions.pin(ids, name, share) == cached * self.size
        if cached == wanted > 0:
            self.mark(key, 0, pin=True)
            self.make_room(account_of(name), key, limit)

    def unpin(self, which: int) -> None:
        pins = [key for key, mark in self.marks.items() if mark.is_pinned]
        if not pins:
            assert not self.cache.retentions.unpin(array("i", [7] * self.size))
            return
        key = pins[which % len(pins)]
        assert self.cache.retentions.unpin(array("i", key[1]), key[0])
        self.marks[key].is_pinned = False
        if self.marks[key].until <= self.now:
            del self.marks[key]

    def drop(self, namespace: int) -> None:
        name, protected = NAMESPACES[namespace % 4], self.protected()
        own = [key for key in self.entries if key[0] == name and key not in protected]
        assert sum(self.cache.drop((name,))) == len(own)
        for key in sorted(own, key=lambda key: -len(key[1])):
            self.remove(key)

    def pick(self, which: int) -> Running | None:
        return self.running[which % len(self.running)] if self.running else None

    def start(self, namespace: int, tokens: list[int], use_cache: bool) -> None:
        name, ids = NAMESPACES[namespace % 4], array("i", tokens)
        expected = self.longest(name, ids)
        assert self.cache.peek(ids, name) == expected * self.size
        if not use_cache:
            expected = 0
        lease = self.cache.match(ids, name, use_cache=use_cache)
        blocks = [self.entries[self.key(name, ids, block + 1)].block for block in range(expected)]
        assert lease.block_ids.tolist() == blocks
        assert lease.num_cached_tokens == lease.num_published_tokens == expected * self.size
        self.running.append(Running(lease, name, ids, use_cache, lease.num_cached_tokens))
        self.log.append(blocks)

    def extend(self, which: int, count: int, sparing: bool = False) -> None:
        if one := self.pick(which):
            before = one.lease.block_ids.tolist()
            evictable = len(self.entries) - len(self.protected())
            available = self.available_to(one.namespace) if sparing else len(self.free) + evictable
            account = account_of(one.namespace)
            is_first = not self.held(account)
            if count <= available:
                self.evict(max(0, count - len(self.free)), account)
            new = self.cache.extend(one.lease, count, sparing=sparing)
            self.log.append(new)
            if count > available:
                assert new is None
                assert one.lease.block_ids.tolist() == before
                return
            assert new is not None
            assert len(new) == count
            if is_first and count:
                self.used_at[account] = self.now
            assert set(new) <= self.free
            self.free -= set(new)
            for block in new:
                self.content[block] = None
            assert one.lease.block_ids.tolist() == before + new

    def compute(self, which: int, count: int) -> None:
        """The forward writes up to `count` tokens; a block has its content from its last token on."""
        if one := self.pick(which):
            room = min(len(one.tokens), len(one.lease.block_ids) * self.size)
            first = one.num_computed // self.size
            one.num_computed = min(room, one.num_computed + count)
            for block in range(first, one.num_computed // self.size):
                self.content[one.lease.block_ids[block]] = self.key(one.namespace, one.tokens, block + 1)

    def publish(self, which: int, held_back: int) -> None:
        if one := self.pick(which):
            limit = max(0, one.num_computed - held_back)
            num_entries = len(self.entries)
            first = one.lease.num_published_tokens // self.size
            own = one.lease.block_ids.tolist()
            duplicates = self.cache.publish(one.lease, one.tokens, limit)
            expected = []
            for block in range(first, limit // self.size if self.caching else 0):
                entry = self.entries.setdefault(self.key(one.namespace, one.tokens, block + 1), Entry(own[block], 0))
                if entry.block != own[block]:
                    expected.append(own[block])
                    own[block] = entry.block
            if len(self.entries) > num_entries:
                self.used_at[account_of(one.namespace)] = self.now
            assert duplicates == expected
            assert one.lease.block_ids.tolist() == own
            self.duplicates += duplicates
            self.log.append(duplicates)

    def advance(self, which: int) -> None:
        one = self.pick(which)
        if one is None or one.num_computed - one.lease.num_published_tokens >= self.size:
            return
        first, own = one.num_computed // self.size, one.lease.block_ids.tolist()
        expected = max(first, self.longest(one.namespace, one.tokens)) if one.use_cache else first
        cached_before = one.lease.num_cached_tokens
        assert self.cache.advance(one.lease, one.tokens) == expected * self.size == one.lease.num_published_tokens
        self.free |= set(own[first:expected])
        keys = [self.key(one.namespace, one.tokens, block + 1) for block in range(first, expected)]
        own[first:expected] = [self.entries[key].block for key in keys]
        assert one.lease.block_ids.tolist() == own
        assert one.lease.num_cached_tokens - cached_before == (expected - first) * self.size
        one.num_computed = max(one.num_computed, expected * self.size)

    def generate(self, which: int, token: int) -> None:
        if one := self.pick(which):
            one.tokens.append(token)

    def release(self, which: int, keep: int | None) -> None:
        one = self.pick(which)
        if one is None:
            return
        self.running.remove(one)
        published = one.lease.num_published_tokens // self.size
        private = one.lease.block_ids.tolist()[published:]
        self.cache.release(one.lease, keep)
        self.free |= set(private)
        self.clock += 1
        self.used_at[account_of(one.namespace)] = self.now
        for block in range(1, published + 1):
            self.entries[self.key(one.namespace, one.tokens, block)].stamp = self.clock
        while keep is not None and published > keep // self.size:
            key = self.key(one.namespace, one.tokens, published)
            if key in self.protected() or key in self.inner():
                break
            self.remove(key)
            published -= 1
        with pytest.raises(LeaseError):
            self.cache.release(one.lease)

    def free_duplicates(self, count: int) -> None:
        given, self.duplicates = self.duplicates[:count], self.duplicates[count:]
        self.cache.free(given)
        self.free |= set(given)

    def reset(self) -> None:
        evictable = len(self.entries) - len(self.protected())
        assert evict_all(self.cache) == evictable
        num_lost = self.num_lost
        self.evict(evictable, None)
        self.num_lost = num_lost  # it was the operator's wish

    def check(self) -> None:
        cache, pinned = self.cache, len(self.protected())
        check_invariants(cache)
        private = sum(len(one.lease.block_ids) - one.lease.num_published_tokens // self.size for one in self.running)
        assert cache.counts.num_free == len(self.free)
        assert cache.counts.num_cached == len(self.entries) - pinned
        assert cache.counts.num_available == len(self.free) + len(self.entries) - pinned
        namespace = NAMESPACES[self.clock % 4]
        assert cache.counts.num_available_to(namespace) == self.available_to(namespace)
        assert cache.counts.num_leased == private + pinned
        assert len(cache.counts.duplicates) == len(self.duplicates)
        retained = {name: len(self.retained(name)) for name in ACCOUNTS}
        assert cache.retentions.num_blocks == sum(retained.values())
        assert cache.retentions.num_pins == sum(mark.is_pinned for mark in self.marks.values())
        assert cache.retentions.num_lost == self.num_lost
        for name, count in retained.items():
            assert cache.retentions.budget(name)[1:3] == (count, len(self.retained(name, pinned=True)))
        for namespace, tokens in self.entries:
            assert cache.peek(array("i", [*tokens, 9]), namespace) >= len(tokens)
        for key, entry in self.entries.items():
            assert self.content[entry.block] == key
        for one in self.running:
            for block in range(one.num_computed // self.size):
                key = self.key(one.namespace, one.tokens, block + 1)
                assert self.content[one.lease.block_ids[block]] == key

    def drain(self) -> None:
        while self.running:
            self.release(0, None)
        self.free_duplicates(len(self.duplicates))
        self.reset()
        self.check()
        assert self.cache.counts.num_free == self.cache.num_blocks


class PrefixCacheMachine(RuleBasedStateMachine):
    which = st.integers(0, 5)
    shares = st.sampled_from([None, None, 0.2, 1.0])

    @initialize(
        num_blocks=st.integers(1, 14), block_size=st.integers(1, 3), caching=st.sampled_from([True] * 7 + [False])
    )
    def build(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.world = World(num_blocks, block_size, caching)

    @rule(
        namespace=st.integers(0, 3),
        tokens=st.lists(st.integers(0, 1), max_size=12),
        use_cache=st.sampled_from([True] * 5 + [False]),
    )
    def start(self, namespace: int, tokens: list[int], use_cache: bool) -> None:
        self.world.start(namespace, tokens, use_cache)

    @rule(which=which)
    def start_like(self, which: int) -> None:
        if one := self.world.pick(which):
            self.world.start(NAMESPACES.index(one.namespace), one.tokens.tolist(), True)

    @rule(which=which, count=st.integers(0, 6), sparing=st.booleans())
    def extend(self, which: int, count: int, sparing: bool) -> None:
        self.world.extend(which, count, sparing)

    @rule(which=which, count=st.integers(1, 12))
    def compute(self, which: int, count: int) -> None:
        self.world.compute(which, count)

    @rule(which=which, held_back=st.sampled_from([0, 0, 0, 1, 4]))
    def publish(self, which: int, held_back: int) -> None:
        self.world.publish(which, held_back)

    @rule(which=which, count=st.integers(1, 12))
    def run_chunk(self, which: int, count: int) -> None:
        self.world.advance(which)
        self.world.extend(which, (count + 1) // 2)
        self.world.compute(which, count)
        self.world.publish(which, 0)

    @rule(which=which)
    def advance(self, which: int) -> None:
        self.world.advance(which)

    @rule(which=which, token=st.integers(0, 1))
    def generate(self, which: int, token: int) -> None:
        self.world.generate(which, token)

    @rule(which=which, keep=st.none() | st.integers(0, 12))
    def release(self, which: int, keep: int | None) -> None:
        self.world.release(which, keep)

    @rule(count=st.integers(1, 4))
    def free_duplicates(self, count: int) -> None:
        self.world.free_duplicates(count)

    @rule()
    def reset(self) -> None:
        self.world.reset()

    @rule(which=which, num_tokens=st.integers(0, 12), ttl=st.integers(0, 9), share=shares, yields=st.booleans())
    def retain(self, which: int, num_tokens: int, ttl: int, share: float | None, yields: bool) -> None:
        self.world.retain(which, num_tokens, ttl, share, yields)

    @rule(which=which)
    def hit(self, which: int) -> None:
        self.world.hit(which)

    @rule(passed=st.sampled_from([0, 1, 3, 5, 200, 900]))
    def set_time(self, passed: int) -> None:
        self.world.set_time(passed)

    @rule(
        account=st.sampled_from(ACCOUNTS),
        weight=st.sampled_from([1.0, 1.0, 2.0, 0.3]),
        most=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
    )
    def share(self, account: str, weight: float, most: float) -> None:
        self.world.share(account, weight, most)

    @rule(which=which, share=shares)
    def pin_like(self, which: int, share: float | None) -> None:
        if one := self.world.pick(which):
            self.world.pin(NAMESPACES.index(one.namespace), one.tokens.tolist(), share)

    @rule(namespace=st.integers(0, 3), tokens=st.lists(st.integers(0, 1), max_size=12), share=shares)
    def pin(self, namespace: int, tokens: list[int], share: float | None) -> None:
        self.world.pin(namespace, tokens, share)

    @rule(which=which)
    def unpin(self, which: int) -> None:
        self.world.unpin(which)

    @rule(namespace=st.integers(0, 3))
    def drop(self, namespace: int) -> None:
        self.world.drop(namespace)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


PrefixCacheMachine.TestCase.settings = settings(examples(2), stateful_step_count=50)
TestPrefixCacheAgainstModel = pytest.mark.slow(PrefixCacheMachine.TestCase)


# A hundred thousand rules.
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_long_runs_of_rules_agree_with_the_model() -> None:
    run_state_machine_as_test(PrefixCacheMachine, settings=settings(examples(50), stateful_step_count=50))


def drive(seed: int, steps: int, check_every: int, caching: bool = True, retaining: bool = False) -> list[object]:
    """A plain seeded run of `steps` operations with bigger pools than the state machine draws."""
    draw = random.Random(seed)
    world = World(draw.randint(8, 40), draw.randint(1, 4), caching)
    prompts: list[list[int]] = [[] for _ in range(6)]
    for step in range(steps):
        which = draw.randrange(64)
        kind = draw.random()
        if kind < 0.25 and len(world.running) < 8:
            tokens = draw.choice(prompts)[: draw.randint(0, 40)] + [
                draw.randint(0, 2) for _ in range(draw.randint(0, 9))
            ]
            prompts[draw.randrange(len(prompts))] = tokens
            world.start(draw.choice((0, 0, 0, 1, 2, 3)), tokens, draw.random() < 0.9)
        elif kind < 0.65:
            world.advance(which)
            world.extend(which, draw.randint(0, 4), draw.random() < 0.5)
            world.compute(which, draw.randint(1, 12))
            world.publish(which, draw.choice((0, 0, 0, 2)))
        elif kind < 0.80:
            world.generate(which, draw.randint(0, 2))
        elif kind < 0.90:
            world.release(which, draw.choice((None, None, draw.randint(0, 30))))
        elif retaining and kind < 0.95:
            share, yields = draw.choice((None, 0.1, 0.3)), draw.random() < 0.3
            world.retain(which, draw.randint(0, 40), draw.randint(1, 50), share, yields)
            world.hit(draw.randrange(64))
            world.set_time(draw.randint(0, 3))
        elif retaining and kind < 0.96 and world.running:
            one = world.running[which % len(world.running)]
            world.pin(NAMESPACES.index(one.namespace), one.tokens[: draw.randint(0, 20)].tolist(), 0.2)
        elif retaining and kind < 0.97:
            world.unpin(which)
        elif retaining and kind < 0.972:
            world.drop(which)
        elif retaining and kind < 0.98:
            world.share(draw.choice(ACCOUNTS), draw.choice((1.0, 3.0)), draw.choice((1.0, 1.0, 0.2)))
            world.set_time(draw.choice((0, 700)))
        elif kind < 0.998:
            world.free_duplicates(draw.randint(0, 3))
        else:
            world.reset()
        if step % check_every == 0:
            world.check()
    world.drain()
    return world.log


# These runs together take more than a hundred thousand steps.
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_seeded_run_agrees_with_model(seed: int) -> None:
    drive(seed, steps=20_000, check_every=40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50, 53))
def test_seeded_run_with_retention_agrees_with_model(seed: int) -> None:
    drive(seed, steps=14_000, check_every=40, retaining=True)


def test_seeded_run_without_caching_agrees_with_model() -> None:
    drive(99, steps=1000, check_every=5, caching=False)


def test_two_runs_of_the_same_calls_yield_the_same_ids() -> None:
    assert drive(7, steps=800, check_every=800) == drive(7, steps=800, check_every=800)


# A million steps.
@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 140))
def test_long_seeded_run_agrees_with_model(seed: int) -> None:
    drive(seed, steps=25_000, check_every=7, retaining=seed % 2 == 0)
