"""KV between services, without sockets: tickets, leases and fetches, under any order of events."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

from moeserve.kv_transfer import KvTicket, TicketOffice, parse_kv_transfer, read_params
from moeserve.plan import Request, SamplingParams
from moeserve.scheduling.kv_transfer import FetchJob, FetchResult, KvFetches, KvOffers
from radix_cache import PrefixCache
from tests.support.cache_invariants import check_invariants
from tests.support.parameters import first

SIZE = 4
OFFICE = TicketOffice(b"k" * 40, "f", SIZE, "127.0.0.1", 5, lease_s=10.0)


def tokens_of(seed: int, count: int = 21) -> array[int]:
    return array("i", (seed * 7 + i for i in range(count)))


def request_of(number: int, tokens: array[int], ticket: KvTicket | None = None) -> Request:
    return Request(str(number), tokens, SamplingParams(1), ticket=ticket)


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


def compute(cache: PrefixCache, tokens: array[int]) -> None:
    lease = cache.match(tokens)
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
    offers.expire(14.5, lacks_memory=False)
    assert [offers.blocks(one) is not None for one in tickets] == [False, False, True, False, False]
    offers.expire(15.0, lacks_memory=True)
    assert (offers.num_held, cache.num_leased) == (0, 0)
    assert offers.make(request_of(9, tokens_of(1, 4)), 0.0) is None


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
                if fetches.look_up(request, now, draw.randrange(3)):
                    waiting.append(request)
                else:
                    fetches.forgo(request)
                    assert request.ticket is None
            case 2 if waiting:
                request = waiting.pop(draw.randrange(len(waiting)))
                assert fetches.leave(request)
            case 3 if open_jobs:
                job = open_jobs.pop(draw.randrange(len(open_jobs)))
                filled = draw.randint(0, len(job.copies))
                failure = None if filled == len(job.copies) or job.is_cancelled else "gone"
                for request in fetches.end(FetchResult(job, filled, 0.1, failure)):
                    waiting.remove(request)
            case 4:
                for request in fetches.take_overdue(now):
                    waiting.remove(request)
        open_jobs += fetches.take_jobs()
        for job in open_jobs:
            job.is_begun = job.is_begun or draw.random() < 0.2
        assert set(fetches.waiting) == set(waiting)
        check_invariants(cache)
    for request in waiting[:]:
        assert fetches.leave(request)
    for job in open_jobs:
        assert fetches.end(FetchResult(job, 0, 0.1)) == []
    check_invariants(cache)
    assert (cache.num_leased, cache.num_in_copy) == (0, 0)


def test_a_prompt_that_waits_too_long_keeps_the_blocks_that_have_come() -> None:
    cache = PrefixCache(24, SIZE)
    fetches = KvFetches(cache, OFFICE, lambda start, stop: 0.0)
    tokens = tokens_of(1)
    requests = [request_of(number, tokens[:], OFFICE.issue(tokens, 5)) for number in range(2)]
    assert all(fetches.look_up(request, 0.0, 0) for request in requests)
    begun, queued = fetches.take_jobs()
    begun.is_begun = True
    # The request whose job no thread has begun goes on; the other one waits for the thread.
    assert fetches.take_overdue(40.0) == [requests[1]]
    assert (begun.is_cancelled, queued.is_cancelled, fetches.counters.failures["timeout"]) == (True, True, 2)
    assert fetches.take_overdue(41.0) == []
    assert fetches.end(FetchResult(begun, 3, 40.0)) == [requests[0]]
    assert fetches.end(FetchResult(queued, 0, 40.0)) == []
    assert (cache.peek(tokens), cache.num_leased, cache.num_in_copy) == (3 * SIZE, 0, 0)


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
