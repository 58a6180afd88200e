"""Which request is next: by priority, then by the service that tenants have had, then by arrival.

Tenants share the service in proportion to their weights, in tokens of prompts and outputs alike, as they are computed.
The tenant that has had least in proportion to its weight is next. So the length of an answer need not be guessed. This
is fair queueing by virtual counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), a deficit
round robin in which the deficit is paid afterwards. With one tenant it is a plain queue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain

from moeserve.plan import DEFAULT_TERMS, Request, Terms
from moeserve.scheduling.pacing import Backlog
from moeserve.scheduling.token_sums import TokenSums

_SMOOTHING = 0.1  # weight of a new request in the geometric mean of a tenant's prompt lengths
# A request passes a long prompt of its own tenant if it lacks at most one in this number of the tokens.
FAR_SHORTER = 4


@dataclass(eq=False, slots=True)
class Tenant:
    """An account with its foreground, or its background, requests.

    `served`: its computed tokens over its weight. `request_tokens`: uncached prompt tokens of one of its typical
    requests, as a geometric mean: a long prompt among short ones changes it little. `waiting`: the uncached prompt
    tokens of its waiting requests.
    """

    terms: Terms
    served: float = 0.0
    num_open: int = 0
    request_tokens: float = 0.0
    num_running: int = 0
    waiting: TokenSums = field(default_factory=TokenSums)

    def count_start(self, request: Request) -> None:
        """Learn from a request that left the queue."""
        num_tokens = max(1, request.num_uncached_tokens)
        self.request_tokens = num_tokens**_SMOOTHING * (self.request_tokens or num_tokens) ** (1 - _SMOOTHING)


class Tenants:
    """The counters of all tenants ever seen, at most two per API key."""

    def __init__(self) -> None:
        self._tenants: dict[tuple[str, bool], Tenant] = {}
        self._active: list[Tenant] = []
        self._floor = 0.0
        # In the foreground, and in the background.
        self._num_waiting = [0, 0]
        # The terms of the request that was asked for last, and its tenant.
        self._latest_terms: Terms | None = None
        self._latest = Tenant(DEFAULT_TERMS)

    @property
    def active(self) -> Sequence[Tenant]:
        """The tenants with requests, waiting or running."""
        return self._active

    def of(self, request: Request) -> Tenant:
        terms = request.terms
        if terms is not self._latest_terms:
            # Requests of one tenant often follow each other, and share their terms.
            self._latest_terms, self._latest = terms, self._tenants[terms.tenant, terms.background]
        return self._latest

    def enter(self, request: Request) -> None:
        """Count a new request. The terms of the newest request hold for its tenant.

        A tenant that had no requests begins level with the tenant that has had least: idleness earns nothing.
        """
        key = (request.terms.tenant, request.terms.background)
        tenant = self._tenants.setdefault(key, Tenant(request.terms))
        tenant.terms = request.terms
        if not tenant.num_open:
            self._raise_floor()
            tenant.served = max(tenant.served, self._floor)
            self._active.append(tenant)
        tenant.num_open += 1

    def leave(self, request: Request) -> None:
        """Count a request's end."""
        tenant = self.of(request)
        tenant.num_open -= 1
        if not tenant.num_open:
            self._raise_floor()
            self._active.remove(tenant)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Count tokens that are computed for a request."""
        tenant = self.of(request)
        tenant.served += num_tokens / tenant.terms.weight

    def charge_each(self, requests: Iterable[Request], counts: Iterable[int]) -> None:
        """Count tokens that are computed for requests."""
        for request, count in zip(requests, counts, strict=True):
            tenant = self.of(request)
            tenant.served += count / tenant.terms.weight

    def share(self, terms: Terms) -> float:
        """Return a tenant's part of the weights of all tenants with requests in the foreground, its own included."""
        others = (tenant.terms for tenant in self._active)
        weights = sum(other.weight for other in others if other.tenant != terms.tenant and not other.background)
        return terms.weight / (terms.weight + weights)

    def turn(self, request: Request) -> tuple[int, float]:
        """Return the sort key of a running prompt; the lowest is computed first."""
        return request.priority, self.of(request).served

    def goes_before(self, waiting: Request, running: Request) -> bool:
        """Return whether a waiting request is to begin before a running prompt continues."""
        if waiting.priority != running.priority:
            return waiting.priority < running.priority
        mine, other = self.of(waiting), self.of(running)
        return mine is not other and mine.served <= other.served

    def may_pass(self, request: Request, lacking: Request) -> bool:
        """Return whether a request may run while a request of another tenant, which comes first, lacks memory."""
        tenant, other = self.of(request), self.of(lacking)
        cost = lacking.num_uncached_tokens / other.terms.weight
        return request.priority <= lacking.priority and tenant.served < other.served + cost

    def wait(self, request: Request) -> None:
        """Count a request that waits from now on."""
        self.of(request).waiting.add(request.num_uncached_tokens)
        self._num_waiting[request.terms.background] += 1

    def end_wait(self, request: Request) -> None:
        """Count a request that waits no longer."""
        self.of(request).waiting.add(request.num_uncached_tokens, -1)
        self._num_waiting[request.terms.background] -= 1

    def num_waiting(self, terms: Terms) -> tuple[int, int]:
        """Return the numbers of waiting requests: of a tenant, and of all tenants in the same ground."""
        tenant = self._tenants.get((terms.tenant, terms.background))
        return 0 if tenant is None else tenant.waiting.count, self._num_waiting[terms.background]

    @property
    def background_runs(self) -> bool:
        """True if a background request runs."""
        return any(tenant.terms.background and tenant.num_running for tenant in self._active)

    def backlogs(self, own: int | None, most: int) -> dict[str, Backlog]:
        """Return the open work of tenants in the foreground, by their names, as a new request would find it.

        own: the uncached tokens of its prompt; None for a typical request of each tenant, of `most` tokens at most. It
        does not wait for all of a prompt of its own tenant that lacks far more tokens.
        """
        found = {}
        for tenant in self._active:
            if not tenant.terms.background:
                typical, waiting = min(round(tenant.request_tokens), most), tenant.waiting
                size = own or typical
                tokens = waiting.bounded(FAR_SHORTER * size) if size else waiting.total
                found[tenant.terms.tenant] = Backlog(
                    tenant.terms.weight, tenant.num_running, waiting.count, tokens, typical
                )
        return found

    def _raise_floor(self) -> None:
        if self._active:
            self._floor = max(self._floor, min(tenant.served for tenant in self._active))


