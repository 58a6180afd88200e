"""Leases on shared prefixes: matching, publishing, eviction, sharing in flight."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_cache import InvariantError, Lease, LeaseError, PrefixCache
from tests.support.cache_invariants import check_invariants, evict_all

SIZE = 4


def tokens(count: int, first: int = 0) -> array[int]:
    return array("i", range(first, first + count))


def run(cache: PrefixCache, prompt: array[int], namespace: str = "") -> Lease:
    """A request that computes and publishes its whole prompt and still holds its lease."""
    lease = cache.match(prompt, namespace)
    num_blocks = -(-len(prompt) // cache.block_size) - len(lease.block_ids)
    assert cache.extend(lease, num_blocks) is not None
    cache.free(cache.publish(lease, prompt, len(prompt)))
    return lease


def remember(cache: PrefixCache, prompt: array[int], namespace: str = "") -> list[int]:
    lease = run(cache, prompt, namespace)
    cache.release(lease)
    return lease.block_ids.tolist()


def test_match_serves_the_longest_cached_prefix_in_whole_blocks() -> None:
    cache = PrefixCache(8, SIZE)
    blocks = remember(cache, tokens(11))
    lease = cache.match(tokens(20))
    assert lease.num_cached_tokens == lease.num_published_tokens == 8
    assert lease.block_ids.tolist() == blocks[:2]
    assert cache.counts.num_leased == 2


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_is_never_served_from_the_cache(length: int, expected: int) -> None:
    cache = PrefixCache(8, SIZE)
    remember(cache, tokens(12))
    assert cache.peek(tokens(length)) == expected
    lease = cache.match(tokens(length))
    assert lease.num_cached_tokens == expected
    assert cache.advance(lease, tokens(length)) == expected


def test_namespaces_never_share() -> None:
    cache = PrefixCache(8, SIZE)
    remember(cache, tokens(8), "a")
    assert cache.match(tokens(9), "b").num_cached_tokens == 0
    assert cache.match(tokens(9)).num_cached_tokens == 0
    assert cache.match(tokens(9), "a").num_cached_tokens == 8


def test_token_ids_are_compared_over_their_whole_range() -> None:
    cache = PrefixCache(8, 1)
    remember(cache, array("i", [2**31 - 1, -(2**31), 0]))
    assert cache.peek(array("i", [2**31 - 1, -(2**31), 5])) == 2
    assert cache.peek(array("i", [-1, -(2**31), 5])) == 0


def test_tokens_of_another_width_are_refused() -> None:
    cache = PrefixCache(8, SIZE)
    with pytest.raises(ValueError, match="typecode 'q'"):
        cache.match(array("q", range(8)))
    check_invariants(cache)


def test_blocks_become_matchable_only_once_published() -> None:
    cache = PrefixCache(8, SIZE)
    lease = cache.match(tokens(10))
    cache.extend(lease, 3)
    assert cache.peek(tokens(10)) == 0
    cache.publish(lease, tokens(10), 7)
    assert cache.peek(tokens(10)) == 4
    cache.publish(lease, tokens(10), 10)
    assert cache.peek(tokens(10)) == 8


def test_publish_of_what_is_not_there_raises_and_changes_nothing() -> None:
    cache = PrefixCache(8, SIZE)
    lease = cache.match(tokens(9))
    cache.extend(lease, 2)
    with pytest.raises(ValueError, match="20 computed tokens"):
        cache.publish(lease, tokens(9), 20)
    with pytest.raises(ValueError, match="2 blocks"):
        cache.publish(lease, tokens(12), 12)
    assert lease.num_published_tokens == 0
    check_invariants(cache)


def test_late_publish_of_fewer_tokens_does_nothing() -> None:
    cache = PrefixCache(8, SIZE)
    lease = run(cache, tokens(8))
    assert cache.publish(lease, tokens(8), 4) == []
    assert lease.num_published_tokens == 8


def test_extend_prefers_the_blocks_behind_the_last_one() -> None:
    cache = PrefixCache(32, SIZE)
    first, second = cache.match(tokens(9)), cache.match(tokens(9, 50))
    for _ in range(6):
        cache.extend(first, 1)
        cache.extend(second, 1)
    for lease in (first, second):
        assert lease.block_ids.tolist() == list(range(lease.block_ids[0], lease.block_ids[0] + 6))


def test_extend_evicts_the_least_recently_used_prefix() -> None:
    cache = PrefixCache(6, SIZE)
    remember(cache, tokens(8))
    remember(cache, tokens(8, 50))
    cache.release(cache.match(tokens(9)))
    lease = cache.match(tokens(1, 99))
    assert cache.extend(lease, 3) is not None
    assert (cache.peek(tokens(9)), cache.peek(tokens(9, 50))) == (8, 4)
    assert cache.extend(lease, 1) is not None
    assert (cache.peek(tokens(9)), cache.peek(tokens(9, 50))) == (8, 0)


def test_peek_does_not_count_as_use() -> None:
    cache = PrefixCache(4, SIZE)
    remember(cache, tokens(8))
    remember(cache, tokens(8, 50))
    assert cache.peek(tokens(9)) == 8
    cache.extend(cache.match(tokens(1, 99)), 1)
    assert (cache.peek(tokens(9)), cache.peek(tokens(9, 50))) == (4, 8)


def test_extend_returns_none_and_changes_nothing_when_impossible() -> None:
    cache = PrefixCache(4, SIZE)
    remember(cache, tokens(4))
    holder = run(cache, tokens(8, 50))
    lease = cache.match(tokens(5))
    assert lease.num_cached_tokens == 4
    assert cache.counts.num_available == 1
    assert cache.extend(lease, 2) is None
    assert lease.block_ids.tolist() == [0]
    assert cache.extend(lease, 0) == []
    with pytest.raises(ValueError, match="negative"):
        cache.extend(lease, -1)
    cache.release(holder)
    assert cache.extend(lease, 2) is not None
    check_invariants(cache)


def test_leased_prefix_survives_any_pressure() -> None:
    cache = PrefixCache(6, SIZE)
    blocks = remember(cache, tokens(8))
    lease = cache.match(tokens(9))
    other = cache.match(tokens(1, 99))
    assert cache.extend(other, 5) is None
    assert cache.extend(other, 4) is not None
    assert cache.counts.num_available == 0
    assert lease.block_ids.tolist() == blocks


def test_release_keeps_published_blocks_and_frees_the_others() -> None:
    cache = PrefixCache(8, SIZE)
    lease = cache.match(tokens(14))
    cache.extend(lease, 4)
    cache.publish(lease, tokens(14), 10)
    cache.release(lease)
    assert (cache.counts.num_free, cache.counts.num_cached, cache.counts.num_leased) == (6, 2, 0)


def test_released_lease_raises_on_every_use() -> None:
    cache = PrefixCache(8, SIZE)
    lease = run(cache, tokens(8))
    cache.release(lease)
    for use in (
        lambda: cache.release(lease),
        lambda: cache.extend(lease, 1),
        lambda: cache.publish(lease, tokens(8), 8),
        lambda: cache.advance(lease, tokens(8)),
    ):
        with pytest.raises(LeaseError):
            use()
    check_invariants(cache)


def test_lease_of_another_cache_raises() -> None:
    lease = PrefixCache(8, SIZE).match(tokens(8))
    with pytest.raises(LeaseError):
        PrefixCache(8, SIZE).release(lease)


@pytest.mark.parametrize(("keep", "cached"), [(None, 3), (12, 3), (11, 2), (8, 2), (3, 0), (0, 0), (99, 3)])
def test_release_drops_published_blocks_beyond_keep_tokens(keep: int | None, cached: int) -> None:
    cache = PrefixCache(8, SIZE)
    cache.release(run(cache, tokens(14)), keep)
    assert (cache.counts.num_cached, cache.counts.num_free) == (cached, 8 - cached)
    assert cache.peek(tokens(20)) == cached * SIZE
    check_invariants(cache)


def test_release_does_not_drop_what_another_lease_holds() -> None:
    cache = PrefixCache(8, SIZE)
    first = run(cache, tokens(12))
    second = cache.match(tokens(9))
    cache.release(first, keep_tokens=0)
    assert cache.counts.num_leased == 2
    assert cache.counts.num_free == 6
    cache.release(second, keep_tokens=0)
    assert cache.counts.num_free == 8


def test_reset_evicts_all_but_leased_blocks() -> None:
    cache = PrefixCache(8, SIZE)
    remember(cache, tokens(12))
    lease = cache.match(tokens(9))
    assert evict_all(cache) == 1
    assert (cache.counts.num_cached, cache.counts.num_leased) == (0, 2)
    cache.release(lease)
    assert evict_all(cache) == 2
    assert cache.counts.num_free == 8


def test_without_caching_nothing_is_shared_or_kept() -> None:
    cache = PrefixCache(8, SIZE, caching=False)
    lease = cache.match(tokens(9))
    cache.extend(lease, 3)
    assert cache.publish(lease, tokens(9), 9) == []
    assert cache.advance(lease, tokens(9)) == 0
    assert cache.match(tokens(9)).num_cached_tokens == 0
    check_invariants(cache)
    cache.release(lease)
    assert (cache.counts.num_free, cache.counts.num_cached) == (8, 0)


def test_many_short_namespaces_leave_nothing_behind() -> None:
    cache = PrefixCache(4, SIZE)
    for number in range(200):
        remember(cache, tokens(8), f"tenant-{number}")
    check_invariants(cache)
    assert len(cache.tree.roots) <= 4
    assert cache.tree.num_nodes <= 8
    assert len(cache.tree.victims.holdings) <= 4


def test_senseless_block_size_raises() -> None:
    with pytest.raises(ValueError, match="block_size"):
        PrefixCache(8, 0)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda cache, lease: lease.block_ids.__setitem__(2, lease.block_ids[1]),
        lambda cache, lease: lease.block_ids.__setitem__(2, 99),
        lambda cache, lease: lease.block_ids.__setitem__(0, 7),
        lambda cache, lease: lease.block_ids.pop(),
        lambda cache, lease: setattr(lease, "num_published_tokens", 4),
        lambda cache, lease: setattr(lease, "namespace", "other"),
        lambda cache, lease: cache.counts.duplicates.add(0),
        lambda cache, lease: cache.leases.clear(),
        lambda cache, lease: cache.counts.allocator.free([lease.block_ids[2]]),
        lambda cache, lease: cache.counts.allocator.allocate(1),
        lambda cache, lease: setattr(cache.counts, "num_private", 0),
        lambda cache, lease: cache.tree.acquire(lease.node),
        lambda cache, lease: setattr(lease.node, "pins", 2),
        lambda cache, lease: lease.node.blocks.pop(),
        lambda cache, lease: lease.node.tokens.__setitem__(0, 77),
        lambda cache, lease: setattr(lease.node, "namespace", "other"),
        lambda cache, lease: setattr(lease.node, "parent", None),
        lambda cache, lease: cache.tree.root("empty"),
        lambda cache, lease: setattr(cache.tree, "num_blocks", 4),
        lambda cache, lease: setattr(cache.tree, "num_nodes", 9),
        lambda cache, lease: setattr(cache.tree, "num_pinned_blocks", 0),
        lambda cache, lease: cache.tree.victims.holdings[""].queue.clear(),
        lambda cache, lease: cache.tree.victims.holdings[""].queue.extend(cache.tree.victims.holdings[""].queue * 100),
        lambda cache, lease: cache.tree.victims.count("", 1),
        lambda cache, lease: cache.tree.victims.count("other", 1),
    ],
)
def test_check_invariants_notices_a_corrupt_cache(corrupt: Callable[[PrefixCache, Lease], object]) -> None:
    cache = PrefixCache(8, SIZE)
    remember(cache, tokens(4, 50))
    lease = cache.match(tokens(9))
    cache.extend(lease, 3)
    cache.publish(lease, tokens(9), 8)
    check_invariants(cache)
    corrupt(cache, lease)
    with pytest.raises(InvariantError):
        check_invariants(cache)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda cache: cache.counts.duplicates.add(0),
        lambda cache: setattr(cache.counts, "num_private", cache.counts.num_private + 1),
        lambda cache: setattr(cache.tree, "num_blocks", cache.tree.num_blocks + 1),
        lambda cache: cache.counts.allocator.free([0]),
    ],
)
def test_check_counts_notices_a_block_too_many(corrupt: Callable[[PrefixCache], object]) -> None:
    cache = PrefixCache(8, SIZE)
    run(cache, tokens(9))
    cache.counts.check()
    corrupt(cache)
    with pytest.raises(InvariantError, match="9 of 8"):
        cache.counts.check()


def test_lease_without_cache_reads_nothing_but_may_publish() -> None:
    cache = PrefixCache(8, SIZE)
    other = cache.match(tokens(9))
    blocks = cache.extend(other, 2)
    assert blocks is not None
    cache.publish(other, tokens(9), 8)
    lease = cache.match(tokens(9), use_cache=False)
    assert lease.num_cached_tokens == 0
    own = cache.extend(lease, 3)
    assert own is not None
    assert cache.advance(lease, tokens(9)) == 0
    assert cache.publish(lease, tokens(9), 9) == own[:2]
    assert lease.block_ids.tolist() == blocks + own[2:]


def test_publish_returns_duplicates_which_stay_taken_until_freed() -> None:
    cache = PrefixCache(8, SIZE)
    first, second = cache.match(tokens(9)), cache.match(tokens(9))
    ids, own = cache.extend(first, 3), cache.extend(second, 3)
    assert ids is not None
    assert own is not None
    assert cache.publish(first, tokens(9), 8) == []
    assert cache.publish(second, tokens(9), 8) == own[:2]
    assert second.block_ids.tolist() == [*ids[:2], own[2]]
    assert (cache.counts.num_free, len(cache.counts.duplicates), cache.counts.num_leased) == (2, 2, 4)
    check_invariants(cache)
    assert cache.extend(first, 3) is None
    cache.free(own[:2])
    assert (cache.counts.num_free, len(cache.counts.duplicates)) == (4, 0)


def test_free_takes_each_duplicate_once_and_nothing_else() -> None:
    cache = PrefixCache(8, SIZE)
    first, second = cache.match(tokens(9)), cache.match(tokens(9))
    ids, own = cache.extend(first, 2), cache.extend(second, 2)
    assert ids is not None
    assert own is not None
    cache.publish(first, tokens(9), 8)
    cache.publish(second, tokens(9), 8)
    for wrong in (ids, [own[0], own[0]], [own[0], 7], [-1], [99]):
        with pytest.raises(ValueError, match="not all of"):
            cache.free(wrong)
    assert len(cache.counts.duplicates) == 2
    cache.free(own)
    with pytest.raises(ValueError, match="not all of"):
        cache.free(own)
    check_invariants(cache)


def test_advance_adopts_published_blocks_in_place_of_own_ones() -> None:
    cache = PrefixCache(16, SIZE)
    first, second = cache.match(tokens(14)), cache.match(tokens(14))
    ids, own = cache.extend(first, 4), cache.extend(second, 2)
    assert ids is not None
    assert own is not None
    assert cache.advance(second, tokens(14)) == 0
    cache.publish(first, tokens(14), 13)
    assert cache.advance(second, tokens(14)) == 12
    assert second.block_ids.tolist() == ids[:3]
    assert second.num_cached_tokens == second.num_published_tokens == 12
    assert cache.counts.num_free == 12
    check_invariants(cache)


def test_advance_keeps_own_blocks_behind_the_adopted_ones() -> None:
    cache = PrefixCache(16, SIZE)
    first, second = cache.match(tokens(14)), cache.match(tokens(14))
    ids, own = cache.extend(first, 4), cache.extend(second, 4)
    assert ids is not None
    assert own is not None
    cache.publish(first, tokens(14), 4)
    assert cache.advance(second, tokens(14)) == 4
    assert second.block_ids.tolist() == [ids[0], *own[1:]]
    check_invariants(cache)


def test_agents_arriving_together_compute_their_shared_prompt_once() -> None:
    cache = PrefixCache(32, SIZE)
    prompts = [tokens(32) + tokens(3, 100 * agent) for agent in range(1, 5)]
    leases = [cache.match(prompt) for prompt in prompts]
    for num_computed in (16, 32):
        cache.extend(leases[0], 4)
        cache.publish(leases[0], prompts[0], num_computed)
        for lease, prompt in zip(leases[1:], prompts[1:], strict=True):
            assert cache.advance(lease, prompt) == num_computed
    assert cache.counts.num_leased == 8
    for lease in leases:
        cache.release(lease)
    check_invariants(cache)


@given(st.data())
def test_continuations_are_texts_that_followed_in_the_own_or_the_public_namespace(data: st.DataObject) -> None:
    cache = PrefixCache(256, 2)
    texts = st.lists(st.sampled_from([1, 2, 70_000]), min_size=1, max_size=9)
    cached: dict[str, list[list[int]]] = {"": [], "a": [], "b": [], "public": []}
    for name in data.draw(st.lists(st.sampled_from([*cached]), max_size=9)):
        text = data.draw(texts)
        remember(cache, array("i", text), name)
        cached[name].append(text[: len(text) // 2 * 2])
    name, text, most = data.draw(st.sampled_from(["", "a"])), data.draw(texts), data.draw(st.integers(1, 6))
    lease = run(cache, array("i", text), name)
    found = cache.continuation(lease, array("i", text[len(text) // 2 * 2 :]), most).tolist()
    end = len(text)
    behind = [other[end:] for other in cached[name] + cached["public"] if other[:end] == text and other[end:]]
    assert len(found) <= most
    assert not found or any(other[: len(found)] == found for other in behind)
    if any(other[:end] == text and other[end:] for other in cached[name]) and not cached["public"]:
        assert found
    cache.release(lease)
    check_invariants(cache)


def test_a_continuation_is_the_one_that_was_released_last() -> None:
    cache = PrefixCache(64, SIZE)
    for last in (20, 30, 40):
        remember(cache, tokens(8) + tokens(8, last))
    lease = run(cache, tokens(9))
    assert cache.continuation(lease, array("i", []), 6) == tokens(6, 40)
    assert cache.continuation(lease, array("i", [20, 21]), 3) == tokens(3, 22)
    assert cache.continuation(lease, array("i", [20, 21, 22, 23, 24]), 9) == tokens(3, 25)
    assert not cache.continuation(lease, array("i", [21]), 3)
