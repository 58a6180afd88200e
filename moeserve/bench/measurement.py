"""What was measured of one request, and what many requests say together. Pure; all times in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Metrics = dict[str, float]
"""Metric name (see `summarise`) to value; a metric that could not be measured is absent."""

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Times are on one monotonic clock.

    `event_times`: arrival of each event that carried text. `output_tokens` is the server's count where it gives one,
    the number of events otherwise. `error`: why it failed; what was measured before does not count then.
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
        """From sending the request to the first text; None without any."""
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
    """The metrics of requests that were measured together.

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
    """With linear interpolation between the two nearest of the `values`, of which there must be one at least."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (start, end) intervals."""
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
