"""KV that moves between services: prompts whose blocks are held for another service, and blocks that are fetched from
it.

The service that computes a prompt holds its blocks by a lease, which ends when they have been fetched, or with its
time. In the service that decodes, a request with a ticket waits outside the queue while threads fetch its blocks into
leased ones. Then it takes its place again, by its arrival, and finds them as a prefix hit. A failure is counted by its
reason, and the prompt is computed. No sockets and no clock here: threads copy blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from moeserve.kv_transfer import KvTicket, TicketOffice
from moeserve.plan import FinishReason, Request
from moeserve.scheduling.arrivals import Arrival, Job, Result, Source, longest_wait_s
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.parts import Part
from moeserve.scheduling.request_memory import RankLoads
from radix_cache import BlockCopy, Lease, PrefixCache, account_of

_MOST_HELD = 0.5  # share of all blocks; tickets beyond it end leases of the account that holds most for its weight


@dataclass(frozen=True, slots=True)
class _Offer:
    """Blocks that are held for a ticket of an account."""

    account: str
    lease: Lease
    deadline: float


class KvOffers(Part):
    """The prompts whose blocks are held for other services, by the number of their ticket."""

    def __init__(self, cache: PrefixCache, office: TicketOffice) -> None:
        self._cache = cache
        self._office = office
        self._offers: OrderedDict[str, _Offer] = OrderedDict()  # by their deadlines
        self._held: dict[str, Counter[int]] = {}  # by account: the number of its tickets that hold each block
        self._now = 0.0
        self._most_held = int(_MOST_HELD * cache.num_blocks)
        self.num_made = 0
        self.num_expired = 0

    @property
    def num_held(self) -> int:
        """The number of blocks that are held."""
        return len(set[int]().union(*self._held.values()))

    def set_time(self, now: float) -> None:
        self._now = now

    def left(self, output: RequestOutput) -> None:
        """Hold the prompt of a request that is complete, if another service is to have it."""
        request, is_complete = output.request, output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if request.asked.offers_kv and is_complete and request.lease is not None:
            output.offered = self.make(request, self._now)

    def num_held_blocks(self) -> int:
        return self.num_held

    def blocks(self, ticket_id: str) -> Sequence[int] | None:
        """Return the blocks of a ticket, None if they are not held any more. Any thread may call it.

        A thread that finds a block still held after it has copied it has copied the right content.
        """
        offer = self._offers.get(ticket_id)
        return None if offer is None else offer.lease.block_ids

    def make(self, request: Request, now: float) -> KvTicket | None:
        """Hold the blocks of a request's prompt. Return the ticket, None if the prompt has no whole block."""
        prompt = request.token_ids[: request.num_prompt_tokens]
        lease = self._cache.match(prompt, request.namespace)
        if not lease.block_ids:
            self._cache.release(lease)
            return None
        ticket, account = self._office.issue(prompt, len(lease.block_ids)), account_of(request.namespace)
        self._offers[ticket.request_id] = _Offer(account, lease, now + self._office.lease_s)
        self._held.setdefault(account, Counter()).update(lease.block_ids)
        self.num_made += 1
        # Accounts rarely hold public blocks, the only ones in common, in such numbers that each has to be counted once.
        while sum(map(len, self._held.values())) > self._most_held < self.num_held:
            self._expire_oldest(self._held)
        return ticket if ticket.request_id in self._offers else None

    def record_fetch(self, ticket_id: str, now: float, *, is_last: bool) -> None:
        """Record that blocks of a ticket were fetched. is_last: the fetch is over, which ends the lease."""
        offer = self._offers.get(ticket_id)
        if offer is not None and is_last:
            self._end(ticket_id)
        elif offer is not None:
            self._offers[ticket_id] = replace(offer, deadline=now + self._office.lease_s)
            self._offers.move_to_end(ticket_id)

    def expire(self, now: float, lacking: Collection[Request]) -> None:
        """End the leases whose time is over, and another one if requests lack memory.

        lacking: these requests. An account keeps its leases while it has less memory in use than the account of each.
        """
        while self._offers and now > (first := next(iter(self._offers.items())))[1].deadline:
            self._expire(first[0])
        if lacking:
            least = min(self._cache.counts.excess(account_of(request.namespace)) for request in lacking)
            self._expire_oldest([account for account in self._held if self._cache.counts.excess(account) >= least])

    def _expire_oldest(self, accounts: Iterable[str]) -> None:
        """End the oldest lease of the one of these accounts whose tickets hold most for its weight, if there is one."""
        most = max(accounts, key=lambda one: self._cache.counts.excess(one, len(self._held[one])), default=None)
        if most is not None:
            self._expire(next(ticket_id for ticket_id, offer in self._offers.items() if offer.account == most))

    def _expire(self, ticket_id: str) -> None:
        self.num_expired += 1
        self._end(ticket_id)

    def _end(self, ticket_id: str) -> None:
        # Threads must not find it any more when its blocks are given to others.
        offer = self._offers.pop(ticket_id)
        held = self._held[offer.account]
        held.subtract(offer.lease.block_ids)
        for block in offer.lease.block_ids:
            if not held[block]:
                del held[block]
        if not held:
            del self._held[offer.account]
        self._cache.release(offer.lease)


@dataclass(eq=False, slots=True)
class FetchJob(Job):
    """Blocks to be fetched into memory, in their order, the first of them number `first` of the ticket.

    A job without blocks ends the lease.
    """

    ticket: KvTicket
    first: int = 0
    copies: Sequence[BlockCopy] = ()


