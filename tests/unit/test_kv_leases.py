"""KV between services, without sockets: tickets, leases and fetches, under any order of events."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from math import inf

import pytest

from moeserve.kv_transfer import KvTicket, TicketOffice, parse_kv_transfer, read_params
from moeserve.plan import DEFAULT_TERMS, Asked, Request, SamplingParams
from moeserve.scheduling.arrivals import Result
from moeserve.scheduling.kv_transfer import FetchJob, KvFetches, KvOffers
from moeserve.scheduling.request_memory import RankLoads
from radix_cache import PrefixCache
from tests.support.cache_invariants import check_invariants
from tests.support.parameters import first
from tests.support.scheduler_simulation import Simulation

SIZE = 4
OFFICE = TicketOffice(b"k" * 40, "f", SIZE, "127.0.0.1", 5, lease_s=10.0)


def tokens_of(seed: int, count: int = 21) -> array[int]:
    return array("i", (seed * 7 + i for i in range(count)))


def request_of(number: int, tokens: array[int], ticket: KvTicket | None = None, namespace: str = "") -> Request:
    return Request(str(number), tokens, SamplingParams(1), namespace, asked=Asked(ticket=ticket))


class Spoken(RankLoads):
    """The loads of running requests that will need some blocks."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__([], [])
        self._num_blocks = num_blocks

    def num_spoken_for(self, request: Request) -> int:
        return self._num_blocks


def test_a_ticket_survives_its_json_and_serves_its_tokens_alone() -> None:
    tokens = tokens_of(1)
    ticket = OFFICE.issue(tokens, 5)
    assert read_params(ticket.params()) == (False, ticket)
    assert OFFICE.why_unusable(ticket, tokens) is None
    assert OFFICE.why_unusable(ticket, tokens_of(2)) == "prompt"
    assert OFFICE.why_unusable(replace(ticket, port=6), tokens) == "foreign"
    assert OFFICE.why_unusable(replace(ticket, signature="é"), tokens) == "foreign"
    assert TicketOffice(b"k" * 40, "g", SIZE, "h", 1, lease_s=10.0).why_unusable(ticket, tokens) == "fingerprint"
    assert TicketOffice(b"o" * 40, "f", SIZE, "h", 1, lease_s=10.0).why_unusable(ticket, tokens) == "foreign"


def test_a_ticket_without_end_survives_its_json() -> None:
    office = TicketOffice(b"k" * 40, "f", SIZE, "127.0.0.1", 5, lease_s=inf)
    _, ticket = read_params(office.issue(tokens_of(1), 5).params())
    assert ticket is not None
    assert office.why_unusable(ticket, tokens_of(1)) is None


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "transport": "moeserve-zmq-3", "remote_port": "x", "remote_num_tokens": -1},
        {"do_remote_prefill": True, "transport": "moeserve-zmq-3", "remote_num_tokens": 2**40, "block_size": True},
    ],
)
def test_odd_parameters_make_a_ticket_that_serves_nothing(params: dict[str, object]) -> None:
    _, ticket = read_params(params)
    assert ticket is not None
    assert OFFICE.why_unusable(ticket, tokens_of(1)) == "foreign"


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("{}", "key_file is missing"),
        ('{"key_file": "k", "kv_port": 70000}', "above 65535"),
        ('{"key_file": "k", "kv_ip": "0.0.0.0"}', "address at which the other services connect"),
        ('{"key_file": "k", "kv_role": "kv_both"}', "is not one of key_file"),
        ('{"key_file": "k", "lease_seconds": 0}', "a number above 0"),
    ],
)
def test_a_wrong_setting_is_refused_in_a_clause(text: str, clause: str) -> None:
    with pytest.raises(ValueError, match=clause):
        parse_kv_transfer(text)


