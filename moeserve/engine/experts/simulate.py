"""`moeserve experts simulate`: replay a routing trace through the decisions of the expert memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from experts.prediction.planning import PrefetchRules
from experts.routing.files import RoutingTrace, TraceError, load_trace, shuffled_control, uniform_control
from experts.simulator import (
    POLICY_NAMES,
    PREDICTOR_NAMES,
    LayerTiming,
    LinkModel,
    RecallFigure,
    SimulationResult,
    SimulationSetup,
    recall_figures,
    simulate,
)
from moeserve.config import ConfigError, parse_size

CONTROLS: dict[str, Callable[[RoutingTrace, int], RoutingTrace]] = {
    "uniform": uniform_control,
    "shuffled": shuffled_control,
}

_TABLE_WIDTH = 160
# Columns of numbers in the table.
_FIGURES = ("misses", "stall/step", "saved", "loaded", "useful", "late", "wasted", "cancelled", "recall", "precision")


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One policy with one predictor, or with demand loads alone. stall_saved: the share of the stall that the same
    policy has on demand, None for the run on demand itself. recall: by distance."""

    policy: str
    predictor: str | None
    result: SimulationResult
    stall_saved: float | None
    recall: tuple[RecallFigure, ...]


def first_requests(trace: RoutingTrace, max_tokens: int) -> RoutingTrace:
    """Return whole requests from the start of the trace, at least two, with at most `max_tokens` tokens together."""
    requests, first, counts = np.unique(trace.requests, return_index=True, return_counts=True)
    order = np.argsort(first)
    fits = np.cumsum(counts[order]) <= max_tokens
    fits[:2] = True
    return trace.select(np.isin(trace.requests, requests[order][fits]))


def run_all(
    trace: RoutingTrace, setup: SimulationSetup, policies: Sequence[str], predictors: Sequence[str]
) -> list[SimulatedRun]:
    """Run each policy on demand and with each predictor. Raise ValueError for a single request or unknown names."""
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
    """Return one object per run, with counts and seconds as measured; NaN becomes null."""
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
    """Return a table with a row per run. Bytes are per step."""
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


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except (ConfigError, ValueError) as error:
            self.fail(str(error), param, ctx)


@click.command("simulate")
@click.argument("trace", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--residency",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.5,
    show_default=True,
    help="Share of a layer's experts that its slots hold.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(POLICY_NAMES),
    default=("lfru",),
    show_default=True,
    help="Who is evicted; may be given several times. belady knows the future.",
)
@click.option(
    "--predictor",
    "predictors",
    multiple=True,
    type=click.Choice(PREDICTOR_NAMES),
    help="What prefetches follow; may be given several times. Gates say what they said when the trace was recorded.",
)
@click.option(
    "--bandwidth",
    type=click.FloatRange(0, min_open=True),
    default=20.0,
    show_default=True,
    help="Of the link, in GB/s (10⁹ bytes).",
)
@click.option("--latency-us", type=click.FloatRange(0), default=0.0, show_default=True, help="Before each transfer.")
@click.option(
    "--chunk-size",
    type=_Size(),
    default="1MiB",
    show_default=True,
    help="Copied before something more urgent may overtake.",
)
@click.option("--expert-size", type=_Size(), default="10MB", show_default=True, help="Bytes of one expert.")
@click.option(
    "--layer-ms",
    type=click.FloatRange(0, min_open=True),
    default=0.5,
    show_default=True,
    help="Computation of one layer, half of it before its experts are known.",
)
@click.option(
    "--prediction-ms", type=click.FloatRange(0), default=0.0, show_default=True, help="Computation of one prediction."
)
@click.option("--distance", type=click.IntRange(1, 3), default=3, show_default=True, help="Layers predicted ahead.")
@click.option(
    "--budget",
    type=_Size(),
    help="Bytes that one prediction of affinity may ask for; as many as can be on time unless given.",
)
@click.option("--streams", type=click.IntRange(1), default=1, show_default=True, help="Requests at a time.")
@click.option("--control", type=click.Choice(list(CONTROLS)), help="Takes the structure out of the trace first.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the control.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=4000,
    show_default=True,
    help="Whole requests are taken from the start of the trace up to this.",
)
@click.option("--json", "to_json", is_flag=True, help="Print JSON.")
def simulate_command(
    trace: Path,
    residency: float,
    policies: tuple[str, ...],
    predictors: tuple[str, ...],
    bandwidth: float,
    latency_us: float,
    chunk_size: int,
    expert_size: int,
    layer_ms: float,
    prediction_ms: float,
    distance: int,
    budget: int | None,
    streams: int,
    control: str | None,
    seed: int,
    max_tokens: int,
    to_json: bool,
) -> None:
    """Replay the routing TRACE through the slots, predictors and transfers that serve, by a simulated clock.

    Every other request is learnt from and warms the slots; the others are measured. Each policy runs with demand loads
    alone and with each predictor. beta, the time to load an expert over the time to compute a layer, tells what other
    machine the figures stand for. Recall and precision are given for one, two and three layers ahead.
    """
    try:
        recorded = first_requests(load_trace(trace), max_tokens)
    except TraceError as error:
        raise click.ClickException(str(error)) from None
    if control is not None:
        recorded = CONTROLS[control](recorded, seed)
    half = layer_ms / 2e3
    setup = SimulationSetup(
        residency=residency,
        policy=policies[0],
        link=LinkModel(bandwidth * 1e9, latency_us / 1e6, chunk_size),
        timing=LayerTiming(half, half, prediction_ms / 1e3),
        expert_bytes=expert_size,
        rules=PrefetchRules(max_distance=distance, max_bytes=budget),
        num_streams=streams,
    )
    try:
        runs = run_all(recorded, setup, policies, predictors)
    except ValueError as error:
        raise click.ClickException(f"{trace}: {error}.") from None
    _print(recorded, setup, runs, control, to_json)


def _print(
    trace: RoutingTrace, setup: SimulationSetup, runs: list[SimulatedRun], control: str | None, to_json: bool
) -> None:
    num_layers, num_tokens, top_k = trace.ids.shape
    num_slots = setup.num_slots(trace.num_experts, top_k)
    if to_json:
        described = {
            "num_layers": num_layers,
            "num_experts": trace.num_experts,
            "top_k": top_k,
            "num_tokens": num_tokens,
            "num_slots": num_slots,
            "beta": setup.beta,
            "control": control,
        }
        click.echo(json.dumps({**described, "runs": as_json(runs)}, indent=2))
        return
    click.echo(
        f"{num_layers} layers of {trace.num_experts} experts, {top_k} per token; {num_tokens} tokens, every other "
        f"request measured; {num_slots} slots per layer; beta {setup.beta:.2f}"
        + (f"; {control} control, nothing to be gained" if control else "")
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    console.print(as_table(runs))
