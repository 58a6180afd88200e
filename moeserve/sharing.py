"""How tenants share what is scarce: places in the queue, running places and blocks of KV memory.

A tenant with less than its share gets what it lacks from the one that has most beyond its own. Nobody's share is kept
free: who is alone has all. Which tenant is next is another question (`moeserve.fair_queue`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf

from moeserve.fair_queue import Tenant, Tenants, WaitingQueue
from moeserve.plan import Request, Terms
from radix_cache import PrefixCache


class Sharing:
    """Says which running requests give their places or memory to other tenants, and who finds a place.

    It moves no request: the scheduler does what it says. `note` is to be called as a step begins; `victims` and `sort`
    go by what tenants held then.
    """

    def __init__(self, tenants: Tenants, caches: Sequence[PrefixCache], max_num_seqs: int) -> None:
        self._tenants = tenants
        self._caches = caches
        self._max_num_seqs = max_num_seqs
        self._num_blocks = sum(cache.num_blocks for cache in caches)
        self._places: Holdings | None = None
        self._blocks: Holdings | None = None
        self._over: set[Tenant] = set()

    def note(self, running: Sequence[Request], num_places: int) -> bool:
        """Note what the tenants' running requests hold. Return whether there are several tenants to share.

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
        """Bring running requests into the order of service. Tenants that hold more than their share come last, and so
        are the first to lose memory."""
        running.sort(key=lambda r: (r.priority, self._tenants.of(r) in self._over, r.arrival))

    def victims(self, waiting: WaitingQueue, *, is_full: bool, lacks_memory: bool) -> Iterator[Request]:
        """Yield the running requests that give way to the one that is next, if its tenant has less than its share and
        another one has more. The caller takes what each holds before it asks for the next.

        is_full: every running place is taken. lacks_memory: a waiting request did not find the blocks for its tokens.
        """
        places, blocks = self._places, self._blocks
        if places is None or blocks is None or not len(waiting) or not (is_full or lacks_memory):
            return
        nexts: dict[Tenant, Request] = {}
        candidates = waiting.candidates()
        for request in candidates:
            if request.priority > candidates[0].priority:
                # More urgent ones would have what is given for it.
                break
            nexts.setdefault(self._tenants.of(request), request)
        for request in nexts.values():
            wanted = -(-len(request.token_ids) // self._caches[0].block_size)
            if is_full and places.may_take(request, 1) and (victim := places.pop_victim()) is not None:
                yield victim
                return
            if lacks_memory and blocks.may_take(request, wanted):
                yield from self._givers(blocks, wanted)
                return

    def _givers(self, blocks: Holdings, wanted: int) -> Iterator[Request]:
        """Yield victims until a rank has the wanted blocks, or nobody has more than its share."""
        while (victim := blocks.pop_victim()) is not None:
            yield victim
            if self._caches[victim.rank].num_available >= wanted:
                return

    def may_run(self, terms: Terms, num_running: int) -> bool:
        """Return whether a tenant with that many running requests may have another one."""
        return num_running < max(1, int(terms.running * self._max_num_seqs))

    def may_wait(self, terms: Terms, waiting: Iterable[Request], num_places: int) -> bool:
        """Return whether a new request finds a place in the queue: a tenant always finds its share of them.

        Requests in the background have places of their own, as many.
        """
        tenants = [other.terms.tenant for other in waiting if other.terms.background == terms.background]
        is_full = len(tenants) >= num_places
        allowed = min(terms.queue, self._tenants.share(terms) if is_full else 1.0)
        return not (is_full or allowed < 1) or tenants.count(terms.tenant) < allowed * num_places


class Holdings:
    """The tenants' holdings of something scarce, by their running requests: places, or blocks of memory.

    It says who may have more and who has to give: no tenant gives below its share, and none takes beyond its own, so
    nothing is taken back and forth. Background requests give first, and take from nobody.
    """

    def __init__(
        self, tenants: Tenants, running: Sequence[Request], amount: Callable[[Request], int], total: int
    ) -> None:
        """running: the last ones give first. amount: what a request holds of `total`."""
        self._tenants = tenants
        self._left = list(running)
        self._amount = amount
        self._total = total
        self._held: Counter[Tenant] = Counter()
        for request in running:
            self._held[tenants.of(request)] += amount(request)

    def may_take(self, request: Request, amount: int) -> bool:
        """Return whether a waiting request would stay within its tenant's share with that much."""
        tenant = self._tenants.of(request)
        fair = max(1.0, self._tenants.share(tenant.terms) * self._total)
        return not tenant.terms.background and self._held[tenant] + amount <= fair

    def is_over(self, tenant: Tenant) -> bool:
        """Return whether a tenant holds more than its share."""
        return self._excess(tenant) > 0

    def pop_victim(self) -> Request | None:
        """Return the request that gives next, and count it out; None if nobody holds more than its share."""
        most = max(self._held, key=self._excess, default=None)
        if most is None or self._excess(most) <= 0:
            return None
        victim = next(r for r in reversed(self._left) if self._tenants.of(r) is most)
        self._left.remove(victim)
        self._held[most] -= self._amount(victim)
        return victim

    def _excess(self, tenant: Tenant) -> float:
        """Return how many times its share the tenant holds, less one."""
        if tenant.terms.background:
            return inf if self._held[tenant] else 0.0
        return self._held[tenant] / max(1.0, self._tenants.share(tenant.terms) * self._total) - 1


def _num_blocks(request: Request) -> int:
    assert request.lease is not None
    return len(request.lease.block_ids)
