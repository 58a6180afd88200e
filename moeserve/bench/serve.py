"""`moeserve bench serve`: measure OpenAI-compatible servers under load."""

from __future__ import annotations

import asyncio
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import groupby
from math import inf
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moeserve.bench.client import ChatClient, Endpoint, RequestFailed
from moeserve.bench.goodput import Crowd, Point, measure_curve, print_curve
from moeserve.bench.metrics import Column, Metrics, RequestRecord, RunMetrics, Slo, columns, summarise
from moeserve.bench.workloads import WORKLOADS, Shape, Workload, run_workload, seeded_text
from moeserve.config import VERSION
from moeserve.machine import read_processor

_DEFAULT_URL = "http://127.0.0.1:8000"
_TABLE_WIDTH = 160
_USUAL_WORKLOADS = ("agents", "stream", "streams", "prefix-ttft")
_NAMED_URL = re.compile(r"([\w.-]+)=(https?://.+)")
_COUNT = click.IntRange(min=1)
_USUAL = Shape()
_WARM_UP_WORDS, _WARM_UP_TOKENS = 16, 4
_READY_POLL_S = 0.5
# Statuses with which servers refuse a field that they do not know.
_FIELD_REFUSED = (400, 422)
# A chat template's own text may be cached in a fresh prompt, but it is a small part of a prompt.
_WARM_SHARE = 0.5
_NONE = "-"
_GOODPUT_SLO = Slo(ttft=2.0)
_CACHED_SHOWN = ("cold", "cached")


def _levels(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    parts = value.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r} is not like 1,4,16", ctx, param)
    return tuple(sorted({int(part) for part in parts}))


def _rates(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in value.split(",")) if value is not None else ()
    except ValueError:
        rates = (0.0,)
    if not all(0 < rate < inf for rate in rates):
        raise click.BadParameter(f"{value!r} is not like 2,4.5,8", ctx, param)
    return rates


def _slo(ctx: click.Context, param: click.Parameter, value: str | None) -> Slo | None:
    try:
        return Slo.parse(value) if value is not None else None
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


@click.command("serve", context_settings={"show_default": True})
@click.option(
    "--url",
    "urls",
    multiple=True,
    metavar="[NAME=]URL",
    help=f"Server to measure; several are measured in turn and compared with the first.  [default: {_DEFAULT_URL}]",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    help="Model to ask for: one for all, or one per --url.  [default: the first that the server lists]",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="MOESERVE_API_KEY",
    help="API key: one for all, or one per --url.  [env: MOESERVE_API_KEY]",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(list(WORKLOADS)),
    help=f"What to run; may be given several times.  [default: {', '.join(_USUAL_WORKLOADS)}]",
)
@click.option(
    "--concurrency",
    callback=_levels,
    metavar="N,N,...",
    help="Runs the sweep too, at these.  [the sweep alone: 1,4,16]",
)
@click.option("--repeat", type=_COUNT, default=1, help="Runs of everything, interleaved; medians are shown.")
@click.option(
    "--seed", type=int, default=0, help="Decides every word that is sent. A server that has seen a seed has it cached."
)
@click.option("--goodput", is_flag=True, help="Instead: the curve of requests asked and answered in time per second.")
@click.option(
    "--rates",
    callback=_rates,
    metavar="R,R,...",
    help="Rates of the curve, per second.  [default: 0.5, 1, 2, 4, 5 times the best rate of answers]",
)
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), default=30.0, help="Time at each rate of the curve."
)
@click.option(
    "--impatient",
    "impatient_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Clients of the curve hang up if they have no whole answer after S seconds.",
)
@click.option("--retry", "retries", is_flag=True, help="Clients of the curve come back when a refusal tells them to.")
@click.option("--slo", callback=_slo, metavar="LIMITS", help="For goodput, e.g. ttft:500ms,tpot:100ms,e2e:10s.")
@click.option(
    "--agents", "num_agents", type=_COUNT, default=_USUAL.num_agents, help="Agents that share a system prompt."
)
@click.option("--turns", "num_turns", type=_COUNT, default=_USUAL.num_turns, help="Questions of each agent.")
@click.option(
    "--agents-at-once", type=_COUNT, default=_USUAL.agents_at_once, help="Agents waiting for an answer at once."
)
@click.option("--system-words", type=_COUNT, default=_USUAL.system_words, help="Words of the agents' system prompt.")
@click.option("--question-words", type=_COUNT, default=_USUAL.question_words, help="Words of every question.")
@click.option("--prefix-repetitions", type=_COUNT, default=_USUAL.prefix_repetitions, help="Prefixes of prefix-ttft.")
@click.option("--output-tokens", type=_COUNT, help="Tokens per answer.  [default: as usual for the workload]")
@click.option("--honour-eos", is_flag=True, help="Let answers end where the model ends them.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=300.0,
    help="Seconds to wait for a server that is there and not ready: one whose GET /ready answers 503.",
)
@click.option("--warm-up", type=_COUNT, default=1, help="Short requests, sent at once, before anything is measured.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=600.0, help="Seconds per request."
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write everything as JSON.",
)
def command(**options: Any) -> None:
    """Measure OpenAI-compatible servers under load, side by side.

    Time to first token (TTFT), time between tokens, throughput, cached tokens and goodput of agents that share a long
    prompt, of one stream, of sixteen, and of a long prompt cold and cached.
    """
    settings = _settings(options)
    targets = _targets(options)
    environment = describe_machine()
    if options["goodput"]:
        _draw_goodput(targets, settings, environment, options)
        return
    try:
        ready, findings = asyncio.run(_measure(targets, settings))
    except KeyboardInterrupt:
        raise click.Abort from None
    print_report(_wide_console(), environment, ready, settings, findings)
    json_file: Path | None = options["json_file"]
    if json_file is not None:
        json_file.write_bytes(to_json(environment, ready, settings, findings))
    if all(run.metrics["errors"] == run.metrics["requests"] for run in findings.runs):
        raise click.ClickException("no request was answered")


