"""What Prometheus sees of the experts. What is not there is not exported: a zero would say that it is."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moeserve.messages import ExpertStats


def expert_metrics(stats: ExpertStats) -> Iterator[Metric]:
    """Layers are numbered among those that have experts."""
    if stats.tokens_recorded is not None:
        yield CounterMetricFamily(
            "moeserve_expert_recorded_tokens", "Tokens whose routing was recorded", value=stats.tokens_recorded
        )
    if stats.expert_balancedness or stats.rank_balancedness:
        balance = GaugeMetricFamily(
            "moeserve_expert_balancedness",
            "Mean over maximum of the recent load, of the experts of a layer or of the ranks that hold them",
            labels=["layer", "of"],
        )
        for of, values in (("experts", stats.expert_balancedness), ("ranks", stats.rank_balancedness or ())):
            for layer, value in enumerate(values):
                balance.add_metric([str(layer), of], value)
        yield balance
    if stats.remote_rows is not None:
        sent, rows = stats.remote_rows
        yield CounterMetricFamily(
            "moeserve_expert_remote_rows", "Rows times the other ranks that hold experts of theirs", value=sent
        )
        yield CounterMetricFamily("moeserve_expert_rows", "Rows: tokens times layers with experts", value=rows)
