"""What Prometheus sees: what this frontend measured, and the engine's newest counters."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moeserve.frontend.dialects.fields import HARMLESS
from moeserve.wire import ExpertMemoryCounters, ExpertStats, PrefetchCounters, RebalanceCounters, Stats

# What Prometheus sees of the experts. What is not there is not exported: a zero would say that it is.


def expert_metrics(stats: ExpertStats) -> Iterator[Metric]:
    """Layers are numbered among those that have experts."""
    if stats.tokens_recorded is not None:
        yield _counter("moeserve_expert_recorded_tokens", "Tokens whose routing was recorded", stats.tokens_recorded)
    if stats.expert_balancedness or stats.rank_balancedness:
        yield _balance(stats)
    if stats.remote_rows is not None:
        sent, rows = stats.remote_rows
        yield _counter("moeserve_expert_remote_rows", "Rows times the other ranks that hold experts of theirs", sent)
        yield _counter("moeserve_expert_rows", "Rows: tokens times layers with experts", rows)
    if stats.links is not None:
        yield from _links(stats.links)
    if stats.memory is not None:
        yield from _memory(stats.memory)
    if stats.rebalancing is not None:
        yield from _rebalancing(stats.rebalancing)


def _balance(stats: ExpertStats) -> Metric:
    balance = GaugeMetricFamily(
        "moeserve_expert_balancedness",
        "Mean over maximum of the recent load, of the experts of a layer or of the ranks that hold them",
        labels=["layer", "of"],
    )
    for of, values in (("experts", stats.expert_balancedness), ("ranks", stats.rank_balancedness or ())):
        for layer, value in enumerate(values):
            balance.add_metric([str(layer), of], value)
    return balance


def _links(links: Iterable[list[int]]) -> Iterator[Metric]:
    rows = CounterMetricFamily(
        "moeserve_expert_link_rows", "Rows that a rank sent to another, padding included", labels=["from", "to"]
    )
    size = CounterMetricFamily(
        "moeserve_expert_link_bytes", "Bytes that a rank handed over for another, both ways", labels=["from", "to"]
    )
    for source, target, num_rows, num_bytes in links:
        rows.add_metric([str(source), str(target)], num_rows)
        size.add_metric([str(source), str(target)], num_bytes)
    yield rows
    yield size


def _memory(ranks: Sequence[ExpertMemoryCounters]) -> Iterator[Metric]:
    yield _by_rank(
        "moeserve_expert_stall_seconds",
        "Time that the computation waited for experts",
        [rank.stall_seconds for rank in ranks],
    )
    for name, documentation, values in (
        (
            "moeserve_expert_misses",
            "Experts that were not in memory when they were wanted",
            [rank.num_misses for rank in ranks],
        ),
        (
            "moeserve_expert_hits",
            "Experts that were in memory when they were wanted",
            [rank.num_hits for rank in ranks],
        ),
        ("moeserve_expert_evictions", "Experts that left memory for others", [rank.num_evictions for rank in ranks]),
        (
            "moeserve_expert_demand_bytes",
            "Bytes read because they were wanted at once",
            [rank.demand_bytes for rank in ranks],
        ),
    ):
        yield _by_rank(name, documentation, values)
    resident = GaugeMetricFamily("moeserve_expert_resident", "Experts in memory, all layers", labels=["rank"])
    for number, rank in enumerate(ranks):
        resident.add_metric([str(number)], rank.num_resident)
    yield resident
    prefetches = [rank.prefetch for rank in ranks if rank.prefetch is not None]
    if prefetches:
        yield from _prefetch(prefetches)


def _prefetch(ranks: Sequence[PrefetchCounters]) -> Iterator[Metric]:
    """All ranks prefetch, or none."""
    for name, documentation, values in (
        ("moeserve_expert_predictor_seconds", "Time spent on predictions", [rank.predictor_seconds for rank in ranks]),
        (
            "moeserve_expert_late",
            "Experts that were wanted while their prefetch was under way",
            [rank.num_late for rank in ranks],
        ),
        ("moeserve_expert_prefetched_bytes", "Bytes read ahead", [rank.prefetch_bytes for rank in ranks]),
    ):
        yield _by_rank(name, documentation, values)
    outcomes = CounterMetricFamily(
        "moeserve_expert_prefetch_bytes", "Bytes read ahead, by what became of them", labels=["rank", "outcome"]
    )
    for number, rank in enumerate(ranks):
        for outcome, num_bytes in (
            ("useful", rank.useful_bytes),
            ("late", rank.late_bytes),
            ("wasted", rank.wasted_bytes),
            ("cancelled", rank.cancelled_bytes),
        ):
            outcomes.add_metric([str(number), outcome], num_bytes)
    yield outcomes
    yield _by_distance(
        "moeserve_expert_foreseeable",
        "Experts that layers needed for which some had been named, by how many layers ahead",
        [rank.num_foreseeable for rank in ranks],
    )
    yield _by_distance(
        "moeserve_expert_foreseen",
        "Of the foreseeable experts, those that had been named: their ratio is the recall of predictions",
        [rank.num_foreseen for rank in ranks],
    )
    yield from _recall(ranks)


def _recall(ranks: Sequence[PrefetchCounters]) -> Iterator[Metric]:
    labels = ["rank", "source", "distance"]
    ranked = CounterMetricFamily(
        "moeserve_expert_ranked_choices",
        "Experts chosen in layers that a source had ranked so many layers before, of a sample of the steps",
        labels=labels,
    )
    recalled = CounterMetricFamily(
        "moeserve_expert_recalled_choices",
        "Of the ranked choices, those among the source's first k: their ratio is its recall",
        labels=labels,
    )
    for number, rank in enumerate(ranks):
        for count in rank.recall:
            values = [str(number), count.source, str(count.distance)]
            ranked.add_metric(values, count.num_chosen)
            recalled.add_metric(values, count.num_recalled)
    yield ranked
    yield recalled


def _rebalancing(rebalancing: RebalanceCounters) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "moeserve_expert_placement_version", "Number of the placement in use", value=rebalancing.placement_version
    )
    yield _counter("moeserve_expert_migrations", "Layers placed anew", rebalancing.num_migrations)
    yield _counter("moeserve_expert_migration_failures", "Layers that could not be", rebalancing.num_failures)
    yield _counter("moeserve_expert_migrated", "Experts read for that, by all ranks", rebalancing.num_experts_loaded)
    if rebalancing.seconds_since_success is not None:
        yield GaugeMetricFamily(
            "moeserve_expert_migration_age_seconds",
            "Time since a layer was last placed anew",
            value=rebalancing.seconds_since_success,
        )


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(name, documentation, value=value)


def _by_distance(name: str, documentation: str, ranks: Iterable[Sequence[int]]) -> Metric:
    counter = CounterMetricFamily(name, documentation, labels=["rank", "distance"])
    for number, of_rank in enumerate(ranks):
        for distance, count in enumerate(of_rank, start=1):
            counter.add_metric([str(number), str(distance)], count)
    return counter


def _by_rank(name: str, documentation: str, values: Iterable[float]) -> Metric:
    counter = CounterMetricFamily(name, documentation, labels=["rank"])
    for rank, value in enumerate(values):
        counter.add_metric([str(rank)], value)
    return counter


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
