"""The report of `moeserve bench serve`: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moeserve.bench.metrics import Column, columns
from moeserve.bench.runs import Environment, Findings, Settings, Target
from moeserve.bench.workloads import Shape

_NONE = "-"
_CACHED_SHOWN = ("cold", "cached")


def print_report(
    console: Console, environment: Environment, targets: list[Target], settings: Settings, findings: Findings
) -> None:
    """Print one table per workload, a column per server and variant, then the machine, the servers and the doubts."""
    for workload, of_workload in groupby(_side_by_side(columns(findings.runs)), key=lambda column: column.workload):
        console.print(f"{workload}: {_lengths(workload, settings.shape)}", style="bold", highlight=False)
        console.print(_table(list(of_workload), settings))
        console.print()
    for line in _denominators(environment, targets, settings):
        console.print(line, highlight=False, style="dim", soft_wrap=True)
    for warning in findings.warnings:
        console.print(f"warning: {escape(warning)}", style="yellow", highlight=False)
    for message, count in findings.errors.items():
        console.print(f"{count} times: {escape(message)}", style="red", highlight=False)


def to_json(environment: Environment, targets: list[Target], settings: Settings, findings: Findings) -> bytes:
    """Return all runs, medians, advantages, the machine and the servers; times in seconds."""
    document: dict[str, Any] = {
        "environment": environment,
        "settings": settings,
        "servers": [
            {
                "name": target.name,
                "url": target.url,
                "version": target.version,
                "model": target.client.model,
                "ignore_eos": target.client.ignore_eos,
            }
            for target in targets
        ],
        "medians": columns(findings.runs),
        "runs": findings.runs,
        "warnings": findings.warnings,
        "errors": findings.errors,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _side_by_side(found: list[Column]) -> list[Column]:
    """Bring the servers of one variant side by side and keep the order otherwise."""
    first: dict[tuple[str, str], int] = {}
    workloads: dict[str, int] = {}
    for index, column in enumerate(found):
        first.setdefault((column.workload, column.variant), index)
        workloads.setdefault(column.workload, index)
    return sorted(found, key=lambda column: (workloads[column.workload], first[column.workload, column.variant]))


def _table(found: list[Column], settings: Settings) -> Table:
    table = Table()
    table.add_column("")
    for column in found:
        table.add_column("\n".join(filter(None, (escape(column.server), column.variant))), justify="right")
    for label, cell in _rows(settings):
        cells = [cell(column) for column in found]
        if any(text != _NONE for text in cells):
            table.add_row(label, *cells)
    cached_prefix = _cold_to_cached(found)
    if cached_prefix:
        table.add_row("TTFT cold / cached", *cached_prefix)
    return table


def _rows(settings: Settings) -> Iterator[tuple[str, Callable[[Column], str]]]:
    for name, label in (("ttft", "TTFT"), ("itl", "inter-token"), ("tpot", "per output token")):
        yield f"{label} p50", _with_advantage(f"{name}_p50", _seconds)
        if name != "tpot":
            yield f"{label} p95", _plain(f"{name}_p95", _seconds)
            yield f"{label} p99", _plain(f"{name}_p99", _seconds)
    yield "output tokens/s", _with_advantage("tokens_per_s", "{:.1f}".format)
    yield "requests/s", _plain("requests_per_s", "{:.2f}".format)
    if settings.slo is not None:
        yield "goodput requests/s", _with_advantage("goodput_per_s", "{:.2f}".format)
        yield "goodput share", _plain("goodput", "{:.0%}".format)
    yield "prompt tokens", _plain("prompt_tokens", "{:.0f}".format)
    yield "of them cached", _plain("cached_tokens", "{:.0f}".format)
    yield "output tokens", _plain("output_tokens", "{:.0f}".format)
    yield "tokens per event", _plain("tokens_per_event", "{:.2f}".format)
    yield "requests", _plain("requests", "{:.0f}".format)
    yield "errors", _plain("errors", "{:.0f}".format)


def _plain(name: str, shown: Callable[[float], str]) -> Callable[[Column], str]:
    return lambda column: shown(column.medians[name]) if name in column.medians else _NONE


def _with_advantage(name: str, shown: Callable[[float], str]) -> Callable[[Column], str]:
    def cell(column: Column) -> str:
        ratio = f" ({column.advantage[name]:.2f}x)" if name in column.advantage else ""
        return _plain(name, shown)(column) + ratio

    return cell


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def _cold_to_cached(found: list[Column]) -> list[str]:
    ttft = {(column.server, column.variant): column.medians.get("ttft_p50") for column in found}
    cells = []
    for column in found:
        cold, cached = (ttft.get((column.server, variant)) for variant in _CACHED_SHOWN)
        cells.append(f"{cold / cached:.1f}x" if cold and cached and column.variant == "cached" else "")
    return cells if any(cells) else []


def _lengths(workload: str, shape: Shape) -> str:
    tokens = shape.max_tokens
    return {
        "traces": f"{shape.num_agents} sessions x {shape.turns(43)} turns, {shape.agents_at_once} at once, "
        f"lengths of traces x {shape.scale:g}",
        "agents": f"{shape.num_agents} agents x {shape.turns(3)} turns, {shape.agents_at_once} at once, "
        f"{shape.system_words} words of shared prompt, {shape.question_words} per question, "
        f"{tokens(48)} output tokens",
        "stream": f"one stream of {tokens(96)} tokens",
        "streams": f"16 streams at once of {tokens(64)} tokens",
        "prefix-ttft": f"TTFT of about 1000 tokens, {shape.prefix_repetitions} times cold and cached",
        "sweep": f"streams of {tokens(64)} tokens, two for each place",
    }[workload]


def _denominators(environment: Environment, targets: list[Target], settings: Settings) -> Iterator[str]:
    runs = "one run" if settings.repeat == 1 else f"medians of {settings.repeat} interleaved runs"
    runs += f", {settings.rest_s:g} s of rest after each" if settings.rest_s else ""
    yield f"{environment.date}, {runs}, seed {settings.seed}, {environment.client}"
    yield f"{environment.cpu}, {environment.num_cores} cores, load {environment.load_before} before the start"
    for target in targets:
        ended = "all tokens asked for" if target.client.ignore_eos else "ends at the end-of-sequence token"
        version = target.version or "version not told"
        yield f"{escape(target.name)}: {escape(target.url)}, {version}, model {escape(target.client.model)}, {ended}"
    if len(targets) > 1:
        yield f"(x): how many times better than {escape(targets[0].name)}, median of the ratios within a run"
    if settings.slo is not None:
        limits = settings.slo
        named = (("TTFT", limits.ttft), ("per output token", limits.tpot), ("request", limits.e2e))
        yield "goodput: " + ", ".join(f"{name} ≤ {_seconds(limit)}" for name, limit in named if limit is not None)
