"""`python -m benchmarks.experts`: measure what the machinery around the experts saves, against its targets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import click
from rich.console import Console
from rich.status import Status

from benchmarks.experts.figures import Amount, Measure, Unavailable
from benchmarks.experts.report import Findings, print_report, to_json
from moeserve.bench.runs import describe_machine

_NUM_SEEDS, _NUM_PAIRS = 5, 10
_QUICK_SEEDS, _QUICK_PAIRS = 2, 2
_TABLE_WIDTH = 200


@dataclass(frozen=True, slots=True)
class Measurement:
    """functions: `module:function` in this package, imported when it is measured; each yields figures."""

    title: str
    functions: tuple[str, ...]


MEASUREMENTS = {
    "remote-ranks": Measurement("remote ranks that a token is sent to, by placement", ("placement:remote_ranks",)),
    "balance": Measurement("balancedness of the ranks' load (mean over maximum)", ("placement:balance",)),
    "recall": Measurement("recall of a token's experts, one to three layers ahead", ("prediction:recall",)),
    "stall-simulated": Measurement(
        "exposed stall with and without prefetch, half of the experts in memory, simulated", ("prediction:stall",)
    ),
    "compute-simulated": Measurement(
        "tokens/s with absent experts copied, computed by the host, or both, simulated",
        ("host_compute:compute_simulated",),
    ),
    "stall-measured": Measurement(
        "exposed stall with and without prefetch, half of the experts in memory", ("memory:stall",)
    ),
    "throughput": Measurement("tokens/s with part of the experts in memory", ("memory:throughput",)),
    "exactness": Measurement("answers with part of the experts in memory", ("memory:exactness",)),
}


def measure_of(function: str) -> Measure:
    module, name = function.split(":")
    measure: Measure = getattr(import_module(f"benchmarks.experts.{module}"), name)
    return measure


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    if value is None:
        return tuple(MEASUREMENTS)
    names = tuple(part.strip() for part in value.split(","))
    for name in names:
        if name not in MEASUREMENTS:
            raise click.BadParameter(f"there is no {name}; there are {', '.join(MEASUREMENTS)}", ctx, param)
    return names


def _described() -> str:
    width = max(map(len, MEASUREMENTS))
    return "\b\n" + "\n".join(f"{name:{width}}  {each.title}" for name, each in MEASUREMENTS.items())


@click.command("experts", context_settings={"show_default": True, "max_content_width": 110}, epilog=_described())
@click.option("--only", "names", callback=_names, metavar="NAME,NAME,...", help="Measure these.  [default: all]")
@click.option("--seeds", "num_seeds", type=click.IntRange(min=1), help=f"Seeds, from 0 on.  [default: {_NUM_SEEDS}]")
@click.option("--pairs", "num_pairs", type=click.IntRange(min=1), help=f"Of timed runs.  [default: {_NUM_PAIRS}]")
@click.option(
    "--quick", is_flag=True, help=f"Little of everything: by default {_QUICK_SEEDS} seeds and {_QUICK_PAIRS} pairs."
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write all values."
)
def command(
    names: tuple[str, ...], num_seeds: int | None, num_pairs: int | None, quick: bool, json_file: Path | None
) -> None:
    """Measure placement, prediction and the expert memory against their targets and baselines.

    Learns on some requests and measures others. Structure is also taken out of the routing (controls: uniform and
    shuffled over time), where every gain has to vanish. Builds the models it needs, and keeps them and the traces that
    it records of them in the cache. Times are worth nothing on a machine that does something else meanwhile.
    """
    num_seeds = num_seeds or (_QUICK_SEEDS if quick else _NUM_SEEDS)
    num_pairs = num_pairs or (_QUICK_PAIRS if quick else _NUM_PAIRS)
    amount = Amount(tuple(range(num_seeds)), num_pairs, quick)
    environment = describe_machine()
    findings = Findings()

    def save() -> None:
        if json_file is not None:
            json_file.write_bytes(to_json(environment, amount, findings))

    try:
        _measure(names, amount, findings, save)
    except KeyboardInterrupt:
        raise click.Abort from None
    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    titles = {name: measurement.title for name, measurement in MEASUREMENTS.items()}
    print_report(console, environment, amount, findings, titles)
    click.echo(f"{findings.num_missed} of {findings.num_figures} figures miss their target")


def _functions(names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (name, function) in the order of `MEASUREMENTS`."""
    for name, measurement in MEASUREMENTS.items():
        if name in names:
            for function in measurement.functions:
                yield name, function


def _measure(names: tuple[str, ...], amount: Amount, findings: Findings, save: Callable[[], None]) -> None:
    """Add to `findings`, save and name each figure as it is found: a whole run takes hours."""
    with Console(stderr=True).status("") as status:
        for name, function in _functions(names):
            status.update(name)
            started = time.perf_counter()
            figures = findings.figures.setdefault(name, [])
            try:
                for figure in measure_of(function)(amount, partial(_show, status, name)):
                    figures.append(figure)
                    save()
                    status.console.print(f"{figure.name}: {figure.mean:.3f}; {figure.note}", highlight=False)
            except Unavailable as reason:
                findings.skipped[name] = str(reason)
            findings.seconds[name] = findings.seconds.get(name, 0.0) + time.perf_counter() - started
            save()


def _show(status: Status, name: str, stage: str) -> None:
    status.update(f"{name}: {stage}")


if __name__ == "__main__":
    command(prog_name="python -m benchmarks.experts")
