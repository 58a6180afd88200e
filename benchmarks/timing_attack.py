"""`python -m benchmarks.timing_attack`: can a key tell by time, or by usage, what another key has sent?

For each probe the victim first sends either the prompt that the attacker then asks for, or another one. How well the
attacker's times tell these apart is the area under the ROC curve: 0.5 is chance, and with n probes chance strays by
about 0.6 / sqrt(n). The same of the victim's own probes shows that there is something to be told.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import getloadavg
from pathlib import Path
from random import Random
from subprocess import Popen
from sys import executable
from tempfile import TemporaryDirectory

import click
import httpx2

from benchmarks.kv_restart import wait_until_ready

_KEYS = ("victim", "attacker")
# The victim asks the same service, or another one that shares the disk and the response store.
_TIERS = {"memory": False, "shared disk and store": True}
_OUTPUT = 8  # tokens


def auc(hits: Sequence[float], misses: Sequence[float]) -> float:
    """Return the probability that a hit's figure is the larger one; ties count half."""
    ordered = sorted(misses)
    below = sum(bisect_left(ordered, hit) + bisect_right(ordered, hit) for hit in hits)
    return below / (2 * len(hits) * len(misses))


@contextmanager
def serving(folder: Path, port: int, model: Path, *settings: str) -> Iterator[httpx2.Client]:
    (folder / "keys").write_text("".join(f"user:{key}\n" for key in _KEYS))
    command = [executable, "-m", "launcher.cli", "serve", str(model), "--port", str(port), "--served-model-name", "m"]
    command += ["--api-key-file", str(folder / "keys"), *settings]
    with (folder / "log").open("ab") as log, Popen(command, stdout=log, stderr=log) as process:
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                wait_until_ready(http, process)
                yield http
        finally:
            process.terminate()


def ask(http: httpx2.Client, key: str, prompt: list[int]) -> tuple[float, float, int]:
    """Return the seconds to the first token and to the end of a stream, and the cached tokens."""
    body = {"model": "m", "prompt": prompt, "max_tokens": _OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    began, first, cached = time.perf_counter(), 0.0, 0
    headers = {"authorization": f"Bearer {key}"}
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                if '"cached_tokens":' in line:
                    cached = int(line.split('"cached_tokens":')[1].split("}")[0].split(",")[0])
    return first, time.perf_counter() - began, cached


def wait_for_blocks(http: httpx2.Client, count: int) -> None:
    """Wait until a number of the victim's blocks is on disk."""
    while http.get("/v1/cache", headers={"authorization": "Bearer victim"}).json()["disk"]["blocks"] < count:
        time.sleep(0.005)


def probe(primed: httpx2.Client, asked: httpx2.Client, key: str, probes: int, tokens: int, draw: Random) -> list[float]:
    """Return the AUC of the time to the first token, of the whole time, and of the cached tokens."""
    seen: dict[bool, list[tuple[float, float, int]]] = {True: [], False: []}
    for number in range(probes):
        wanted, other = ([draw.randrange(3, 250) for _ in range(tokens)] for _ in range(2))
        is_sent = number % 2 == 0
        ask(primed, "victim", wanted if is_sent else other)
        if primed is not asked:
            wait_for_blocks(primed, (number + 1) * (tokens // 16))
        seen[is_sent].append(ask(asked, key, wanted))
    columns = [list(zip(*seen[is_sent], strict=True)) for is_sent in (True, False)]
    # A hit takes less time, and has more cached tokens.
    return [
        auc(columns[1][0], columns[0][0]),
        auc(columns[1][1], columns[0][1]),
        auc(columns[0][2], columns[1][2]),
    ]


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True, help="A folder; a small model.")
@click.option("--probes", type=click.IntRange(min=20), default=400, show_default=True)
@click.option("--tokens", type=click.IntRange(min=32), default=512, show_default=True, help="Of a prompt.")
@click.option("--port", type=int, default=18_470, show_default=True, help="The first of two.")
def command(model: Path, probes: int, tokens: int, port: int) -> None:
    """Print the areas for both keys, KV in memory and on a disk that two services share."""
    draw = Random(1)
    click.echo("| tier | who asks | time to the first token | whole time | cached tokens |")
    click.echo("|---|---|---|---|---|")
    for tier, is_shared in _TIERS.items():
        with TemporaryDirectory() as name, ExitStack() as stack:
            folder = Path(name)
            shared = ("--kv-disk-path", str(folder / "kv"), "--response-store", str(folder / "store"))
            settings = shared if is_shared else ()
            for part in "ab":
                (folder / part).mkdir()
            first = second = stack.enter_context(serving(folder / "a", port, model, *settings))
            if is_shared:
                second = stack.enter_context(serving(folder / "b", port + 1, model, *settings))
            for key in _KEYS:
                areas = probe(first, second, key, probes, tokens, draw)
                click.echo(f"| {tier} | {key} | " + " | ".join(f"{area:.3f}" for area in areas) + " |")
    click.echo(f"load {getloadavg()[0]:.1f}")


if __name__ == "__main__":
    command()
