"""KV between services, without sockets: tickets, leases and fetches, under any order of events."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from math import inf

import pytest

from moeserve.kv_transfer import KvTicket, TicketOffice, parse_kv_transfer, read_params
from moeserve.plan import FinishReason, Request, SamplingParams
from moeserve.scheduling.kv_transfer import FetchJob, FetchResult, KvFetches, KvOffers
from radix_cache import PrefixCache
from tests.support.cache_invariants import check_invariants
from tests.support.parameters import first
from tests.support.scheduler_simulation import Simulation

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
        {"do_remote_prefill": True, "transport": "moeserve-zmq-2", "remote_port": "x", "remote_num_tokens": -1},
        {"do_remote_prefill": True, "transport": "moeserve-zmq-2", "remote_num_tokens": 2**40, "block_size": True},
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


def test_an_early_ticket_grows_with_its_prompt_and_ends_with_it() -> None:
    cache = PrefixCache(40, SIZE)
    offers = KvOffers(cache, OFFICE)
    tokens = tokens_of(1, 42)
    request = request_of(1, tokens)
    compute(cache, tokens[:8])
    request.num_computed_tokens = 8
    ticket = request.offered = offers.make_early(request, 0.0)
    assert ticket is not None
    assert (ticket.num_blocks, ticket.is_early, OFFICE.why_unusable(ticket, tokens)) == (10, True, None)
    found = []
    for number in range(1, 6):
        # Whatever fills memory meanwhile, the blocks of the ticket stay.
        compute(cache, tokens_of(100 * number, 16))
        request.num_computed_tokens = min(8 * (number + 1), 42)
        compute(cache, tokens[: request.num_computed_tokens])
        offers.grow(9.0 * number)
        offers.expire(9.0 * number, lacks_memory=False)
        assert offers.is_growing(ticket.request_id)
        found.append(list(offers.blocks(ticket.request_id) or ()))
    assert all(found[-1][: len(blocks)] == blocks for blocks in found)
    assert offers.make(request, 50.0) == ticket
    assert not offers.is_growing(ticket.request_id)
    assert len(offers.blocks(ticket.request_id) or ()) == 10
    offers.record_fetch(ticket.request_id, 51.0, is_last=True)
    assert (offers.take_unwanted(), offers.num_held, cache.num_leased) == ([], 0, 0)


@pytest.mark.parametrize("way", ["fetched", "late", "lacks memory", "dropped"])
def test_a_prompt_whose_early_ticket_ends_is_wanted_no_more(way: str) -> None:
    cache = PrefixCache(40, SIZE)
    offers = KvOffers(cache, OFFICE)
    tokens = tokens_of(1)
    compute(cache, tokens[:8])
    request = request_of(1, tokens)
    request.num_computed_tokens = 8
    request.offered = offers.make_early(request, 0.0)
    assert request.offered is not None
    match way:
        case "fetched":
            offers.record_fetch(request.offered.request_id, 1.0, is_last=True)
        case "late" | "lacks memory":
            offers.expire(11.0 if way == "late" else 1.0, lacks_memory=way != "late")
        case "dropped":
            request.finished = True
            offers.drop(request)
    assert offers.take_unwanted() == ([] if way == "dropped" else [request])
    assert (offers.num_held, cache.num_leased, offers.take_unwanted()) == (0, 0, [])
    huge = request_of(2, tokens_of(1, 90))
    huge.num_computed_tokens = 8
    assert offers.make_early(huge, 0.0) is None


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


def test_a_running_prompt_keeps_its_early_ticket_while_others_lack_memory() -> None:
    cache = PrefixCache(40, SIZE)
    offers = KvOffers(cache, OFFICE)
    compute(cache, tokens_of(50))
    held = offers.make(request_of(1, tokens_of(50)), 0.0)
    request = request_of(2, tokens_of(1))
    request.lease = cache.match(request.token_ids)
    ticket = request.offered = offers.make_early(request, 0.0)
    assert held is not None
    assert ticket is not None
    for _ in range(3):
        offers.expire(1.0, lacks_memory=True)
    assert (offers.blocks(held.request_id), offers.is_growing(ticket.request_id)) == (None, True)
    # Preempted, it holds blocks that others need.
    cache.release(request.lease)
    request.lease = None
    offers.expire(1.0, lacks_memory=True)
    assert (offers.take_unwanted(), cache.num_leased) == ([request], 0)


def test_an_early_ticket_is_made_before_the_first_step_and_news_are_told_once() -> None:
    cache = PrefixCache(40, SIZE)
    offers = KvOffers(cache, OFFICE)
    request = request_of(1, tokens_of(1))
    ticket = request.offered = offers.make_early(request, 0.0)
    assert ticket is not None
    assert (list(offers.blocks(ticket.request_id) or ()), offers.is_growing(ticket.request_id)) == ([], True)
    offers.grow(1.0)
    assert not offers.take_news()
    compute(cache, request.token_ids[:8])
    request.num_computed_tokens = 8
    offers.grow(2.0)
    assert (offers.take_news(), offers.take_news()) == (True, False)
    compute(cache, request.token_ids)
    request.num_computed_tokens = len(request.token_ids)
    assert offers.make(request, 3.0) == ticket
    assert (len(offers.blocks(ticket.request_id) or ()), offers.take_news()) == (ticket.num_blocks, True)
    offers.record_fetch(ticket.request_id, 4.0, is_last=True)
    assert (offers.take_news(), offers.take_unwanted(), cache.num_leased) == (False, [], 0)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", first(4, range(30)))
def test_prompts_with_early_tickets_are_computed_while_memory_is_scarce(seed: int, depth: int) -> None:
    draw = random.Random(seed)
    office = TicketOffice(b"k" * 40, "f", SIZE, "127.0.0.1", 5, lease_s=inf)
    simulation = Simulation(
        num_blocks=16, block_size=SIZE, budget=7, max_num_seqs=4, depth=depth, run_ahead=depth > 0, office=office
    )
    scheduler = simulation.scheduler
    assert scheduler.transfer is not None
    offers, tickets = scheduler.transfer.offers, list[KvTicket]()
    for number in range(12):
        prompt = [draw.randrange(3) for _ in range(draw.randint(3, 34))]
        is_offered = draw.random() < 0.6
        sampling = SamplingParams(max_tokens=1 if is_offered else draw.randint(1, 12), seed=number)
        simulation.add(f"r{number}", prompt, sampling, offers_kv=is_offered)
    while not scheduler.is_idle:
        simulation.step()
        scheduler.grow_offers()
        for output in scheduler.offer_early():
            ticket = output.request.offered
            assert ticket is not None
            assert (ticket.is_early, output.finish_reason) == (True, FinishReason.LENGTH)
            tickets.append(ticket)
        if tickets and draw.random() < 0.1:
            scheduler.record_fetched(tickets.pop(draw.randrange(len(tickets))).request_id, is_last=True)
        before = [record for record in simulation.records.values() if not record.request.finished]
        scheduler.expire_offers()
        for record in before:
            if record.request.finished:
                record.finish_reason = FinishReason.LATE
        check_invariants(simulation.cache)
    for record in simulation.records.values():
        if (ticket := record.request.offered) is not None and (blocks := offers.blocks(ticket.request_id)) is not None:
            assert len(blocks) == ticket.num_blocks
            offers.record_fetch(ticket.request_id, 0.0, is_last=True)
    assert (offers.num_held, offers.take_unwanted()) == (0, [])
    simulation.check_all_done()
