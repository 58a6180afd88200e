"""Prefixes of models with recurrent states: a match ends where KV and a snapshot are, checked against brute force."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest

from radix_cache import PUBLIC, Lease, MissReason, PrefixCache, Snapshot
from radix_cache.errors import InvariantError
from tests.support.cache_invariants import check_invariants, evict_all

SIZE = 4
TALK = list(range(100, 140))


def prefill(cache: PrefixCache, tokens: list[int], saves: list[int], namespace: str = "") -> int:
    """Serve a prompt that saves snapshots at `saves` as it computes. Return how many of its tokens were cached."""
    ids = array("i", tokens)
    lease = cache.match(ids, namespace)
    cached = lease.num_published_tokens
    cache.states.begin_load(lease)
    cache.states.end_load(lease)
    assert cache.extend(lease, -(-len(ids) // cache.block_size) - len(lease.block_ids)) is not None
    for position in [*(p for p in saves if p > cached), len(ids)]:
        row = cache.states.take(lease, position) if position in saves else None
        cache.free(cache.publish(lease, ids, position))
        if row is not None:
            cache.states.keep(lease, row, position)
    cache.release(lease)
    check_invariants(cache)
    return cached


def stateful(num_snapshots: int, *, num_blocks: int = 64, block_size: int = SIZE) -> PrefixCache:
    return PrefixCache(num_blocks, block_size, snapshot_rows=range(2, 2 + num_snapshots))


def test_kv_without_a_snapshot_is_computed_again_and_shared_by_then() -> None:
    cache = stateful(2)
    assert prefill(cache, TALK[:20], []) == 0
    assert prefill(cache, TALK[:20], [16]) == 0
    assert cache.counts.num_cached == 5
    assert prefill(cache, TALK[:20], [16]) == 16


def test_a_match_tells_how_far_the_kv_goes_on_behind_the_snapshot() -> None:
    cache = stateful(2)
    prefill(cache, TALK[:24], [8])
    ids = array("i", [*TALK[:18], 1, 2, 3, 4])
    lease = cache.match(ids)
    assert (lease.num_published_tokens, lease.num_known_tokens) == (8, 16)
    assert lease.snapshot is not None
    assert cache.explain(lease, ids).reason is MissReason.NO_STATE
    assert cache.peek(ids) == 8
    cache.release(lease)


def test_a_split_loses_no_snapshot() -> None:
    cache = stateful(8)
    prefill(cache, TALK[:32], [8, 16, 24, 28])
    assert prefill(cache, [*TALK[:18], 1, 2, 3], []) == 16
    assert [prefill(cache, TALK[:length], []) for length in (32, 27, 23, 15)] == [28, 24, 16, 8]


def test_identical_prompts_go_on_from_the_same_snapshot_at_once() -> None:
    cache = stateful(1)
    prefill(cache, TALK[:20], [16])
    leases = [cache.match(array("i", TALK[:20])) for _ in range(3)]
    assert [lease.num_published_tokens for lease in leases] == [16] * 3
    assert len({cache.states.begin_load(lease) for lease in leases}) == 1
    assert cache.states.take(leases[0], 20) is None
    for lease in leases:
        check_invariants(cache)
        cache.release(lease)
    assert cache.states.table.num_used == 3


def test_the_second_of_two_snapshots_at_a_boundary_gives_its_row_back() -> None:
    cache = stateful(3)
    ids = array("i", TALK[:20])
    leases = [cache.match(ids) for _ in range(2)]
    for lease in leases:
        cache.extend(lease, 5)
    rows = [cache.states.take(lease, 16) for lease in leases]
    assert cache.states.table.num_written == 2
    kept = []
    for lease, row in zip(leases, rows, strict=True):
        assert row is not None
        cache.free(cache.publish(lease, ids, 16))
        kept.append(cache.states.keep(lease, row, 16))
    assert kept[0] is kept[1]
    assert (cache.states.table.num_written, cache.states.table.num_cached, cache.states.table.num_free) == (0, 1, 2)


def test_the_snapshot_that_saves_most_stays_and_a_lesser_one_is_not_even_taken() -> None:
    cache = stateful(2)
    prefill(cache, TALK[:40], [4, 36])
    assert prefill(cache, [1] * 8, [4]) == 0
    assert prefill(cache, TALK[:40], []) == 36
    # A block against the eight that nothing else saves: the talk's first block was the lesser one.
    assert prefill(cache, [*TALK[:6], 1, 2, 3], []) == 0
    assert prefill(cache, [1] * 8, []) == 4


def test_age_ends_even_the_most_valuable_snapshot() -> None:
    cache = stateful(1, num_blocks=400)
    prefill(cache, TALK[:40], [36])
    for number in range(12):
        prefill(cache, [number] * 16, [12])
    # Nothing lesser was taken as long as nothing made the time pass.
    assert prefill(cache, TALK[:40], []) == 36
    cache = stateful(2, num_blocks=400)
    prefill(cache, TALK[:40], [36])
    for number in range(12):
        prefill(cache, [number] * 16, [12])
    assert prefill(cache, TALK[:40], []) == 0


def test_a_snapshot_of_a_retained_prefix_stays_longer_but_not_for_ever() -> None:
    def others_until_gone(pin: bool) -> int:
        cache = stateful(2, num_blocks=400)
        prefill(cache, TALK[:20], [16])
        if pin:
            assert cache.retentions.pin(array("i", TALK[:16])) == 16
        for number in range(100):
            if cache.peek(array("i", TALK[:20])) == 0:
                return number
            prefill(cache, [number] * 20, [16])
        raise AssertionError("it stayed for ever")

    assert others_until_gone(pin=False) == 2
    assert 6 < others_until_gone(pin=True) < 30


def test_an_account_that_fills_the_rows_evicts_its_own_snapshots() -> None:
    cache = stateful(4, num_blocks=400)
    prefill(cache, TALK[:20], [16], "mine")
    for number in range(100):
        prefill(cache, [number] * 40, [36], "flood/chat")
    assert prefill(cache, TALK[:20], [], "mine") == 16
    # It may have half of the rows, and no more than that at the expense of the other.
    for number in range(100):
        prefill(cache, [number] * 20, [16], "mine")
    kept = [[cache.peek(array("i", [n] * 40), name) for n in range(100)] for name in ("mine", "flood/chat")]
    assert [sum(map(bool, found)) for found in kept] == [2, 2]


def test_an_account_that_is_away_for_long_loses_its_snapshots_to_others() -> None:
    cache = stateful(4, num_blocks=400)
    prefill(cache, TALK[:20], [16], "mine")
    cache.set_time(3600.0)
    for number in range(8):
        prefill(cache, [number] * 20, [16], "other")
    assert cache.peek(array("i", TALK[:20]), "mine") == 0
    assert sum(cache.peek(array("i", [n] * 20), "other") > 0 for n in range(8)) == 4


def test_a_public_prefix_keeps_its_snapshot_while_an_account_has_others_to_give() -> None:
    cache = stateful(2, num_blocks=400)
    prefill(cache, TALK[:20], [16], PUBLIC)
    cache.set_time(3600.0)
    for number in range(8):
        prefill(cache, [number] * 80, [76], "mine")
    assert cache.peek(array("i", TALK[:20]), "mine") == 16


def test_a_snapshot_goes_with_the_block_before_it() -> None:
    cache = stateful(4, num_blocks=6)
    prefill(cache, TALK[:24], [12, 20])
    prefill(cache, [1] * 8, [])
    assert cache.states.table.num_cached == 1
    assert prefill(cache, TALK[:24], []) == 12


def test_tokens_that_are_not_kept_take_their_snapshots_along() -> None:
    cache = stateful(4)
    ids = array("i", TALK[:24])
    lease = cache.match(ids)
    cache.extend(lease, 6)
    for position in (8, 16):
        row = cache.states.take(lease, position)
        assert row is not None
        cache.publish(lease, ids, position)
        cache.states.keep(lease, row, position)
    cache.release(lease, 12)
    check_invariants(cache)
    assert cache.states.table.num_cached == 1
    assert cache.peek(ids) == 8


def test_a_row_whose_boundary_was_not_published_is_free_again() -> None:
    cache = stateful(1)
    ids = array("i", TALK[:20])
    lease = cache.match(ids)
    cache.extend(lease, 5)
    row = cache.states.take(lease, 16)
    assert row is not None
    assert cache.states.keep(lease, row, 16) is None
    assert cache.states.table.num_free == 1
    with pytest.raises(KeyError):
        cache.states.drop_row(row)


def test_what_a_conversation_has_left_behind_goes_first_but_not_where_prompts_branch() -> None:
    cache = stateful(3)
    prefill(cache, TALK[:20], [16])
    prefill(cache, [*TALK[:16], *[1] * 16], [28])
    ids = array("i", [*TALK[:16], *[1] * 12, *[2] * 12])
    lease = cache.match(ids)
    assert cache.states.begin_load(lease) is not None
    resumed = lease.snapshot
    assert resumed is not None
    cache.states.end_load(lease)
    cache.extend(lease, 3)
    row = cache.states.take(lease, 36)
    assert row is not None
    cache.free(cache.publish(lease, ids, 40))
    cache.states.drop_row(row)
    cache.states.supersede(resumed)
    cache.release(lease)
    assert [snapshot.is_superseded for snapshot in walk(cache).values()].count(True) == 0
    # Another prompt may branch there too, so only a place that one prompt alone passes is left behind.
    before = prefill(cache, [*[3] * 20], [16])
    assert before == 0
    talk = array("i", [*[3] * 16, *[4] * 16])
    lease = cache.match(talk)
    resumed = lease.snapshot
    assert resumed is not None
    cache.states.begin_load(lease)
    cache.states.end_load(lease)
    cache.states.supersede(resumed)
    cache.release(lease)
    assert resumed.is_superseded
    prefill(cache, [5] * 8, [4])
    assert resumed.node is None


def test_a_snapshot_of_no_use_can_be_given_up_but_not_one_that_was_used() -> None:
    cache = stateful(2)
    ids = array("i", TALK[:20])
    lease = cache.match(ids)
    cache.extend(lease, 5)
    row = cache.states.take(lease, 16)
    assert row is not None
    cache.publish(lease, ids, 16)
    snapshot = cache.states.keep(lease, row, 16)
    assert snapshot is not None
    other = cache.match(ids)
    cache.states.drop_unused(snapshot)
    assert snapshot.node is not None
    cache.release(other)
    cache.states.drop_unused(snapshot)
    assert snapshot.node is None
    cache.states.drop_unused(snapshot)
    check_invariants(cache)
    assert prefill(cache, TALK[:20], [16]) == 0
    assert prefill(cache, TALK[:20], [16]) == 16
    (kept,) = (s for s in walk(cache).values())
    cache.states.drop_unused(kept)
    assert kept.node is not None


def test_a_public_prefix_gets_its_snapshot_from_whoever_computes_it() -> None:
    cache = stateful(4)
    assert prefill(cache, TALK[:20], [], PUBLIC) == 0
    assert prefill(cache, [*TALK[:20], 1, 2, 3, 4, 5], [20], "a") == 0
    assert prefill(cache, [*TALK[:20], 6, 7, 8, 9, 10], [], "b") == 20
    assert cache.counts.num_cached == 5 + 2


def test_a_public_prefix_that_is_evicted_meanwhile_becomes_the_requests_own() -> None:
    cache = stateful(4, num_blocks=8)
    prefill(cache, TALK[:16], [], PUBLIC)
    ids = array("i", TALK[:20])
    lease = cache.match(ids, "a")
    assert lease.num_known_tokens == 16
    cache.extend(lease, 5)
    assert evict_all(cache) == 3
    row = cache.states.take(lease, 16)
    assert row is not None
    cache.free(cache.publish(lease, ids, 20))
    cache.states.drop_row(row)
    cache.release(lease)
    check_invariants(cache)
    assert cache.counts.num_cached == 5


def test_without_caching_no_row_is_used() -> None:
    cache = PrefixCache(8, SIZE, caching=False, snapshot_rows=range(2, 6))
    assert [prefill(cache, TALK[:20], [16]) for _ in range(2)] == [0, 0]
    assert cache.states.table.num_rows == 0


def test_a_lost_row_is_found() -> None:
    cache = stateful(2)
    prefill(cache, TALK[:20], [8])
    rows = cache.states.table.rows
    cache.states.table.rows = range(rows.start, rows.stop + 1)
    with pytest.raises(InvariantError):
        cache.counts.check()


def walk(cache: PrefixCache) -> dict[tuple[str, tuple[int, ...]], Snapshot]:
    """The snapshots of the tree by namespace and prefix."""
    tree, found = cache.tree, {}
    nodes = list(tree.roots.values())
    for node in nodes:
        nodes += node.children.values()
        prefix = array("i", tree.prefix(node)).tolist()
        above = len(prefix) // cache.block_size - len(node.blocks)
        for snapshot in node.snapshots:
            found[node.namespace, tuple(prefix[: (above + snapshot.offset) * cache.block_size])] = snapshot
    return found


@dataclass
class Kept:
    row: int
    since: int = 0
    worth: int = 0
    entry: int = 0
    superseded: bool = False
    pins: int = 0
    uses: int = 0


@dataclass
class Running:
    lease: Lease
    namespace: str
    tokens: array[int]
    num_computed: int
    pinned: tuple[str, tuple[int, ...]] | None
    resumed: Snapshot | None = None


class World:
    """Every snapshot by its prefix, and the rules for them without a tree, a queue or counters."""

    def __init__(self, num_blocks: int, size: int, num_snapshots: int) -> None:
        self.cache = PrefixCache(num_blocks, size, snapshot_rows=range(1, 1 + num_snapshots))
        self.size = size
        self.kept: dict[tuple[str, tuple[int, ...]], Kept] = {}
        self.free = set(range(1, 1 + num_snapshots))
        self.running: list[Running] = []
        self.age = self.entry = 0
        self.num_hits = self.num_evicted = self.num_refused = 0

    def depth(self, namespace: str, tokens: array[int], limit: int, below: int = 0) -> int:
        """The deepest boundary of `tokens` up to `limit` blocks, above `below`, that has a snapshot; 0 for none."""
        boundaries = (n for n in range(limit, below, -1) if (namespace, tuple(tokens[: n * self.size])) in self.kept)
        return next(boundaries, 0)

    def known(self, namespace: str, tokens: array[int]) -> int:
        """The leading blocks whose KV is in the tree, as a plain cache would match them."""
        whole = (len(tokens) - 1) // self.size * self.size
        return self.cache.tree.depth(namespace, tokens[:whole].tobytes())

    def gain(self, key: tuple[str, tuple[int, ...]]) -> int:
        namespace, prefix = key
        count = len(prefix) // self.size
        return count - self.depth(namespace, array("i", prefix), count - 1)

    def worth(self, key: tuple[str, tuple[int, ...]]) -> int:
        return 0 if self.kept[key].superseded else self.kept[key].since + self.gain(key)

    def queue(self, key: tuple[str, tuple[int, ...]]) -> None:
        self.entry += 1
        self.kept[key].entry = self.entry
        self.kept[key].worth = self.worth(key)

    def first_victim(self, account: str) -> tuple[str, tuple[int, ...]] | None:
        """The oldest that is worth nothing, else the least of the account that holds most, more than this."""
        num_held = Counter(namespace for namespace, _ in self.kept)

        def place(key: tuple[str, tuple[int, ...]]) -> tuple[int, int, int]:
            worth, entry = self.kept[key].worth, self.kept[key].entry
            return (-num_held[key[0]], worth, entry) if worth else (-len(self.kept) - 1, 0, entry)

        def may_go(key: tuple[str, tuple[int, ...]]) -> bool:
            return not self.kept[key].worth or key[0] == account or num_held[key[0]] > num_held[account]

        while victims := [key for key, kept in self.kept.items() if not kept.pins and may_go(key)]:
            victim = min(victims, key=place)
            if self.worth(victim) <= self.kept[victim].worth:
                return victim
            self.queue(victim)
        return None

    def supersede(self, one: Running, resumed: Snapshot) -> None:
        """From the snapshot that a request went on from up to where prompts branch."""
        key = next((key for key, snapshot in walk(self.cache).items() if snapshot is resumed), None)
        self.cache.states.supersede(resumed)
        if key is None:
            return
        namespace, prefix = key
        left = []
        for end in range(len(prefix), 0, -self.size):
            if len(self.continuations(namespace, prefix[:end])) > 1:
                break
            kept = self.kept.get((namespace, prefix[:end]))
            if kept is not None and kept.uses < 2:
                left.append((namespace, prefix[:end]))
        for left_key in reversed(left):
            self.kept[left_key].superseded = True
            if not self.kept[left_key].pins:
                self.queue(left_key)

    def continuations(self, namespace: str, prefix: tuple[int, ...]) -> set[tuple[int, ...]]:
        """The blocks that follow a prefix in the tree."""
        tree, found = self.cache.tree, set()
        nodes = [tree.roots[namespace]]
        for node in nodes:
            nodes += node.children.values()
            whole = tuple(array("i", tree.prefix(node)))
            if len(whole) > len(prefix) and whole[: len(prefix)] == prefix:
                found.add(whole[len(prefix) : len(prefix) + self.size])
        return found

    def unpin(self, one: Running) -> None:
        if one.pinned is not None:
            kept = self.kept[one.pinned]
            kept.pins -= 1
            if not kept.pins:
                self.queue(one.pinned)
            one.pinned = None

    def pin(self, one: Running, depth: int) -> None:
        self.unpin(one)
        if depth:
            one.pinned = (one.namespace, tuple(one.tokens[: depth * self.size]))
            self.kept[one.pinned].pins += 1

    def remove(self, key: tuple[str, tuple[int, ...]]) -> None:
        assert not self.kept[key].pins
        self.free.add(self.kept.pop(key).row)

    def follow_blocks(self) -> None:
        """Snapshots whose KV the cache has evicted are gone."""
        tree = self.cache.tree
        for key in list(self.kept):
            namespace, prefix = key
            if tree.depth(namespace, array("i", prefix).tobytes()) * self.size < len(prefix):
                self.remove(key)

    def start(self, namespace: str, tokens: list[int]) -> None:
        ids = array("i", tokens)
        known = self.known(namespace, ids)
        depth = self.depth(namespace, ids, known)
        assert self.cache.peek(ids, namespace) == depth * self.size
        lease = self.cache.match(ids, namespace)
        assert (lease.num_published_tokens, lease.num_known_tokens) == (depth * self.size, known * self.size)
        one = Running(lease, namespace, ids, depth * self.size, None)
        self.pin(one, depth)
        assert (lease.snapshot.row if lease.snapshot else None) == (self.kept[one.pinned].row if one.pinned else None)
        self.running.append(one)

    def advance(self, one: Running) -> None:
        if one.num_computed - one.lease.num_published_tokens >= self.size:
            return
        first = one.lease.num_published_tokens // self.size
        depth = self.depth(one.namespace, one.tokens, self.known(one.namespace, one.tokens), first)
        assert self.cache.advance(one.lease, one.tokens) == max(first, depth) * self.size
        if depth:
            self.pin(one, depth)
            one.num_computed = max(one.num_computed, depth * self.size)

    def load(self, one: Running) -> None:
        if one.pinned is not None:
            kept = self.kept[one.pinned]
            assert self.cache.states.begin_load(one.lease) == kept.row
            one.resumed = one.lease.snapshot
            kept.uses += 1
            kept.since, kept.superseded = self.age, False
            self.num_hits += 1
        self.cache.states.end_load(one.lease)
        self.unpin(one)

    def compute(self, one: Running, num_blocks: int, save: bool) -> None:
        end = min(len(one.tokens), (one.num_computed // self.size + num_blocks) * self.size)
        if (
            end <= one.num_computed
            or self.cache.extend(one.lease, -(-end // self.size) - len(one.lease.block_ids)) is None
        ):
            return
        self.follow_blocks()
        row = self.take(one, end) if save and end % self.size == 0 else None
        one.num_computed = end
        self.cache.free(self.cache.publish(one.lease, one.tokens, end))
        if row is not None:
            self.keep(one, row, end)

    def take(self, one: Running, end: int) -> int | None:
        first = one.lease.num_published_tokens // self.size
        gain = end // self.size - self.depth(one.namespace, one.tokens, first)
        row = self.cache.states.take(one.lease, end)
        if not self.free:
            victim = self.first_victim(one.namespace)
            if victim is None or (victim[0] == one.namespace and self.kept[victim].worth > self.age + gain):
                assert row is None
                self.num_refused += 1
                return None
            self.age = max(self.age, self.kept[victim].worth)
            self.remove(victim)
            self.num_evicted += 1
        assert row in self.free
        self.free.remove(row)
        return row

    def keep(self, one: Running, row: int, end: int) -> None:
        key = one.namespace, tuple(one.tokens[:end])
        snapshot = self.cache.states.keep(one.lease, row, end)
        assert snapshot is not None
        if key in self.kept:
            self.free.add(row)
        else:
            self.kept[key] = Kept(row, self.age)
            self.queue(key)
        assert snapshot.row == self.kept[key].row
        if one.resumed is not None:
            self.supersede(one, one.resumed)
            one.resumed = None

    def release(self, one: Running, keep: int | None) -> None:
        self.running.remove(one)
        self.unpin(one)
        self.cache.release(one.lease, keep)
        self.follow_blocks()

    def check(self) -> None:
        check_invariants(self.cache)
        found = {key: (s.row, s.worth, s.pins, s.uses, s.is_superseded) for key, s in walk(self.cache).items()}
        assert found == {key: (k.row, k.worth, k.pins, k.uses, k.superseded) for key, k in self.kept.items()}
        assert self.cache.states.table.num_free == len(self.free)


def drive(seed: int, steps: int) -> World:
    draw = Random(seed)
    world = World(draw.randint(12, 40), draw.randint(1, 3), draw.randint(1, 5))
    prompts: list[list[int]] = [[] for _ in range(5)]
    for _ in range(steps):
        kind = draw.random()
        one = draw.choice(world.running) if world.running else None
        if kind < 0.25 and len(world.running) < 5:
            tokens = draw.choice(prompts)[: draw.randint(0, 30)] + [
                draw.randint(0, 2) for _ in range(draw.randint(1, 9))
            ]
            prompts[draw.randrange(5)] = tokens
            world.start(draw.choice(("", "", "a")), tokens)
        elif one is None:
            continue
        elif kind < 0.70:
            world.advance(one)
            world.load(one)
            world.compute(one, draw.randint(1, 4), draw.random() < 0.6)
        elif kind < 0.78:
            one.tokens.append(draw.randint(0, 2))
        elif kind < 0.99:
            world.release(one, draw.choice((None, None, None, draw.randint(0, 20))))
        else:
            evict_all(world.cache)
            world.follow_blocks()
        world.check()
    while world.running:
        world.release(world.running[0], None)
    evict_all(world.cache)
    assert world.cache.counts.num_free == world.cache.num_blocks
    assert world.cache.states.table.num_free == world.cache.states.table.num_rows
    return world


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_seeded_run_agrees_with_brute_force(seed: int) -> None:
    world = drive(seed, 1500)
    assert world.num_hits > 10
    assert world.num_evicted > 3


@pytest.mark.parametrize("num_uses", range(6))
def test_a_victim_that_has_become_worth_more_keeps_its_place_in_a_queue_that_is_cleared_up(
    monkeypatch: pytest.MonkeyPatch, num_uses: int
) -> None:
    monkeypatch.setattr("radix_cache.worth_queue._HEAP_SLACK", 0)
    cache = stateful(2, num_blocks=100)
    prefill(cache, TALK[:40], [4, 36])
    # It takes the row of the first snapshot, without which the second one saves a block more.
    prefill(cache, [1] * 40, [36])
    for _ in range(num_uses):
        cache.release(cache.match(array("i", [1] * 40)))
    prefill(cache, [2] * 40, [36])
    check_invariants(cache)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_long_seeded_run_agrees_with_brute_force(seed: int) -> None:
    drive(seed, 5000)
