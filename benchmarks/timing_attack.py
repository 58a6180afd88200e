"""`python -m benchmarks.timing_attack`: can a key tell by time, or by usage, what another key has sent?

For each probe the victim first sends either the prompt that the attacker then asks for, or another one. How well the
attacker's times tell these apart is the area under the ROC curve: 0.5 is chance, and with n probes chance strays by
about 0.6 / sqrt(n). The same of the victim's own probes shows that there is something to be told.

`--tier host` is of KV that has left a GPU: `-- --device cuda`, with a `--kv-cache-memory` for a few prompts. With
`tests/support/host_below_cpu` in PYTHONPATH a CPU is in the GPU's place.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
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
_OTHER = "other"  # a key whose prompts push others' off a GPU
_OUTPUT = 8  # tokens
_Sample = tuple[float, float, int]
_Probe = tuple[bool, list[int], list[int]]


def auc(hits: Sequence[float], misses: Sequence[float]) -> float:
    """Return the probability that a hit's figure is the larger one; ties count half."""
    ordered = sorted(misses)
    below = sum(bisect_left(ordered, hit) + bisect_right(ordered, hit) for hit in hits)
    return below / (2 * len(hits) * len(misses))


@contextmanager
def serving(folder: Path, port: int, model: Path, *settings: str) -> Iterator[httpx2.Client]:
    (folder / "keys").write_text("".join(f"user:{key}\n" for key in (*_KEYS, _OTHER)))
    command = [executable, "-m", "launcher.cli", "serve", str(model), "--port", str(port), "--served-model-name", "m"]
    command += ["--api-key-file", str(folder / "keys"), *settings]
    with (folder / "log").open("ab") as log, Popen(command, stdout=log, stderr=log) as process:
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                wait_until_ready(http, process)
                yield http
        finally:
            process.terminate()
            process.wait()


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


def num_blocks(http: httpx2.Client, tier: str) -> int:
    """Return the number of the victim's blocks in a tier."""
    return int(http.get("/v1/cache", headers={"authorization": "Bearer victim"}).json()[tier]["blocks"])


def wait_for_blocks(http: httpx2.Client, count: int) -> None:
    """Wait until a number of the victim's blocks is on disk."""
    while num_blocks(http, "disk") < count:
        time.sleep(0.005)


def push_off(http: httpx2.Client, count: int, tokens: int, draw: Random) -> None:
    """Have prompts of a third key computed until a number of the victim's blocks is in the host's memory."""
    while num_blocks(http, "host") < count:
        ask(http, _OTHER, [draw.randrange(3, 250) for _ in range(tokens)])


def prompts_of(draw: Random, probes: int, tokens: int) -> list[_Probe]:
    """Return for each probe whether the victim sends the attacker's prompt, that prompt, and what the victim sends."""
    found = []
    for number in range(probes):
        wanted, other = ([draw.randrange(3, 250) for _ in range(tokens)] for _ in range(2))
        found.append((number % 2 == 0, wanted, wanted if number % 2 == 0 else other))
    return found


def areas(seen: dict[bool, list[_Sample]]) -> list[float]:
    """Return the AUC of the time to the first token, of the whole time, and of the cached tokens.

    seen: the measured times, by whether the victim had sent the prompt.
    """
    columns = [list(zip(*seen[is_sent], strict=True)) for is_sent in (True, False)]
    # A hit takes less time, and has more cached tokens.
    return [auc(columns[1][0], columns[0][0]), auc(columns[1][1], columns[0][1]), auc(columns[0][2], columns[1][2])]


