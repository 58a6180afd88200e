"""Services of several ranks as a user starts them: their speed, their texts, and what migrating layers costs."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from benchmarks.experts.figures import Amount, Figure, Progress, Unavailable, at_least, at_most, in_turn
from benchmarks.experts.traces import BUILDS, documents, folder_of
from moeserve.bench.client import ChatClient, Endpoint, RequestFailed
from moeserve.bench.metrics import Metrics, summarise
from moeserve.bench.workloads import Conversation, Workload, run_workload, seeded_text

_READY = re.compile(r"ready on (http://\S+)")
_SECONDS_TO_START, _SECONDS_TO_END = 180, 30
_TIMEOUT = 600.0
# Tied experts come in pairs with equal load, one of each pair on either rank: nothing would migrate.
_MIGRATING = BUILDS[2]
_MIGRATING_STREAMS, _STREAMS = 8, 16


class Service:
    """A running service; requests come from this process."""

    def __init__(self, url: str, log: TextIO) -> None:
        self._log = log
        self._client = ChatClient(Endpoint.parse(url), "m", None, ignore_eos=True, timeout_s=_TIMEOUT)
        self._num_runs = 0

    def run(self, num_streams: int, num_tokens: int, seed: int) -> Metrics:
        """Measure independent streams that begin at once. Every call sends other texts. Raise Unavailable."""
        self._num_runs += 1
        conversations = tuple(
            Conversation("", None, (seeded_text(24, seed, self._num_runs, number),), cold=True)
            for number in range(num_streams)
        )
        workload = Workload("streams", num_streams, num_tokens, conversations)
        records = asyncio.run(run_workload(self._client, workload))
        for record in records:
            if record.error is not None:
                raise Unavailable(f"{record.error}; the service said: {_last_error(self._log)}")
        return summarise(records, None)

    def answers(self, num_requests: int, num_tokens: int, num_at_once: int = 8) -> list[str]:
        """Return greedy texts for the first documents, with requests coming and going. Raise Unavailable."""
        prompts = [" ".join(document.split()[:24]) for document in documents()[:num_requests]]
        return asyncio.run(self._answers(prompts, num_tokens, num_at_once))

    def experts(self) -> dict[str, Any]:
        """Return the answer of `/v1/experts`. Raise Unavailable."""
        try:
            answer: dict[str, Any] = asyncio.run(self._client.get("/v1/experts"))
        except RequestFailed as error:
            raise Unavailable(f"{error}; the service said: {_last_error(self._log)}") from error
        return answer

    async def _answers(self, prompts: Sequence[str], num_tokens: int, num_at_once: int) -> list[str]:
        places = asyncio.Semaphore(num_at_once)

        async def answer(prompt: str) -> str:
            async with places:
                _, found = await self._client.chat([{"role": "user", "content": prompt}], num_tokens)
                return found.text

        try:
            return await asyncio.gather(*map(answer, prompts))
        except RequestFailed as error:
            raise Unavailable(f"{error}; the service said: {_last_error(self._log)}") from error


@contextmanager
def service(folder: Path, num_ranks: int, threads: int, *options: str) -> Iterator[Service]:
    """Run `moeserve serve` on a free port of this machine. Raise Unavailable if it does not start."""
    sizes = ("--expert-parallel-size", str(num_ranks), "--threads", str(threads), "--kv-cache-memory", "256MiB")
    # Others may use the machine too.
    patience = ("--engine-timeout", "60")
    command = [sys.executable, "-m", "launcher.cli", "serve", str(folder), "--port", "0", "--served-model-name", "m"]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, *sizes, *patience, *options], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        too_long = threading.Timer(_SECONDS_TO_START, process.kill)
        too_long.start()
        try:
            url = _url(process)
            too_long.cancel()
            if url is None:
                raise Unavailable(f"A service of {num_ranks} ranks did not start: {_last_error(errors)}")
            yield Service(url, errors)
        finally:
            too_long.cancel()
            _end(process)


def _last_error(log: TextIO) -> str:
    """Return the last line of a log with the word error in it."""
    log.seek(0)
    lines = [line.strip() for line in log if "rror" in line]
    return lines[-1] if lines else "nothing"


def _url(process: subprocess.Popen[str]) -> str | None:
    """Wait until the service is ready and return its address; None if it ends before."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := _READY.search(line):
            return found[1]
    return None


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _in_turn(
    services: Sequence[Service], amount: Amount, num_streams: int, num_tokens: int, metric: str, progress: Progress
) -> list[tuple[float, ...]]:
    """Return the metric of each service by round. All are there all the time; the first round warms them up."""

    def run(running: Service, number: int) -> float:
        progress(f"pair {number + 1} of {amount.num_pairs}")
        return running.run(num_streams, num_tokens, number)[metric]

    return in_turn(services, amount.num_pairs, run, warm_up=True)


