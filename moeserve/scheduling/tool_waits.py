"""Which conversations' KV stays in memory while their tools run. No clock here; the caller tells the time.

A turn that calls tools comes back when they have run. The service learns how long each tool of each account takes. From
that it has the rate at which a conversation is expected back, which changes while it waits: KV leaves memory in the
order of these rates, beside prefixes that go by their last use. Stored KV is read back as soon as it is expected to be
used sooner than the KV that would have to leave for it. In memory it is also retained against all other prefixes for
the time that costs least: keeping it costs a share of memory for that time, losing it costs the seconds to have it
again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

from moeserve.plan import Request
from moeserve.scheduling.waiting_room import WaitingRoom
from radix_cache import PrefixCache, Retention, account_of

_REMEMBERED = 64  # latest durations of a tool
_KNOWN_FROM = 4  # a tool with this number of durations of its own is judged by these alone
# The durations, in seconds, of an unknown tool: eight quantiles of a log-normal distribution with a median of 5 s.
_UNKNOWN = (0.5, 1.3, 2.4, 3.9, 6.4, 10.4, 19.0, 49.6)
_MOST_TOOLS = 4096
_MOST_NAME_CHARS = 256  # a model may write any name
_MOST_WAITS = 256
_MOST_ENDED = 256  # requests that have ended and may turn out to have called a tool
_LATEST_S = 3600.0  # a conversation that comes later does not count as a tool's duration
# Seconds that others lose for each second in which all of memory is kept.
_PRICE = 0.2
# An open wait is expected to last its age times this factor.
_TIMES_SO_FAR = 1.5
_MARGIN = 1.1  # KV that is expected after a duration is kept for this many times the duration
_WORTH_READING_S = 0.02  # seconds; shorter readings are left to the request that needs them
# An answer whose tools are not reported within this number of seconds calls none: its conversation waits for the user.
_TOLD_WITHIN_S = 2.0
_NO_TOOL = ""
# Seconds between two looks at the waits that are due, and the most of them in one look: each takes some 60 us of the
# engine's thread. A wait is due again after this number of seconds, or this share of its time so far if that is longer.
_LOOK_S, _MOST_LOOKED_AT = 0.1, 8
_DUE_S, _DUE_SHARE = 0.5, 0.1
# The shortest time for which a rate of return is computed, in seconds and as a share of the wait so far: with few
# durations the rate of a shorter time would be chance.
_LEAST_RATED_S, _LEAST_RATED_SHARE = 0.25, 0.25
_LEAST_RATE = 1e-6  # returns per second
# A wait is placed anew once its expected time is this factor off. KV is read back if the KV that has to leave for it is
# expected later by the second factor: each reading costs time of the lower tier and memory.
_LONGER, _CLEARLY_LONGER = 1.3, 2.0
_MOST_READ_BACK = 32  # waits, the first ones expected, that are looked at for reading


class Durations:
    """The latest durations of a tool, in seconds."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, seconds: float) -> None:
        if len(self._latest) == _REMEMBERED:
            self._sorted.remove(self._latest.popleft())
        self._latest.append(seconds)
        insort(self._sorted, seconds)

    def samples(self) -> Sequence[float]:
        """Return durations that represent the tool's next call, the shortest first."""
        if len(self._latest) >= _KNOWN_FROM:
            return self._sorted
        return sorted((*_UNKNOWN, *self._sorted, *self._sorted))


def best_keep_s(samples: Sequence[float], lost_s: float, rent: float) -> float:
    """Return the seconds to keep KV at the least expected cost; 0 not to keep it.

    samples: durations, the shortest first. lost_s: seconds to have the KV again. rent: seconds lost elsewhere for each
    second of keeping it.
    """
    best_cost, best = lost_s, 0.0
    ended_s, number = 0.0, len(samples)
    for index, seconds in enumerate(samples):
        ended_s += seconds
        until = seconds * _MARGIN
        num_later = number - index - 1
        cost = (rent * (ended_s + until * num_later) + lost_s * num_later) / number
        if cost < best_cost:
            best_cost, best = cost, until
    return best


