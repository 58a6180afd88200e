"""KV that moves between services: prompts whose blocks are held for another service, and blocks that are fetched from
it.

The service that computes a prompt holds its blocks by a lease, which ends when they have been fetched, or with its
time. In the service that decodes, a request with a ticket waits outside the queue while threads fetch its blocks into
leased ones. Then it takes its place again, by its arrival, and finds them as a prefix hit. A failure is counted by its
reason, and the prompt is computed. An early ticket serves while its prompt is still computed: the request has been
answered then and is computed for the other service alone. No sockets and no clock here: threads copy blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from moeserve.kv_transfer import KvTicket, TicketOffice
from moeserve.plan import Request
from moeserve.scheduling.lower_tier import longest_wait_s
from radix_cache import BlockCopy, Fill, Lease, PrefixCache, begin_fill, end_fill, is_still_full

_MOST_HELD = 0.5  # share of all blocks that are held for other services; beyond it the oldest leases end
_EARLY_WAITS = 3  # times that wait for an early ticket, whose prompt the other service still computes among others


@dataclass(slots=True)
class _Offer:
    """Blocks that are held. request: the request while it still computes the prompt, else None; `num_seen` of its
    tokens had been computed when the lease began."""

    lease: Lease
    deadline: float
    request: Request | None = None
    num_seen: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.lease.block_ids)


class KvOffers:
    """The prompts whose blocks are held for other services, by the number of their ticket."""

    def __init__(self, cache: PrefixCache, office: TicketOffice) -> None:
        self._cache = cache
        self._office = office
        self._offers: dict[str, _Offer] = {}
        self._unwanted: list[Request] = []
        self._has_news = False
        self._most_held = int(_MOST_HELD * cache.num_blocks)
        self.num_made = 0
        self.num_early = 0
        self.num_expired = 0

    @property
    def num_held(self) -> int:
        """The number of blocks that are held."""
        return len({block for offer in self._offers.values() for block in offer.lease.block_ids})

    def blocks(self, ticket_id: str) -> Sequence[int] | None:
        """Return the blocks of a ticket, None if they are not held any more. Any thread may call it.

        A thread that finds a block still held after it has copied it has copied the right content.
        """
        offer = self._offers.get(ticket_id)
        return None if offer is None else offer.lease.block_ids

    def is_growing(self, ticket_id: str) -> bool:
        """Return whether further blocks of a ticket are still computed. Any thread may call it, before `blocks`: if
        this is false, `blocks` returns all blocks that there will be."""
        offer = self._offers.get(ticket_id)
        return offer is not None and offer.request is not None

    def computed_for(self, ticket_id: str) -> str | None:
        """Return the id of the request that still computes the prompt of a ticket. Any thread may call it."""
        offer = self._offers.get(ticket_id)
        request = None if offer is None else offer.request
        return None if request is None else request.request_id

    def make(self, request: Request, now: float) -> KvTicket | None:
        """Hold the blocks of a request's prompt; return the ticket, None if the prompt has no whole block."""
        if request.offered is not None:
            self._grow(request.offered.request_id, now)
            if (offer := self._offers.get(request.offered.request_id)) is not None:
                offer.request = None
                self._has_news = True
            return request.offered
        prompt = request.token_ids[: request.num_prompt_tokens]
        lease = self._cache.match(prompt, request.namespace)
        if not lease.block_ids:
            self._cache.release(lease)
            return None
        return self._hold(self._office.issue(prompt, len(lease.block_ids)), _Offer(lease, now + self._office.lease_s))

    def make_early(self, request: Request, now: float) -> KvTicket | None:
        """Hold the blocks of a request's prompt from now on, as they are computed; return the ticket, None if they are
        more than may be held."""
        prompt = request.token_ids[: request.num_prompt_tokens]
        num_blocks = (len(prompt) - 1) // self._cache.block_size
        if not 0 < num_blocks <= self._most_held:
            return None
        lease = self._computed(request)
        self.num_early += 1
        offer = _Offer(lease, now + self._office.lease_s, request, request.num_computed_tokens)
        return self._hold(self._office.issue(prompt, num_blocks, is_early=True), offer)

    def grow(self, now: float) -> None:
        """Extend the leases of prompts with early tickets by the tokens computed since the last call."""
        for ticket_id in [one for one, offer in self._offers.items() if offer.request is not None]:
            self._grow(ticket_id, now)
        self._keep_bound()

    def take_news(self) -> bool:
        """Return whether early tickets got further blocks, or are complete, since the last call."""
        has_news, self._has_news = self._has_news, False
        return has_news

    def drop(self, request: Request) -> None:
        """Record that the prompt of an early ticket will not be computed."""
        if request.offered is not None and request.offered.request_id in self._offers:
            self._end(request.offered.request_id)

    def take_unwanted(self) -> list[Request]:
        """Return the requests with early tickets whose blocks no service waits for any more."""
        unwanted, self._unwanted = self._unwanted, []
        return [request for request in unwanted if not request.finished]

    def _hold(self, ticket: KvTicket, offer: _Offer) -> KvTicket | None:
        self._offers[ticket.request_id] = offer
        self.num_made += 1
        self._keep_bound()
        return ticket if ticket.request_id in self._offers else None

    def _keep_bound(self) -> None:
        # Prompts that begin alike hold the same blocks, which are rarely so many that they have to be counted.
        while sum(offer.num_blocks for offer in self._offers.values()) > self._most_held < self.num_held:
            self._expire(next(iter(self._offers)))

    def _computed(self, request: Request) -> Lease:
        """Return a lease of the blocks of a request's prompt that are computed, but for the last token's."""
        num_tokens = min(request.num_computed_tokens + 1, request.num_prompt_tokens)
        return self._cache.match(request.token_ids[:num_tokens], request.namespace)

    def _grow(self, ticket_id: str, now: float) -> None:
        offer = self._offers.get(ticket_id)
        if offer is None or offer.request is None:
            return
        request, before = offer.request, offer.lease
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if num_tokens > offer.num_seen:
            # Threads find the longer lease before the shorter one ends.
            offer.lease = self._computed(request)
            offer.deadline, offer.num_seen = now + self._office.lease_s, num_tokens
            self._cache.release(before)
            self._has_news = True

    def record_fetch(self, ticket_id: str, now: float, *, is_last: bool) -> None:
        """Record that blocks of a ticket were fetched. is_last: the fetch is over, which ends the lease."""
        offer = self._offers.get(ticket_id)
        if offer is not None and is_last:
            self._end(ticket_id)
        elif offer is not None:
            offer.deadline = now + self._office.lease_s

    def expire(self, now: float, *, lacks_memory: bool) -> None:
        """End the leases whose time is over. If requests lack memory, end the oldest one, except leases of running
        requests: these need the blocks themselves."""
        for ticket_id in [one for one, offer in self._offers.items() if now > offer.deadline]:
            self._expire(ticket_id)
        if lacks_memory:
            offers = self._offers.items()
            oldest = next((one for one, offer in offers if offer.request is None or offer.request.lease is None), None)
            if oldest is not None:
                self._expire(oldest)

    def _expire(self, ticket_id: str) -> None:
        self.num_expired += 1
        self._end(ticket_id)

    def _end(self, ticket_id: str) -> None:
        # Threads must not find it any more when its blocks are given to others.
        offer = self._offers.pop(ticket_id)
        if offer.request is not None:
            self._unwanted.append(offer.request)
            self._has_news = True
        self._cache.release(offer.lease)


