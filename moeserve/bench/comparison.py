"""Medians over repeated runs, and how the servers compare. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from moeserve.bench.measurement import Metrics

_LOWER_IS_BETTER = ("ttft_", "itl_", "tpot_", "e2e_")
_HIGHER_IS_BETTER = ("tokens_per_s", "requests_per_s", "goodput_per_s")


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
    first server. A ratio within a run is that of neighbours in time, so that a machine that slows down hits both.
    """

    workload: str
    variant: str
    server: str
    medians: Metrics
    advantage: Metrics


def columns(runs: Iterable[RunMetrics]) -> list[Column]:
    """One column per (workload, variant, server), in order of first appearance."""
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
