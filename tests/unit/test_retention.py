"""Which retentions give way, by script: refused pins, and retentions that meet when the blocks between them go."""

from __future__ import annotations

from array import array

import pytest

from radix_cache import BudgetError, Lease, PrefixCache, Shares, list_prefixes
from tests.support.cache_invariants import check_invariants
from tests.support.jobs import finish

SIZE = 4


def run(cache: PrefixCache, prompt: array[int]) -> Lease:
    """A request that computes and publishes its whole prompt and still holds its lease."""
    lease = cache.match(prompt)
    assert cache.extend(lease, len(prompt) // SIZE - len(lease.block_ids)) is not None
    cache.free(cache.publish(lease, prompt, len(prompt)))
    return lease


def retain(cache: PrefixCache, prompt: array[int], ttl: float, share: float | None = None) -> None:
    lease = run(cache, prompt)
    cache.retentions.retain(lease, len(prompt), ttl, share)
    cache.release(lease)


def retained(cache: PrefixCache) -> set[tuple[int, float]]:
    """Return (hundred of its tokens, seconds left) of every prefix that a retention ends."""
    found = finish(list_prefixes(cache.tree, None, 100)).prefixes
    return {(one.preview[0] // 100, one.retained_for) for one in found if one.retained_for is not None}


def test_a_refused_pin_changes_nothing_not_even_which_retention_gives_way_first() -> None:
    cache = PrefixCache(16, SIZE)
    first, second, third = (array("i", range(start, start + 16)) for start in (0, 100, 200))
    retain(cache, first, 10)
    retain(cache, second, 10)
    with pytest.raises(BudgetError) as caught:
        cache.retentions.pin(first, share=0.2)
    assert (caught.value.num_wanted, caught.value.num_free) == (4, 3)
    retain(cache, third, 10)
    assert retained(cache) == {(1, 10), (2, 10)}
    check_invariants(cache)


def test_a_pin_that_is_there_is_not_refused_when_the_budget_has_shrunk() -> None:
    cache = PrefixCache(16, SIZE)
    prompt = array("i", range(16))
    cache.release(run(cache, prompt))
    assert cache.retentions.pin(prompt) == 16
    assert cache.retentions.pin(prompt, share=0.1) == 16
    assert cache.retentions.num_pins == 1


@pytest.mark.parametrize("newest", ["head", "whole"])
def test_of_two_retentions_that_meet_the_newer_place_in_the_order_and_the_later_end_stay(newest: str) -> None:
    cache = PrefixCache(16, SIZE, shares=Shares(retained=1.0))
    whole, other = array("i", range(16)), array("i", range(100, 108))
    head = whole[:8]
    wishes = {"head": (head, 5.0), "whole": (whole, 9.0)}
    oldest = next(name for name in wishes if name != newest)
    for prompt, ttl in (wishes[oldest], (other, 7.0), wishes[newest]):
        retain(cache, prompt, ttl)
    # All but one block are in use, so the two tail blocks of the whole prompt are evicted.
    held = [run(cache, head), run(cache, other)]
    busy = cache.match(array("i", [7]))
    assert cache.extend(busy, 12) is not None
    assert retained(cache) == {(0, 9.0), (1, 7.0)}
    # Room is made for a retention of one block: of three, that of the other prompt is the oldest.
    cache.release(busy)
    retain(cache, array("i", range(200, 204)), 3, share=0.2)
    assert retained(cache) == {(0, 9.0), (2, 3.0)}
    for lease in held:
        cache.release(lease)
    check_invariants(cache)


def test_a_prefix_is_as_recent_as_whatever_goes_on_from_it() -> None:
    cache = PrefixCache(16, SIZE)
    prompt = array("i", range(16))
    cache.set_time(1000.0)
    lease = run(cache, prompt)
    cache.retentions.retain(lease, 8, 60.0)  # splits a run that nobody has released yet
    assert [one.unused_for for one in finish(list_prefixes(cache.tree, None, 10)).prefixes] == [0.0, 0.0]
    cache.set_time(1001.0)
    cache.release(lease)
    cache.set_time(1003.0)
    assert [one.unused_for for one in finish(list_prefixes(cache.tree, None, 10)).prefixes] == [2.0, 2.0]