@dataclass(slots=True)
class FetchCounters:
    """Totals since the start. failures: requests that could not fetch their blocks and computed them, by reason."""

    num_tokens: int = 0
    num_blocks: int = 0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)


class KvFetches(Source[FetchJob]):
    """The requests that wait until blocks of their prompts have been fetched from other services."""

    def __init__(self, cache: PrefixCache, office: TicketOffice, compute_s: Callable[[int, int], float]) -> None:
        """compute_s: returns the seconds that computing tokens takes, from one position to another."""
        super().__init__()
        self._cache = cache
        self._office = office
        self._compute_s = compute_s
        self._coming: dict[str, Arrival[FetchJob]] = {}  # by the number of the ticket
        self._returns: list[FetchJob] = []
        self.counters = FetchCounters()
        # The services, by host and port, whose tickets had another fingerprint. Their tickets were signed with the key.
        self.unlike: set[tuple[str, int]] = set()

    def check(self, request: Request) -> None:
        """Remove the ticket of a new request if it cannot serve it, and count the reason."""
        ticket = request.asked.ticket
        failure = None if ticket is None else self._office.why_unusable(ticket, request.token_ids)
        if ticket is not None and failure is not None:
            self.counters.failures[failure] += 1
            if failure == "fingerprint":
                self.unlike.add((ticket.host, ticket.port))
            _take_ticket(request)

    def num_held(self, request: Request) -> int:
        """Count the request's tokens that another service holds for it, by its ticket."""
        ticket = request.asked.ticket
        return 0 if ticket is None else min(ticket.num_blocks * self._cache.block_size, len(request.token_ids) - 1)

    def num_found(self, request: Request) -> int:
        return self.num_held(request)

    def is_looked_for(self, request: Request) -> bool:
        return request in self.arrivals.waiting

    def concerns(self, request: Request) -> bool:
        return request.asked.ticket is not None

    def look_up(self, request: Request, now: float, loads: RankLoads, num_running: int) -> bool:
        """Return whether a request of the queue waits, from now on, until the blocks of its ticket have been fetched.

        See `Source` for the arguments.
        """
        ticket = request.asked.ticket
        if ticket is None:
            return False
        num_spoken_for = loads.num_spoken_for(request)
        fetch = self._coming.get(ticket.request_id)
        if fetch is None:
            if self.lacks_room(request, self._cache, num_spoken_for):
                return False
            if request.wants_prompt_logprobs or self.num_lacking(request) <= 0:
                self.give_back(request)
                return False
            fetch = self._begin(request, ticket, now, num_spoken_for)
        if fetch is None or fetch.job.is_cancelled:
            # There is no room yet, or another request has just ended its fetch of these blocks.
            return False
        _take_ticket(request)
        self.arrivals.wait(request, fetch)
        return True

    def started(self, request: Request) -> None:
        """Record that a request is computed; if it has its ticket still, its blocks found no memory before."""
        if request.asked.ticket is not None:
            self.counters.failures["memory"] += 1
            self.give_back(request)

    def take_overdue(self, now: float) -> list[Request]:
        """Return the requests that have waited too long; they are to be computed."""
        num_late, overdue = self.arrivals.take_overdue(now)
        if num_late:
            self.counters.failures["timeout"] += num_late
        return overdue

    def take_jobs(self, now: float, num_running: int) -> list[FetchJob]:
        jobs, self._returns = self._returns + self.arrivals.take_jobs(), []
        return jobs

    def end(self, result: Result[FetchJob], now: float) -> list[Request]:
        job, counters = result.job, self.counters
        if not job.copies:
            return []
        fetch, requests = self.arrivals.end(job)
        assert fetch.fill is not None
        del self._coming[job.ticket.request_id]
        num_filled = len(result.num_bytes)
        counters.num_blocks += num_filled
        counters.num_tokens += num_filled * self._cache.block_size
        counters.seconds += result.seconds
        if result.error is not None:
            counters.failures[result.error] += 1
        fetch.fill.end(num_filled)
        return requests

    def num_lacking(self, request: Request) -> int:
        """Count the request's tokens that another service holds for it and that are not cached here."""
        size = self._cache.block_size
        return self.num_held(request) // size * size - self._cache.peek(request.token_ids, request.namespace)

    def left(self, output: RequestOutput) -> None:
        super().left(output)
        self.give_back(output.request)

    def give_back(self, request: Request) -> None:
        """End the lease of a request's ticket, if it has one still: the other service need not hold the blocks."""
        ticket = _take_ticket(request)
        if ticket is not None and ticket.request_id not in self._coming:
            self._returns.append(FetchJob(ticket))

    def _begin(self, request: Request, ticket: KvTicket, now: float, num_spoken_for: int) -> Arrival[FetchJob] | None:
        size = self._cache.block_size
        stop = self.num_held(request) // size
        fill = self.begin_fill(request, self._cache, stop, num_spoken_for)
        if fill is None:
            return None
        deadline = now + longest_wait_s(self._compute_s(fill.first * size, stop * size))
        fetch = self.arrivals.begin(FetchJob(ticket, fill.first, fill.copies), deadline, fill)
        self._coming[ticket.request_id] = fetch
        return fetch


def _take_ticket(request: Request) -> KvTicket | None:
    """Return the ticket of a request, which has none from now on."""
    ticket = request.asked.ticket
    if ticket is not None:
        request.asked = replace(request.asked, ticket=None)
    return ticket
