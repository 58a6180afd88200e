"""The events that routers get describe the tree's blocks."""

from __future__ import annotations

import random
from array import array

import hypothesis.strategies as st
import msgpack
from hypothesis import given, settings

from moeserve.engine.kv.events.blocks import BlockRemoved, BlockStored, KvBlocks, block_hash
from moeserve.engine.kv.events.publisher import pack_batch
from radix_cache import PUBLIC, Lease, PrefixCache
from tests.support.cache_invariants import check_invariants, evict_all
from tests.support.examples import examples
from tests.support.kv_consumer import EventConsumer

SIZE = 2
NAMESPACES = ("", "a", "a/x", "b", PUBLIC)


def ids(*tokens: int) -> array[int]:
    return array("i", tokens)


def bytes_of(*tokens: int) -> bytes:
    return ids(*tokens).tobytes()


def compute(cache: PrefixCache, tokens: array[int], namespace: str = "") -> Lease | None:
    """Publish a prompt as a request does; None if memory is short."""
    lease = cache.match(tokens, namespace)
    if cache.extend(lease, -(-len(tokens) // cache.block_size) - len(lease.block_ids)) is None:
        cache.release(lease)
        return None
    cache.free(cache.publish(lease, tokens, len(tokens)))
    return lease


def telling_cache(num_blocks: int) -> PrefixCache:
    cache = PrefixCache(num_blocks, SIZE)
    cache.facts.begin()
    return cache


def held(cache: PrefixCache) -> set[tuple[str | None, tuple[int, ...]]]:
    """The salts and tokens of all prefixes in a tree, public ones also as each namespace behind them sees them."""
    paths: dict[int, tuple[str, tuple[int, ...]]] = {}
    found = set()
    size = cache.block_size
    for fact in cache.facts.published():
        tokens = array("i", fact.tokens)
        above = ("", ()) if fact.parent is None else paths[fact.parent]
        view = "" if fact.namespace == PUBLIC else fact.namespace
        if fact.parent is not None and above[0] != view:
            found |= {(view, above[1][:end]) for end in range(size, len(above[1]) + 1, size)}
        for place, block in enumerate(fact.blocks):
            above = (view, above[1] + tuple(tokens[place * size : (place + 1) * size]))
            paths[block] = above
            found.add(above)
    return {(view or None, tokens) for view, tokens in found}


class Driver:
    """A cache under random requests, and a consumer that follows it."""

    def __init__(self, source: random.Random) -> None:
        self.random = source
        self.cache = telling_cache(source.randint(6, 24))
        self.blocks = KvBlocks(SIZE)
        self.running: list[tuple[Lease, array[int]]] = []
        self.batches: list[bytes] = []
        self.send(self.blocks.restart([]))

    def send(self, events: list) -> None:
        if events:
            self.batches.append(pack_batch(0.0, events, 0, SIZE, as_maps=True))

    def act(self) -> None:
        choice, cache = self.random.random(), self.cache
        if choice < 0.5:
            tokens = ids(*(self.random.randint(0, 1) for _ in range(self.random.randint(1, 14))))
            lease = compute(cache, tokens, self.random.choice(NAMESPACES))
            if lease is not None:
                self.running.append((lease, tokens))
        elif choice < 0.65 and self.running:
            lease, tokens = self.random.choice(self.running)
            tokens.extend(self.random.randint(0, 1) for _ in range(SIZE))
            missing = -(-len(tokens) // SIZE) - len(lease.block_ids)
            if cache.extend(lease, missing) is not None:
                cache.free(cache.publish(lease, tokens, len(tokens)))
            else:
                del tokens[-SIZE:]
        elif choice < 0.93 and self.running:
            lease, tokens = self.running.pop(self.random.randrange(len(self.running)))
            cache.release(lease, self.random.choice((None, None, self.random.randint(0, len(tokens)))))
        elif choice < 0.96:
            list(cache.drop(self.random.choice((None, ["a"], ["b", PUBLIC]))))
        if self.random.random() < 0.7:
            self.send(self.blocks.apply(cache.facts.take()))


@settings(examples(2))
@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_who_follows_the_events_knows_the_blocks_of_the_tree(source, num_acts):
    driver = Driver(source)
    at_snapshot, snapshot = 0, []
    for _ in range(num_acts):
        driver.act()
        if source.random() < 0.2:
            at_snapshot, snapshot = len(driver.batches), list(driver.blocks.snapshot(source.randint(1, 5)))
    driver.send(driver.blocks.apply(driver.cache.facts.take()))
    follower, latecomer = EventConsumer(), EventConsumer()
    for number, batch in enumerate(driver.batches):
        follower.take(number, batch)
    assert follower.prefixes == held(driver.cache)
    latecomer.blocks, latecomer.parents = {1: (None, (9, 9))}, {1: None}
    for events in snapshot:
        _, shown, _ = msgpack.unpackb(pack_batch(0.0, events, 0, SIZE, as_maps=True))
        for event in shown:
            latecomer.apply(event)
    for number in range(at_snapshot, len(driver.batches)):
        latecomer.take(number, driver.batches[number])
    if snapshot:
        assert latecomer.blocks == follower.blocks
    check_invariants(driver.cache)
    # The events that follow a full queue are the same.
    driver.send(driver.blocks.restart(driver.cache.facts.published()))
    follower.take(len(driver.batches) - 1, driver.batches[-1])
    assert follower.prefixes == held(driver.cache)


def test_a_cache_tells_nothing_unless_it_is_asked_to():
    cache = PrefixCache(8, SIZE)
    compute(cache, ids(1, 2, 3, 4))
    assert cache.facts.take() == []


def test_equal_prefixes_have_equal_hashes_in_any_process():
    # Hashes are on the wire between replicas of any age: these must never change.
    first = block_hash("", None, bytes_of(1, 2))
    assert first == 17887521233246515358
    assert block_hash("", first, bytes_of(3, 4)) == 3477103156298008260
    assert block_hash("a", None, bytes_of(1, 2)) == 14430779190556126444


def test_a_run_that_is_split_is_no_event():
    cache, blocks = telling_cache(16), KvBlocks(SIZE)
    compute(cache, ids(1, 2, 3, 4, 5, 6))
    (stored,) = blocks.apply(cache.facts.take())
    assert isinstance(stored, BlockStored)
    assert len(stored.block_hashes) == 3
    compute(cache, ids(1, 2, 3, 4, 7, 8))
    (branch,) = blocks.apply(cache.facts.take())
    assert branch == BlockStored(
        [block_hash("", stored.block_hashes[1], bytes_of(7, 8))], stored.block_hashes[1], bytes_of(7, 8)
    )


def test_blocks_go_from_the_end_of_a_prefix():
    cache, blocks = telling_cache(16), KvBlocks(SIZE)
    lease = compute(cache, ids(1, 2, 3, 4, 5, 6))
    (stored,) = blocks.apply(cache.facts.take())
    cache.release(lease)
    evict_all(cache)
    assert blocks.apply(cache.facts.take()) == [BlockRemoved(stored.block_hashes[::-1])]


def test_a_part_of_a_block_is_told_once_it_is_full():
    cache, blocks = telling_cache(16), KvBlocks(SIZE)
    compute(cache, ids(1, 2, 3))
    (stored,) = blocks.apply(cache.facts.take())
    assert stored == BlockStored([block_hash("", None, bytes_of(1, 2))], None, bytes_of(1, 2))


def test_a_public_prefix_is_told_under_the_salt_of_each_namespace_that_goes_on_behind_it():
    cache, blocks, consumer = telling_cache(32), KvBlocks(SIZE), EventConsumer()
    cache.release(compute(cache, ids(1, 2, 3, 4), PUBLIC))
    lease = compute(cache, ids(1, 2, 3, 4, 5, 6), "a")
    consumer.take(0, pack_batch(0.0, blocks.apply(cache.facts.take()), 0, SIZE, as_maps=True))
    assert consumer.prefixes == {
        (None, (1, 2)),
        (None, (1, 2, 3, 4)),
        ("a", (1, 2)),
        ("a", (1, 2, 3, 4)),
        ("a", (1, 2, 3, 4, 5, 6)),
    }
    cache.release(lease, keep_tokens=0)
    consumer.take(1, pack_batch(0.0, blocks.apply(cache.facts.take()), 0, SIZE, as_maps=True))
    assert consumer.prefixes == {(None, (1, 2)), (None, (1, 2, 3, 4))}


def test_two_namespaces_share_no_hash():
    cache, blocks = telling_cache(16), KvBlocks(SIZE)
    compute(cache, ids(1, 2, 3, 4), "a")
    compute(cache, ids(1, 2, 3, 4), "b")
    one, other = blocks.apply(cache.facts.take())
    assert not set(one.block_hashes) & set(other.block_hashes)
    assert (one.salt, other.salt) == ("a", "b")
