"""What `moeserve experts simulate` computes and prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan

import numpy as np
from rich.table import Table

from experts.prediction.figures import RecallFigure, recall_figures
from experts.routing.traces import RoutingTrace, shuffled_control, uniform_control
from experts.simulation.replay import SimulationResult
from experts.simulation.setup import SimulationSetup, simulate

CONTROLS: dict[str, Callable[[RoutingTrace, int], RoutingTrace]] = {
    "uniform": uniform_control,
    "shuffled": shuffled_control,
}

# Columns of numbers in the table.
_FIGURES = ("misses", "stall/step", "saved", "loaded", "useful", "late", "wasted", "cancelled", "recall", "precision")


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One policy with one predictor, or with demand loads alone. stall_saved: share of the stall of the same policy on
    demand, None for that itself. recall: by distance."""

    policy: str
    predictor: str | None
    result: SimulationResult
    stall_saved: float | None
    recall: tuple[RecallFigure, ...]


def first_requests(trace: RoutingTrace, max_tokens: int) -> RoutingTrace:
    """Whole requests from the start of the trace, two at least, as long as they have no more tokens than that."""
    requests, first, counts = np.unique(trace.requests, return_index=True, return_counts=True)
    order = np.argsort(first)
    fits = np.cumsum(counts[order]) <= max_tokens
    fits[:2] = True
    return trace.select(np.isin(trace.requests, requests[order][fits]))


def run_all(
    trace: RoutingTrace, setup: SimulationSetup, policies: Sequence[str], predictors: Sequence[str]
) -> list[SimulatedRun]:
    """Each policy on demand and with each predictor. ValueError for a trace of a single request or an unknown name."""
    learning, held_out = trace.split()
    if not len(held_out.requests):
        raise ValueError("the trace has one request, and none would be held out to be measured")
    recall = recall_figures(learning, held_out, predictors, setup.rules.max_distance)
    found = []
    for policy in policies:
        on_demand = simulate(learning, held_out, replace(setup, policy=policy, predictor=None))
        found.append(SimulatedRun(policy, None, on_demand, None, ()))
        for predictor in predictors:
            result = simulate(learning, held_out, replace(setup, policy=policy, predictor=predictor))
            of_predictor = tuple(figure for figure in recall if figure.predictor == predictor)
            found.append(SimulatedRun(policy, predictor, result, _saved(on_demand, result), of_predictor))
    return found


def as_json(runs: Sequence[SimulatedRun]) -> list[dict[str, object]]:
    """One object per run, counts and seconds as measured; NaN becomes null."""
    return [
        {
            "policy": run.policy,
            "predictor": run.predictor,
            "num_steps": run.result.num_steps,
            "seconds": run.result.seconds,
            "exposed_stall_seconds": run.result.exposed_stall,
            "prediction_seconds": run.result.prediction_seconds,
            "stall_saved": run.stall_saved,
            "miss_rate": run.result.miss_rate,
            "wasted_share": run.result.wasted_share,
            **asdict(run.result.counters),
            "by_distance": [
                {
                    "distance": figure.distance,
                    "recall": None if isnan(figure.recall) else figure.recall,
                    "precision": None if isnan(figure.precision) else figure.precision,
                }
                for figure in run.recall
            ],
        }
        for run in runs
    ]


def as_table(runs: Sequence[SimulatedRun]) -> Table:
    """Bytes are per step."""
    table = Table(box=None, header_style="bold")
    for name in ("policy", "predictor"):
        table.add_column(name)
    for name in _FIGURES:
        table.add_column(name, justify="right")
    for run in runs:
        result, counters = run.result, run.result.counters

        def per_step(num_bytes: int, num_steps: int = result.num_steps) -> str:
            return f"{num_bytes / max(num_steps, 1) / 1e6:.1f} MB"

        table.add_row(
            run.policy,
            run.predictor or "on demand",
            f"{result.miss_rate:.1%}",
            f"{result.exposed_stall / max(result.num_steps, 1) * 1e3:.2f} ms",
            "" if run.stall_saved is None else f"{run.stall_saved:.1%}",
            per_step(counters.demand_bytes + counters.prefetch_bytes),
            per_step(counters.useful_bytes),
            per_step(counters.late_bytes),
            per_step(counters.wasted_bytes),
            per_step(counters.cancelled_bytes),
            _by_distance([figure.recall for figure in run.recall]),
            _by_distance([figure.precision for figure in run.recall]),
        )
    return table


def _by_distance(shares: Sequence[float]) -> str:
    return " ".join("-" if isnan(share) else f"{share:.2f}" for share in shares)


def _saved(on_demand: SimulationResult, result: SimulationResult) -> float:
    stalled = on_demand.exposed_stall
    return 1 - (result.exposed_stall + result.prediction_seconds) / stalled if stalled else 0.0