def compute(cache: PrefixCache, tokens: array[int], namespace: str = "") -> None:
    lease = cache.match(tokens, namespace)
    assert cache.extend(lease, -(-len(tokens) // SIZE) - len(lease.block_ids)) is not None
    cache.free(cache.publish(lease, tokens, len(tokens)))
    cache.release(lease)


def test_leases_end_by_fetch_by_time_and_by_need() -> None:
    cache = PrefixCache(40, SIZE)
    offers = KvOffers(cache, OFFICE)
    tickets = []
    for number in range(5):
        compute(cache, tokens_of(10 * number))
        ticket = offers.make(request_of(number, tokens_of(10 * number)), float(number))
        assert ticket is not None
        tickets.append(ticket.request_id)
    # At most half of the blocks are held.
    assert (offers.num_held, offers.blocks(tickets[0])) == (20, None)
    offers.record_fetch(tickets[1], 11.0, is_last=True)
    offers.record_fetch(tickets[2], 11.0, is_last=False)
    offers.expire(14.5, [])
    assert [offers.blocks(one) is not None for one in tickets] == [False, False, True, False, False]
    offers.expire(15.0, [request_of(10, tokens_of(3))])
    assert (offers.num_held, cache.counts.num_leased) == (0, 0)
    assert offers.make(request_of(9, tokens_of(1, 4)), 0.0) is None


def offer(cache: PrefixCache, offers: KvOffers, number: int, namespace: str) -> str:
    """Compute a prompt of five blocks, and return the number of its ticket."""
    compute(cache, tokens_of(10 * number), namespace)
    ticket = offers.make(request_of(number, tokens_of(10 * number), namespace=namespace), 0.0)
    assert ticket is not None
    return ticket.request_id


def test_the_tickets_of_one_account_end_none_of_another_that_holds_less() -> None:
    cache = PrefixCache(40, SIZE)
    offers = KvOffers(cache, OFFICE)
    bobs = offer(cache, offers, 0, "bob")
    # Names within an account are the account's.
    alices = [offer(cache, offers, number, f"alice/{number}") for number in range(1, 11)]
    assert [number for number, one in enumerate(alices) if offers.blocks(one) is not None] == [7, 8, 9]
    assert offers.blocks(bobs) is not None
    assert offers.num_held == 20


def test_the_weight_of_an_account_is_that_of_its_tickets() -> None:
    cache = PrefixCache(40, SIZE)
    offers = KvOffers(cache, OFFICE)
    cache.share("alice", 3.0, 1.0)
    bobs = [offer(cache, offers, number, "bob") for number in range(2)]
    alices = [offer(cache, offers, number, "alice") for number in range(2, 8)]
    assert [offers.blocks(one) is not None for one in bobs] == [False, True]
    assert [offers.blocks(one) is not None for one in alices] == [False] * 3 + [True] * 3


def test_requests_that_lack_memory_end_tickets_of_accounts_with_as_much_in_use() -> None:
    cache = PrefixCache(40, SIZE)
    offers = KvOffers(cache, OFFICE)
    bobs, alices = offer(cache, offers, 0, "bob"), offer(cache, offers, 1, "alice")
    running = cache.match(tokens_of(10), "alice/x")
    assert cache.extend(running, 8) is not None
    lacks = request_of(9, tokens_of(90), namespace="alice")
    for _ in range(3):
        offers.expire(0.0, [lacks])
    assert (offers.blocks(bobs) is None, offers.blocks(alices)) == (False, None)
    # Carol has nothing, and gets what others hold.
    offers.expire(0.0, [lacks, request_of(8, tokens_of(80), namespace="carol")])
    assert offers.blocks(bobs) is None
    cache.release(running)
    assert cache.counts.num_leased == 0


def test_a_fetched_lease_is_no_longer_the_oldest() -> None:
    cache = PrefixCache(40, SIZE)
    offers = KvOffers(cache, OFFICE)
    tickets = [offer(cache, offers, number, "bob") for number in range(3)]
    offers.record_fetch(tickets[0], 5.0, is_last=False)
    offers.expire(10.5, [])
    assert [offers.blocks(one) is not None for one in tickets] == [True, False, False]


@pytest.mark.parametrize("seed", first(4, range(20)))
def test_as_many_blocks_are_held_as_the_tickets_of_all_accounts_have(seed: int) -> None:
    draw = random.Random(seed)
    cache = PrefixCache(60, SIZE)
    offers = KvOffers(cache, OFFICE)
    tickets: list[str] = []
    now = 0.0
    for number in range(150):
        now += draw.choice((0.0, 1.0, 4.0))
        cache.set_time(now)
        match draw.randrange(4):
            case 0 | 1:
                namespace = draw.choice(("a", "b", "b/x"))
                tokens = array("i", (draw.randrange(2) for _ in range(draw.randint(4, 40))))
                compute(cache, tokens, namespace)
                ticket = offers.make(request_of(number, tokens, namespace=namespace), now)
                tickets += [] if ticket is None else [ticket.request_id]
            case 2 if tickets:
                offers.record_fetch(draw.choice(tickets), now, is_last=draw.random() < 0.5)
            case 3:
                lacking = [request_of(0, tokens_of(1), namespace=one) for one in ("a", "c") if draw.random() < 0.1]
                offers.expire(now, lacking)
        held = {block for ticket_id in tickets for block in offers.blocks(ticket_id) or ()}
        assert offers.num_held == len(held) == cache.counts.num_leased <= 30
        check_invariants(cache)
    offers.expire(now + 11.0, [])
    assert (offers.num_held, cache.counts.num_leased) == (0, 0)


def test_a_ticket_serves_nobody_once_its_lease_has_to_be_over() -> None:
    now, tokens = 1e9, tokens_of(1)
    office = TicketOffice(b"k" * 40, "f", SIZE, "127.0.0.1", 5, lease_s=10.0, clock=lambda: now)
    ticket = office.issue(tokens, 5)
    # Clocks of machines differ by minutes.
    now += 300.0
    assert office.why_unusable(ticket, tokens) is None
    now += 20.0
    assert office.why_unusable(ticket, tokens) == "old"
    assert office.why_unusable(replace(ticket, use_by=2 * ticket.use_by), tokens) == "foreign"


def test_services_with_another_fingerprint_are_known_by_their_address() -> None:
    fetches = KvFetches(PrefixCache(24, SIZE), OFFICE, lambda start, stop: 0.0)
    tokens = tokens_of(1)
    other = TicketOffice(b"k" * 40, "g", SIZE, "h", 6, lease_s=10.0)
    stranger = TicketOffice(b"o" * 40, "g", SIZE, "h", 7, lease_s=10.0)
    for office in (OFFICE, other, other, stranger):
        fetches.check(request_of(1, tokens, office.issue(tokens, 5)))
    assert fetches.unlike == {("h", 6)}
    assert fetches.counters.failures == {"fingerprint": 2, "foreign": 1}


@pytest.mark.parametrize("seed", first(8, range(40)))
def test_whatever_happens_to_fetches_no_block_is_lost_and_each_request_returns_once(seed: int) -> None:
    draw = random.Random(seed)
    cache = PrefixCache(24, SIZE)
    fetches = KvFetches(cache, OFFICE, lambda start, stop: 0.0)
    queued: list[Request] = []
    waiting: list[Request] = []
    open_jobs: list[FetchJob] = []
    now = 0.0
    tickets = [(tokens_of(100 * n, draw.randint(6, 30)), n) for n in range(4)]
    issued = [(tokens, OFFICE.issue(tokens, (len(tokens) - 1) // SIZE)) for tokens, _ in tickets]
    for number in range(200):
        now += draw.choice((0.0, 1.0, 40.0 if draw.random() < 0.1 else 0.0))
        match draw.randrange(5):
            case 0:
                tokens, ticket = draw.choice(issued)
                request = request_of(number, tokens[:], ticket)
                fetches.check(request)
                queued.append(request)
            case 1 if queued:
                request = queued.pop(draw.randrange(len(queued)))
                if fetches.look_up(request, now, Spoken(draw.randrange(3)), 0):
                    waiting.append(request)
                else:
                    fetches.started(request)
                    assert request.asked.ticket is None
            case 2 if waiting:
                request = waiting.pop(draw.randrange(len(waiting)))
                assert fetches.arrivals.leave(request)
            case 3 if open_jobs:
                job = open_jobs.pop(draw.randrange(len(open_jobs)))
                filled = draw.randint(0, len(job.copies))
                failure = None if filled == len(job.copies) or job.is_cancelled else "gone"
                for request in fetches.end(Result(job, [1] * filled, 0.1, failure), 0.0):
                    waiting.remove(request)
            case 4:
                for request in fetches.take_overdue(now):
                    waiting.remove(request)
        open_jobs += fetches.take_jobs(0.0, 0)
        for job in open_jobs:
            job.is_begun = job.is_begun or draw.random() < 0.2
        assert set(fetches.arrivals.waiting) == set(waiting)
        check_invariants(cache)
    for request in waiting[:]:
        assert fetches.arrivals.leave(request)
    for job in open_jobs:
        assert fetches.end(Result(job, [1] * 0, 0.1), 0.0) == []
    check_invariants(cache)
    assert (cache.counts.num_leased, cache.copies.num_in_copy) == (0, 0)


def test_a_prompt_that_waits_too_long_keeps_the_blocks_that_have_come() -> None:
    cache = PrefixCache(24, SIZE)
    fetches = KvFetches(cache, OFFICE, lambda start, stop: 0.0)
    tokens = tokens_of(1)
    requests = [request_of(number, tokens[:], OFFICE.issue(tokens, 5)) for number in range(2)]
    assert all(fetches.look_up(request, 0.0, Spoken(0), 0) for request in requests)
    begun, queued = fetches.take_jobs(0.0, 0)
    begun.is_begun = True
    # The request whose job no thread has begun goes on; the other one waits for the thread.
    assert fetches.take_overdue(40.0) == [requests[1]]
    assert (begun.is_cancelled, queued.is_cancelled, fetches.counters.failures["timeout"]) == (True, True, 2)
    assert fetches.take_overdue(41.0) == []
    assert fetches.end(Result(begun, [1] * 3, 40.0), 0.0) == [requests[0]]
    assert fetches.end(Result(queued, [1] * 0, 40.0), 0.0) == []
    assert (cache.peek(tokens), cache.counts.num_leased, cache.copies.num_in_copy) == (3 * SIZE, 0, 0)


def test_prompts_that_begin_alike_hold_their_common_blocks_once() -> None:
    cache = PrefixCache(40, SIZE)
    offers = KvOffers(cache, OFFICE)
    common, tickets = tokens_of(1, 57), []
    for number in range(5):
        tokens = common[:56] + array("i", [number] * 5)
        compute(cache, tokens)
        tickets.append(offers.make(request_of(number, tokens), 0.0))
    assert all(ticket is not None and offers.blocks(ticket.request_id) for ticket in tickets)
    assert offers.num_held == 14 + 5


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", first(4, range(30)))
def test_all_requests_end_while_tickets_of_several_accounts_hold_much_of_a_scarce_memory(seed: int, depth: int) -> None:
    draw = random.Random(seed)
    office = TicketOffice(b"k" * 40, "f", SIZE, "127.0.0.1", 5, lease_s=inf)
    simulation = Simulation(
        num_blocks=16, block_size=SIZE, budget=7, max_num_seqs=4, depth=depth, run_ahead=depth > 0, office=office
    )
    scheduler = simulation.scheduler
    assert simulation.offers is not None
    offers, tickets = simulation.offers, set[str]()
    for number in range(20):
        prompt, account = [draw.randrange(3) for _ in range(draw.randint(3, 34))], draw.choice("abc")
        sampling = SamplingParams(max_tokens=draw.randint(1, 12), seed=number)
        terms = replace(DEFAULT_TERMS, tenant=account)
        is_offered = draw.random() < 0.6
        simulation.add(f"r{number}", prompt, sampling, namespace=account, terms=terms, offers_kv=is_offered)
    tickets = set[str]()
    while not scheduler.is_idle:
        outputs = simulation.step()
        tickets |= {output.offered.request_id for output in outputs if output.offered is not None}
        if tickets and draw.random() < 0.1:
            offers.record_fetch(draw.choice(sorted(tickets)), 0.0, is_last=True)
        offers.expire(0.0, scheduler.lacking)
        check_invariants(simulation.cache)
        assert offers.num_held <= 8
    for ticket_id in tickets:
        offers.record_fetch(ticket_id, 0.0, is_last=True)
    assert offers.num_held == 0
    simulation.check_all_done()
