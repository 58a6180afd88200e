"""Metrics of requests under load: times of one request, statistics of many, comparison of servers.

Torch-free, without a clock; all times in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from moeserve.settings.quantities import parse_limits

Metrics = dict[str, float]
"""Metric name (see `summarise`) to value; a metric that could not be measured is absent."""

PERCENTILES = (50, 95, 99)
_LOWER_IS_BETTER = ("ttft_", "itl_", "tpot_", "e2e_")
_HIGHER_IS_BETTER = ("tokens_per_s", "requests_per_s", "goodput_per_s")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Times are on one monotonic clock.

    `event_times`: arrival of each event that carried text. `output_tokens`: the server's count, or the number of events
    if it gives none. `error`: why the request failed; its other fields do not count then.
    """

    variant: str
    cold: bool
    sent_at: float
    ended_at: float
    event_times: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Time from sending the request to the first text; None without text."""
        return self.event_times[0] - self.sent_at if self.event_times else None

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None below two tokens."""
        if self.output_tokens < 2 or not self.event_times:
            return None
        return (self.event_times[-1] - self.event_times[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        return self.ended_at - self.sent_at

    @property
    def gaps(self) -> list[float]:
        """Times between one event with text and the next."""
        return [later - earlier for earlier, later in pairwise(self.event_times)]


def summarise(records: Sequence[RequestRecord], meets_slo: Callable[[RequestRecord], bool] | None) -> Metrics:
    """Return the metrics of requests that were measured together.

    `ttft`, `itl`, `tpot` and `e2e`, each `_p50`, `_p95`, `_p99`, in s; `tokens_per_s`, `requests_per_s` and
    `goodput_per_s` over the time during which at least one of the requests was under way (`busy_s`); `goodput`: the
    fraction of all requests that met the objectives; `tokens_per_event`: above 1 the server sends several tokens at
    once and `itl` is coarser than a token; token counts are totals.
    """
    good = [record for record in records if record.error is None]
    metrics: Metrics = {"requests": len(records), "errors": len(records) - len(good)}
    for name, values in (
        ("ttft", [record.ttft for record in good]),
        ("itl", [gap for record in good for gap in record.gaps]),
        ("tpot", [record.tpot for record in good]),
        ("e2e", [record.e2e for record in good]),
    ):
        metrics |= _percentiles(name, [value for value in values if value is not None])
    metrics |= _totals(good)
    busy_s = covered((record.sent_at, record.ended_at) for record in records)
    metrics["busy_s"] = busy_s
    if busy_s > 0:
        metrics["tokens_per_s"] = metrics["output_tokens"] / busy_s
        metrics["requests_per_s"] = len(good) / busy_s
    if meets_slo is not None and records:
        num_met = sum(map(meets_slo, records))
        metrics["goodput"] = num_met / len(records)
        if busy_s > 0:
            metrics["goodput_per_s"] = num_met / busy_s
    return metrics


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the two nearest of the `values`, at least one."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (start, end) intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _percentiles(name: str, values: Sequence[float]) -> Metrics:
    return {f"{name}_p{percent}": percentile(values, percent) for percent in PERCENTILES} if values else {}


def _totals(good: Sequence[RequestRecord]) -> Metrics:
    totals: Metrics = {"output_tokens": sum(record.output_tokens for record in good)}
    for name in ("prompt_tokens", "cached_tokens"):
        counts = [count for record in good if (count := getattr(record, name)) is not None]
        if counts:
            totals[name] = sum(counts)
    num_events = sum(len(record.event_times) for record in good)
    if num_events:
        totals["tokens_per_event"] = totals["output_tokens"] / num_events
    return totals


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits in seconds on the time to first token, the time per output token and the whole request."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parse `ttft:500ms,tpot:100ms,e2e:5s`, or some of these. Raise ValueError."""
        return cls(**parse_limits(text, ("ttft", "tpot", "e2e")))

    def met(self, record: RequestRecord) -> bool:
        """Return whether the request met all objectives.

        A failed request meets none; a request of one token has no time per output token to miss.
        """
        if record.error is not None:
            return False
        measured = ((self.ttft, record.ttft), (self.tpot, record.tpot), (self.e2e, record.e2e))
        return all(limit is None or value is None or value <= limit for limit, value in measured)


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """The metrics of one server, one variant of a workload and one run. `variant` is empty if there is only one."""

    workload: str
    variant: str
    server: str
    run: int
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Column:
    """One server on one variant: medians over the runs, and the advantage over the first server.

    `advantage`: median over the runs of the ratio within a run, above 1 where this server is better; empty for the
    first server. Both sides of a ratio are neighbours in time, so a machine that slows down hits both.
    """

    workload: str
    variant: str
    server: str
    medians: Metrics
    advantage: Metrics


def columns(runs: Iterable[RunMetrics]) -> list[Column]:
    """Return one column per (workload, variant, server), in order of first appearance."""
    cells: dict[tuple[str, str], dict[str, dict[int, Metrics]]] = {}
    for run in runs:
        by_server = cells.setdefault((run.workload, run.variant), {})
        by_server.setdefault(run.server, {})[run.run] = run.metrics
    result = []
    for (workload, variant), by_server in cells.items():
        reference = next(iter(by_server.values()))
        for server, by_run in by_server.items():
            advantage = {} if by_run is reference else _advantage(by_run, reference)
            result.append(Column(workload, variant, server, _medians(by_run.values()), advantage))
    return result


def _medians(runs: Iterable[Metrics]) -> Metrics:
    collected: dict[str, list[float]] = {}
    for metrics in runs:
        for name, value in metrics.items():
            collected.setdefault(name, []).append(value)
    return {name: median(values) for name, values in collected.items()}


def _advantage(by_run: dict[int, Metrics], reference: dict[int, Metrics]) -> Metrics:
    ratios: dict[str, list[float]] = {}
    for run, metrics in by_run.items():
        for name, value in metrics.items():
            other = reference.get(run, {}).get(name)
            if not value or not other:
                continue
            if name.startswith(_LOWER_IS_BETTER):
                ratios.setdefault(name, []).append(other / value)
            elif name in _HIGHER_IS_BETTER:
                ratios.setdefault(name, []).append(value / other)
    return {name: median(values) for name, values in ratios.items()}
