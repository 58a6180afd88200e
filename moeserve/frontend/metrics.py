"""What Prometheus sees: what this frontend measured, and the engine's newest counters."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moeserve.frontend.dialects.fields import HARMLESS
from moeserve.frontend.expert_metrics import expert_metrics
from moeserve.messages import Stats

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
_ITL = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LONG = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
_QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """One registry. Latencies are in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rejections: Tally[str] = Tally()
        self._engine = _EngineCollector(self.rejections)
        self.registry.register(self._engine)
        self.time_to_first_token = self._histogram(
            "moeserve_time_to_first_token_seconds", "From the request's arrival to its first token", _TTFT
        )
        self.inter_token = self._histogram(
            "moeserve_inter_token_latency_seconds", "Between two outputs of a choice, per token", _ITL
        )
        self.end_to_end = self._histogram(
            "moeserve_request_seconds", "From the request's arrival to the end of its answer", _LONG
        )
        self.queue_time = self._histogram(
            "moeserve_request_queue_seconds", "From admission to the first scheduled token", _QUEUE
        )
        self._responses = Counter(
            "moeserve_http_responses", "Responses by route and status", ["route", "status"], registry=self.registry
        )
        self._ignored = Counter(
            "moeserve_ignored_fields", "Request fields that were not understood", ["field"], registry=self.registry
        )
        self._disconnects = Counter(
            "moeserve_client_disconnects", "Clients that left before their answer was complete", registry=self.registry
        )

    def on_stats(self, stats: Stats) -> None:
        """Takes the engine's newest counters."""
        self._engine.stats = stats
        for seconds in stats.queue_seconds:
            self.queue_time.observe(seconds)

    def count_response(self, route: str, status: int) -> None:
        self._responses.labels(route, str(status)).inc()

    def count_disconnect(self) -> None:
        self._disconnects.inc()

    def count_ignored(self, names: Iterable[str]) -> None:
        """Names that clients made up would be labels without bound, so they share one."""
        for name in names:
            self._ignored.labels(name if name in HARMLESS else "other").inc()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """Shows the newest `Stats`; nothing of the engine before the first one."""

    def __init__(self, rejections: Tally[str]) -> None:
        self.stats: Stats | None = None
        self._rejections = rejections

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        reasons = Tally(stats.rejections if stats else {}) + self._rejections
        rejected = CounterMetricFamily(
            "moeserve_rejections", "Requests that were refused, by reason", labels=["reason"]
        )
        for reason, count in sorted(reasons.items()):
            rejected.add_metric([reason], count)
        yield rejected
        if stats is not None:
            yield from _engine_metrics(stats)
            if stats.experts is not None:
                yield from expert_metrics(stats.experts)


def _engine_metrics(stats: Stats) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("moeserve_kv_blocks", "KV blocks by state", labels=["state"])
    for state, count in (
        ("free", stats.blocks_free),
        ("cached", stats.blocks_cached),
        ("leased", stats.blocks_leased),
    ):
        blocks.add_metric([state], count)
    yield blocks
    for name, documentation, gauge in (
        ("requests_running", "Requests that take part in steps", stats.num_running),
        ("requests_waiting", "Requests that wait to run", stats.num_waiting),
        ("kv_slots_empty", "Slots in leased blocks that hold no token", stats.slots_empty),
    ):
        yield GaugeMetricFamily(f"moeserve_{name}", documentation, value=gauge)
    for name, documentation, total in (
        ("steps", "Steps that ran", stats.step),
        ("step_seconds", "Time spent in steps", stats.step_seconds),
        ("prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens),
        ("generation_tokens", "Tokens drawn", stats.generation_tokens),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_query_tokens),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hit_tokens),
        ("preemptions", "Requests whose memory was taken back", stats.preemptions),
    ):
        yield CounterMetricFamily(f"moeserve_{name}", documentation, value=total)
