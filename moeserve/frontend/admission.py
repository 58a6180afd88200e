"""Admission: which requests a frontend takes in, on what terms, and how it refuses the others.

A refusal asks nobody: it follows from this process's counts and the engine's latest `Load`. The engine decides again
when it admits the request.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf

from starlette.types import Scope

from moeserve.frontend.errors import OVERLOADED, ApiError, check_choices, forbidden, invalid, unavailable
from moeserve.frontend.keys import Identity, cache_account
from moeserve.plan import Terms
from moeserve.scheduling.pacing import Load, Slo
from moeserve.settings.quantities import parse_limits

SLO_HEADER = b"x-moeserve-slo"
_LONGEST_WAIT_S = 60.0
_REMEMBERED = 1024
# The engine is assumed to have worked on for at most this number of seconds since it last reported its load.
_MOST_AGE_S = 1.0
# A request may ask for one choice per this number of places, or for the second number if that is more, but never for
# more than half of the places.
_SHARE_OF_CHOICES = 4
_ALWAYS_CHOICES = 16


def read_terms(
    scope: Scope, secret: str, slo: Slo, priority: int = 0, *, background: bool = False, detached: bool = False
) -> Terms:
    """Return the terms of a request. Raise ApiError for terms that its key may not ask for.

    secret: of the namespaces of keys. slo: the service's. detached: nobody waits for the answer.
    """
    identity: Identity = scope["state"]["identity"]
    if priority < 0 and not identity.may_hurry:
        raise forbidden(
            "A `priority` below 0 needs a key that may ask for it: one with the role `admin`, or with `priority=yes` "
            "in the key file",
            "priority",
        )
    if background and priority:
        raise invalid("A request has either a `priority` or `background`", "background")
    ttft_s, tpot_s = _asked_slo(scope, identity, slo)
    return terms_of(
        identity, secret, ttft_s=ttft_s, tpot_s=tpot_s, patient=background or detached, background=background
    )


def terms_of(
    identity: Identity,
    secret: str,
    *,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    patient: bool,
    background: bool,
) -> Terms:
    """Return the terms of a caller's request. secret: of the namespaces of keys."""
    rights = identity.rights
    return Terms(
        tenant=cache_account(secret, identity),
        weight=rights.weight,
        running=rights.running,
        queue=rights.queue,
        cached=rights.cached,
        retained=rights.retention,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        patient=patient,
        background=background,
    )


def _asked_slo(scope: Scope, identity: Identity, slo: Slo) -> tuple[float | None, float | None]:
    """Return the times to the first token and per output token that the header asks for. Raise ApiError."""
    name = SLO_HEADER.decode()
    value = next((value for key, value in scope["headers"] if key == SLO_HEADER), None)
    if value is None:
        return None, None
    try:
        asked = parse_limits(value.decode("latin-1"), ("ttft", "tpot"))
    except ValueError as error:
        raise invalid(f"`{name}`: {error}", name) from None
    ttft_s, tpot_s = asked.get("ttft"), asked.get("tpot")
    longest = max(slo.ttft_s, slo.burst_s)
    if ttft_s is not None and ttft_s > longest:
        raise invalid(f"`{name}`: ttft may be at most {longest:g}s on this server", name)
    if tpot_s is not None and tpot_s < slo.tpot_s and not identity.may_hurry:
        least = f"at least {slo.tpot_s:g}s" if slo.tpot_s < inf else "set only"
        raise invalid(f"`{name}`: tpot may be {least} with this key", name)
    return ttft_s, tpot_s