def return_rate(samples: Sequence[float], waited_s: float) -> float:
    """Return the most returns per second, of KV in memory, that a wait promises for any time from now on.

    samples: durations, the shortest first. waited_s: how long the wait is open.
    """
    least_s = max(_LEAST_RATED_S, _LEAST_RATED_SHARE * waited_s)
    first = bisect_right(samples, waited_s)
    num_left, spent_s, best = len(samples) - first, 0.0, _LEAST_RATE
    if not num_left:
        return max(best, 1 / max(least_s, (_TIMES_SO_FAR - 1) * waited_s))
    for count, sample in enumerate(samples[first:], start=1):
        seconds = max(least_s, sample - waited_s)
        spent_s += seconds
        best = max(best, count / (spent_s + (num_left - count) * seconds))
    return best


@dataclass(eq=False, slots=True)
class Wait:
    """A conversation whose tools run since `since`.

    expected_s: in which it was expected back at `looked_at`. At `placed_at` it was put into the order of eviction as
    expected after `placed_s`. is_coming: it is read back, and has its place in that order once it is in memory.
    retention: None without one of its own, `ttl` its seconds.
    """

    tokens: array[int]
    namespace: str
    session: str
    tool: str
    rank: int
    share: float | None
    since: float
    expected_s: float = 0.0
    looked_at: float = 0.0
    placed_at: float = 0.0
    placed_s: float = 0.0
    is_coming: bool = False
    ttl: float = 0.0
    retention: Retention | None = None

    @property
    def due_at(self) -> float:
        """When it is to be looked at again."""
        return self.looked_at + max(_DUE_S, _DUE_SHARE * (self.looked_at - self.since))


@dataclass(slots=True)
class ToolWaitCounters:
    """Totals since the start. num_kept: of `num_waits`, retained. num_returned: came back, `num_in_time` while they
    were in memory. num_read: were read back before they came."""

    num_waits: int = 0
    num_kept: int = 0
    num_returned: int = 0
    num_in_time: int = 0
    num_read: int = 0


