"""The findings about the experts: tables for people, JSON for programs. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.experts.figures import Amount, Figure, Limit, Sense, Verdict
from moeserve.bench.runs import Environment

_STYLES = {Verdict.MET: "green", Verdict.MISSED: "red", Verdict.OPEN: "yellow", Verdict.REPORTED: "dim"}


@dataclass(slots=True)
class Findings:
    """All by the name of the measurement. skipped: why it could not be measured, or not to its end."""

    figures: dict[str, list[Figure]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def num_figures(self) -> int:
        return sum(map(len, self.figures.values()))

    @property
    def num_missed(self) -> int:
        return sum(figure.verdict is Verdict.MISSED for figures in self.figures.values() for figure in figures)


def print_report(
    console: Console, environment: Environment, amount: Amount, findings: Findings, titles: Mapping[str, str]
) -> None:
    """Print one table per measurement, then the skipped measurements and the machine."""
    for name, figures in findings.figures.items():
        if figures:
            console.print(f"{name}: {titles[name]}", style="bold", highlight=False)
            console.print(_table(figures))
            console.print()
    for name, reason in findings.skipped.items():
        console.print(f"{name} was not measured: {escape(reason)}", style="yellow", highlight=False, soft_wrap=True)
    for line in _denominators(environment, amount):
        console.print(line, highlight=False, style="dim", soft_wrap=True)


def to_json(environment: Environment, amount: Amount, findings: Findings) -> bytes:
    """Return all values; shares and seconds as they are, not in percent or milliseconds."""
    document: dict[str, Any] = {
        "environment": environment,
        "seeds": amount.seeds,
        "pairs": amount.num_pairs,
        "quick": amount.quick,
        "figures": [
            {
                "measurement": measurement,
                "name": figure.name,
                "baseline": figure.baseline,
                "unit": figure.unit,
                "values": [float(value) for value in figure.values],
                "mean": float(figure.mean),
                "half_width": None if figure.half_width is None else float(figure.half_width),
                "limit": None if figure.limit is None else [figure.limit.sense.value, figure.limit.value],
                "verdict": figure.verdict.name.lower(),
                "note": figure.note,
            }
            for measurement, figures in findings.figures.items()
            for figure in figures
        ],
        "skipped": findings.skipped,
        "seconds": findings.seconds,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _table(figures: Sequence[Figure]) -> Table:
    table = Table()
    for name in ("figure", "against"):
        table.add_column(name)
    for name in ("mean ± 95 %", "lowest … highest", "n", "target"):
        table.add_column(name, justify="right")
    table.add_column("")
    table.add_column("note")
    for figure in figures:
        verdict = figure.verdict
        table.add_row(
            escape(figure.name),
            escape(figure.baseline),
            _mean(figure),
            f"{_value(min(figure.values), figure.unit)} … {_value(max(figure.values), figure.unit)}",
            str(len(figure.values)),
            _limit(figure.limit, figure.unit),
            f"[{_STYLES[verdict]}]{verdict.value}[/]",
            escape(figure.note),
        )
    return table


def _mean(figure: Figure) -> str:
    half = figure.half_width
    shown = _value(figure.mean, figure.unit)
    return shown if half is None else f"{shown} ± {_value(half, figure.unit)}"


def _value(value: float, unit: str) -> str:
    match unit:
        case "%":
            return f"{value * 100:.1f} %"
        case "ms":
            return f"{value * 1000:.2f} ms"
        case "":
            return f"{value:.3f}"
        case _:
            return f"{value:.2f}{'' if unit == 'x' else ' '}{unit}"


def _limit(limit: Limit | None, unit: str) -> str:
    if limit is None:
        return ""
    prefix = "0 ± " if limit.sense is Sense.WITHIN else f"{limit.sense.value} "
    return prefix + _value(limit.value, unit)


def _denominators(environment: Environment, amount: Amount) -> list[str]:
    seeds = ", ".join(map(str, amount.seeds))
    lines = [
        f"{environment.date}, seeds {seeds}, {amount.num_pairs} interleaved pairs where time is measured, "
        f"{environment.client}",
        f"{environment.cpu}, {environment.num_cores} cores, load {environment.load_before} before the start",
        "met or missed: all of the 95 % interval of the mean is on one side of the target; open: it is not",
    ]
    if amount.quick:
        lines.append("a quick run: it shows that everything works, and little more")
    return lines
