"""How long requests may wait, and how long they will wait: the arithmetic of refusing early.

The scheduler decides from its own state. A frontend refuses by the last `Load` from the engine, so that a refusal need
not wait. Pure: time is an argument, in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from moeserve.config import ServeConfig
from moeserve.plan import FinishReason, Request
from moeserve.scheduling.cost_model import CostModel, StepSize, Stretch
from moeserve.scheduling.departures import Departures
from moeserve.scheduling.survival import Survival
from moeserve.settings.quantities import parse_limits

# A request may always wait for this share of its time to the first token, however long its own prompt takes.
_LEAST_SHARE = 0.25
# A request is refused once its predicted wait exceeds its limit by this factor.
_BENEFIT_OF_DOUBT = 1.5
# A request that was admitted to the queue in a burst is dropped after this multiple of the longest wait allowed then.
_TIMES_IN_BURST = 6
# A step has room for at least this number of prompt tokens, whatever pace the running requests need.
LEAST_PROMPT_TOKENS = 16
_SMOOTHING = 0.1
# While requests wait, a step may take this share of the time to the first token, otherwise the rest of it: a request
# that comes during a step needs another one.
_STEP_SHARE = 1 / 3
# If decodes alone take more than this share of the longest step, a step may be longer.
_LARGEST_SHARE_OF_DECODES = 1 / 5
# The largest share of the throughput that is given up for shorter steps.
_MOST_GIVEN_UP = 1 / 2
# Most answers take at most this many times the average time.
_SPREAD = 1.1
# The number of ends that are remembered, over the number of requests that may run at once.
_REMEMBERED = 8


@dataclass(frozen=True, slots=True)
class Slo:
    """The service's objectives: the time to the first token, and the time per output token; inf without a bound.

    `gap_s`: the longest step while streams run and nobody waits. `burst_s`: how long a burst may last, and the longest
    wait that it is taken in with, of an engine that can keep the objective. In a lasting overload (`Patience`) `ttft_s`
    bounds the wait instead: a burst is served late, a lasting overload is refused. The idea is that of controlled delay
    (Nichols and Jacobson, "Controlling Queue Delay", 2012; Maurer, "Fail at Scale", 2015).
    """

    ttft_s: float
    tpot_s: float = inf
    burst_s: float = 0.0
    gap_s: float = 0.25


UNBOUNDED = Slo(inf, gap_s=inf)  # bounds no wait, and no step, by time


def service_slo(config: ServeConfig) -> Slo:
    """Return the objectives that the settings name."""
    limits = parse_limits(config.slo, ("ttft", "tpot"))
    return Slo(limits["ttft"], limits.get("tpot", inf), config.max_queue_seconds)


def allowance(ttft_s: float, prefill_s: float) -> float:
    """Return how long a request may wait for its first step if its own prompt takes `prefill_s`."""
    return max(ttft_s - prefill_s, _LEAST_SHARE * ttft_s)


class Patience:
    """Tells bursts from lasting overload, and so bounds the wait of a request without terms of its own.

    An overload is lasting once requests wait that arrived after the queue had not been empty for the time of a burst.
    It ends when no request has waited for long within as long a time: while requests are refused, the queue is empty
    now and then.

    The time of a burst is `burst_s` where a step takes at most its share of the objective, and longer in proportion
    where it takes more: the same requests are a burst on a slow machine.
    """

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._empty_at: float | None = None
        self._pressed_at = 0.0
        self._burst_s = slo.burst_s
        # No burst is allowed for: every overload is a lasting one.
        self.is_lasting = not slo.burst_s

    def observe(self, now: float, waiting: tuple[float, float] | None, step_s: float) -> None:
        """Record the first and the last arrival of requests that wait, None if none waits. To be called every step.

        step_s: of a full step.
        """
        if not self._slo.burst_s:
            return
        self._burst_s = self._slo.burst_s * max(1.0, step_s / (_STEP_SHARE * self._slo.ttft_s))
        if waiting is None or self._empty_at is None:
            self._empty_at = now
        if waiting is not None and now - waiting[0] > _LEAST_SHARE * self._slo.ttft_s:
            self._pressed_at = now
        if self.is_lasting:
            self.is_lasting = now - self._pressed_at < self._burst_s
        elif waiting is not None:
            self.is_lasting = waiting[1] - self._empty_at >= self._burst_s

    def limit(self, prefill_s: float, step_s: float = 0.0) -> float:
        """Return the longest wait at which a request with a prefill of `prefill_s` is still admitted.

        step_s: of the step under way, for which its first token waits too. A request whose own prompt takes longer than
        the objective is never in time. It may wait in proportion to that, at any load, as a request of the objective's
        length in a burst.
        """
        slo = self._slo
        of_long = slo.burst_s * prefill_s / slo.ttft_s if prefill_s > slo.ttft_s else 0.0
        return max(allowance(slo.ttft_s, step_s + prefill_s), of_long, 0.0 if self.is_lasting else self._burst_s)


@dataclass(frozen=True, slots=True)
class Backlog:
    """The requests of one tenant: the numbers that run and wait, and the uncached prompt tokens that wait.

    `request_tokens`: uncached prompt tokens of one of its typical requests.
    """

    weight: float
    running: int
    waiting: int
    tokens: int
    request_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """The load that a request would find at time `at`.

    `limit_s`: the longest wait of a request whose prompt needs one step. A step takes `step_s` and has room for
    `step_tokens` tokens of prompts. `places` requests run at once (fewer than allowed where memory is full), one ends
    every `place_s`. `request_tokens`: uncached prompt tokens of a typical request. `spares`: the longest waits of
    tenants whose clients leave before their answers are whole.
    """

    at: float
    limit_s: float
    step_s: float
    step_tokens: int
    places: int
    place_s: float
    request_tokens: int
    tenants: dict[str, Backlog] = field(default_factory=dict)
    spares: dict[str, float] = field(default_factory=dict)

    def limit_of(self, tenant: str) -> float:
        """Return the longest wait, in seconds, of a tenant's request whose prompt needs one step."""
        return min(self.limit_s, self.spares.get(tenant, inf))

    @property
    def request_s(self) -> float:
        """The seconds between the starts of two requests, as long as requests wait."""
        return max(self.place_s, self.step_s * self.request_tokens / max(1, self.step_tokens))

    def wait_s(self, tenant: str, weight: float, num_new: int = 0) -> float:
        """Return the wait of a new request for its first step, behind `num_new` of its tenant not yet in the backlog.

        Tenants are served by weight. While one tenant is given an amount, another tenant gets as much, in proportion to
        the weights, as long as it has work: the fluid model of fair queueing (Parekh and Gallager, 1993).
        """
        usual = min(self.request_tokens, self.step_tokens)
        mine = self.tenants.get(tenant, Backlog(weight, 0, 0, 0, usual))
        waiting = mine.waiting + num_new
        tokens = mine.tokens + num_new * mine.request_tokens
        all_waiting, all_tokens, weights = float(waiting), float(tokens), weight
        for name, other in self.tenants.items():
            if name == tenant:
                continue
            ratio = other.weight / weight
            all_waiting += min(other.waiting, waiting * ratio)
            all_tokens += min(other.tokens, tokens * ratio)
            weights += other.weight
        has_own_place = mine.running + waiting < self.places * weight / weights
        return self.wait_behind_s(0 if has_own_place else all_waiting + 1 - self.num_free_places, all_tokens)

    @property
    def num_free_places(self) -> int:
        """The number of requests that could begin at once, memory aside."""
        return max(0, self.places - sum(backlog.running for backlog in self.tenants.values()))

    def wait_behind_s(self, num_places: float, num_tokens: float) -> float:
        """Return the wait until `num_places` requests have ended and `num_tokens` tokens of prompts are computed."""
        return max(self.step_s * num_tokens / max(1, self.step_tokens), self.place_s * num_places, 0.0)