async def _measure(targets: list[Target], settings: Settings) -> tuple[list[ReadyTarget], Findings]:
    progress = Console(stderr=True)
    with progress.status("warming up") as status:
        ready = []
        for target in targets:
            status.update(f"warming up {target.name}")
            try:
                ready.append(await prepare(target, settings, progress.print))
            except RequestFailed as error:
                raise click.ClickException(f"{target.url}: {error}") from error
        return ready, await measure(ready, settings, status.update)


def _draw_goodput(targets: list[Target], settings: Settings, environment: Environment, options: dict[str, Any]) -> None:
    """Measure the curve of each server in turn, print it, and write it if asked to."""
    shape = settings.shape
    crowd = Crowd(
        rates=options["rates"],
        seconds=options["seconds"],
        words=shape.question_words,
        tokens=shape.max_tokens(16),
        impatient_s=options["impatient_s"],
        retries=options["retries"],
        seed=settings.seed,
    )
    slo = settings.slo or _GOODPUT_SLO
    try:
        curves = asyncio.run(_measure_curves(targets, settings, crowd, slo))
    except KeyboardInterrupt:
        raise click.Abort from None
    for name, points in curves.items():
        print_curve(_wide_console(), name, crowd, points)
    if options["json_file"] is not None:
        document = {"environment": environment, "crowd": crowd, "slo": slo, "curves": curves}
        options["json_file"].write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


async def _measure_curves(targets: list[Target], settings: Settings, crowd: Crowd, slo: Slo) -> dict[str, list[Point]]:
    curves = {}
    progress = Console(stderr=True)
    with progress.status("warming up") as status:
        for target in targets:
            try:
                ready = await prepare(target, settings, progress.print)
                curves[target.name] = await measure_curve(ready.client, crowd, slo, status.update)
            except RequestFailed as error:
                raise click.ClickException(f"{target.url}: {error}") from error
    return curves


def _wide_console() -> Console:
    """Return a console for tables, which a file has room for whatever the terminal has."""
    console = Console()
    return console if console.is_terminal else Console(width=_TABLE_WIDTH)


def _settings(options: dict[str, Any]) -> Settings:
    workloads = options["workloads"] or _USUAL_WORKLOADS
    levels = options["concurrency"]
    if levels and "sweep" not in workloads:
        workloads = (*workloads, "sweep")
    shape = Shape(
        num_agents=options["num_agents"],
        num_turns=options["num_turns"],
        agents_at_once=options["agents_at_once"],
        system_words=options["system_words"],
        question_words=options["question_words"],
        prefix_repetitions=options["prefix_repetitions"],
        sweep=levels or _USUAL.sweep,
        output_tokens=options["output_tokens"],
    )
    return Settings(
        workloads=tuple(dict.fromkeys(workloads)),
        shape=shape,
        seed=options["seed"],
        repeat=options["repeat"],
        slo=options["slo"],
        warm_up=options["warm_up"],
        wait_s=options["wait_s"],
    )


