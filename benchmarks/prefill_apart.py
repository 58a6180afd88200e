"""`python -m benchmarks.prefill_apart`: prefill and decode in two services, against one service with the same threads.

In the first part streams run while long prompts come: the time between tokens of these streams. In the second part
short and long prompts come at some rates: how many are good, which keep to a time to the first token and to a mean time
between tokens. Of the two services one computes prompts and the other one fetches their KV and decodes; this program
asks them as a proxy does, one after the other. Arrangements take turns, so that a slow minute is none's alone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from os import getloadavg, sched_getaffinity
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import click
import httpx2

from benchmarks.kv_restart import serving
from moeserve.engine.ranks.meeting import create_keys

_PLAIN = ("--speculative-config", '{"method":"none"}')  # every token is a step
_TIMEOUT_S = 600.0
_SHORT, _OUTPUT = 64, 32  # tokens of a short prompt, and of each answer in the second part
_SHARE_LONG = 0.2  # of the requests of the second part


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Services that answer together. prefills: the address that computes prompts, None where `decodes` does that."""

    name: str
    decodes: str
    prefills: str | None = None

    async def tokens(self, http: httpx2.AsyncClient, prompt: list[int], count: int) -> AsyncGenerator[float]:
        """Yield the times at which the tokens of an answer come."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        if self.prefills is not None:
            first = body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            answer = await http.post(f"{self.prefills}/v1/completions", json=first)
            answer.raise_for_status()
            body["kv_transfer_params"] = answer.json()["kv_transfer_params"]
        async with http.stream("POST", f"{self.decodes}/v1/completions", json=body | {"stream": True}) as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    if "error" in json.loads(line.removeprefix("data: ")):
                        raise click.ClickException(line)
                    yield time.perf_counter()


@dataclass(slots=True)
class Times:
    """Seconds between tokens of running streams, and from long prompts to their first tokens."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)

    def line(self, name: str) -> str:
        gaps = sorted(self.gaps)
        shown = [1e3 * gaps[int(share * (len(gaps) - 1))] for share in (0.5, 0.9, 0.99, 1.0)]
        return f"| {name} | " + " | ".join(f"{gap:.0f}" for gap in shown) + f" | {median(self.first):.2f} |"


async def run_streams(
    arrangement: Arrangement, draw: Random, streams: int, prompts: int, tokens: int, pause_s: float, times: Times
) -> None:
    """Have streams run for as long as long prompts are answered, one after the other."""
    async with httpx2.AsyncClient(timeout=_TIMEOUT_S) as http:
        ended, begun = asyncio.Event(), asyncio.Semaphore(0)

        async def keep_running(number: int) -> None:
            while not ended.is_set():
                before = 0.0
                async with aclosing(arrangement.tokens(http, [300 + number] * _SHORT, 4000)) as stream:
                    async for now in stream:
                        if before:
                            times.gaps.append(now - before)
                        else:
                            begun.release()
                        before = now
                        if ended.is_set():
                            return

        async with asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(keep_running(number))
            for _ in range(streams):
                await begun.acquire()
            times_before = len(times.gaps)
            for _ in range(prompts):
                began = time.perf_counter()
                async with aclosing(arrangement.tokens(http, random_tokens(draw, tokens), 2)) as answer:
                    times.first.append(await anext(answer) - began)
                await asyncio.sleep(pause_s)
            del times.gaps[:times_before]
            ended.set()


def random_tokens(draw: Random, count: int) -> list[int]:
    return [draw.randrange(200, 40_000) for _ in range(count)]


async def run_rate(
    arrangement: Arrangement, draw: Random, rate: float, seconds: float, tokens: int, is_good: Callable[..., bool]
) -> tuple[int, int]:
    """Send requests at a rate, as a Poisson process. Return how many were good, and how many there were."""
    async with httpx2.AsyncClient(timeout=_TIMEOUT_S, limits=httpx2.Limits(max_connections=None)) as http:

        async def ask(prompt: list[int]) -> bool:
            began = time.perf_counter()
            try:
                arrivals = [now async for now in arrangement.tokens(http, prompt, _OUTPUT)]
            except httpx2.HTTPError:
                return False  # refused for its load
            return is_good(arrivals[0] - began, (arrivals[-1] - arrivals[0]) / max(1, len(arrivals) - 1))

        running: list[Awaitable[bool]] = []
        async with asyncio.TaskGroup() as group:
            end = time.perf_counter() + seconds
            while (now := time.perf_counter()) < end:
                count = tokens if draw.random() < _SHARE_LONG else _SHORT
                running.append(group.create_task(ask(random_tokens(draw, count))))
                await asyncio.sleep(min(draw.expovariate(rate), end - now))
        return sum([await one for one in running]), len(running)


