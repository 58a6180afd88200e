"""`python -m benchmarks.kv_disk_pace`: what KV on disk costs requests that do not need it, and streams beside a load.

Two services of the demo answer the same new prompts in turn, one of them with KV on disk: both compute, and one writes.
Then a stream runs while other prompts' prefixes are read from disk, which an earlier life of the service has written,
and once more beside the same prompts, whose prefixes are in memory by then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from os import getloadavg
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from threading import Thread

import click
import httpx2

from benchmarks.kv_restart import ask, serving

_SETTINGS = ("--speculative-config", '{"method":"none"}')
_OUTPUT = 48  # tokens
_STREAM = 400  # tokens
_STEPS_BEFORE = 20  # of the stream, before a load


def seconds(http: httpx2.Client, prompt: list[int]) -> float:
    """Return the seconds that an answer takes."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": _OUTPUT, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    http.post("/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - began


def stream(http: httpx2.Client) -> Iterator[float]:
    """Yield the times at which the tokens of a stream come."""
    body = {"model": "demo", "prompt": [500], "max_tokens": _STREAM, "temperature": 0, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield time.perf_counter()


def gaps_beside_loads(http: httpx2.Client, prompts: list[list[int]]) -> tuple[list[float], list[float], int]:
    """Return the seconds between tokens of a stream alone and beside loads, and the tokens that were loaded."""
    alone, beside = list[float](), list[float]()
    waiting = iter(prompts)
    load: Thread | None = None
    found: list[tuple[float, dict[str, int]]] = []
    before, num_alone = 0.0, 0
    for now in stream(http):
        is_loading = load is not None and load.is_alive()
        if before:
            (beside if is_loading else alone).append(now - before)
            num_alone = 0 if is_loading else num_alone + 1
        before = now
        if not is_loading and num_alone >= _STEPS_BEFORE and (prompt := next(waiting, None)) is not None:
            load = Thread(target=lambda prompt=prompt: found.append(ask(http, prompt)))
            load.start()
    if load is not None:
        load.join()
    return alone, beside, sum(where["disk"] for _, where in found)


@click.command()
@click.option("--pairs", type=click.IntRange(min=2), default=16, show_default=True)
@click.option("--loads", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--tokens", type=click.IntRange(min=100), default=1000, show_default=True, help="Of each load.")
@click.argument("settings", nargs=-1)
def command(pairs: int, loads: int, tokens: int, settings: tuple[str, ...]) -> None:
    """Print the times with KV on disk as shares of the times without, and a stream's steps beside loads.

    SETTINGS, after --, are further settings of `moeserve serve`.
    """
    settings = *_SETTINGS, *settings
    draw = Random(1)
    long = [[draw.randrange(200, 40_000) for _ in range(tokens)] for _ in range(loads)]
    with ExitStack() as ends:
        plain, disk = (Path(ends.enter_context(TemporaryDirectory())) for _ in range(2))
        with serving(disk, settings) as http:
            for prompt in long:
                ask(http, prompt)
        without = ends.enter_context(serving(plain, settings, on_disk=False))
        with_disk = ends.enter_context(serving(disk, settings))
        shares = []
        for number in range(pairs):
            prompt = [draw.randrange(200, 40_000) for _ in range(200)]
            order = [without, with_disk] if number % 2 else [with_disk, without]
            took = {http: seconds(http, prompt) for http in order}
            shares.append(took[with_disk] / took[without])
        alone, beside, loaded = gaps_beside_loads(with_disk, long)
        _, again, from_disk = gaps_beside_loads(with_disk, long)
    shares.sort()
    click.echo(
        f"with a disk / without, {pairs} pairs: median {median(shares):.3f}, {shares[0]:.3f} to {shares[-1]:.3f}"
    )
    click.echo(
        f"between tokens of a stream: {1e3 * median(alone):.2f} ms alone, {1e3 * median(beside):.2f} beside loads of "
        f"{loaded} tokens ({median(beside) / median(alone):.3f}), longest {1e3 * max(beside):.1f}; beside the same "
        f"prompts in memory ({from_disk} tokens from disk) {1e3 * median(again):.2f}, longest {1e3 * max(again):.1f}"
    )
    click.echo(f"load {getloadavg()[0]:.1f}")


if __name__ == "__main__":
    command()
