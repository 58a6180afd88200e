"""Shares of cached blocks: whose prefixes go when one account fills the cache, and whose stay.

`test_prefix_cache_stateful.py` holds the order of victims against a model that finds each anew.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from itertools import count

import pytest

from radix_cache import PUBLIC, BudgetError, PrefixCache, Shares
from radix_cache.victims import HALF_LIFE_S
from tests.support.cache_invariants import check_invariants, evict_all
from tests.support.line_counts import num_lines


class Shelf:
    """A cache of blocks of one token. Every prompt is new unless it is given."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = PrefixCache(num_blocks, 1)
        self._tokens = count()

    def put(self, namespace: str, num_blocks: int, chunk: int = 1) -> array[int]:
        """Serve a new prompt of that many blocks, `chunk` of them at a time, and end it."""
        prompt = array("i", (next(self._tokens) for _ in range(num_blocks)))
        lease = self.cache.match(prompt, namespace)
        for stop in range(chunk, num_blocks + 1, chunk):
            assert self.cache.extend(lease, chunk) is not None
            self.cache.free(self.cache.publish(lease, prompt, stop))
        self.cache.release(lease)
        check_invariants(self.cache)
        return prompt

    def kept(self, namespace: str, prompt: array[int]) -> int:
        return self.cache.peek(prompt + array("i", [-1]), namespace)

    def held(self) -> dict[str, int]:
        holdings = self.cache.tree.victims.holdings
        return {account: holding.num_blocks for account, holding in holdings.items()}


def test_who_fills_the_cache_with_prompts_evicts_its_own() -> None:
    shelf = Shelf(100)
    prefix = shelf.put("b", 20)
    for _ in range(30):
        shelf.put("a", 30)
        assert shelf.kept("b", prefix) == 20


def test_within_an_account_the_order_is_age_whatever_the_salt() -> None:
    shelf = Shelf(100)
    prefix = shelf.put("a/one", 20)
    shelf.put("a/two", 60)
    shelf.put("a/two", 30)
    assert shelf.kept("a/one", prefix) == 10
    shelf.put("a/two", 10)
    assert shelf.kept("a/one", prefix) == 0


def test_nobody_who_keeps_to_its_share_loses_a_block_to_who_does_not() -> None:
    shelf = Shelf(120)
    prompts = {name: [shelf.put(name, 15), shelf.put(name, 15)] for name in ("b", "c")}
    for size in (7, 30, 60, 1, 60):
        shelf.put("a", size)
        assert all(shelf.kept(name, prompt) == 15 for name in prompts for prompt in prompts[name])
    shelf.put("b", 10)
    assert shelf.held() == {"a": 50, "b": 40, "c": 30}


def test_one_big_prompt_takes_from_all_down_to_one_level() -> None:
    shelf = Shelf(100)
    for name, size in (("a", 50), ("b", 30), ("c", 20)):
        shelf.put(name, size)
    shelf.put("new", 40, chunk=40)
    assert shelf.held() == {"a": 20, "b": 20, "c": 20, "new": 40}


def test_weights_are_shares_of_the_cache() -> None:
    shelf = Shelf(100)
    shelf.cache.share("heavy", 3.0, 1.0)
    for _ in range(30):
        shelf.put("heavy", 10)
        shelf.put("light", 10)
    # One prompt more or less.
    assert shelf.held()["heavy"] == pytest.approx(75, abs=10)


def test_an_account_beyond_its_limit_comes_first_and_one_alone_may_have_all() -> None:
    shelf = Shelf(100)
    shelf.cache.share("few", 1.0, 0.1)
    shelf.put("few", 40)
    shelf.put("much", 60)
    assert shelf.held() == {"few": 40, "much": 60}
    shelf.put("much", 20)
    assert shelf.held() == {"few": 20, "much": 80}
    shelf.put("much", 20)
    # Within its limit it is an account like others.
    assert shelf.held() == {"few": 10, "much": 90}


def test_what_is_told_of_an_account_outlives_its_blocks_and_can_be_taken_back() -> None:
    shelf = Shelf(40)
    shelf.cache.share("few", 1.0, 0.0)
    shelf.put("few", 10)
    sum(shelf.cache.drop(("few",)))
    shelf.put("few", 10)
    shelf.put("much", 40)
    assert shelf.held() == {"much": 40}
    shelf.cache.share("few", 1.0, 1.0)
    shelf.put("few", 10)
    shelf.put("much", 15)
    assert shelf.held() == {"few": 10, "much": 30}


def test_the_share_of_an_account_that_comes_no_more_passes_to_the_others() -> None:
    shelf = Shelf(100)
    prefix = shelf.put("gone", 20)
    now = 0.0
    kept = []
    for _ in range(6):
        for _ in range(10):
            shelf.put("here", 10)
        kept.append(shelf.kept("gone", prefix))
        now += HALF_LIFE_S
        shelf.cache.set_time(now)
    assert kept[:2] == [20, 20]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < 10


