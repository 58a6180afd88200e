"""`python -m benchmarks.kv_restart`: the time until a long prompt is answered, cold and from disk after a restart."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import getloadavg
from pathlib import Path
from random import Random
from socket import socket
from tempfile import TemporaryDirectory

import click
import httpx2

_WAIT_S = 600.0


@contextmanager
def serving(folder: Path, settings: Sequence[str], *, on_disk: bool = True) -> Iterator[httpx2.Client]:
    """Serve the demo until the block ends, with its log and, if `on_disk`, its KV in a folder.

    settings: further ones of `moeserve serve`.
    """
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "launcher.cli", "serve", "--port", str(port), *settings]
    if on_disk:
        command += ["--kv-disk-path", str(folder)]
    with (folder / "log").open("ab") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=_WAIT_S) as http:
                wait_until_ready(http, process)
                yield http
        finally:
            process.terminate()


def wait_until_ready(http: httpx2.Client, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _WAIT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if http.get("/ready").status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.2)
    raise click.ClickException("the service does not get ready")


def ask(http: httpx2.Client, prompt: list[int]) -> tuple[float, dict[str, int]]:
    """Return the seconds to an answer of one token, and where the cached tokens were."""
    began = time.perf_counter()
    answer = http.post("/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 1})
    answer.raise_for_status()
    return time.perf_counter() - began, answer.json()["usage"]["cached_tokens_details"]


@click.command()
@click.option("--tokens", type=click.IntRange(min=400), default=7000, show_default=True)
@click.argument("settings", nargs=-1)
def command(tokens: int, settings: tuple[str, ...]) -> None:
    """Print both times. Each service has answered another prompt before.

    SETTINGS, after --, are further settings of `moeserve serve`.
    """
    draw = Random(1)
    prompt, other = ([draw.randrange(200, 40_000) for _ in range(count)] for count in (tokens, 300))
    with TemporaryDirectory() as folder:
        found = []
        for _ in range(2):
            with serving(Path(folder), settings) as http:
                ask(http, other)
                found.append(ask(http, prompt))
    (cold_s, _), (warm_s, cached) = found
    click.echo(f"cold {cold_s:.2f} s, after a restart {warm_s:.2f} s ({cached['disk']} tokens from disk): ", nl=False)
    click.echo(f"1/{cold_s / warm_s:.0f}, at a load of {getloadavg()[0]:.1f}")


if __name__ == "__main__":
    command()
