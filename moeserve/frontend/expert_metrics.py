"""What Prometheus sees of the experts. What is not there is not exported: a zero would say that it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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


def _memory(ranks: Sequence[ExpertMemoryCounters]) -> Iterator[Metric]:
    yield _by_rank(
        "moeserve_expert_stall_seconds",
        "Time that the computation waited for experts",
        [rank.stall_seconds for rank in ranks],
    )
    misses = CounterMetricFamily(
        "moeserve_expert_misses",
        "Experts that were not in memory when they were wanted, by source",
        labels=["rank", "tier"],
    )
    for number, rank in enumerate(ranks):
        for tier, count in sorted(rank.misses_by_tier.items()):
            misses.add_metric([str(number), tier], count)
    yield misses
    for name, documentation, values in (
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