def most_choices(capacity: int) -> int:
    """Return how many choices one request may ask for. capacity: the places of the engine."""
    return min(max(1, capacity // 2), max(_ALWAYS_CHOICES, capacity // _SHARE_OF_CHOICES))


@dataclass(slots=True)
class Held:
    """The places of one request: of a tenant, in the background or not.

    came: when each of its choices came, and the tenant.
    """

    key: tuple[str, bool] | None = None
    num_choices: int = 0
    came: list[tuple[float, str]] = field(default_factory=list)


class Admission:
    """Counts choices in flight. Refuses requests that are too many or would wait too long, before any work is done.

    `clock` gives seconds, monotonic and the same for the engine. Refusals are counted in `rejections`. `jitter` draws
    from [0, 1). Each of `num_frontends` sees its part of the requests.
    """

    def __init__(
        self,
        rejections: Counter[str],
        jitter: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        num_frontends: int = 1,
    ) -> None:
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._rejections = rejections
        self._jitter = jitter
        self._clock = clock
        self._num_frontends = num_frontends
        self._held: Counter[tuple[str, bool]] = Counter()
        self._weights: dict[tuple[str, bool], float] = {}
        self._load: Load | None = None
        self._loaded_at = 0.0
        # By tenant: when its latest refused request may come back.
        self._promised: dict[str, float] = {}
        # (when, tenant) of choices that the engine may not have counted in its latest load.
        self._new: deque[tuple[float, str]] = deque(maxlen=_REMEMBERED)

    def on_load(self, load: Load) -> None:
        self._load, self._loaded_at = load, self._clock()
        while self._new and self._new[0][0] <= load.at:
            self._new.popleft()

    @contextmanager
    def hold(self, num_choices: int, capacity: int, terms: Terms) -> Iterator[Held]:
        """Hold places for the length of the block. Raise ApiError: 400 if they never fit, 429 if the key has its part
        already, 503 if they are taken now.
        """
        held = Held()
        self.change(held, num_choices, capacity, terms)
        try:
            yield held
        finally:
            self._release(held)
            self._forget(held)
            if self.in_flight == 0:
                self.idle.set()
                if self._num_frontends == 1:
                    # All counted requests are gone; the engine reports its load anew after the step under way.
                    self._load = None

    def change(self, held: Held, num_choices: int, capacity: int, terms: Terms) -> None:
        """Hold other places for a request whose number of choices and terms are known only now. Raise as `hold`."""
        check_choices(num_choices, most_choices(capacity))
        key = (terms.tenant, terms.background)
        known = 0 if held.key != key else held.num_choices
        self._release(held)
        self._check_places(num_choices, capacity, terms, key)
        if not known:
            self._check_wait(terms)
        held.key, held.num_choices = key, num_choices
        self._held[key] += num_choices
        self._weights[key] = terms.weight
        self.in_flight += num_choices
        self.idle.clear()
        if not terms.background:
            came = [(self._clock(), terms.tenant)] * (num_choices - known)
            self._new.extend(came)
            held.came += came

    def _release(self, held: Held) -> None:
        if held.key is None:
            return
        self.in_flight -= held.num_choices
        self._held[held.key] -= held.num_choices
        if not self._held[held.key]:
            del self._held[held.key], self._weights[held.key]
        held.key, held.num_choices = None, 0

    def _forget(self, held: Held) -> None:
        """Count a request that is gone no longer as one that waits before the next."""
        for came in held.came:
            with suppress(ValueError):
                self._new.remove(came)

    def late(self, terms: Terms, wait_s: float | None = None) -> ApiError:
        """503 for a request that would wait too long, or did. wait_s: what the engine predicts, if it was asked."""
        message = "The server is too busy to answer in time"
        return unavailable(message, OVERLOADED, self._retry_after_s(terms, wait_s))

    def full(self, terms: Terms, wait_s: float | None = None) -> ApiError:
        """503 for a request that finds no place."""
        return unavailable("The server's queue is full", "queue_full", self._retry_after_s(terms, wait_s))

    def overload(self) -> str | None:
        """Return why a newcomer would be refused, None if it would not."""
        load = self._load
        if load is None:
            return None
        newcomer = Terms("" if "" in load.tenants else "newcomer")
        wait_s = self._wait_s(newcomer)
        return f"overloaded: requests would wait {wait_s:.0f} s" if wait_s > load.limit_of(newcomer.tenant) else None

    def _check_places(self, num_choices: int, capacity: int, terms: Terms, key: tuple[str, bool]) -> None:
        """Raise ApiError unless the tenant finds places: there are some, or it has less than its share of them.

        Requests in the background have as many places of their own.
        """
        own = self._held[key] + num_choices
        if terms.queue < 1 and own > terms.queue * capacity:
            self._rejections["key_queue_full"] += 1
            raise ApiError(
                429,
                f"This key may have {int(terms.queue * capacity)} choices open at once",
                type="rate_limit_error",
                code="key_queue_full",
                retry_after_s=self._retry_after_s(terms),
            )
        total = sum(held for (_, background), held in self._held.items() if background == terms.background)
        if total + num_choices <= capacity:
            return
        weights = sum(weight for other, weight in self._weights.items() if other != key and other[1] == key[1])
        if own > capacity * terms.weight / (terms.weight + weights):
            self._rejections["queue_full"] += 1
            raise self.full(terms)

    def _check_wait(self, terms: Terms) -> None:
        if self._load is None or terms.patient:
            return
        limit_s = self._load.limit_of(terms.tenant) if terms.ttft_s is None else terms.ttft_s
        if self._wait_s(terms) > limit_s:
            self._rejections[OVERLOADED] += 1
            raise self.late(terms)

    def _wait_s(self, terms: Terms) -> float:
        """Return how long a new request would wait: by the work that waited when the engine reported its load, and the
        work that came since, less the work done meanwhile."""
        load = self._load
        if load is None:
            return 0.0
        came = [at for at, tenant in self._new if tenant == terms.tenant]
        wait_s = load.wait_s(terms.tenant, terms.weight)
        # The other frontends will have admitted about as many.
        full_s = load.wait_s(terms.tenant, terms.weight, self._num_frontends * len(came))
        each_s = (full_s - wait_s) / max(1, len(came))
        latest, now = self._loaded_at, min(self._clock(), self._loaded_at + _MOST_AGE_S)
        for at in came:
            at = min(max(at, latest), now)
            wait_s, latest = max(0.0, wait_s - (at - latest)) + each_s, at
        return max(0.0, wait_s - (now - latest))

    def _retry_after_s(self, terms: Terms, wait_s: float | None = None) -> float:
        """Return the seconds after which to come back, 1 to 60: after the predicted wait, and after the tenant's
        requests that were refused before. These come back one by one, as requests are served; the other frontends do
        the same with theirs. Up to a quarter is added at random.
        """
        now = self._clock()
        apart_s = 0.0 if self._load is None else self._num_frontends * self._load.request_s
        wait_s = max(1.0, self._wait_s(terms) if wait_s is None else wait_s)
        at = max(now + wait_s, self._promised.get(terms.tenant, 0.0) + apart_s)
        self._promised[terms.tenant] = at = min(at, now + _LONGEST_WAIT_S)
        return min((at - now) * (1 + 0.25 * self._jitter()), _LONGEST_WAIT_S)
