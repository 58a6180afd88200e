"""A frontend's admission and an engine's scheduler on one scripted clock, under clients that come whether or not there
is room: what a service does in overload, without a service."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from moeserve.frontend.admission import Admission
from moeserve.frontend.errors import ApiError
from moeserve.plan import DEFAULT_TERMS, ChunkResult, Request, SamplingParams, StepPlan, StepResult, Terms
from moeserve.scheduling.outcomes import QueueFullError, TooLateError
from moeserve.scheduling.pacing import Pace, Slo
from moeserve.scheduling.scheduler import Scheduler
from radix_cache import PrefixCache

# The service's default.
USUAL = Slo(2.0, burst_s=10.0)
_STATS_S = 0.5
# The seconds until a client that is gone is noticed.
_NOTICED_S = 0.2
# The seconds of the first step after the start, as a multiple of later steps' seconds.
_COLD = 8.0
# Rows and milliseconds of a step, roughly as the demo takes them on two cores.
_COSTS = ((0, 0), (1, 43), (4, 81), (16, 97), (64, 158), (512, 716))


def step_seconds(plan: StepPlan) -> float:
    return seconds_of(plan.num_tokens)


def seconds_of(rows: float) -> float:
    """Return the seconds of a step with a number of rows."""
    place = max(1, bisect_left([knot for knot, _ in _COSTS], rows))
    (low, from_ms), (high, to_ms) = _COSTS[place - 1], _COSTS[min(place, len(_COSTS) - 1)]
    return (from_ms + (to_ms - from_ms) * (rows - low) / max(1, high - low)) / 1000


@dataclass(slots=True)
class Client:
    """One request that is asked for at `at`, until it is answered. Times are seconds of the script's clock.

    `leaves_s`: it hangs up if its answer is not whole by then. `tries`: how often it asks, coming back when it is
    told to.
    """

    name: str
    at: float
    terms: Terms = DEFAULT_TERMS
    num_prompt_tokens: int = 90
    num_output_tokens: int = 16
    priority: int = 0
    leaves_s: float | None = None
    tries: int = 1
    first_at: float | None = None
    ended_at: float | None = None
    asked_at: float = 0.0
    has_left: bool = False
    refusals: list[float] = field(default_factory=list)
    places: ExitStack = field(default_factory=ExitStack)
    admission: Admission | None = None

    @property
    def ttft(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.asked_at

    def met(self, ttft_s: float) -> bool:
        return self.ttft is not None and self.ttft <= ttft_s and not self.has_left


def poisson(rate: float, seconds: float, seed: int, start: float = 0.0) -> list[float]:
    """Return the times of random arrivals."""
    random, now, times = Random(seed), start, []
    while (now := now + random.expovariate(rate)) < start + seconds:
        times.append(now)
    return times


class OverloadSimulation:
    """Runs clients against one scheduler and some frontends, each try at one that is drawn."""

    def __init__(
        self,
        *,
        slo: Slo = USUAL,
        max_num_seqs: int = 64,
        num_blocks: int = 2000,
        slowness: float = 1.0,
        num_frontends: int = 1,
        num_cold: int = 0,
        warm_up: Sequence[tuple[int, float]] = (),
    ) -> None:
        """num_cold: the number of first steps that take `_COLD` times as long. warm_up: see `Pace`."""
        pace = Pace(slo, 256, max_num_seqs, warm_up=warm_up)
        self.scheduler = Scheduler(
            [PrefixCache(num_blocks, 16)],
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            max_num_queued_reqs=256,
            max_model_len=16 * num_blocks,
            pace=pace,
        )
        self._capacity = max_num_seqs + 256
        self.now = 0.0
        self._slowness = slowness
        self._num_cold = num_cold
        self._random = Random(7)
        self.rejections: Counter[str] = Counter()
        self.admissions = [
            Admission(self.rejections, self._random.random, lambda: self._clock, num_frontends)
            for _ in range(num_frontends)
        ]
        self._draw = Random(8)
        self._clock = 0.0
        self._events: list[tuple[float, int, str, Client]] = []
        self._num_events = 0
        self._inbox: list[Client] = []
        self._open: dict[str, Client] = {}
        self._told_at = -1.0
        self.plans: list[StepPlan] = []

    def run(self, clients: Iterable[Client]) -> None:
        """Play all clients to their ends."""
        for client in clients:
            self._push(client.at, "ask", client)
        while self._events or self._open or self._inbox:
            self._arrive()
            self._turn()

    def _push(self, at: float, what: str, client: Client) -> None:
        heappush(self._events, (at, self._num_events, what, client))
        self._num_events += 1

    def _arrive(self) -> None:
        """Let everything happen at the frontend that happens until now."""
        while self._events and self._events[0][0] <= self.now:
            self._clock, _, what, client = heappop(self._events)
            if what == "ask":
                self._ask(client)
            elif what == "leave":
                if client.name in self._open:
                    client.has_left = True
                    self._push(self._clock + _NOTICED_S, "notice", client)
            elif client.name in self._open:
                self._end(client)
                self.scheduler.abort(client.name)

    def _ask(self, client: Client) -> None:
        client.asked_at = self._clock
        client.tries -= 1
        client.admission = self._draw.choice(self.admissions)
        try:
            client.places.enter_context(client.admission.hold(1, self._capacity, client.terms))
        except ApiError as error:
            self._refused(client, error.retry_after_s or 0.0)
            return
        self._inbox.append(client)
        self._open[client.name] = client
        if client.leaves_s is not None:
            self._push(self._clock + client.leaves_s, "leave", client)

    def _come_back(self, client: Client, wait_s: float | None = None) -> None:
        """Have a client told what the frontend says that it had asked."""
        assert client.admission is not None
        self._refused(client, client.admission.late(client.terms, wait_s).retry_after_s or 0.0)

    def _refused(self, client: Client, retry_after_s: float) -> None:
        client.refusals.append(retry_after_s)
        if client.tries:
            self._push(self._clock + retry_after_s, "ask", client)

    def _turn(self) -> None:
        """One turn of the engine's loop."""
        scheduler = self.scheduler
        scheduler.set_time(self.now)
        for client in self._inbox:
            if client.name in self._open:
                self._add(client)
        self._inbox.clear()
        for output in scheduler.drop_late():
            self.rejections["dropped"] += 1
            client = self._open[output.request.request_id]
            self._end(client)
            self._clock = self.now
            self._come_back(client)
        plans = scheduler.schedule()
        if plans is None:
            self._tell()
            assert not self._open, "requests are open and nothing runs"
            self.now = max(self.now, self._events[0][0]) if self._events else self.now
            # An idle engine turns several times a second.
            scheduler.set_time(self.now)
            scheduler.schedule()
            return
        (plan,) = plans
        self.plans.append(plan)
        seconds = self._slowness * step_seconds(plan) * (_COLD if len(self.plans) <= self._num_cold else 1)
        self.now += seconds
        results = [ChunkResult(None if chunk.sampling is None else 5) for chunk in plan.chunks]
        self._arrive()
        for output in scheduler.commit(plans, [StepResult(plan.step, results)]):
            client = self._open[output.request.request_id]
            client.first_at = client.first_at or self.now
            if output.finish_reason is not None:
                self._end(client)
        scheduler.count_step(seconds)
        if self.now - self._told_at >= _STATS_S:
            self._tell()

    def _add(self, client: Client) -> None:
        # Everybody has a prompt of his own.
        random = Random(f"{client.name} {client.tries}")
        prompt = array("i", (random.randrange(1000) for _ in range(client.num_prompt_tokens)))
        sampling = SamplingParams(client.num_output_tokens)
        request = Request(client.name, prompt, sampling, client.terms.tenant, client.priority)
        request.terms, request.arrived_at = client.terms, client.asked_at
        try:
            self.scheduler.add(request)
        except (QueueFullError, TooLateError):
            self.rejections["by the engine"] += 1
            self._end(client)
            self._clock = self.now
            load = self.scheduler.load(request.num_uncached_tokens)
            wait_s = load.wait_s(client.terms.tenant, client.terms.weight)
            self._come_back(client, max(1.0, wait_s))

    def _tell(self) -> None:
        self._told_at = self._clock = self.now
        for admission in self.admissions:
            admission.on_load(self.scheduler.load())

    def _end(self, client: Client) -> None:
        del self._open[client.name]
        client.ended_at = self.now
        client.places.close()
