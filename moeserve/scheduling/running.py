"""The running requests: the places they take, and the requests among them that give way to others."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.plan import Request
from moeserve.scheduling.fair_queue import Tenants
from moeserve.scheduling.outcomes import SchedulerCounters
from moeserve.scheduling.parts import Parts
from moeserve.scheduling.request_memory import RequestMemory
from moeserve.scheduling.sharing import Sharing
from moeserve.scheduling.waiting_room import WaitingRoom


class Running:
    """Owns `requests`, the running requests in the order of service. The last ones give way first."""

    def __init__(
        self,
        requests: list[Request],
        waiting: WaitingRoom,
        tenants: Tenants,
        sharing: Sharing,
        memories: Sequence[RequestMemory],
        parts: Parts,
        counters: SchedulerCounters,
    ) -> None:
        """requests: an empty list, which `waiting` reads. memories: by rank.
        counters: get the preemptions."""
        self.requests = requests
        self._waiting = waiting
        self._tenants = tenants
        self._sharing = sharing
        self._memories = memories
        self._parts = parts
        self._counters = counters

    def start(self, request: Request) -> None:
        """Take a request with a lease out of the queue."""
        self._waiting.queue.remove(request)
        self._tenants.end_wait(request)
        self._tenants.of(request).num_running += 1
        self.requests.append(request)

    def leave(self, request: Request) -> None:
        """Free the place of a request that has ended or is preempted."""
        self.requests.remove(request)
        self._tenants.of(request).num_running -= 1

    def preempt(self, request: Request) -> None:
        """Take a request's memory; it waits again and will compute, or find cached, all its tokens."""
        self.leave(request)
        for preempted in self._parts.preempted:
            preempted(request, len(self.requests))
        self._memories[request.rank].detach(request)
        request.num_preemptions += 1
        request.yields = False
        self._counters.preemptions += 1
        self._tenants.wait(request)
        self._waiting.place(request)

    def make_room(self, num_places: int, *, lacks_memory: bool) -> None:
        """Take places and memory from tenants that have more than their share, for the next request.

        num_places: the requests that may run at once just now. lacks_memory: a waiting request lacked it in the
        previous step.
        """
        for request in [r for r in self.requests if r.yields and not r.is_in_flight]:
            self.preempt(request)
        if not self._sharing.observe(self.requests, num_places):
            return
        self.sort()
        is_full = len(self.requests) >= num_places
        for victim in self._sharing.victims(self._waiting.queue, is_full=is_full, lacks_memory=lacks_memory):
            if victim.is_in_flight:
                victim.yields = True
            else:
                self.preempt(victim)

    def sort(self) -> None:
        """Restore the order of service, which new requests have disturbed."""
        self._sharing.sort(self.requests)

    def has_others(self, request: Request) -> bool:
        """Return whether other requests of the tenant run on the request's rank."""
        others = (other for other in self.requests if other is not request and other.rank == request.rank)
        return any(other.terms.tenant == request.terms.tenant for other in others)

    def last_after(self, request: Request, *, of_tenant: bool) -> Request | None:
        """Return the last request after the given one on its rank that no plan names. of_tenant: only of its tenant."""
        for other in reversed(self.requests):
            if other is request:
                return None
            is_meant = not of_tenant or other.terms.tenant == request.terms.tenant
            if is_meant and other.rank == request.rank and not other.is_in_flight:
                return other
        return None
