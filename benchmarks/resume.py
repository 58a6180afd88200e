"""`python -m benchmarks.resume`: the time until streams go on after the process that computes them is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from os import getloadavg
from pathlib import Path
from socket import socket
from statistics import median

import click
import httpx2

from benchmarks.kv_restart import wait_until_ready

_WORDS = "Once upon a time there was a tree. " * 20
# Tokens of each stream before the kill, and in all.
_BEFORE, _IN_ALL = 40, 200


def children_of(pid: int) -> list[int]:
    found = list[int]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):
            found += map(int, (task / "children").read_text().split())
    return found


def engine_of(supervisor: int, *, holder: bool) -> int:
    """Return the process that computes, or for `holder` the one that it is a copy of, which holds the model."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(supervisor)}
    loaded = next(pid for pid, command in commands.items() if b"launcher.worker" in command)
    return loaded if holder else children_of(loaded)[0]


class Streams:
    """Streams of different prompts at once; `times`: the arrivals of the tokens of each."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self.times: list[list[float]] = [[] for _ in range(count)]

    def read(self, number: int) -> None:
        """Read one stream to its end. Raise click.ClickException if it ends with an error."""
        body = {
            "model": "demo",
            "prompt": f"Story number {number}. {_WORDS}",
            "max_tokens": _IN_ALL,
            "ignore_eos": True,
            "stream": True,
            "seed": number,
        }
        with httpx2.stream("POST", f"{self._url}/v1/completions", json=body, timeout=300) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    if "error" in json.loads(line.removeprefix("data: ")):
                        raise click.ClickException(line)
                    self.times[number].append(time.monotonic())

    def measure(self, kill: Callable[[], None]) -> list[float]:
        """Return the seconds from the kill to the next token of each stream, ascending."""
        with ThreadPoolExecutor(len(self.times)) as pool:
            done = [pool.submit(self.read, number) for number in range(len(self.times))]
            while min(map(len, self.times)) < _BEFORE:
                time.sleep(0.02)
            kill()
            killed = time.monotonic()
            for one in done:
                one.result()
        # Tokens that were on their way at the kill arrive at once.
        return sorted(min(at for at in times if at > killed + 0.05) - killed for times in self.times)


@click.command()
@click.option("--streams", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--holder", is_flag=True, help="Kill the process that holds the model, too.")
@click.argument("settings", nargs=-1)
def command(streams: int, holder: bool, settings: tuple[str, ...]) -> None:
    """Print the seconds to the first stream that goes on, the median and the last one.

    SETTINGS, after --, are further settings of `moeserve serve`.
    """
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = [sys.executable, "-m", "launcher.cli", "serve", "--port", str(port), "--speculative-config", "none"]
    with subprocess.Popen([*serve, *settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            with httpx2.Client(base_url=url, timeout=60) as http:
                wait_until_ready(http, process)
            engine = engine_of(process.pid, holder=holder)
            after = Streams(url, streams).measure(lambda: os.kill(engine, signal.SIGKILL))
            click.echo(
                f"first {after[0]:.1f} s, median {median(after):.1f}, last {after[-1]:.1f}; load {getloadavg()[0]:.1f}"
            )
        finally:
            process.terminate()


if __name__ == "__main__":
    command()
