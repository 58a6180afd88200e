"""Who gives running places and memory to whom, and who finds a place."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from moeserve.plan import Request, SamplingParams, Terms
from moeserve.scheduling.fair_queue import Tenants, WaitingQueue
from moeserve.scheduling.sharing import Holdings, Sharing
from radix_cache import PrefixCache

A, B = Terms("a"), Terms("b")


class Shop:
    """Two ranks of 20 blocks of one token, eight running places; a running request holds a block for each token."""

    def __init__(self) -> None:
        self.tenants = Tenants()
        self.caches = [PrefixCache(20, 1) for _ in range(2)]
        self.sharing = Sharing(self.tenants, self.caches, 8)
        self.waiting = WaitingQueue(self.tenants)
        self.running: list[Request] = []
        self.arrivals = 0

    def add(self, terms: Terms, num_tokens: int) -> Request:
        tokens = array("i", [self.arrivals] * num_tokens)
        request = Request(f"{terms.tenant}{self.arrivals}", tokens, SamplingParams(1), arrival=self.arrivals)
        request.terms = terms
        self.arrivals += 1
        self.tenants.enter(request)
        return request

    def run(self, terms: Terms, num_tokens: int, rank: int = 0) -> Request:
        request = self.add(terms, num_tokens)
        request.rank = rank
        request.lease = self.caches[rank].match(request.token_ids)
        assert self.caches[rank].extend(request.lease, num_tokens) is not None
        self.running.append(request)
        return request

    def wait(self, terms: Terms, num_tokens: int) -> None:
        request = self.add(terms, num_tokens)
        self.tenants.wait(request)
        self.waiting.add(request)

    def victims(self, *, is_full: bool = False, lacks_memory: bool = False) -> list[Request]:
        """Take what the victims have, one after another."""
        assert self.sharing.observe(self.running, 8) == (len(self.tenants.active) > 1)
        found = []
        for victim in self.sharing.victims(self.waiting, is_full=is_full, lacks_memory=lacks_memory):
            assert victim.lease is not None
            self.caches[victim.rank].release(victim.lease)
            self.running.remove(victim)
            found.append(victim)
        return found


def test_one_tenant_takes_nothing_from_itself() -> None:
    shop = Shop()
    for _ in range(8):
        shop.run(A, 1)
    shop.wait(A, 1)
    assert shop.victims(is_full=True, lacks_memory=True) == []


def test_nobody_gives_while_there_is_room() -> None:
    shop = Shop()
    for _ in range(7):
        shop.run(A, 1)
    shop.wait(B, 1)
    assert shop.victims() == []


def test_a_full_house_gives_one_place_to_who_has_less_than_its_share() -> None:
    shop = Shop()
    theirs = [shop.run(A, 1) for _ in range(8)]
    shop.wait(B, 1)
    assert shop.victims(is_full=True) == [theirs[-1]]


def test_who_has_its_share_of_the_places_takes_no_more() -> None:
    shop = Shop()
    for terms in (A, B) * 4:
        shop.run(terms, 1)
    shop.wait(B, 1)
    assert shop.victims(is_full=True) == []


def test_memory_is_taken_from_the_newest_until_one_rank_has_enough() -> None:
    shop = Shop()
    first, second, third = (shop.run(A, 8, rank) for rank in (0, 1, 1))
    shop.wait(B, 15)
    # Rank 1 has 4 blocks, then 12, and the tenant is left with less than its share of 20.
    assert shop.victims(lacks_memory=True) == [third]
    assert shop.running == [first, second]


def test_memory_is_taken_until_the_waiting_request_fits_and_no_further() -> None:
    shop = Shop()
    theirs = [shop.run(A, 9, rank) for rank in (0, 0, 1, 1)]
    shop.wait(B, 10)
    assert shop.victims(lacks_memory=True) == [theirs[3]]


def test_background_requests_give_all_they_have() -> None:
    shop = Shop()
    background = Terms("a", background=True)
    theirs = [shop.run(background, 5) for _ in range(4)]
    shop.wait(A, 20)
    assert shop.victims(lacks_memory=True) == theirs[::-1]


def test_who_held_more_than_its_share_comes_last_among_equal_priorities() -> None:
    shop = Shop()
    greedy = [shop.run(A, 4) for _ in range(5)]
    modest = shop.run(B, 1, 1)
    greedy[4].priority = -1
    shop.victims()
    shop.sharing.sort(shop.running)
    assert shop.running == [greedy[4], modest, *greedy[:4]]


@pytest.mark.parametrize(("share", "most"), [(1.0, 8), (0.5, 4), (0.3, 2), (0.0, 1)])
def test_a_tenant_runs_its_part_of_the_places_and_one_at_least(share: float, most: int) -> None:
    sharing = Shop().sharing
    allowed = [sharing.may_run(Terms("a", running=share), count) for count in range(9)]
    assert allowed == [count < most for count in range(9)]


def test_the_queue_has_a_share_for_everybody_and_one_for_the_background() -> None:
    shop = Shop()
    for _ in range(4):
        shop.wait(A, 1)
    may_wait = shop.sharing.may_wait
    assert may_wait(A, 5)
    assert not may_wait(A, 4)
    assert may_wait(B, 4)
    assert not may_wait(Terms("b", queue=0.0), 9)
    assert may_wait(Terms("a", background=True), 4)


def holdings(amounts: dict[str, list[int]], total: int, background: str = "") -> tuple[Holdings, list[Request]]:
    tenants, running, arrival = Tenants(), [], 0
    for name, of_tenant in amounts.items():
        for amount in of_tenant:
            request = Request(f"{name}{arrival}", array("i", [1] * amount), SamplingParams(1), arrival=arrival)
            request.terms = Terms(name, background=name == background)
            arrival += 1
            tenants.enter(request)
            running.append(request)
    return Holdings(tenants, running, lambda request: request.num_prompt_tokens, total), running


def test_who_holds_most_beyond_its_share_gives_its_newest_first() -> None:
    shares, running = holdings({"a": [10, 20, 30], "b": [25]}, 90)
    assert shares.pop_victim() is running[2]
    assert shares.pop_victim() is None


def test_background_requests_give_first_and_take_nothing() -> None:
    shares, running = holdings({"a": [80], "back": [5, 5], "b": [5]}, 90, "back")
    assert not shares.may_take(running[1], 1)
    assert [shares.pop_victim() for _ in range(4)] == [running[2], running[1], running[0], None]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_taken_for_one_is_not_taken_back_for_the_other(seed: int) -> None:
    random = Random(seed)
    amounts = {name: [random.randrange(1, 30) for _ in range(random.randrange(1, 6))] for name in "abc"}
    shares, running = holdings(amounts, sum(map(sum, amounts.values())))
    taker = random.choice(running)
    amount = random.randrange(1, 30)
    if not shares.may_take(taker, amount):
        return
    while (victim := shares.pop_victim()) is not None:
        assert victim.terms.tenant != taker.terms.tenant