def _targets(options: dict[str, Any]) -> list[Target]:
    urls = options["urls"] or (_DEFAULT_URL,)
    models = _one_for_each("--model", options["models"], urls)
    api_keys = _one_for_each("--api-key", options["api_keys"], urls)
    targets = []
    for text, model, api_key in zip(urls, models, api_keys, strict=True):
        named = _NAMED_URL.fullmatch(text)
        url = named[2] if named else text
        try:
            endpoint = Endpoint.parse(url)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--url") from error
        client = ChatClient(endpoint, model or "", api_key, not options["honour_eos"], options["timeout_s"])
        targets.append(Target(named[1] if named else endpoint.authority, url, client))
    if len({target.name for target in targets}) < len(targets):
        raise click.BadParameter("two servers have the same name; name them like a=http://…", param_hint="--url")
    return targets


def _one_for_each(option: str, values: Sequence[str], urls: Sequence[str]) -> list[str | None]:
    if len(values) == len(urls):
        return list(values)
    if len(values) > 1:
        raise click.UsageError(f"{option} is given {len(values)} times for {len(urls)} servers")
    return [values[0] if values else None] * len(urls)


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure; `client.model` is empty until the server was asked for one."""

    name: str
    url: str
    client: ChatClient


@dataclass(frozen=True, slots=True)
class ReadyTarget:
    """A server that has answered. `ignores_eos` is False if it stops at its end-of-sequence token."""

    name: str
    url: str
    client: ChatClient
    version: str | None

    @property
    def ignores_eos(self) -> bool:
        return self.client.ignore_eos


@dataclass(frozen=True, slots=True)
class Settings:
    """Workload names, lengths, seed, number of runs, objectives, and warm-up requests per server.

    wait_s: the longest wait for a server that is not ready.
    """

    workloads: tuple[str, ...]
    shape: Shape
    seed: int
    repeat: int
    slo: Slo | None
    warm_up: int
    wait_s: float


@dataclass(slots=True)
class Findings:
    """All measured runs. `warnings` name doubts about the figures; `errors` counts failures by message."""

    runs: list[RunMetrics] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)


async def prepare(target: Target, settings: Settings, say: Callable[[str], None]) -> ReadyTarget:
    """Find the model and the version, and warm the server up. Raises RequestFailed.

    A server that is not ready is waited for, and `say` gets a sentence about that. A server that refuses `ignore_eos`
    is asked again, and measured, without it.
    """
    client = target.client
    await _wait_until_ready(target, settings.wait_s, say)
    version = await client.version()
    if not client.model:
        client = replace(client, model=await client.first_model())
    try:
        await _warm_up(client, settings)
    except RequestFailed as error:
        if not client.ignore_eos or error.status not in _FIELD_REFUSED:
            raise
        client = replace(client, ignore_eos=False)
        await _warm_up(client, settings)
    return ReadyTarget(target.name, target.url, client, version)


async def measure(targets: list[ReadyTarget], settings: Settings, progress: Callable[[str], None]) -> Findings:
    """Run every workload on every server, several times.

    The order of the servers is reversed from run to run, so that none is always measured first.
    """
    findings = Findings()
    for run in range(settings.repeat):
        in_turn = targets if run % 2 == 0 else targets[::-1]
        for workload in _workloads(settings, run):
            for target in in_turn:
                label = f"{workload.name}, {workload.concurrency} at once,"
                progress(f"run {run + 1} of {settings.repeat}: {label} on {target.name}")
                await _measure_one(target, workload, run, settings.slo, findings)
    # Columns are shown in the order in which the servers were named, whichever ran first.
    order = {target.name: index for index, target in enumerate(targets)}
    findings.runs.sort(key=lambda measured: order[measured.server])
    return findings


def _workloads(settings: Settings, run: int) -> Iterator[Workload]:
    for name in settings.workloads:
        yield from WORKLOADS[name](settings.shape, settings.seed, run)


async def _measure_one(target: ReadyTarget, workload: Workload, run: int, slo: Slo | None, findings: Findings) -> None:
    cpu_before = process_time()
    records = await run_workload(target.client, workload)
    client_cpu_s = process_time() - cpu_before
    for variant, measured in _records_by_variant(records).items():
        metrics: Metrics = summarise(measured, slo.met if slo else None)
        metrics["client_cpu_s"] = client_cpu_s * len(measured) / len(records)
        findings.runs.append(RunMetrics(workload.name, variant, target.name, run, metrics))
    for record in records:
        if record.error is not None:
            message = f"{target.name}, {workload.name}: {record.error}"
            findings.errors[message] = findings.errors.get(message, 0) + 1
    if was_warm(records):
        findings.warnings.append(
            f"{target.name} had text of {workload.name} in its prefix cache before run {run + 1}: "
            "take a --seed that it has not seen"
        )


def was_warm(records: list[RequestRecord]) -> bool:
    """Return whether a large part of every prompt was cached although one at least should have been cold."""
    cold = [record for record in records if record.cold]
    return bool(cold) and all((r.cached_tokens or 0) > _WARM_SHARE * (r.prompt_tokens or 0) for r in cold)


def _records_by_variant(records: list[RequestRecord]) -> dict[str, list[RequestRecord]]:
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(record.variant, []).append(record)
    return groups


async def _wait_until_ready(target: Target, wait_s: float, say: Callable[[str], None]) -> None:
    """Wait while the server answers 503 at `/ready`. Raises RequestFailed if it still does after `wait_s`.

    A server without that route is taken as ready.
    """
    until = monotonic() + wait_s
    said = False
    while True:
        try:
            await target.client.get("/ready")
            return
        except RequestFailed as error:
            if error.status != 503:
                return
            if monotonic() >= until:
                raise RequestFailed(f"not ready after {wait_s:g} s: {error}", error.status) from error
            if not said:
                say(f"{target.url} is not ready, waiting for at most {wait_s:g} s: {error}")
                said = True
        await asyncio.sleep(_READY_POLL_S)


async def _warm_up(client: ChatClient, settings: Settings) -> None:
    prompts = [seeded_text(_WARM_UP_WORDS, settings.seed, "warm-up", index) for index in range(settings.warm_up)]
    answers = [client.chat([{"role": "user", "content": prompt}], _WARM_UP_TOKENS) for prompt in prompts]
    for outcome in await asyncio.gather(*answers, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def print_report(
    console: Console, environment: Environment, targets: list[ReadyTarget], settings: Settings, findings: Findings
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


def to_json(environment: Environment, targets: list[ReadyTarget], settings: Settings, findings: Findings) -> bytes:
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
                "ignore_eos": target.ignores_eos,
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
        "agents": f"{shape.num_agents} agents x {shape.num_turns} turns, {shape.agents_at_once} at once, "
        f"{shape.system_words} words of shared prompt, {shape.question_words} per question, "
        f"{tokens(48)} output tokens",
        "stream": f"one stream of {tokens(96)} tokens",
        "streams": f"16 streams at once of {tokens(64)} tokens",
        "prefix-ttft": f"TTFT of about 1000 tokens, {shape.prefix_repetitions} times cold and cached",
        "sweep": f"streams of {tokens(64)} tokens, two for each place",
    }[workload]


def _denominators(environment: Environment, targets: list[ReadyTarget], settings: Settings) -> Iterator[str]:
    runs = "one run" if settings.repeat == 1 else f"medians of {settings.repeat} interleaved runs"
    yield f"{environment.date}, {runs}, seed {settings.seed}, {environment.client}"
    yield f"{environment.cpu}, {environment.num_cores} cores, load {environment.load_before} before the start"
    for target in targets:
        ended = "all tokens asked for" if target.ignores_eos else "ends at the end-of-sequence token"
        version = target.version or "version not told"
        yield f"{escape(target.name)}: {escape(target.url)}, {version}, model {escape(target.client.model)}, {ended}"
    if len(targets) > 1:
        yield f"(x): how many times better than {escape(targets[0].name)}, median of the ratios within a run"
    if settings.slo is not None:
        limits = settings.slo
        named = (("TTFT", limits.ttft), ("per output token", limits.tpot), ("request", limits.e2e))
        yield "goodput: " + ", ".join(f"{name} ≤ {_seconds(limit)}" for name, limit in named if limit is not None)


@dataclass(frozen=True, slots=True)
class Environment:
    """`load_before` is the load average of the last minute: above about 0.1 the machine was not quiet."""

    date: str
    client: str
    cpu: str
    num_cores: int
    memory_gib: float
    system: str
    load_before: float


def describe_machine() -> Environment:
    """Describe the machine of the client; the server may run on another one."""
    name, instruction_sets = read_processor()
    return Environment(
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        client=f"moeserve bench {VERSION}, Python {platform.python_version()}",
        cpu=" ".join((name, *instruction_sets[:1])),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        load_before=round(os.getloadavg()[0], 2),
    )
