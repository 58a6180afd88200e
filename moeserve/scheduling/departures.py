"""When clients leave before their answers are whole, and how many requests should run at once because of that.

An answer whose client leaves is lost work. The more requests run, the better each step is used and the longer each
answer takes: so fewer requests run at once where more answers are then whole in time. Each tenant's clients have a
patience of their own, and a tenant whose clients leave takes nothing from a tenant whose clients stay.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from moeserve.scheduling.survival import Survival

# The largest share of the throughput that is given up for answers that are whole in time.
_MOST_GIVEN_UP = 1 / 2
# The ratio between numbers of running requests that are compared.
_NEXT_TRIED = 0.8
# At the deadline this share of the clients that stay until the best age are still there.
_STAYING = 0.9
# The deadline grows by this share while one round of running requests ends, to notice when clients have become more
# patient.
_DEADLINE_GROWTH = 0.1
_FEWEST_ENDS = 16  # requests of a tenant that must have ended: of fewer, it is not known how long its clients stay


@dataclass(slots=True)
class _Clients:
    """One tenant's clients.

    ages: of requests when they end, in seconds. deadline_s: the age by which answers are to be whole. spare_s: the
    seconds that a request may wait if its answer is to be whole by then. num_ends: of its requests so far.
    last_end: number of its latest end.
    """

    ages: Survival
    deadline_s: float = inf
    spare_s: float = inf
    num_ends: int = 0
    num_new_ends: int = 0
    last_end: int = 0


class Departures:
    """Learns when the clients of each tenant leave.

    places: the number of requests that may run at once. It keeps the deadline of the most patient tenant.
    """

    def __init__(self, least_wait_s: float, max_num_seqs: int, num_remembered: int) -> None:
        """least_wait_s: a request may always wait for so long. num_remembered: the ends after which one counts for a
        third, and a tenant without any is forgotten."""
        self.places = max_num_seqs
        self._least_wait_s = least_wait_s
        self._max_num_seqs = max_num_seqs
        self._num_remembered = num_remembered
        self._tenants: dict[str, _Clients] = {}
        self._num_ends = 0

    def count(self, tenant: str, age_s: float, *, has_left: bool) -> None:
        """Learn from a request that ended at an age of `age_s`. has_left: its client left."""
        self._num_ends += 1
        # The latest to end is the last one.
        clients = self._tenants.pop(tenant, None) or _Clients(Survival(0.1, 1.05, self._num_remembered))
        self._tenants[tenant] = clients
        clients.ages.count(age_s, has_ended=has_left)
        clients.num_ends += 1
        clients.num_new_ends += 1
        clients.last_end = self._num_ends

    def spare_s(self, tenant: str) -> float:
        """Return how long a tenant's request may wait if its client is to get the whole answer; inf if clients stay."""
        clients = self._tenants.get(tenant)
        return inf if clients is None else clients.spare_s

    def spares(self) -> dict[str, float]:
        """Return `spare_s` of the tenants whose clients leave."""
        return {name: clients.spare_s for name, clients in self._tenants.items() if clients.spare_s < inf}

    def update(self, throughput: Callable[[int], float], answer_s: Callable[[int], float]) -> None:
        """Choose the number of places and the longest waits anew if requests have ended.

        throughput: rows per second while a number of requests run. answer_s: seconds within which most answers are
        whole then.
        """
        fresh = [clients for clients in self._tenants.values() if clients.num_new_ends]
        if not fresh:
            return
        for clients in fresh:
            grown = 1 + _DEADLINE_GROWTH * min(1, clients.num_new_ends / self.places)
            best_s = inf
            if clients.num_ends >= _FEWEST_ENDS:
                best_s = self._best_deadline(clients.ages, throughput, answer_s)
            clients.deadline_s = min(clients.deadline_s * grown, best_s)
            clients.num_new_ends = 0
        while self._num_ends - next(iter(self._tenants.values())).last_end > self._num_remembered:
            del self._tenants[next(iter(self._tenants))]
        deadline_s = max(clients.deadline_s for clients in self._tenants.values())
        self.places = self._places_for(deadline_s, throughput, answer_s)
        for clients in self._tenants.values():
            spare_s = clients.deadline_s - answer_s(self.places)
            clients.spare_s = inf if clients.deadline_s == inf else max(self._least_wait_s, spare_s)

    def _places_for(
        self, deadline_s: float, throughput: Callable[[int], float], answer_s: Callable[[int], float]
    ) -> int:
        if deadline_s == inf:
            return self._max_num_seqs
        places = range(1, self._max_num_seqs + 1)
        least = (1 - _MOST_GIVEN_UP) * throughput(self._max_num_seqs)
        in_time = bisect_right(places, deadline_s - self._least_wait_s / 2, key=answer_s)
        return max(in_time, 1 + bisect_left(places[:-1], least, key=throughput))

    def _best_deadline(
        self, ages: Survival, throughput: Callable[[int], float], answer_s: Callable[[int], float]
    ) -> float:
        """Return the age by which answers should be whole for most to reach clients; inf unless clients leave."""
        if not ages.any_ended:
            return inf
        num_running = self._max_num_seqs
        most = throughput(num_running)
        best, best_s = -1.0, inf
        while num_running and (rate := throughput(num_running)) >= (1 - _MOST_GIVEN_UP) * most:
            age_s = answer_s(num_running) + self._least_wait_s / 2
            if (answered := rate * ages.share(age_s)) > best:
                best, best_s = answered, age_s
            num_running = int(_NEXT_TRIED * num_running)
        return max(best_s, ages.longest(_STAYING * ages.share(best_s)))
