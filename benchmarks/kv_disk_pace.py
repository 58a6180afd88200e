"""`python -m benchmarks.kv_disk_pace`: what KV on disk costs requests that do not need it, and streams beside a load.

Two services of the demo answer the same prompts in turn, one of them with KV on disk. New prompts are computed by both,
and one writes. Of stored prompts one service finds the prefix on disk, which an earlier life of it has written, and
reads or computes it. Then a stream runs while other prompts' prefixes are read, and once more beside the same prompts,
whose prefixes are in memory by then.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import chain
from math import exp, log, sqrt
from pathlib import Path
from random import Random
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory
from threading import Thread

import click
import httpx2

from benchmarks.kv_restart import ask, serving

_SETTINGS = ("--speculative-config", '{"method":"none"}')
_OUTPUT = 48  # tokens
_STREAM = 400  # tokens
_NEW = 200  # tokens of a new prompt
_SETTLES_S = 0.1  # after an answer, in which the rest of it is written
_STEPS_BEFORE = 20  # of the stream, before a load


def seconds(http: httpx2.Client, prompt: list[int], output: int) -> float:
    """Return the seconds that an answer of `output` tokens takes."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    http.post("/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - began


@contextmanager
def streaming(http: httpx2.Client) -> Iterator[None]:
    """Have a stream run."""
    tokens = stream(http)
    for _ in range(3):
        next(tokens)
    yield
    tokens.close()


class Asked:
    """A service, with the processes that it has started."""

    def __init__(self, http: httpx2.Client, before: set[int]) -> None:
        """before: the processes that were there before it."""
        self.http = http
        self._pids = descendants(os.getpid()) - before

    def processor_s(self) -> float:
        """Return the seconds of processor time that its threads have taken so far."""
        found = 0
        for task in chain.from_iterable(Path(f"/proc/{pid}/task").glob("*/schedstat") for pid in self._pids):
            with suppress(OSError):  # the thread has ended
                found += int(task.read_text().split()[0])
        return found / 1e9


def descendants(pid: int) -> set[int]:
    """Return the processes that a process has started, directly or not."""
    children = {
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    }
    return children.union(*map(descendants, children))


def ratios(
    disk: Asked, plain: Asked, prompts: Sequence[list[int]], output: int, *, beside: bool
) -> tuple[list[float], list[float]]:
    """Return the seconds of each prompt's answer with a disk as a share of those without, and so its processor time.

    beside: a stream runs meanwhile in the service that is asked.
    """
    times, loads = list[float](), list[float]()
    for number, prompt in enumerate(prompts):
        took, used = {}, {}
        for one in (plain, disk) if number % 2 else (disk, plain):
            before = one.processor_s()
            with streaming(one.http) if beside else nullcontext():
                took[one] = seconds(one.http, prompt, output)
            time.sleep(_SETTLES_S)
            used[one] = one.processor_s() - before
        times.append(took[disk] / took[plain])
        loads.append(used[disk] / used[plain])
    return times, loads


def shown(found: Sequence[float]) -> str:
    """Return the geometric mean of ratios with its interval of 95 %, their median, least and most."""
    logs = [log(ratio) for ratio in found]
    middle, error = mean(logs), 1.96 * stdev(logs) / sqrt(len(logs))
    low, high = exp(middle - error), exp(middle + error)
    return (
        f"{exp(middle):.3f} ({low:.3f} to {high:.3f}), median {median(found):.3f}, {min(found):.3f} to {max(found):.3f}"
    )


