"""How tenants share scarce resources: places in the queue, running places and blocks of KV memory.

A tenant with less than its share gets the rest from the tenant that holds most beyond its own share. No share is kept
free: a tenant that is alone has everything. `moeserve.scheduling.fair_queue` decides which tenant is next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf

from moeserve.plan import Request, Terms
from moeserve.scheduling.fair_queue import Tenant, Tenants, WaitingQueue
from radix_cache import PrefixCache


class Sharing:
    """Chooses the running requests that give places or memory to other tenants, and the requests that find a place.

    It moves no request: the scheduler does. `observe` is to be called as a step begins; `victims` and `sort` go by the
    holdings at that time.
    """

    def __init__(self, tenants: Tenants, caches: Sequence[PrefixCache], max_num_seqs: int) -> None:
        self._tenants = tenants
        self._caches = caches
        self._max_num_seqs = max_num_seqs
        self._num_blocks = sum(cache.num_blocks for cache in caches)
        self._places: Holdings | None = None
        self._blocks: Holdings | None = None
        self._over: set[Tenant] = set()

    def observe(self, running: Sequence[Request], num_places: int) -> bool:
        """Record the holdings of the tenants' running requests. Return whether there are several tenants to share.

        num_places: the requests that may run at once just now.
        """
        self._over.clear()
        self._places = self._blocks = None
        if len(self._tenants.active) < 2:
            return False
        places = self._places = Holdings(self._tenants, running, lambda _: 1, num_places)
        blocks = self._blocks = Holdings(self._tenants, running, _num_blocks, self._num_blocks)
        self._over.update(t for t in self._tenants.active if places.is_over(t) or blocks.is_over(t))
        return True

    def sort(self, running: list[Request]) -> None:
        """Sort running requests in the order of service.

        Tenants that hold more than their share come last, and so are the first to lose memory.
        """
        running.sort(key=lambda r: (r.priority, self._tenants.of(r) in self._over, r.queue_key))

    def victims(self, waiting: WaitingQueue, *, is_full: bool, lacks_memory: bool) -> Iterator[Request]:
        """Yield running requests that give way to the next, if its tenant holds less and another more than its share.

        The caller takes each victim's holdings before it asks for the next. is_full: every running place is taken.
        lacks_memory: a waiting request did not find the blocks for its tokens.
        """
        places, blocks = self._places, self._blocks
        if places is None or blocks is None or not len(waiting) or not (is_full or lacks_memory):
            return
        # Requests of other priorities do not count: more urgent ones would take the memory that their victims free.
        for request in waiting.firsts():
            wanted = -(-len(request.token_ids) // self._caches[0].block_size)
            if is_full and places.may_take(request, 1) and (victim := places.pop_victim()) is not None:
                yield victim
                return
            if lacks_memory and blocks.may_take(request, wanted):
                yield from self._givers(blocks, wanted)
                return

    def _givers(self, blocks: Holdings, wanted: int) -> Iterator[Request]:
        """Yield victims until a rank has the wanted blocks, or no tenant has more than its share."""
        while (victim := blocks.pop_victim()) is not None:
            yield victim
            if self._caches[victim.rank].counts.num_available >= wanted:
                return

    def may_run(self, terms: Terms, num_running: int) -> bool:
        """Return whether a tenant with `num_running` running requests may have another."""
        return num_running < max(1, int(terms.running * self._max_num_seqs))

    def may_wait(self, terms: Terms, num_places: int) -> bool:
        """Return whether a new request finds a place in the queue: a tenant always finds its share of the places.

        Background requests have places of their own, equally many.
        """
        num_own, num_waiting = self._tenants.num_waiting(terms)
        is_full = num_waiting >= num_places
        allowed = min(terms.queue, self._tenants.share(terms) if is_full else 1.0)
        return not (is_full or allowed < 1) or num_own < allowed * num_places


class Holdings:
    """The tenants' holdings of a scarce resource, by their running requests: places, or blocks of memory.

    It tells which tenants may take and which must give. No tenant gives below its share or takes beyond its share, so
    nothing goes back and forth. Background requests give first, and take from no tenant.
    """

    def __init__(
        self, tenants: Tenants, running: Sequence[Request], amount: Callable[[Request], int], total: int
    ) -> None:
        """running: the last requests give first. amount: the part of `total` that a request holds."""
        self._tenants = tenants
        self._left = list(running)
        self._amount = amount
        self._total = total
        self._held: Counter[Tenant] = Counter()
        for request in running:
            self._held[tenants.of(request)] += amount(request)

    def may_take(self, request: Request, amount: int) -> bool:
        """Return whether the tenant of a waiting request would stay within its share with `amount` more."""
        tenant = self._tenants.of(request)
        fair = max(1.0, self._tenants.share(tenant.terms) * self._total)
        return not tenant.terms.background and self._held[tenant] + amount <= fair

    def is_over(self, tenant: Tenant) -> bool:
        """Return whether a tenant holds more than its share."""
        return self._excess(tenant) > 0

    def pop_victim(self) -> Request | None:
        """Return the request that gives next, and count it out; None if no tenant holds more than its share."""
        most = max(self._held, key=self._excess, default=None)
        if most is None or self._excess(most) <= 0:
            return None
        victim = next(r for r in reversed(self._left) if self._tenants.of(r) is most)
        self._left.remove(victim)
        self._held[most] -= self._amount(victim)
        return victim

    def _excess(self, tenant: Tenant) -> float:
        """Return the tenant's holding over its share, less one; inf for a background tenant that holds anything."""
        if tenant.terms.background:
            return inf if self._held[tenant] else 0.0
        return self._held[tenant] / max(1.0, self._tenants.share(tenant.terms) * self._total) - 1


def _num_blocks(request: Request) -> int:
    return len(request.held.block_ids)
