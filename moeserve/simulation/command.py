"""`moeserve experts simulate`: replays a routing trace through the decisions of the expert memory."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from experts.prediction.choice import SOURCE_NAMES, source_names
from experts.prefetch.planning import PrefetchRules
from experts.routing.trace_file import TraceError, load_trace
from experts.routing.traces import RoutingTrace
from experts.simulation.link_model import LinkModel
from experts.simulation.replay import LayerTiming
from experts.simulation.setup import POLICY_NAMES, SimulationSetup
from moeserve.config import ConfigError, parse_size
from moeserve.simulation.runs import CONTROLS, SimulatedRun, as_json, as_table, first_requests, run_all

_TABLE_WIDTH = 160


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except (ConfigError, ValueError) as error:
            self.fail(str(error), param, ctx)


def _check_predictor(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        try:
            source_names(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return values


@click.command()
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
    callback=_check_predictor,
    metavar="NAME[+NAME…]",
    help=f"What prefetches follow; may be given several times. Of {', '.join(SOURCE_NAMES)}.",
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
    "--budget", type=_Size(), help="Bytes that one prediction may ask for; as many as can be on time unless given."
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
def simulate(
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