class WaitingQueue:
    """Waiting requests; a preempted one returns to the place of its arrival.

    Among the requests of one priority and tenant, requests of an earlier life of the engine are first, in the order
    of their arrival there. The others follow in the order of arrival.

    If the oldest of them is late, so that it can no longer have its first token in time, the newest is next, after
    requests that have begun already: serving in the order of arrival would make all of them late.
    """

    def __init__(
        self,
        tenants: Tenants,
        is_late: Callable[[Request], bool] = lambda _: False,
        is_bounded: Callable[[Request], bool] = lambda _: False,
        tells_overload: Callable[[Request], bool] = lambda _: False,
    ) -> None:
        """tenants: the tenants of all its requests. is_bounded: tells whether a request's wait is bounded, which does
        not change while it waits. tells_overload: tells, as a request comes, whether a long wait of it tells of an
        overload."""
        self._tenants = tenants
        self._is_late = is_late
        self._is_bounded = is_bounded
        self._tells_overload = tells_overload
        # By priority and tenant, in the order of arrival.
        self._lines: dict[int, dict[Tenant, list[Request]]] = {}
        self._num_requests = 0
        self._num_bounded = 0
        # The times of arrival of requests that tell of an overload if they wait for long: ascending, and by id.
        self._arrivals: list[float] = []
        self._telling: dict[str, float] = {}

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in no order that means anything."""
        return chain.from_iterable(line for lines in self._lines.values() for line in lines.values())

    @property
    def is_awaited(self) -> bool:
        """True if a request with a bounded wait is here."""
        return self._num_bounded > 0

    @property
    def telling(self) -> tuple[float, float] | None:
        """The first and the last arrival of requests that tell of an overload if they wait for long, None without
        one."""
        return (self._arrivals[0], self._arrivals[-1]) if self._arrivals else None

    def add(self, request: Request) -> None:
        lines = self._lines.setdefault(request.priority, {})
        insort(lines.setdefault(self._tenants.of(request), []), request, key=_queue_key)
        self._num_requests += 1
        self._num_bounded += self._is_bounded(request)
        if self._tells_overload(request):
            insort(self._arrivals, request.arrived_at)
            self._telling[request.request_id] = request.arrived_at

    def remove(self, request: Request) -> None:
        """Remove a request. Raise ValueError if it does not wait."""
        tenant = self._tenants.of(request)
        lines = self._lines.get(request.priority, {})
        line = lines.get(tenant, [])
        index = bisect_left(line, request.queue_key, key=_queue_key)
        if index == len(line) or line[index] is not request:
            raise ValueError(f"request {request.request_id} does not wait")
        del line[index]
        self._num_requests -= 1
        if not line:
            del lines[tenant]
            if not lines:
                del self._lines[request.priority]
        self._num_bounded -= self._is_bounded(request)
        if (arrived_at := self._telling.pop(request.request_id, None)) is not None:
            del self._arrivals[bisect_left(self._arrivals, arrived_at)]

    def candidates(self) -> Iterator[Request]:
        """Return the requests that wait now, to be tried in this order."""
        return chain.from_iterable([_by_turns(self._turns(priority)) for priority in sorted(self._lines)])

    def firsts(self) -> list[Request]:
        """Return the first request of each tenant with requests of the most urgent priority, the next one first."""
        turns = self._turns(min(self._lines)) if self._lines else []
        return [line[0] for _, _, _, line in sorted(turns, key=lambda turn: turn[:2])]

    def _turns(self, priority: int) -> list[_Turn]:
        lines = [(tenant, self._line(line)) for tenant, line in self._lines[priority].items()]
        return [(tenant.served, line[0].queue_key, tenant, line) for tenant, line in lines]

    def _line(self, requests: list[Request]) -> list[Request]:
        """Return a tenant's requests of one priority in their order of service. requests: in the order of arrival."""
        if len(requests) < 2:
            return requests[:]
        oldest = next((request for request in requests if not request.keeps_its_turn), None)
        if oldest is not None and self._is_late(oldest):
            waiting = [request for request in requests if not request.keeps_its_turn]
            return [request for request in requests if request.keeps_its_turn] + waiting[::-1]
        return requests[:]


# The tokens that a tenant has had, the key of its first request, the tenant, and its line.
_Turn = tuple[float, tuple[int, float, int], Tenant, list[Request]]


def _by_turns(turns: list[_Turn]) -> Iterator[Request]:
    """Merge the lines of tenants: the next request is that of the tenant that will have had least by then."""
    if len(turns) == 1:
        yield from turns[0][3]
        return
    heap = [(served, key, tenant, line, 0) for served, key, tenant, line in turns]
    heapify(heap)
    while heap:
        served, _, tenant, line, place = heap[0]
        request = line[place]
        yield request
        if place + 1 == len(line):
            heappop(heap)
        else:
            served += request.num_uncached_tokens / tenant.terms.weight
            heapreplace(heap, (served, line[place + 1].queue_key, tenant, line, place + 1))


def _queue_key(request: Request) -> tuple[int, float, int]:
    return request.queue_key