@dataclass(eq=False, slots=True)
class FetchJob:
    """Blocks to be fetched into memory, in their order, the first of them number `first` of the ticket.

    A job without blocks ends the lease. is_cancelled: further blocks are not wanted. is_begun: a thread fetches them,
    and ends the job soon after it is cancelled.
    """

    ticket: KvTicket
    first: int = 0
    copies: Sequence[BlockCopy] = ()
    is_cancelled: bool = False
    is_begun: bool = False


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The end of a job. failure: a word for the reason if not all of its blocks were fetched."""

    job: FetchJob
    num_filled: int
    seconds: float
    failure: str | None = None


@dataclass(slots=True)
class FetchCounters:
    """Totals since the start. failures: requests that could not fetch their blocks and computed them, by reason."""

    num_tokens: int = 0
    num_blocks: int = 0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False, slots=True)
class _Fetch:
    """Blocks that are being fetched, for requests that wait for them until `deadline`."""

    fill: Fill
    job: FetchJob
    deadline: float
    waiting: list[Request] = field(default_factory=list)


class KvFetches:
    """The requests that wait until blocks of their prompts have been fetched from other services."""

    def __init__(self, cache: PrefixCache, office: TicketOffice, compute_s: Callable[[int, int], float]) -> None:
        """compute_s: see `LowerTier`."""
        self._cache = cache
        self._office = office
        self._compute_s = compute_s
        self._fetches: dict[str, _Fetch] = {}  # by the number of the ticket
        self._of_request: dict[Request, _Fetch] = {}
        self._new_jobs: list[FetchJob] = []
        self.counters = FetchCounters()

    @property
    def waiting(self) -> Collection[Request]:
        return self._of_request.keys()

    def check(self, request: Request) -> None:
        """Remove the ticket of a new request if it cannot serve it, and count the reason."""
        if request.ticket is not None:
            failure = self._office.why_unusable(request.ticket, request.token_ids)
            if failure is not None:
                self.counters.failures[failure] += 1
                request.ticket = None

    def num_held(self, request: Request) -> int:
        """Count the request's tokens that another service holds for it, by its ticket."""
        ticket = request.ticket
        return 0 if ticket is None else min(ticket.num_blocks * self._cache.block_size, len(request.token_ids) - 1)

    def look_up(self, request: Request, now: float, num_spoken_for: int) -> bool:
        """Return whether a request of the queue waits, from now on, until the blocks of its ticket have been fetched.

        It is then to leave the queue until `end` or `take_overdue` returns it. now: on the scheduler's clock.
        num_spoken_for: blocks that running requests will need, beside which the request has to fit.
        """
        ticket = request.ticket
        if ticket is None:
            return False
        fetch = self._fetches.get(ticket.request_id)
        if fetch is None:
            room = self._cache.room(num_spoken_for)
            if is_still_full(room, request.no_room_to_fill):
                return False
            if request.wants_prompt_logprobs or self.num_lacking(request) <= 0:
                self._return(request)
                return False
            fetch = self._begin(request, ticket, now, num_spoken_for)
            request.no_room_to_fill = room if fetch is None else None
        if fetch is None or fetch.job.is_cancelled:
            # There is no room yet, or another request has just ended its fetch of these blocks.
            return False
        request.ticket = None
        fetch.waiting.append(request)
        self._of_request[request] = fetch
        return True

    def forgo(self, request: Request) -> None:
        """Record that a request is computed; if it has its ticket still, its blocks found no memory before."""
        if request.ticket is not None:
            self.counters.failures["memory"] += 1
            self._return(request)

    def leave(self, request: Request) -> bool:
        """Forget a request that has ended. Return whether it waited for its blocks."""
        self._return(request)
        fetch = self._of_request.pop(request, None)
        if fetch is None:
            return False
        fetch.waiting.remove(request)
        if not fetch.waiting:
            self._give_up(fetch)
        return True

    def take_overdue(self, now: float) -> list[Request]:
        """Return the requests that have waited too long; they are to be computed.

        If a job has begun, some blocks may have come: its requests wait for its end, which comes soon, and `end`
        returns them.
        """
        overdue: list[Request] = []
        for fetch in self._fetches.values():
            if now > fetch.deadline and not fetch.job.is_cancelled:
                self.counters.failures["timeout"] += 1
                if fetch.job.is_begun:
                    fetch.job.is_cancelled = True
                    continue
                overdue += fetch.waiting
                fetch.waiting = []
                self._give_up(fetch)
        for request in overdue:
            del self._of_request[request]
        return overdue

    def take_jobs(self) -> list[FetchJob]:
        jobs, self._new_jobs = self._new_jobs, []
        return jobs

    def end(self, result: FetchResult) -> list[Request]:
        """Receive the end of a job. Return the requests that go back to the queue."""
        job, counters = result.job, self.counters
        if not job.copies:
            return []
        fetch = self._fetches.pop(job.ticket.request_id)
        counters.num_blocks += result.num_filled
        counters.num_tokens += result.num_filled * self._cache.block_size
        counters.seconds += result.seconds
        if result.failure is not None:
            counters.failures[result.failure] += 1
        end_fill(self._cache, fetch.fill, result.num_filled)
        for request in fetch.waiting:
            del self._of_request[request]
        return fetch.waiting

    def num_lacking(self, request: Request) -> int:
        """Count the request's tokens that another service holds for it and that are not cached here."""
        size = self._cache.block_size
        return self.num_held(request) // size * size - self._cache.peek(request.token_ids, request.namespace)

    def _return(self, request: Request) -> None:
        """End the lease of a request's ticket: the other service need not hold the blocks any longer."""
        ticket, request.ticket = request.ticket, None
        if ticket is not None and ticket.request_id not in self._fetches:
            self._new_jobs.append(FetchJob(ticket))

    def _begin(self, request: Request, ticket: KvTicket, now: float, num_spoken_for: int) -> _Fetch | None:
        size = self._cache.block_size
        stop = self.num_held(request) // size
        spare = num_spoken_for + -(-len(request.token_ids) // size) - stop
        fill = begin_fill(self._cache, request.token_ids, request.namespace, stop, spare)
        if fill is None:
            return None
        job = FetchJob(ticket, fill.first, fill.copies)
        compute_s = self._compute_s(fill.first * size, stop * size)
        deadline = now + longest_wait_s(compute_s) * (_EARLY_WAITS if ticket.is_early else 1)
        fetch = self._fetches[ticket.request_id] = _Fetch(fill, job, deadline)
        self._new_jobs.append(job)
        return fetch

    def _give_up(self, fetch: _Fetch) -> None:
        """Release the lease of a fetch without waiting requests. Its blocks are free once the job has ended."""
        fetch.job.is_cancelled = True
        self._cache.release(fetch.fill.lease)


class KvTransfer:
    """Both sides of the transfer of KV between services."""

    def __init__(self, cache: PrefixCache, office: TicketOffice, compute_s: Callable[[int, int], float]) -> None:
        self.offers_early = office.issues_early
        self.offers = KvOffers(cache, office)
        self.fetches = KvFetches(cache, office, compute_s)