class ToolWaits:
    """The conversations whose tools run, and the durations of each tool."""

    def __init__(self, caches: Sequence[PrefixCache], recovery: WaitingRoom) -> None:
        self._caches = caches
        self._recovery = recovery
        self._durations: OrderedDict[tuple[str, str], Durations] = OrderedDict()
        # The requests that have ended, and when.
        self._ended: OrderedDict[str, tuple[Request, float]] = OrderedDict()
        # By the request that continues them.
        self._returned: dict[str, Wait] = {}
        # By namespace; the oldest first.
        self._waits: dict[str, list[Wait]] = {}
        self._in_order: deque[Wait] = deque()
        self._open: defaultdict[tuple[str, str], list[Wait]] = defaultdict(list)
        self._next_look = self._next_reading = 0.0
        self.counters = ToolWaitCounters()

    @property
    def num_open(self) -> int:
        """The number of conversations that are waited for."""
        return len(self._in_order)

    def record_end(self, request: Request, now: float, *, is_whole: bool) -> None:
        """Record that a request has ended. is_whole: its answer is complete, and may have called tools."""
        wait = self._returned.pop(request.request_id, None)
        if wait is not None and wait.retention is not None:
            self._caches[wait.rank].retentions.end(wait.retention, wait.ttl)
        if is_whole and request.session is not None:
            self._ended[request.request_id] = (request, now)
            if len(self._ended) > _MOST_ENDED:
                self._ended.popitem(last=False)

    def begin(self, request_id: str, tools: Sequence[str], now: float) -> None:
        """Record which tools a request that has ended called. They run from now on."""
        request, _ = self._ended.pop(request_id, (None, now))
        if request is not None and tools:
            self._begin(request, "+".join(sorted(set(tools)))[:_MOST_NAME_CHARS], now)

    def _begin(self, request: Request, tool: str, now: float) -> None:
        cache = self._caches[request.rank]
        num_tokens = len(request.token_ids) // cache.block_size * cache.block_size
        if not num_tokens:
            return
        share = request.terms.retained
        tokens, session = request.token_ids[:num_tokens], request.session or ""
        wait = Wait(tokens, request.namespace, session, tool, request.rank, share, now)
        self.counters.num_waits += 1
        self._keep(wait, now)
        self._waits.setdefault(wait.namespace, []).append(wait)
        self._in_order.append(wait)
        self._open[account_of(wait.namespace), wait.tool].append(wait)
        while len(self._in_order) > _MOST_WAITS:
            self._forget(self._in_order[0])

    def record_return(self, request: Request, now: float) -> None:
        """Record a new request: if it continues a conversation whose tools ran, learn how long they took."""
        waits, session = self._waits.get(request.namespace, ()), request.session
        wait = next((one for one in reversed(waits) if session and one.session == session), None)
        if wait is None:
            wait = next((one for one in reversed(waits) if self._continues(request.token_ids, one)), None)
        if wait is None:
            return
        self._forget(wait)
        # The KV is kept until the request, which may have to wait for its turn, has ended.
        self._returned[request.request_id] = wait
        seconds = now - wait.since
        if seconds <= _LATEST_S:
            self._durations_of(wait).add(seconds)
            self.counters.num_returned += 1
            self.counters.num_in_time += self._is_in_memory(wait)

    def advance(self, now: float) -> None:
        """Put KV in order by when it is expected, read back stored KV, and forget conversations that did not come."""
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        while self._in_order and now - self._in_order[0].since > _LATEST_S:
            self._forget(self._in_order[0])
        self._end_turns(now)
        due = [wait for wait in self._in_order if now >= wait.due_at]
        for wait in nsmallest(_MOST_LOOKED_AT, due, key=lambda wait: wait.due_at):
            wait.looked_at, wait.expected_s = now, 1 / return_rate(self._samples(wait, now), now - wait.since)
            self._place(wait, now)
        if now < self._next_reading:
            return
        self._next_reading = now + _DUE_S
        waits = sorted(self._in_order, key=lambda wait: wait.expected_s)
        for rank in range(len(self._caches)):
            self._read_back([wait for wait in waits if wait.rank == rank], rank)

    def _place(self, wait: Wait, now: float) -> None:
        """Put a wait's KV where it belongs in the order of eviction, if it is off."""
        if wait.is_coming and not self._is_in_memory(wait):
            return
        as_placed = now - wait.placed_at + wait.placed_s
        is_off = wait.is_coming or not wait.expected_s / _LONGER < as_placed < wait.expected_s * _LONGER
        wait.is_coming = False
        if is_off and self._caches[wait.rank].place(wait.tokens, wait.namespace, wait.expected_s):
            wait.placed_at, wait.placed_s = now, wait.expected_s

    def _end_turns(self, now: float) -> None:
        """Let conversations whose last answer called no tool wait for their users."""
        while self._ended:
            request_id, (request, ended_at) = next(iter(self._ended.items()))
            if now - ended_at < _TOLD_WITHIN_S:
                return
            del self._ended[request_id]
            self._begin(request, _NO_TOOL, ended_at)

    def _read_back(self, waits: Sequence[Wait], rank: int) -> None:
        """Read the KV of the first of a rank's waits that is not in memory, if it is worth more than what goes."""
        cache = self._caches[rank]
        for wait in waits[:_MOST_READ_BACK]:
            num_blocks = len(wait.tokens) // cache.block_size
            if cache.seconds_of_next(num_blocks) < _CLEARLY_LONGER * wait.expected_s:
                return
            if self._is_in_memory(wait) or self._recovery.recovery_s(wait.tokens, wait.namespace) < _WORTH_READING_S:
                continue
            if self._recovery.read_back(wait.tokens, wait.namespace, rank):
                self.counters.num_read += 1
                wait.is_coming = True
                return

    def _is_in_memory(self, wait: Wait) -> bool:
        """Return whether a wait's KV is in memory, but for its last block."""
        cache = self._caches[wait.rank]
        return cache.peek(wait.tokens, wait.namespace) >= len(wait.tokens) - cache.block_size

    def _keep(self, wait: Wait, now: float) -> None:
        """Decide where in the order of eviction a new wait's KV is, and for how long it is retained."""
        cache = self._caches[wait.rank]
        samples = self._samples(wait, now)
        lost_s = self._recovery.recovery_s(wait.tokens, wait.namespace)
        rent = _PRICE * len(wait.tokens) / (cache.block_size * cache.num_blocks)
        seconds = best_keep_s(samples, lost_s, rent)
        if seconds and not self._has_budget(wait):
            seconds = 0.0
        self.counters.num_kept += seconds > 0
        wait.looked_at = wait.placed_at = now
        wait.placed_s = 1 / return_rate(samples, now - wait.since)
        wait.expected_s = wait.placed_s
        wait.retention = cache.expect_back(wait.tokens, wait.namespace, wait.expected_s, seconds, wait.share)
        wait.ttl = seconds

    def _has_budget(self, wait: Wait) -> bool:
        """Return whether a wait's KV can be retained within its account's budget.

        Other waits, the oldest first, give way for that, but nothing that clients retain.
        """
        cache, account = self._caches[wait.rank], account_of(wait.namespace)
        num_blocks = len(wait.tokens) // cache.block_size
        others = (one for one in self._in_order if one.rank == wait.rank and account_of(one.namespace) == account)
        while True:
            budget, num_retained, *_ = cache.retentions.budget(account, wait.share)
            if num_retained + num_blocks <= budget:
                return True
            other = next((one for one in others if one.retention is not None), None)
            if other is None or other.retention is None:
                return False
            cache.retentions.end(other.retention, other.ttl)
            other.retention = None

    def _samples(self, wait: Wait, now: float) -> Sequence[float]:
        """Return durations that represent the end of a wait.

        Other waits that are open for longer than most ended ones say as well how long the tool takes.
        """
        samples = self._durations_of(wait).samples()
        usual = _quantile(samples, 0.5)
        waits = self._open.get((account_of(wait.namespace), wait.tool), ())
        longer = [now - one.since for one in waits if now - one.since > usual and one is not wait]
        return sorted((*samples, *(_TIMES_SO_FAR * seconds for seconds in longer))) if longer else samples

    def _continues(self, tokens: array[int], wait: Wait) -> bool:
        """Return whether a prompt begins like a conversation, but for its last block: a template may end it anew."""
        num_equal = len(wait.tokens) - self._caches[wait.rank].block_size
        return 0 < num_equal < len(tokens) and tokens[:num_equal] == wait.tokens[:num_equal]

    def _forget(self, wait: Wait) -> None:
        self._in_order.remove(wait)
        key = account_of(wait.namespace), wait.tool
        self._open[key].remove(wait)
        if not self._open[key]:
            del self._open[key]
        waits = self._waits[wait.namespace]
        waits.remove(wait)
        if not waits:
            del self._waits[wait.namespace]

    def _durations_of(self, wait: Wait) -> Durations:
        key = account_of(wait.namespace), wait.tool
        found = self._durations.get(key)
        if found is None:
            found = self._durations[key] = Durations()
            if len(self._durations) > _MOST_TOOLS:
                self._durations.popitem(last=False)
        self._durations.move_to_end(key)
        return found


def _quantile(samples: Sequence[float], share: float) -> float:
    return samples[min(len(samples) - 1, int(share * len(samples)))]
