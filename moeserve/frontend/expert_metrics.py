"""What Prometheus sees of the experts. What is not there is not exported: a zero would say that it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moeserve.messages import ExpertMemoryCounters, ExpertStats, PrefetchCounters, RebalanceCounters


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


def _memory(memory: ExpertMemoryCounters) -> Iterator[Metric]:
    yield _counter(
        "moeserve_expert_stall_seconds", "Time that the computation waited for experts", memory.stall_seconds
    )
    misses = CounterMetricFamily(
        "moeserve_expert_misses", "Experts that were not in memory when they were wanted, by source", labels=["tier"]
    )
    for tier, count in sorted(memory.misses_by_tier.items()):
        misses.add_metric([tier], count)
    yield misses
    yield _counter("moeserve_expert_hits", "Experts that were in memory when they were wanted", memory.num_hits)
    yield _counter("moeserve_expert_evictions", "Experts that left memory for others", memory.num_evictions)
    yield _counter("moeserve_expert_demand_bytes", "Bytes read because they were wanted at once", memory.demand_bytes)
    yield GaugeMetricFamily("moeserve_expert_resident", "Experts in memory, all layers", value=memory.num_resident)
    if memory.prefetch is not None:
        yield from _prefetch(memory.prefetch)


def _prefetch(prefetch: PrefetchCounters) -> Iterator[Metric]:
    yield _counter("moeserve_expert_predictor_seconds", "Time spent on predictions", prefetch.predictor_seconds)
    yield _counter(
        "moeserve_expert_late", "Experts that were wanted while their prefetch was under way", prefetch.num_late
    )
    yield _counter("moeserve_expert_prefetched_bytes", "Bytes read ahead", prefetch.prefetch_bytes)
    outcomes = CounterMetricFamily(
        "moeserve_expert_prefetch_bytes", "Bytes read ahead, by what became of them", labels=["outcome"]
    )
    for outcome, num_bytes in (
        ("useful", prefetch.useful_bytes),
        ("late", prefetch.late_bytes),
        ("wasted", prefetch.wasted_bytes),
        ("cancelled", prefetch.cancelled_bytes),
    ):
        outcomes.add_metric([outcome], num_bytes)
    yield outcomes


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
