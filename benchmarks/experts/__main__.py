"""`python -m benchmarks.experts`: measures what the machinery around the experts saves, against its targets."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.status import Status

from benchmarks.experts.figures import Verdict
from benchmarks.experts.measuring import GROUPS, Amount, groups_of, measure_of
from benchmarks.experts.report import Findings, print_report, to_json
from benchmarks.experts.unavailable import Unavailable
from moeserve.bench.serve import describe_machine

_NUM_SEEDS, _NUM_PAIRS = 5, 10
_QUICK_SEEDS, _QUICK_PAIRS = 2, 2
_TABLE_WIDTH = 200


def _targets(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    if value is None:
        return tuple(GROUPS)
    names = tuple(part.strip().upper() for part in value.split(","))
    for name in names:
        if name not in GROUPS:
            raise click.BadParameter(f"there is no {name}; there are {', '.join(GROUPS)}", ctx, param)
    return names


@click.command("experts", context_settings={"show_default": True})
@click.option("--only", "targets", callback=_targets, metavar="T1,T5,...", help="Measure these.  [default: all]")
@click.option("--seeds", "num_seeds", type=click.IntRange(min=1), help=f"Seeds, from 0 on.  [default: {_NUM_SEEDS}]")
@click.option("--pairs", "num_pairs", type=click.IntRange(min=1), help=f"Of what is timed.  [default: {_NUM_PAIRS}]")
@click.option(
    "--quick", is_flag=True, help=f"Little of everything: by default {_QUICK_SEEDS} seeds and {_QUICK_PAIRS} pairs."
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write all values."
)
def command(
    targets: tuple[str, ...], num_seeds: int | None, num_pairs: int | None, quick: bool, json_file: Path | None
) -> None:
    """Measure dispatch, placement, prediction and the expert memory against their targets and baselines.

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
        _measure(targets, amount, findings, save)
    except KeyboardInterrupt:
        raise click.Abort from None
    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    print_report(console, environment, amount, findings)
    missed = sum(figure.verdict is Verdict.MISSED for figure in findings.figures)
    click.echo(f"{missed} of {len(findings.figures)} figures miss what is wanted")


def _measure(targets: tuple[str, ...], amount: Amount, findings: Findings, save: Callable[[], None]) -> None:
    """Adds to `findings`, group by group, and saves them after each: a whole run takes hours."""
    with Console(stderr=True).status("") as status:
        for target, group in groups_of(targets):
            label = f"{target} {group.replace('_', ' ')}"
            status.update(label)
            started = time.perf_counter()
            try:
                findings.figures += measure_of(group)(amount, partial(_show, status, label))
            except Unavailable as reason:
                findings.skipped[target] = str(reason)
            findings.seconds[label] = time.perf_counter() - started
            save()


def _show(status: Status, label: str, what: str) -> None:
    status.update(f"{label}: {what}")


if __name__ == "__main__":
    command(prog_name="python -m benchmarks.experts")
