from array import array

import pytest

from radix_cache import PrefixCache

SIZE = 4


def tokens(count: int, first: int = 0) -> "array[int]":
    return array("i", range(first, first + count))


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
    assert (cache.num_free, cache.num_duplicates, cache.num_leased) == (2, 2, 4)
    cache.check_invariants()
    assert cache.extend(first, 3) is None
    cache.free(own[:2])
    assert (cache.num_free, cache.num_duplicates) == (4, 0)


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
    assert cache.num_duplicates == 2
    cache.free(own)
    with pytest.raises(ValueError, match="not all of"):
        cache.free(own)
    cache.check_invariants()


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
    assert cache.num_free == 12
    cache.check_invariants()


def test_advance_keeps_own_blocks_behind_the_adopted_ones() -> None:
    cache = PrefixCache(16, SIZE)
    first, second = cache.match(tokens(14)), cache.match(tokens(14))
    ids, own = cache.extend(first, 4), cache.extend(second, 4)
    assert ids is not None
    assert own is not None
    cache.publish(first, tokens(14), 4)
    assert cache.advance(second, tokens(14)) == 4
    assert second.block_ids.tolist() == [ids[0], *own[1:]]
    cache.check_invariants()


def test_agents_arriving_together_compute_their_shared_prompt_once() -> None:
    cache = PrefixCache(32, SIZE)
    prompts = [tokens(32) + tokens(3, 100 * agent) for agent in range(1, 5)]
    leases = [cache.match(prompt) for prompt in prompts]
    for num_computed in (16, 32):
        cache.extend(leases[0], 4)
        cache.publish(leases[0], prompts[0], num_computed)
        for lease, prompt in zip(leases[1:], prompts[1:], strict=True):
            assert cache.advance(lease, prompt) == num_computed
    assert cache.num_leased == 8
    for lease in leases:
        cache.release(lease)
    cache.check_invariants()