@dataclass(frozen=True, slots=True)
class StepBound:
    """The seconds that a step should take at most, and so the tokens of prompts that it has room for.

    `pace_s` keeps the pace that running requests ask for, in the model's seconds. `ttft_s` leaves time to requests that
    come during the step, more if others wait already (`is_awaited`); while nobody waits, `gap_s` lets no stream stall.
    Where the least step takes nearly as long, as with experts that are loaded from a disk in every step, a short step
    would only cost throughput.
    """

    cost: CostModel
    pace_s: float
    gap_s: float
    ttft_s: float
    is_awaited: bool

    def seconds(self, decodes: StepSize) -> float:
        """Return the longest that a step with these decodes should take; inf without a bound."""
        least_s = self.cost.seconds(decodes.rows + LEAST_PROMPT_TOKENS, decodes.attended)
        step_s = self.ttft_s * (_STEP_SHARE if self.is_awaited else 1 - _STEP_SHARE)
        if not self.is_awaited:
            own_s = self.cost.seconds(decodes.rows, decodes.attended)
            step_s = min(step_s, max(self.gap_s, own_s / _LARGEST_SHARE_OF_DECODES))
        if least_s > step_s or not self.is_awaited:
            step_s = max(step_s, least_s / (1 - _MOST_GIVEN_UP))
        return min(self.pace_s, step_s)