def probe(primed: httpx2.Client, asked: httpx2.Client, key: str, probes: int, tokens: int, draw: Random) -> list[float]:
    """Return the areas where the victim sends to one service, and the attacker then asks another one, or the same."""
    seen: dict[bool, list[_Sample]] = {True: [], False: []}
    for number, (is_sent, wanted, sent) in enumerate(prompts_of(draw, probes, tokens), start=1):
        ask(primed, "victim", sent)
        if primed is not asked:
            wait_for_blocks(primed, number * (tokens // 16))
        seen[is_sent].append(ask(asked, key, wanted))
    return areas(seen)


def send_all(http: httpx2.Client, found: Sequence[_Probe]) -> None:
    """Have the victim send its prompts."""
    for _, _, sent in found:
        ask(http, "victim", sent)


def areas_of(http: httpx2.Client, key: str, found: list[_Probe], draw: Random) -> list[float]:
    """Return the areas where the attacker asks for its prompts in random order."""
    seen: dict[bool, list[_Sample]] = {True: [], False: []}
    draw.shuffle(found)
    for is_sent, wanted, _ in found:
        seen[is_sent].append(ask(http, key, wanted))
    return areas(seen)


def probe_restarted(
    serve: Callable[[], AbstractContextManager[httpx2.Client]], key: str, probes: int, tokens: int, draw: Random
) -> list[float]:
    """Return the areas where the service is restarted between the victim's prompts and the attacker's."""
    found = prompts_of(draw, probes, tokens)
    with serve() as http:
        send_all(http, found)
        wait_for_blocks(http, probes * (tokens // 16))
    with serve() as http:
        return areas_of(http, key, found, draw)


def probe_hosted(
    serve: Callable[[], AbstractContextManager[httpx2.Client]], key: str, probes: int, tokens: int, draw: Random
) -> list[float]:
    """Return the areas where the victim's prompts have left the GPU before the attacker asks."""
    found = prompts_of(draw, probes, tokens)
    with serve() as http:
        send_all(http, found)
        # A GPU may evict some without a copy: steps come first.
        push_off(http, probes * (tokens // 16) * 9 // 10, tokens, draw)
        return areas_of(http, key, found, draw)


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True, help="A folder; a small model.")
@click.option("--probes", type=click.IntRange(min=20), default=400, show_default=True)
@click.option("--tokens", type=click.IntRange(min=32), default=512, show_default=True, help="Of a prompt.")
@click.option("--port", type=int, default=18_470, show_default=True, help="The first of three.")
@click.option(
    "--tier",
    "tiers",
    type=click.Choice(["memory", "shared", "disk", "host"]),
    multiple=True,
    default=("memory", "shared", "disk"),
    show_default=True,
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the prompts.")
@click.argument("settings", nargs=-1)
def command(
    model: Path, probes: int, tokens: int, port: int, tiers: tuple[str, ...], seed: int, settings: tuple[str, ...]
) -> None:
    """Print the areas for both keys: KV in memory, on a disk that two services share, on disk after a restart, or in
    the host's memory below a GPU. SETTINGS go to the services.
    """
    draw = Random(seed)
    click.echo("| tier | who asks | time to the first token | whole time | cached tokens |")
    click.echo("|---|---|---|---|---|")

    def show(tier: str, key: str, found: list[float]) -> None:
        click.echo(f"| {tier} | {key} | " + " | ".join(f"{area:.3f}" for area in found) + " |")

    with TemporaryDirectory() as name, ExitStack() as stack:
        folders = {part: Path(name) / part for part in ("memory", "a", "b")}
        for folder in folders.values():
            folder.mkdir()
        if "memory" in tiers:
            only = stack.enter_context(serving(folders["memory"], port, model, *settings))
            for key in _KEYS:
                show("memory", key, probe(only, only, key, probes, tokens, draw))
        if "shared" in tiers:
            # The victim asks another service that shares the disk and the response store.
            shared = ("--kv-disk-path", f"{name}/kv", "--response-store", f"{name}/store", *settings)
            first = stack.enter_context(serving(folders["a"], port + 1, model, *shared))
            second = stack.enter_context(serving(folders["b"], port + 2, model, *shared))
            for key in _KEYS:
                show("shared disk and store", key, probe(first, second, key, probes, tokens, draw))
    for tier, told, run in (("disk", "disk, after a restart", probe_restarted), ("host", "host", probe_hosted)):
        for key in _KEYS if tier in tiers else ():
            with TemporaryDirectory() as name:
                lower = ("--kv-disk-path", f"{name}/kv") if tier == "disk" else ("--kv-host-memory", "256MiB")
                serve = partial(serving, Path(name), port, model, *lower, *settings)
                show(told, key, run(serve, key, probes, tokens, draw))
    click.echo(f"load {getloadavg()[0]:.1f}")


if __name__ == "__main__":
    command()
