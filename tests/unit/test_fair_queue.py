"""Whose turn it is: against a brute-force oracle, and what holds for every script."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from moeserve.plan import DEFAULT_TERMS, Request, SamplingParams, Terms
from moeserve.scheduling.fair_queue import Tenant, Tenants, WaitingQueue


class Line:
    """A queue whose requests are served whole, one after another; `arrivals` numbers them."""

    def __init__(self) -> None:
        self.tenants = Tenants()
        self.late = False
        self.queue = WaitingQueue(self.tenants, lambda _: self.late)
        self.arrivals = 0

    def add(self, terms: Terms = DEFAULT_TERMS, tokens: int = 10, priority: int = 0) -> Request:
        request = Request(f"{self.arrivals}", array("i", [1] * tokens), SamplingParams(1), priority=priority)
        request.terms, request.arrival = terms, self.arrivals
        self.arrivals += 1
        self.tenants.enter(request)
        self.queue.add(request)
        return request

    def serve(self, num_tokens: int | None = None) -> Request:
        """Serve the next request: `num_tokens` in all, its prompt unless given."""
        request = next(self.queue.candidates())
        self.queue.remove(request)
        self.tenants.charge(request, num_tokens or request.num_prompt_tokens)
        self.tenants.leave(request)
        return request


class Oracle:
    """The same rules in the plainest form: look at everything, each time."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self.waiting: list[Request] = []
        self.floor = 0.0

    def add(self, request: Request) -> None:
        name = request.terms.tenant
        active = {other.terms.tenant for other in self.waiting}
        if active:
            self.floor = max(self.floor, min(self.served[other] for other in active))
        if name not in active:
            self.served[name] = max(self.served.get(name, 0.0), self.floor)
        self.waiting.append(request)

    def serve(self, num_tokens: int) -> Request:
        urgent = min(request.priority for request in self.waiting)
        firsts: dict[str, Request] = {}
        for request in sorted(self.waiting, key=lambda request: request.arrival):
            if request.priority == urgent:
                firsts.setdefault(request.terms.tenant, request)
        chosen = min(firsts.values(), key=lambda request: (self.served[request.terms.tenant], request.arrival))
        self.served[chosen.terms.tenant] += num_tokens / chosen.terms.weight
        active = {other.terms.tenant for other in self.waiting}
        self.waiting.remove(chosen)
        if chosen.terms.tenant not in {other.terms.tenant for other in self.waiting}:
            self.floor = max(self.floor, min(self.served[other] for other in active))
        return chosen


@pytest.mark.parametrize("seed", range(15))
def test_the_order_is_that_of_the_oracle(seed: int) -> None:
    random, line, oracle = Random(seed), Line(), Oracle()
    tenants = [Terms(f"t{number}", weight=random.choice([0.5, 1.0, 3.0])) for number in range(4)]
    for _ in range(300):
        if oracle.waiting and random.random() < 0.5:
            tokens = random.randrange(1, 500)
            expected = oracle.serve(tokens)
            assert line.serve(tokens) is expected
        else:
            request = line.add(random.choice(tenants), random.randrange(1, 100), random.choice([0, 0, 0, 1, -1]))
            oracle.add(request)


@pytest.mark.parametrize("seed", range(5))
def test_tenants_that_always_have_requests_get_tokens_by_their_weights(seed: int) -> None:
    random, line = Random(seed), Line()
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    got = dict.fromkeys(weights, 0)
    for name, weight in weights.items():
        for _ in range(3):
            line.add(Terms(name, weight=weight), random.randrange(1, 300))
    for _ in range(4000):
        tokens = random.randrange(1, 400)
        name = line.serve(tokens).terms.tenant
        got[name] += tokens
        line.add(Terms(name, weight=weights[name]), random.randrange(1, 300))
    shares = {name: got[name] / weight for name, weight in weights.items()}
    assert max(shares.values()) - min(shares.values()) < 2 * 400


@pytest.mark.parametrize("seed", range(5))
def test_nobody_waits_longer_than_for_as_much_as_others_of_equal_weight_may_have(seed: int) -> None:
    random, line = Random(seed), Line()
    for _ in range(50):
        line.add(Terms("flood"), random.randrange(1, 100))
    waiting: dict[str, int] = {}
    for turn in range(500):
        if turn % 20 == 0:
            mine = line.add(Terms(f"quiet {turn % 3}"), 10)
            waiting[mine.request_id] = turn
        served = line.serve(random.randrange(1, 100))
        line.add(Terms("flood"), random.randrange(1, 100))
        began = waiting.pop(served.request_id, None)
        assert began is None or turn - began <= 2
    assert len(waiting) <= 1


def test_idleness_earns_nothing() -> None:
    line = Line()
    quiet, busy = Terms("quiet"), Terms("busy")
    line.add(quiet)
    line.serve()
    for _ in range(50):
        line.add(busy)
        line.serve()
    for _ in range(10):
        line.add(busy)
        line.add(quiet)
    assert [line.serve().terms.tenant for _ in range(20)] == ["busy", "quiet"] * 10


def test_a_debt_is_remembered_while_others_have_requests() -> None:
    line = Line()
    line.add(Terms("b"))
    line.add(Terms("a"))
    line.add(Terms("b"))
    assert line.serve(1000).terms.tenant == "b"
    for _ in range(3):
        line.add(Terms("a"))
    assert [line.serve(10).terms.tenant for _ in range(5)] == ["a"] * 4 + ["b"]


def test_the_newest_is_next_where_the_oldest_is_late_but_after_those_that_have_begun() -> None:
    line = Line()
    requests = [line.add() for _ in range(4)]
    patient = line.add(Terms(patient=True))
    requests[1].num_preemptions = 1
    line.late = True
    assert list(line.queue.candidates()) == [requests[1], patient, requests[3], requests[2], requests[0]]


def test_a_tenant_is_told_from_its_background() -> None:
    line = Line()
    front, back = line.add(Terms("a")), line.add(Terms("a", background=True))
    assert line.tenants.of(front) is not line.tenants.of(back)
    assert isinstance(line.tenants.of(front), Tenant)
    assert line.tenants.share(front.terms) == 1.0
