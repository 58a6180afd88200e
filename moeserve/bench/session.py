"""A whole measurement: servers made ready, then every workload on every server in turn, several times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import process_time

from moeserve.bench.comparison import RunMetrics
from moeserve.bench.load import run_workload
from moeserve.bench.measurement import Metrics, RequestRecord, summarise
from moeserve.bench.openai_client import ChatClient, RequestFailed
from moeserve.bench.slo import Slo
from moeserve.bench.words import text
from moeserve.bench.workloads import WORKLOADS, Shape, Workload

_WARM_UP_WORDS, _WARM_UP_TOKENS = 16, 4
# Statuses with which servers refuse a field that they do not know.
_FIELD_REFUSED = (400, 422)
# A chat template's own text may be cached in a fresh prompt, but it is a small part of a prompt.
_WARM_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Target:
    """A server under measurement; `client.model` is empty until it was asked."""

    name: str
    url: str
    client: ChatClient


@dataclass(frozen=True, slots=True)
class ReadyTarget:
    """A server that has answered. `ignores_eos` is False where it stops at its end-of-sequence token instead."""

    name: str
    url: str
    client: ChatClient
    version: str | None

    @property
    def ignores_eos(self) -> bool:
        return self.client.ignore_eos


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run: workload names, lengths, seed, number of runs, objectives and warm-up requests per server."""

    workloads: tuple[str, ...]
    shape: Shape
    seed: int
    repeat: int
    slo: Slo | None
    warm_up: int


@dataclass(slots=True)
class Findings:
    """All that was measured. `warnings` say what makes the figures doubtful; `errors` counts failures by message."""

    runs: list[RunMetrics] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)


async def prepare(target: Target, settings: Settings) -> ReadyTarget:
    """Finds the model and the version, and warms the server up. Raises RequestFailed.

    A server that refuses `ignore_eos` is asked again, and measured, without it.
    """
    client = target.client
    version = await client.version()
    if not client.model:
        client = client.with_model(await client.first_model())
    try:
        await _warm_up(client, settings)
    except RequestFailed as error:
        if not client.ignore_eos or error.status not in _FIELD_REFUSED:
            raise
        client = client.honouring_eos()
        await _warm_up(client, settings)
    return ReadyTarget(target.name, target.url, client, version)


async def measure(targets: list[ReadyTarget], settings: Settings, progress: Callable[[str], None]) -> Findings:
    """Runs all; the order of the servers turns round from run to run, so that none is always measured first."""
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
    for variant, measured in _by_variant(records).items():
        metrics: Metrics = summarise(measured, slo.met if slo else None)
        metrics["client_cpu_s"] = client_cpu_s * len(measured) / len(records)
        findings.runs.append(RunMetrics(workload.name, variant, target.name, run, metrics))
    for record in records:
        if record.error is not None:
            message = f"{target.name}, {workload.name}: {record.error}"
            findings.errors[message] = findings.errors.get(message, 0) + 1
    if any(map(_found_warm, records)):
        findings.warnings.append(
            f"{target.name} had text of {workload.name} in its prefix cache before run {run + 1}: "
            "take a --seed that it has not seen"
        )


def _found_warm(record: RequestRecord) -> bool:
    """Whether a prompt that nobody has sent before was cached for a good part."""
    cached, prompt = record.cached_tokens or 0, record.prompt_tokens or 0
    return record.cold and cached > _WARM_SHARE * prompt


def _by_variant(records: list[RequestRecord]) -> dict[str, list[RequestRecord]]:
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(record.variant, []).append(record)
    return groups


async def _warm_up(client: ChatClient, settings: Settings) -> None:
    prompts = [text(_WARM_UP_WORDS, settings.seed, "warm-up", index) for index in range(settings.warm_up)]
    answers = [client.chat([{"role": "user", "content": prompt}], _WARM_UP_TOKENS) for prompt in prompts]
    for outcome in await asyncio.gather(*answers, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
