"""Which request is next: by priority, then by the service that tenants have had, then by arrival.

Tenants share the service in proportion to their weights, in tokens of prompts and outputs alike, as they are computed.
The tenant that has had least in proportion to its weight is next. So the length of an answer need not be guessed. This
is fair queueing by virtual counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), a deficit
round robin in which the deficit is paid afterwards. With one tenant it is a plain queue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import groupby

from moeserve.pacing import Backlog
from moeserve.plan import Request, Terms

_SMOOTHING = 0.1
# A request that lacks so many times fewer tokens passes a long prompt of its own tenant.
FAR_SHORTER = 4
_LPM_WINDOW = 64
_LPM_MAX_OVERTAKERS = 32


@dataclass(eq=False, slots=True)
class Tenant:
    """An account with its foreground, or its background, requests.

    `served`: its computed tokens over its weight. `request_tokens`: uncached prompt tokens of one of its typical
    requests, as a geometric mean: a long prompt among short ones changes it little.
    """

    terms: Terms
    served: float = 0.0
    num_open: int = 0
    request_tokens: float = 0.0

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

    @property
    def active(self) -> Sequence[Tenant]:
        """The tenants with requests, waiting or running."""
        return self._active

    def of(self, request: Request) -> Tenant:
        """Return the tenant of a request that has entered."""
        return self._tenants[request.terms.tenant, request.terms.background]

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

    def backlogs(
        self, running: Iterable[Request], waiting: Iterable[Request], own: int | None = None
    ) -> dict[str, Backlog]:
        """Return the open work of tenants in the foreground, by their names, as a new request would find it.

        own: the uncached tokens of its prompt; None for a typical request of each tenant.
        """
        num_running, num_waiting, tokens = Counter[str](), Counter[str](), Counter[str]()
        for request in running:
            num_running[request.terms.tenant] += not request.terms.background
        for request in waiting:
            if not request.terms.background:
                num_waiting[request.terms.tenant] += 1
                own_tokens = own or round(self.of(request).request_tokens) or request.num_uncached_tokens
                tokens[request.terms.tenant] += tokens_before(own_tokens, request.num_uncached_tokens)
        found = {}
        for tenant in self._active:
            if not tenant.terms.background:
                name, typical = tenant.terms.tenant, round(tenant.request_tokens)
                found[name] = Backlog(tenant.terms.weight, num_running[name], num_waiting[name], tokens[name], typical)
        return found

    def _raise_floor(self) -> None:
        if self._active:
            self._floor = max(self._floor, min(tenant.served for tenant in self._active))


def tokens_before(own: int, other: int) -> int:
    """Return for how many tokens of a prompt of `other` tokens one of `own` tokens behind it waits at most.

    A request does not wait for a prompt of its own tenant that lacks far more tokens than it does.
    """
    return min(other, FAR_SHORTER * own)


class WaitingQueue:
    """Waiting requests; a preempted one returns to the place of its arrival.

    Among the requests of one priority and tenant, those that an earlier life of the engine had are first, in the order
    of their arrival there. Among the others policy `fcfs` goes by arrival. `lpm` tries requests of the most
    urgent priority with the longest cached prefix first, so that requests which share a prompt run while it is in
    memory; a request that was overtaken `_LPM_MAX_OVERTAKERS` times goes first, so none starves.

    If the oldest of them is late, so that it can no longer have its first token in time, the newest is next, after
    requests that have begun already: serving in the order of arrival would make all of them late.
    """

    def __init__(
        self,
        policy: str,
        matched_tokens: Callable[[Request], int],
        tenants: Tenants,
        is_late: Callable[[Request], bool] = lambda _: False,
    ) -> None:
        """matched_tokens: counts the cached tokens of a request. tenants: the tenants of all its requests."""
        if policy not in ("fcfs", "lpm"):
            raise ValueError(f"unknown scheduling policy {policy!r}")
        self._policy = policy
        self._matched_tokens = matched_tokens
        self._tenants = tenants
        self._is_late = is_late
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_queue_key)

    def remove(self, request: Request) -> None:
        """Remove a request. Raise ValueError if it does not wait."""
        index = bisect_left(self._requests, request.queue_key, key=_queue_key)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"request {request.request_id} does not wait")
        del self._requests[index]

    def candidates(self) -> list[Request]:
        """Return the requests to be tried, in order."""
        found: list[Request] = []
        for _, requests in groupby(self._requests, key=lambda request: request.priority):
            lines: dict[Tenant, list[Request]] = {}
            for request in requests:
                lines.setdefault(self._tenants.of(request), []).append(request)
            is_top = not found
            found += _by_turns({tenant: self._line(line, is_top) for tenant, line in lines.items()})
        return found

    def take(self, request: Request) -> None:
        """Remove the request, counting it as an overtaker of its tenant's requests before it."""
        self.remove(request)
        tenant = self._tenants.of(request)
        for other in self._requests:
            if other.queue_key >= request.queue_key:
                break
            other.num_overtakers += self._tenants.of(other) is tenant

    def _line(self, requests: list[Request], is_top: bool) -> list[Request]:
        """Return a tenant's requests of one priority in their order of service. requests: in the order of arrival."""
        if len(requests) < 2:
            return requests
        waiting = [request for request in requests if not request.keeps_its_turn]
        if waiting and self._is_late(waiting[0]):
            return [request for request in requests if request.keeps_its_turn] + waiting[::-1]
        if self._policy == "fcfs" or not is_top:
            return requests
        window = requests[:_LPM_WINDOW]
        first = [r for r in window if r.resumes or r.num_overtakers >= _LPM_MAX_OVERTAKERS]
        others = [r for r in window if not (r.resumes or r.num_overtakers >= _LPM_MAX_OVERTAKERS)]
        others.sort(key=self._matched_tokens, reverse=True)
        return first + others + requests[len(window) :]


def _by_turns(lines: dict[Tenant, list[Request]]) -> list[Request]:
    """Merge the lines of tenants: the next request is that of the tenant that will have had least by then."""
    if len(lines) == 1:
        return next(iter(lines.values()))
    found: list[Request] = []
    turns = [(tenant.served, line[0].queue_key, tenant, 0) for tenant, line in lines.items()]
    heapify(turns)
    while turns:
        served, _, tenant, place = turns[0]
        line = lines[tenant]
        request = line[place]
        found.append(request)
        if place + 1 == len(line):
            heappop(turns)
        else:
            served += request.num_uncached_tokens / tenant.terms.weight
            heapreplace(turns, (served, line[place + 1].queue_key, tenant, place + 1))
    return found


def _queue_key(request: Request) -> tuple[int, float, int]:
    return request.queue_key
