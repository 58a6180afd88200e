"""Runs of workloads against servers, in turn: the figures of each, and the machine."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from time import monotonic, process_time

from moeserve.bench.client import ChatClient, RequestFailed
from moeserve.bench.metrics import Metrics, RequestRecord, RunMetrics, Slo, summarise
from moeserve.bench.workloads import WORKLOADS, Shape, Workload, run_workload, seeded_text
from moeserve.config import VERSION
from moeserve.machine import read_processor

_WARM_UP_WORDS, _WARM_UP_TOKENS = 16, 4
_READY_POLL_S = 0.5
# Statuses with which servers refuse a field that they do not know.
_FIELD_REFUSED = (400, 422)
# A chat template's own text may be cached in a fresh prompt, but it is a small part of a prompt.
_WARM_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure. `client.model` is empty, and the version not known, until the server was asked."""

    name: str
    url: str
    client: ChatClient
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Workload names, lengths, seed, number of runs, objectives, and warm-up requests per server.

    wait_s: the longest wait for a server that is not ready. rest_s: the pause after each run of a workload.
    """

    workloads: tuple[str, ...]
    shape: Shape
    seed: int
    repeat: int
    slo: Slo | None
    warm_up: int
    wait_s: float
    rest_s: float = 0.0


@dataclass(slots=True)
class Findings:
    """All measured runs. `warnings` name doubts about the figures; `errors` counts failures by message."""

    runs: list[RunMetrics] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)


async def prepare(target: Target, settings: Settings, say: Callable[[str], None]) -> Target:
    """Find the model and the version, and warm the server up; return the server with them. Raise RequestFailed.

    Wait for a server that is not ready, and give `say` a sentence about that. A server that refuses `ignore_eos` is
    asked again, and measured, without it.
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
    return replace(target, client=client, version=version)


async def measure(targets: list[Target], settings: Settings, progress: Callable[[str], None]) -> Findings:
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
                await asyncio.sleep(settings.rest_s)
    # Columns are shown in the order in which the servers were named, whichever ran first.
    order = {target.name: index for index, target in enumerate(targets)}
    findings.runs.sort(key=lambda measured: order[measured.server])
    return findings


def _workloads(settings: Settings, run: int) -> Iterator[Workload]:
    for name in settings.workloads:
        yield from WORKLOADS[name](settings.shape, settings.seed, run)


async def _measure_one(target: Target, workload: Workload, run: int, slo: Slo | None, findings: Findings) -> None:
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
    """Wait while the server answers 503 at `/ready`. Raise RequestFailed if it still does after `wait_s`.

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