def stream(http: httpx2.Client) -> Generator[float]:
    """Yield the times at which the tokens of a stream come."""
    body = {"model": "demo", "prompt": [500], "max_tokens": _STREAM, "temperature": 0, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield time.perf_counter()


def gaps_beside_loads(
    http: httpx2.Client, prompts: list[list[int]]
) -> tuple[list[float], list[float], int, list[float]]:
    """Return the seconds between tokens of a stream alone and beside loads, the loaded tokens, and the seconds
    until each load was answered."""
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
    return alone, beside, sum(where["disk"] for _, where in found), [took for took, _ in found]


@click.command()
@click.option("--pairs", type=click.IntRange(min=0), default=16, show_default=True, help="New prompts.")
@click.option("--stored", type=click.IntRange(min=2), default=8, show_default=True, help="Stored prompts of a length.")
@click.option("--length", multiple=True, type=click.IntRange(min=17), help="Of stored prompts.")
@click.option("--beside", is_flag=True, help="A stream runs in the service that is asked.")
@click.option("--loads", type=click.IntRange(min=0), default=4, show_default=True)
@click.option("--tokens", type=click.IntRange(min=100), default=1000, show_default=True, help="Of each load.")
@click.argument("settings", nargs=-1)
def command(
    pairs: int, stored: int, length: tuple[int, ...], beside: bool, loads: int, tokens: int, settings: tuple[str, ...]
) -> None:
    """Print the times with KV on disk as shares of the times without, and a stream's steps beside loads.

    SETTINGS, after --, are further settings of `moeserve serve`.
    """
    settings = *_SETTINGS, *settings
    draw = Random(1)

    def drawn(number: int, size: int) -> list[list[int]]:
        return [[draw.randrange(200, 40_000) for _ in range(size)] for _ in range(number)]

    long, by_length = drawn(loads, tokens), {size: drawn(stored, size) for size in length}
    with ExitStack() as ends:
        plain, disk = (Path(ends.enter_context(TemporaryDirectory())) for _ in range(2))
        with serving(disk, settings) as http:
            for prompt in chain(long, *by_length.values()):
                ask(http, prompt)
        before = descendants(os.getpid())
        without = Asked(ends.enter_context(serving(plain, settings, on_disk=False)), before)
        before = descendants(os.getpid())
        with_disk = Asked(ends.enter_context(serving(disk, settings)), before)
        if pairs:
            times, used = ratios(with_disk, without, drawn(pairs, _NEW), _OUTPUT, beside=beside)
            click.echo(f"with a disk / without, {pairs} new prompts: {shown(times)}; processor time {shown(used)}")
        for size, prompts in by_length.items():
            known = from_disk(with_disk.http)
            times, _ = ratios(with_disk, without, prompts, 1, beside=beside)
            read = from_disk(with_disk.http) - known
            click.echo(f"{stored} stored prompts of {size} tokens, {read:.0f} tokens read: {shown(times)}")
        if loads:
            show_gaps(with_disk.http, long)
    click.echo(f"load {os.getloadavg()[0]:.1f}")


def from_disk(http: httpx2.Client) -> float:
    """Return the tokens that were found on disk so far; the service reports them twice a second."""
    time.sleep(1)
    found = re.search(r'^moeserve_kv_tier_hit_tokens_total\{tier="disk"\} (\S+)', http.get("/metrics").text, re.M)
    return float(found[1]) if found else 0.0


def show_gaps(http: httpx2.Client, prompts: list[list[int]]) -> None:
    """Print the times between a stream's tokens alone, beside loads, and beside the same prompts in memory."""
    alone, beside, loaded, took = gaps_beside_loads(http, prompts)
    _, again, num_read, took_again = gaps_beside_loads(http, prompts)
    click.echo(
        f"between tokens of a stream: {1e3 * median(alone):.2f} ms alone, {1e3 * median(beside):.2f} beside loads of "
        f"{loaded} tokens ({median(beside) / median(alone):.3f}), longest {1e3 * max(beside):.1f}; beside the same "
        f"prompts in memory ({num_read} tokens from disk) {1e3 * median(again):.2f}, longest {1e3 * max(again):.1f}; "
        f"a load is answered after {median(took):.2f} s, in memory after {median(took_again):.2f}"
    )


if __name__ == "__main__":
    command()