def total(url: str, name: str) -> float:
    """Return the sum of a service's counter."""
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}_total"))


def arrange(ends: ExitStack, threads: int, settings: Sequence[str]) -> list[Arrangement]:
    """Start one service with all threads, and two that share them."""
    folder = Path(ends.enter_context(TemporaryDirectory()))
    create_keys(folder / "kv.key")
    transfer = ("--kv-transfer-config", json.dumps({"key_file": str(folder / "kv.key")}))
    half = str(max(1, threads // 2))
    found = []
    for name, more in (
        ("one", ("--threads", str(threads))),
        ("prefills", ("--threads", half, *transfer)),
        ("decodes", ("--threads", half, *transfer)),
    ):
        (folder / name).mkdir()
        http = ends.enter_context(serving(folder / name, (*_PLAIN, *settings, *more), on_disk=False))
        found.append(str(http.base_url).rstrip("/"))
    return [Arrangement("one service", found[0]), Arrangement("two services", found[2], found[1])]


@click.command()
@click.option("--streams", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--prompts", type=click.IntRange(min=1), default=6, show_default=True, help="Beside the streams.")
@click.option("--tokens", type=click.IntRange(min=64), default=2000, show_default=True, help="Of a long prompt.")
@click.option("--pause", "pause_s", default=0.5, show_default=True, help="Seconds between long prompts.")
@click.option("--rate", "rates", multiple=True, type=float, default=(0.1, 0.2, 0.4), show_default=True)
@click.option("--seconds", default=60.0, show_default=True, help="Of each rate.")
@click.option("--ttft", default=5.0, show_default=True, help="Most seconds to the first token of a good request.")
@click.option("--tpot", default=0.1, show_default=True, help="Most seconds between its tokens, on the mean.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True)
@click.argument("settings", nargs=-1)
def command(
    streams: int,
    prompts: int,
    tokens: int,
    pause_s: float,
    rates: tuple[float, ...],
    seconds: float,
    ttft: float,
    tpot: float,
    rounds: int,
    settings: tuple[str, ...],
) -> None:
    """Print both tables. SETTINGS, after --, are further settings of all services."""

    def is_good(first_s: float, between_s: float) -> bool:
        return first_s <= ttft and between_s <= tpot

    with ExitStack() as ends:
        both = arrange(ends, len(sched_getaffinity(0)), settings)
        times = {arrangement: Times() for arrangement in both}
        good = {(arrangement, rate): [0, 0] for arrangement in both for rate in rates}
        for number in range(rounds):
            for arrangement in both if number % 2 else both[::-1]:
                draw = Random(number)  # the same requests for both
                asyncio.run(run_streams(arrangement, draw, streams, prompts, tokens, pause_s, times[arrangement]))
                for rate in rates:
                    found = asyncio.run(run_rate(arrangement, draw, rate, seconds, tokens, is_good))
                    good[arrangement, rate] = [a + b for a, b in zip(good[arrangement, rate], found, strict=True)]
        tokens_fetched, fetch_s = (
            total(both[1].decodes, f"moeserve_kv_transfer_{name}") for name in ("tokens", "seconds")
        )
    click.echo(f"{streams} streams beside prompts of {tokens} tokens: ms between tokens, s to a prompt's first token\n")
    click.echo("| | p50 | p90 | p99 | longest | prompt |\n|---|---|---|---|---|---|")
    for arrangement in both:
        click.echo(times[arrangement].line(arrangement.name))
    click.echo(
        f"\nGood requests ({ttft:g} s, {tpot:g} s) of those sent, and good ones a second, by requests a second\n"
    )
    click.echo("| | " + " | ".join(f"{rate:g}" for rate in rates) + " |\n|---|" + "---|" * len(rates))
    for arrangement in both:
        cells = [
            f"{kept} of {sent}, {kept / (rounds * seconds):.3f}"
            for kept, sent in (good[arrangement, rate] for rate in rates)
        ]
        click.echo(f"| {arrangement.name} | " + " | ".join(cells) + " |")
    click.echo(f"\n{tokens_fetched:.0f} tokens fetched in {fetch_s:.1f} s of fetches; load {getloadavg()[0]:.1f}")


if __name__ == "__main__":
    command()