class Pace:
    """Measures how fast requests are served, and derives how long each may wait. It decides nothing about memory.

    `now` is the scheduler's time, `max_num_batched_tokens` the most tokens that a step computes on each rank.
    """

    def __init__(
        self,
        slo: Slo,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        num_ranks: int = 1,
        warm_up: Iterable[tuple[int, float]] = (),
    ) -> None:
        """max_num_batched_tokens: of each rank. warm_up: tokens and seconds of steps that computed one prompt each.
        Without them the first steps, slow as they may be, are the measure of all others.
        """
        self.now = 0.0
        self._slo = slo
        self._patience = Patience(slo)
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._num_ranks = num_ranks
        self._cost = CostModel()
        self._stretch = Stretch()
        for count, seconds in warm_up:
            self._cost.observe(*StepSize().plus(count, 0), seconds)
        self._is_awaited = False
        self._attended = 0.0
        self._attended_of_row = 0.0
        self._step_s = 0.0
        # The seconds of a step that computes as many tokens as it may.
        self._full_step_s = self._cost.seconds(max_num_batched_tokens, 0.0)
        self._request_tokens = _Average()
        num_remembered = _REMEMBERED * max_num_seqs
        self._output_tokens = Survival(1, 1.1, num_remembered)
        self._departures = Departures(_LEAST_SHARE * slo.ttft_s, max_num_seqs, num_remembered)

    def set_time(self, now: float) -> None:
        """Set the time, which must not go back."""
        self.now = now

    def count_step(self, size: StepSize, seconds: float, *, has_prompts: bool = False) -> None:
        """Learn from a measured step."""
        self._stretch.observe(self._cost.seconds(size.rows, size.attended), seconds, has_prompts=has_prompts)
        self._cost.observe(size.rows, size.attended, seconds)
        self._attended += _SMOOTHING * (size.attended - self._attended)
        self._attended_of_row += _SMOOTHING * (size.attended / size.rows - self._attended_of_row)
        self._step_s += _SMOOTHING * (self._cost.seconds(size.rows, size.attended) - self._step_s)
        self._full_step_s = self._cost.seconds(self.max_num_batched_tokens, self._attended)

    def count_start(self, request: Request) -> None:
        """Learn from a request that left the queue."""
        self._request_tokens.count(request.num_uncached_tokens)

    def count_end(self, request: Request, reason: FinishReason) -> None:
        """Learn from a request that ended, begun or not."""
        if request.num_output_tokens:
            is_whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
            self._output_tokens.count(request.num_output_tokens, has_ended=is_whole)
        if self._slo.ttft_s < inf and not request.terms.patient:
            age_s = self.now - request.arrived_at
            self._departures.count(request.terms.tenant, age_s, has_left=reason is FinishReason.ABORT)

    @property
    def step_s(self) -> float:
        """The seconds of a usual step of late."""
        return self._step_s

    def compute_s(self, start: int, stop: int, rows: int = 0) -> float:
        """Return the seconds of the steps that compute a prompt's tokens from position `start` to `stop`.

        rows: the tokens that each of these steps computes anyway; their seconds do not count. 0 before the first step.
        """
        most = max(1, self.max_num_batched_tokens - rows)
        anyway_s = self._cost.seconds(rows, 0.0) if rows else 0.0
        return sum(
            self._cost.seconds(rows + (count := min(most, stop - at)), count * (at + 0.5 * count)) - anyway_s
            for at in range(start, stop, most)
        )

    def bulk_s(self, num_tokens: int, num_positions: float) -> float:
        """Return the seconds in which full steps compute `num_tokens`, which attend to `num_positions` in total."""
        if not num_tokens:
            return 0.0
        most = self.max_num_batched_tokens
        return num_tokens / most * self._cost.seconds(most, num_positions / num_tokens * most)

    def num_places(self) -> int:
        """Return the number of requests that may run at once: as many as the settings allow, unless all tenants'
        clients leave (`Departures`)."""
        return self._departures.places

    def record_waiting(self, telling: tuple[float, float] | None, *, is_awaited: bool) -> None:
        """Record the requests that still wait after a step.

        telling: the first and the last arrival of requests that tell of an overload (`tells_overload`), None without
        one. is_awaited: any has a bounded wait.
        """
        self._is_awaited = is_awaited
        self._patience.observe(self.now, telling, self._full_step_s)
        self._departures.update(self._throughput, self._answer_s)

    def is_bounded(self, request: Request) -> bool:
        """Return whether a request may be refused or dropped because of its wait."""
        return not request.keeps_its_turn and self._ttft_s(request) < inf

    def tells_overload(self, request: Request) -> bool:
        """Return whether a request that waits for long tells of an overload: its wait is bounded, and its prompt is not
        longer than one that can be in time."""
        return self.is_bounded(request) and not self._is_long(request)

    def _is_long(self, request: Request) -> bool:
        """Return whether a request's own prompt takes several steps, and longer than the objective."""
        own = request.num_uncached_tokens
        return own > self.max_num_batched_tokens and self._prefill_s(own) > self._slo.ttft_s

    def limit(self, request: Request) -> float:
        """Return how long a request may wait for its first step.

        In a burst it waits for its turn, also where predictions were wrong.
        """
        return self._limit(request, _TIMES_IN_BURST if self._is_of_burst(request) else 1)

    def admits(self, request: Request, wait_s: float) -> bool:
        """Return whether a request that would wait `wait_s` from now on is taken in.

        Frontends refuse at the bound itself, and sooner, since this refusal comes only after a step.
        """
        # In a burst, a long step during which the request arrived does not count as its wait.
        waited_s = 0.0 if self._is_of_burst(request) else self.now - request.arrived_at
        return waited_s + wait_s <= _BENEFIT_OF_DOUBT * self._limit(request)

    def _limit(self, request: Request, times: float = 1) -> float:
        """Return the longest wait for which a request is taken in, times `times`."""
        if not self.is_bounded(request):
            return inf
        prefill_s = self._prefill_s(request.num_uncached_tokens)
        if request.terms.ttft_s:
            return allowance(request.terms.ttft_s, prefill_s)
        return min(times * self._patience.limit(prefill_s), self._longest_for_whole_s(request))

    def _is_of_burst(self, request: Request) -> bool:
        """Return whether a request without terms of its own, and without a long prompt, waits in a burst."""
        return not (self._patience.is_lasting or request.terms.ttft_s or self._is_long(request))

    def is_late(self, request: Request) -> bool:
        """Return whether a waiting request's first token will be late, or its answer whole only after its client
        leaves."""
        allowed_s = allowance(self._ttft_s(request), self._prefill_s(request.num_uncached_tokens))
        return self.now - request.arrived_at > min(allowed_s, self._longest_for_whole_s(request))

    def step_bound(self, decodes: Sequence[Request]) -> StepBound:
        """Return the bound of a step in which the requests `decodes` have a token each.

        They must keep their pace. And a step must not be so long that requests which come during it are late when it
        ends.
        """
        slo = self._slo
        paces = [request.terms.tpot_s or slo.tpot_s for request in decodes if not request.terms.background]
        pace_s = min(paces, default=inf) / self._stretch.times
        return StepBound(self._cost, pace_s, slo.gap_s if paces else inf, slo.ttft_s, self._is_awaited)

    def load(self, tenants: dict[str, Backlog], lacks_memory: bool) -> Load:
        """Return the load that a new request would find. lacks_memory: whether no more requests fit than run now."""
        num_running = sum(backlog.running for backlog in tenants.values())
        places = max(1, num_running) if lacks_memory else self.num_places()
        return Load(
            at=self.now,
            limit_s=self._limit_of_one_step_s,
            step_s=self._full_step_s,
            step_tokens=max(LEAST_PROMPT_TOKENS, self._num_ranks * self.max_num_batched_tokens - num_running),
            places=places,
            place_s=(self._output_tokens.mean() + 1) * self._step_s / places,
            request_tokens=round(self._request_tokens.value),
            tenants=tenants,
            spares=self._departures.spares(),
        )

    @property
    def _limit_of_one_step_s(self) -> float:
        """The longest wait, in seconds, for which frontends take in a request whose prompt needs one step."""
        step_s = self._full_step_s
        return self._patience.limit(step_s, step_s)

    def _throughput(self, num_running: int) -> float:
        """Return the rows per second of steps with `num_running` typical requests: as one ends, another begins."""
        rows_of_each = 1 + self._request_tokens.value / max(1.0, self._output_tokens.mean())
        rows = min(round(num_running * rows_of_each / self._num_ranks), self.max_num_batched_tokens)
        return rows / max(self._cost.seconds(rows, rows * self._attended_of_row), 1e-9)

    def _answer_s(self, num_running: int) -> float:
        """Return the seconds within which most typical answers are whole while `num_running` run (Little's law)."""
        rows = self._request_tokens.value + max(1.0, self._output_tokens.mean())
        return _SPREAD * num_running * rows / self._num_ranks / max(self._throughput(num_running), 1e-9)

    def _longest_for_whole_s(self, request: Request) -> float:
        """Return the longest wait, in seconds, of a request whose answer is to be whole before its client leaves.

        It is a step longer than the wait allowed to new requests, since a prediction is not exact.
        """
        return self._departures.spare_s(request.terms.tenant) + self._full_step_s

    def _ttft_s(self, request: Request) -> float:
        """Return the objective of a request for the time to its first token, in seconds."""
        return request.terms.ttft_s or self._slo.ttft_s

    def _prefill_s(self, num_tokens: int) -> float:
        """Return the least seconds of the steps that compute a prompt in a busy engine, where all steps are full."""
        return self._full_step_s * -(-num_tokens // self.max_num_batched_tokens)


class _Average:
    """The mean of all values at first, later of the last values."""

    def __init__(self) -> None:
        self.value = 0.0
        self._num_values = 0

    def count(self, value: float) -> None:
        self._num_values += 1
        self.value += max(_SMOOTHING, 1 / self._num_values) * (value - self.value)
