"""The curve of goodput: the answers that a server gives in time under more requests than it can serve.

Clients come at random at a fixed mean rate, whether earlier ones were answered or not (an open loop), so a server that
falls behind is not spared by its own slowness. Goodput counts the answers that met the objectives, per second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from time import perf_counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moeserve.bench.client import Answer, ChatClient, RequestFailed, Response
from moeserve.bench.metrics import Slo, percentile
from moeserve.bench.workloads import record_of, seeded_text

_REFUSED = (429, 503)
_MAX_TRIES = 20  # of one client that is refused
_CLOSED_LOOP = 32  # clients that ask again at once, to find the highest rate
_LOADS = (0.5, 1.0, 2.0, 4.0, 5.0)  # rates that are offered, in multiples of that rate
_PROBE_PAUSE_S = 0.5  # between two probes whether the service has recovered
_MAX_RECOVERY_S = 180.0  # the longest wait for that
_BAR_CELLS = 30  # width of the longest bar, in characters
_HEADINGS = (
    "asked/s",
    "goodput/s",
    "",
    "answered",
    "refused",
    "TTFT p50",
    "p99",
    "refusal p99",
    "told",
    "tries",
    "normal after",
)


@dataclass(frozen=True, slots=True)
class Crowd:
    """The clients of a curve: lengths, for how long they come, and how they behave.

    `impatient_s`: clients hang up if their answer is not complete by then. `retries`: refused clients come back when
    the refusal tells them to. `rates`: clients per second; empty for multiples of the server's best rate.
    """

    rates: tuple[float, ...]
    seconds: float
    words: int
    tokens: int
    impatient_s: float | None
    retries: bool
    seed: int


@dataclass(slots=True)
class Visit:
    """One client: the times of its last try, the refusals before it, and the reason of its failure."""

    ttft: float | None = None
    met: bool = False
    error: str | None = None
    tries: int = 0
    refusal_s: float = 0.0
    told_s: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """The figures of a server at one rate. Rates and goodput are per second, times in seconds; None where nothing was
    measured.

    `recovery_s`: from the last arrival until a new request met the objectives again.
    """

    rate: float
    sent: int
    answered: int
    goodput_per_s: float
    ttft_p50: float | None
    ttft_p99: float | None
    refused: int
    refusal_p99: float | None
    told_s: float | None
    tries: float
    recovery_s: float | None


async def measure_curve(client: ChatClient, crowd: Crowd, slo: Slo, progress: Callable[[str], None]) -> list[Point]:
    """Return a point for each rate, the lowest first. Between two points the server is left alone until it has
    recovered."""
    rates: Sequence[float] = crowd.rates
    if not rates:
        progress("finding out how many requests per second are answered at best")
        best = await _closed_loop(client, crowd)
        rates = [load * best for load in _LOADS]
    points = []
    for number, rate in enumerate(sorted(rates)):
        progress(f"{rate:.1f} requests per second for {crowd.seconds:g} s")
        points.append(await _measure_rate(client, crowd, slo, rate, number))
    return points


async def _closed_loop(client: ChatClient, crowd: Crowd) -> float:
    """Return the answers per second of clients that ask again as soon as they are answered."""
    answered = 0
    until = perf_counter() + crowd.seconds

    async def ask_again(place: int) -> None:
        nonlocal answered
        turn = 0
        while perf_counter() < until:
            turn += 1
            try:
                await client.chat(_question(crowd, "closed", place, turn), crowd.tokens)
            except RequestFailed as error:
                if error.status not in _REFUSED:
                    raise
                await asyncio.sleep(error.retry_after_s or 1.0)
            else:
                answered += perf_counter() <= until

    await asyncio.gather(*map(ask_again, range(_CLOSED_LOOP)))
    return max(answered, 1) / crowd.seconds


async def _measure_rate(client: ChatClient, crowd: Crowd, slo: Slo, rate: float, number: int) -> Point:
    random = Random(f"{crowd.seed}/{number}")
    began = perf_counter()
    at, visits, tasks = began, [], []
    while (at := at + random.expovariate(rate)) < began + crowd.seconds:
        await asyncio.sleep(max(0.0, at - perf_counter()))
        visit = Visit()
        visits.append(visit)
        messages = _question(crowd, number, len(visits))
        tasks.append(asyncio.create_task(_visit(client, crowd, slo, messages, visit)))
    recovery = await _recover(client, crowd, slo, number)
    await asyncio.gather(*tasks)
    return _point(rate, crowd, visits, recovery)


async def _visit(client: ChatClient, crowd: Crowd, slo: Slo, messages: list[dict[str, str]], visit: Visit) -> None:
    """Ask until an answer, an error or the end of the client's patience. Fill in `visit`."""
    patience_s = crowd.impatient_s if crowd.impatient_s is not None else client.timeout_s
    while True:
        visit.tries += 1
        sent_at = perf_counter()
        try:
            response, answer = await replace(client, timeout_s=patience_s).chat(messages, crowd.tokens)
        except RequestFailed as error:
            visit.error = str(error)
            if error.status not in _REFUSED:
                return
            visit.refusal_s = max(visit.refusal_s, perf_counter() - sent_at)
            visit.told_s = error.retry_after_s
            if not crowd.retries or error.retry_after_s is None or visit.tries == _MAX_TRIES:
                return
            await asyncio.sleep(error.retry_after_s)
        else:
            visit.error = None
            visit.ttft = answer.event_times[0] - response.sent_at if answer.event_times else None
            visit.met = _meets(slo, response, answer)
            return


