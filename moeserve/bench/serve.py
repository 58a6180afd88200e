"""`moeserve bench serve`: measure OpenAI-compatible servers under load."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from moeserve.bench.client import ChatClient, Endpoint, RequestFailed
from moeserve.bench.goodput import Crowd, Point, measure_curve, print_curve
from moeserve.bench.metrics import Slo
from moeserve.bench.report import print_report, to_json
from moeserve.bench.runs import Environment, Findings, Settings, Target, describe_machine, measure, prepare
from moeserve.bench.workloads import WORKLOADS, Shape
from moeserve.listeners import USUAL_URL, why_not_own

_TABLE_WIDTH = 160
_USUAL_WORKLOADS = ("agents", "stream", "streams", "prefix-ttft")
_NAMED_URL = re.compile(r"([\w.-]+)=(https?://.+)")
_COUNT = click.IntRange(min=1)
_USUAL = Shape()
_GOODPUT_SLO = Slo(ttft=2.0)


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
    help=f"Server to measure; several are measured in turn and compared with the first.  [default: {USUAL_URL}]",
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
@click.option("--turns", "num_turns", type=_COUNT, help="Questions of each agent.  [default: 3, of traces 43]")
@click.option(
    "--scale",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Lengths of `traces`: 1 is a median request of 142,000 tokens.",
)
@click.option(
    "--agents-at-once", type=_COUNT, default=_USUAL.agents_at_once, help="Agents waiting for an answer at once."
)
@click.option("--system-words", type=_COUNT, default=_USUAL.system_words, help="Words of the agents' system prompt.")
@click.option("--question-words", type=_COUNT, default=_USUAL.question_words, help="Words of every question.")
@click.option("--prefix-repetitions", type=_COUNT, default=_USUAL.prefix_repetitions, help="Prefixes of prefix-ttft.")
@click.option("--output-tokens", type=_COUNT, help="Tokens per answer.  [default: as usual for the workload]")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, help="Of answers: greedy ones may run in circles."
)
@click.option("--honour-eos", is_flag=True, help="Let answers end where the model ends them.")
@click.option(
    "--rest",
    "rest_s",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Seconds of pause after each run of a workload on a server: some spin for seconds behind their last request.",
)
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


async def _measure(targets: list[Target], settings: Settings) -> tuple[list[Target], Findings]:
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
        scale=options["scale"],
    )
    return Settings(
        workloads=tuple(dict.fromkeys(workloads)),
        shape=shape,
        seed=options["seed"],
        repeat=options["repeat"],
        slo=options["slo"],
        warm_up=options["warm_up"],
        wait_s=options["wait_s"],
        rest_s=options["rest_s"],
    )


def _targets(options: dict[str, Any]) -> list[Target]:
    if not options["urls"] and (reason := why_not_own()) is not None:
        raise click.ClickException(reason)
    urls = options["urls"] or (USUAL_URL,)
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
        client = ChatClient(
            endpoint, model or "", api_key, not options["honour_eos"], options["timeout_s"], options["temperature"]
        )
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