def test_a_running_request_counts_with_all_its_blocks() -> None:
    shelf = Shelf(100)
    old = shelf.put("b", 30)
    own = shelf.put("a", 10)
    prompt = array("i", range(1000, 1050))
    lease = shelf.cache.match(prompt, "a")
    assert shelf.cache.extend(lease, 50) is not None
    shelf.cache.free(shelf.cache.publish(lease, prompt, 50))
    # 10 are free. The account with 60 blocks gives the 10 that it can, then the other one gives.
    assert shelf.cache.extend(lease, 20) is not None
    assert (shelf.kept("a", own), shelf.kept("b", old)) == (0, 30)
    assert shelf.cache.extend(lease, 5) is not None
    assert shelf.kept("b", old) == 25


def test_retained_prefixes_of_an_account_beyond_its_share_still_outlive_unretained_ones() -> None:
    shelf = Shelf(100)
    prompt = array("i", range(1000, 1050))
    lease = shelf.cache.match(prompt, "a")
    assert shelf.cache.extend(lease, 50) is not None
    shelf.cache.free(shelf.cache.publish(lease, prompt, 50))
    shelf.cache.retentions.retain(lease, 50, 60.0)
    shelf.cache.release(lease)
    shelf.put("b", 40)
    shelf.put("c", 20)
    assert (shelf.kept("a", prompt), shelf.held()["b"]) == (50, 30)


def test_public_prefixes_count_for_nobody() -> None:
    shelf = Shelf(100)
    public = shelf.put(PUBLIC, 30)
    shelf.cache.retentions.pin(public, PUBLIC, 1.0)
    prompt = public + array("i", range(1000, 1010))
    lease = shelf.cache.match(prompt, "b")
    assert (lease.num_cached_tokens, shelf.cache.extend(lease, 10) is not None) == (30, True)
    shelf.cache.free(shelf.cache.publish(lease, prompt, 40))
    shelf.cache.release(lease)
    assert shelf.held() == {PUBLIC: 30, "b": 10}
    for _ in range(10):
        shelf.put("a", 40)
    assert shelf.held() == {PUBLIC: 30, "b": 10, "a": 60}
    evict_all(shelf.cache)
    assert shelf.held() == {}


def test_keys_that_pin_what_they_may_leave_others_a_cache() -> None:
    cache = PrefixCache(160, 1, shares=Shares(pinned=0.25))
    for name in ("a", "b", "c"):
        for number in range(20):
            tokens = array("i", [ord(name), number, 1, 2])
            lease = cache.match(tokens, name)
            cache.extend(lease, 4 - len(lease.block_ids))
            cache.publish(lease, tokens, 4)
            cache.release(lease)
            with suppress(BudgetError):
                cache.retentions.pin(tokens, name)
    pinned = [cache.retentions.budget(name)[2] for name in ("a", "b", "c")]
    # Half of a quarter each; who comes third may pin nothing, but gets its fair share of all blocks.
    assert pinned == [19, 19, 0]
    prompts = [array("i", range(100 * number, 100 * number + 11)) for number in range(1, 4)]
    for _ in range(2):
        for prompt in prompts:
            lease = cache.match(prompt, "third")
            cache.extend(lease, 11 - len(lease.block_ids))
            cache.free(cache.publish(lease, prompt, 11))
            cache.release(lease)
    assert [cache.peek(prompt, "third") for prompt in prompts] == [10] * 3
    assert [cache.retentions.budget(name)[2] for name in ("a", "b", "c")] == pinned


def test_an_operators_grant_for_pins_takes_nothing_from_the_others() -> None:
    cache = PrefixCache(160, 1, shares=Shares(pinned=0.25))
    shelf = array("i", range(61))
    for name in ("granted", "other"):
        lease = cache.match(shelf, name)
        cache.extend(lease, 61)
        cache.publish(lease, shelf, 61)
        cache.release(lease)
    assert cache.retentions.pin(shelf[:60], "granted", pin_share=0.5) == 60
    assert cache.retentions.budget("granted", pin_share=0.5)[2:] == (60, 20)
    assert cache.retentions.budget("other")[2:] == (0, 20)
    with pytest.raises(BudgetError):
        cache.retentions.pin(shelf[:21], "other")
    assert cache.retentions.pin(shelf[:20], "other") == 20
    check_invariants(cache)
    assert cache.retentions.unpin(shelf[:20], "other")
    assert not cache.retentions.unpin(shelf[:20], "other")
    assert cache.retentions.budget("other")[2:] == (0, 20)


def test_the_work_of_a_pin_does_not_grow_with_the_number_of_pins() -> None:
    counts = []
    for num_pins in (20, 500):
        cache = PrefixCache(4096, 1, shares=Shares(retained=1.0))
        for number in range(num_pins + 1):
            tokens = array("i", [number, 1, 2])
            lease = cache.match(tokens)
            cache.extend(lease, 3)
            cache.publish(lease, tokens, 3)
            cache.release(lease)
            if number < num_pins:
                cache.retentions.pin(tokens)
        tokens = array("i", [num_pins, 1, 2])
        pins = cache.retentions
        counts.append(num_lines(lambda: pins.pin(tokens)) + num_lines(lambda: pins.unpin(tokens)))  # noqa: B023
        assert cache.retentions.num_pins == num_pins
    assert counts[1] <= 1.1 * counts[0]