def two_ranks(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """Two ranks with one thread each against one rank with two threads, on this machine."""
    folder = folder_of(BUILDS[0], amount, progress)
    progress("loading")
    with service(folder, 1, 2) as one, service(folder, 2, 1) as two:
        rates = _in_turn((one, two), amount, _STREAMS, amount.of(64, 8), "tokens_per_s", progress)
    ratios = tuple(split / whole for whole, split in rates)
    whole, split = (fmean(pair[index] for pair in rates) for index in (0, 1))
    note = f"{split:.1f} and {whole:.1f} tokens/s over HTTP, gloo"
    name = f"{BUILDS[0].name}, {_STREAMS} streams, tokens/s of two ranks"
    yield Figure(name, "one rank with two threads", ratios, "x", at_least(0.7), note=note)


def migration(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """Time between tokens while layers get another placement, against a service whose layers stay."""
    folder = folder_of(_MIGRATING, amount, progress)
    restless = ("--rebalance-interval", "8", "--rebalance-threshold", "0")
    progress("loading")
    with service(folder, 2, 1) as still, service(folder, 2, 1, *restless) as moving:
        # The round that warms up also fills the window of loads by which placements are decided.
        pairs = _in_turn((still, moving), amount, _MIGRATING_STREAMS, amount.of(128, 32), "itl_p99", progress)
        rebalancing = moving.experts()["rebalancing"]
    yield from migration_figures(pairs, rebalancing)


def migration_figures(pairs: Sequence[tuple[float, ...]], rebalancing: dict[str, Any]) -> Iterator[Figure]:
    """pairs: p99 between tokens in seconds, of the service that stays and of the one that migrates.

    rebalancing: what the latter reports. Raise Unavailable if nothing migrated.
    """
    if not rebalancing["num_migrations"]:
        raise Unavailable("no layer was placed anew while it was measured")
    ratios = tuple(moving / still for still, moving in pairs)
    name = f"{_MIGRATING.name}, R=2, {_MIGRATING_STREAMS} streams, p99 between tokens"
    note = f"{rebalancing['num_migrations']} migrations of one layer each"
    yield Figure(name, "the same without rebalancing", ratios, "x", at_most(1.2), note=note)
    migrating, steady = rebalancing["migrating_step_p99"], rebalancing["steady_step_p99"]
    if migrating and steady:
        name = "p99 of its own steps with a migration under way"
        note = f"{migrating * 1e3:.0f} ms and {steady * 1e3:.0f} ms; prompts are computed in either kind of step"
        yield Figure(name, "its own steps without", (migrating / steady,), "x", note=note)


def exactness(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """Texts of two ranks under several placements, against one rank."""
    folder = folder_of(_MIGRATING, amount, progress)
    num_requests, num_tokens = amount.of(32, 8), amount.of(64, 16)
    progress("one rank")
    with service(folder, 1, 1) as one:
        expected = one.answers(num_requests, num_tokens)
    restless = ("--rebalance-interval", "4", "--rebalance-threshold", "0")
    variants: dict[str, tuple[str, ...]] = {", placed anew while serving": restless}
    if not amount.quick:
        variants[", contiguous"] = ()
        variants[", round-robin"] = ("--placement", "round-robin")
        variants[", 4 replicas per layer"] = ("--num-redundant-experts", "4")
    for variant, options in variants.items():
        progress(f"two ranks{variant}")
        with service(folder, 2, 1, *options) as two:
            if options is restless:
                # Counts enough for a first decision, so that answers are given while layers migrate.
                two.run(8, amount.of(64, 24), 0)
            found = two.answers(num_requests, num_tokens)
            moved = two.experts().get("rebalancing", {}).get("num_migrations")
        same = sum(text == other for text, other in zip(found, expected, strict=True)) / num_requests
        note = f"{num_requests} requests of {num_tokens} tokens, 8 at a time"
        if moved is not None:
            note += f"; {moved} migrations"
        name = f"{_MIGRATING.name}, R=2{variant}, requests with the same text"
        yield Figure(name, "one rank", (same,), "%", at_least(0.99), exact=True, note=note)