def _meets(slo: Slo, response: Response, answer: Answer) -> bool:
    return bool(answer.event_times) and slo.met(record_of(response, answer))


async def _recover(client: ChatClient, crowd: Crowd, slo: Slo, number: int) -> float | None:
    """Return the seconds until a request meets the objectives again, None if that takes too long."""
    began = perf_counter()
    turn = 0
    while perf_counter() - began < _MAX_RECOVERY_S:
        sent_at, turn = perf_counter(), turn + 1
        try:
            response, answer = await client.chat(_question(crowd, "probe", number, turn), crowd.tokens)
        except RequestFailed:
            pass
        else:
            if _meets(slo, response, answer):
                return sent_at - began
        await asyncio.sleep(_PROBE_PAUSE_S)
    return None


def _question(crowd: Crowd, *name: object) -> list[dict[str, str]]:
    return [{"role": "user", "content": seeded_text(crowd.words, crowd.seed, "goodput", *name)}]


def _point(rate: float, crowd: Crowd, visits: list[Visit], recovery_s: float | None) -> Point:
    ttfts = [visit.ttft for visit in visits if visit.ttft is not None]
    refusals = [visit.refusal_s for visit in visits if visit.refusal_s > 0]
    told = [visit.told_s for visit in visits if visit.told_s is not None]
    return Point(
        rate=rate,
        sent=len(visits),
        answered=sum(visit.error is None for visit in visits),
        goodput_per_s=sum(visit.met for visit in visits) / crowd.seconds,
        ttft_p50=percentile(ttfts, 50) if ttfts else None,
        ttft_p99=percentile(ttfts, 99) if ttfts else None,
        refused=len(refusals),
        refusal_p99=percentile(refusals, 99) if refusals else None,
        told_s=percentile(told, 50) if told else None,
        tries=sum(visit.tries for visit in visits) / max(1, len(visits)),
        recovery_s=recovery_s,
    )


def print_curve(console: Console, name: str, crowd: Crowd, points: Sequence[Point]) -> None:
    """Draw the curve: a bar of goodput for each rate, and the figures behind it."""
    console.print(f"{escape(name)}: {_behaviour(crowd)}", style="bold", highlight=False)
    table = Table()
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "" else "right")
    longest = max([point.goodput_per_s for point in points], default=0.0) or 1.0
    for point in points:
        table.add_row(
            f"{point.rate:.2f}",
            f"{point.goodput_per_s:.2f}",
            "█" * round(_BAR_CELLS * point.goodput_per_s / longest),
            f"{point.answered} of {point.sent}",
            str(point.refused),
            *(_shown(value) for value in (point.ttft_p50, point.ttft_p99, point.refusal_p99, point.told_s)),
            f"{point.tries:.1f}",
            _shown(point.recovery_s),
        )
    console.print(table)
    console.print()


def _behaviour(crowd: Crowd) -> str:
    parts = [f"{crowd.words} words, {crowd.tokens} output tokens, {crowd.seconds:g} s at each rate"]
    if crowd.impatient_s is not None:
        parts.append(f"clients hang up after {crowd.impatient_s:g} s")
    return "; ".join([*parts, "clients come back as told" if crowd.retries else "clients ask once"])


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
