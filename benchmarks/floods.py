"""`python -m benchmarks.floods`: how long a flood of one key's requests on one route delays a stream of another key.

A whole service is started, its cache filled with prefixes of one block, and each route asked `--requests` times at once
by one key, while a process of its own reads a stream of another key. Printed are the longest time between two tokens of
the stream, beside that of the seconds before the flood, and how the requests ended. At the end the first route, the
listing, is flooded `--rounds` times in a row. Exit code 1 if the engine was started anew, or a token came later than
250 ms.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import click

from moeserve.model.demo import ensure_demo

AIM_S = 0.25
QUIET_S = 3.0
FILLED_PER_REQUEST = 64
PREFIX_TOKENS = 17
_READY = re.compile(r"ready on http://127\.0\.0\.1:(\d+)")
_Call = tuple[str, str, dict[str, Any] | None]


@dataclass(frozen=True)
class Flood:
    """The answers of a flood by status, its seconds, and the longest gaps of the stream before and during it."""

    route: str
    statuses: Counter[int]
    seconds: float
    quiet_s: float
    gap_s: float

    def __str__(self) -> str:
        statuses = ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items()))
        gaps = f"{1000 * self.gap_s:.0f} ms | {1000 * self.quiet_s:.0f} ms"
        return f"| `{self.route}` | {statuses} | {self.seconds:.1f} s | {gaps} |"


def read_stream(port: int, times: Connection, stop: Connection) -> None:
    """Read streams one after another. Send the times of their tokens, and None after each stream."""
    while not stop.poll():
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"model": "m", "prompt": "hello", "max_tokens": 1500, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), _headers("victim"))
        answer = connection.getresponse()
        while (line := answer.readline()) and not stop.poll():
            if line.startswith(b"data: {"):
                times.send((time.monotonic(), b'"error"' in line))
        connection.close()
        times.send(None)


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "content-type": "application/json"}


class Stream:
    """The stream that a process of its own reads."""

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._times, theirs = context.Pipe(duplex=False)
        their_stop, self._stop = context.Pipe(duplex=False)
        self._process = context.Process(target=read_stream, args=(port, theirs, their_stop))
        self._process.start()
        self._gaps: list[tuple[float, float]] = []
        self._last: float | None = None
        self.num_errors = 0

    def gaps(self, start: float, end: float) -> list[float]:
        """Return the times between tokens that came in a period. A gap that has not ended counts until now."""
        while self._times.poll():
            read = self._times.recv()
            if read is None:
                self._last = None
                continue
            at, is_error = read
            self.num_errors += is_error
            if self._last is not None:
                self._gaps.append((at, at - self._last))
            self._last = at
        found = [gap for at, gap in self._gaps if start <= at <= end]
        if self._last is not None and time.monotonic() - self._last > AIM_S:
            found.append(time.monotonic() - self._last)
        return found or [0.0]

    def end(self) -> None:
        self._stop.send(None)
        self._process.join(10)
        self._process.kill()


@contextmanager
def service(model: Path, folder: Path, slo: str) -> Iterator[int]:
    """Run a service with two keys; yield its port."""
    keys = folder / "keys"
    keys.write_text("admin:root\nuser:victim\nuser:flooder\n")
    keys.chmod(0o600)
    command = [sys.executable, "-m", "launcher.cli", "serve", str(model), "--port", "0", "--served-model-name", "m"]
    command += ["--api-key-file", str(keys), "--max-model-len", "2048", "--kv-cache-memory", "512MiB", "--slo", slo]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (
        (folder / "errors").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            port = next((found[1] for line in process.stdout if (found := _READY.search(line))), None)
            if port is None:
                raise click.ClickException((folder / "errors").read_text()[-2000:])
            yield int(port)
        finally:
            process.terminate()


def ask(port: int, method: str, path: str, body: dict[str, Any] | None = None, key: str = "flooder") -> str:
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, path, None if body is None else json.dumps(body), _headers(key))
    text = connection.getresponse().read().decode()
    connection.close()
    return text


async def _ask_at_once(port: int, calls: list[_Call]) -> Counter[int]:
    async def one(method: str, path: str, body: dict[str, Any] | None) -> int:
        data = b"" if body is None else json.dumps(body).encode()
        fields = "".join(f"{name}: {value}\r\n" for name, value in _headers("flooder").items())
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n{fields}content-length: {len(data)}"
        )
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{head}\r\n\r\n".encode() + data)
            status = int((await reader.readline()).split()[1])
            await reader.read()
            writer.close()
        except (OSError, IndexError, ValueError):
            return 0
        return status

    return Counter(await asyncio.gather(*(one(*call) for call in calls)))


def routes(draw: random.Random, prefixes: list[list[int]], response_id: str) -> dict[str, list[_Call]]:
    """Return the calls of each flood, endlessly varied where a body can be."""
    text = "How many of these harbours lie under fog? " * 8

    def prompt(length: int) -> list[int]:
        return [draw.randrange(10, 250) for _ in range(length)]

    def each(method: str, path: str, make: Any) -> list[_Call]:
        return [(method, path, make(number)) for number in range(1000)]

    def prefix(number: int) -> dict[str, Any]:
        return {"prompt": prefixes[number % len(prefixes)]}

    return {
        "GET /v1/cache?limit=1000": each("GET", "/v1/cache?limit=1000", lambda _: None),
        "POST /v1/cache/warm": each("POST", "/v1/cache/warm", lambda _: {"prompt": prompt(40)}),
        "POST /v1/cache/pin": each("POST", "/v1/cache/pin", prefix),
        "POST /v1/cache/unpin": each("POST", "/v1/cache/unpin", prefix),
        "POST /v1/completions with cache_report": each(
            "POST",
            "/v1/completions",
            lambda _: {"model": "m", "prompt": prompt(40), "max_tokens": 1, "cache_report": True},
        ),
        "POST /v1/messages/count_tokens": each(
            "POST",
            "/v1/messages/count_tokens",
            lambda number: {"model": "m", "messages": [{"role": "user", "content": f"{number} {text}"}]},
        ),
        "POST /tokenize": each("POST", "/tokenize", lambda number: {"model": "m", "prompt": f"{number} {text}"}),
        "GET /v1/responses/{id}": each("GET", f"/v1/responses/{response_id}", lambda _: None),
        "GET /v1/models": each("GET", "/v1/models", lambda _: None),
        "DELETE /v1/cache": each("DELETE", "/v1/cache", lambda _: None),
    }


def fill(port: int, draw: random.Random, count: int) -> list[list[int]]:
    """Cache prefixes of one block for the flooding key. Return their token ids."""
    prefixes = [[draw.randrange(10, 250) for _ in range(PREFIX_TOKENS)] for _ in range(count)]
    for start in range(0, count, FILLED_PER_REQUEST):
        prompts = prefixes[start : start + FILLED_PER_REQUEST]
        ask(port, "POST", "/v1/completions", {"model": "m", "prompt": prompts, "max_tokens": 1})
    return prefixes


def run_flood(port: int, stream: Stream, route: str, calls: list[_Call]) -> Flood:
    quiet_from = time.monotonic()
    time.sleep(QUIET_S)
    start = time.monotonic()
    statuses = asyncio.run(_ask_at_once(port, calls))
    end = time.monotonic()
    time.sleep(1.0)
    return Flood(route, statuses, end - start, max(stream.gaps(quiet_from, start)), max(stream.gaps(start, end + 0.5)))


def num_restarts(port: int) -> float:
    lines = ask(port, "GET", "/metrics", key="root").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("moeserve_engine_restarts"))


@click.command(help=__doc__)
@click.option("--model", type=Path, default=None, help="A model folder; by default the demo.")
@click.option("--only", multiple=True, metavar="TEXT", help="Flood the routes alone whose name has it; repeatable.")
@click.option("--requests", type=int, default=350)
@click.option("--prefixes", "num_prefixes", type=int, default=1120)
@click.option("--rounds", type=int, default=6)
@click.option("--slo", default="ttft:2s,tpot:0.15s", help="Steps of prompts are bounded by it.", show_default=True)
def main(model: Path | None, only: tuple[str, ...], requests: int, num_prefixes: int, rounds: int, slo: str) -> None:
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name, service(model or ensure_demo(), Path(name), slo) as port:
        prefixes = fill(port, draw, num_prefixes)
        kept = json.loads(ask(port, "POST", "/v1/responses", {"model": "m", "input": "hello", "max_output_tokens": 16}))
        stream = Stream(port)
        try:
            found: list[Flood] = []
            floods = routes(draw, prefixes, kept["id"])
            chosen = [route for route in floods if not only or any(text in route for text in only)]
            for number, route in enumerate([*chosen, *[chosen[0]] * rounds]):
                if number == len(chosen):
                    fill(port, draw, num_prefixes)
                found.append(run_flood(port, stream, route, floods[route][:requests]))
                click.echo(found[-1])
        finally:
            stream.end()
        restarts = num_restarts(port)
    usual = median(flood.quiet_s for flood in found)
    click.echo(
        f"{restarts:.0f} restarts, {stream.num_errors} errors in the stream, usual longest gap {1000 * usual:.0f} ms"
    )
    if restarts or stream.num_errors or max(flood.gap_s for flood in found) > AIM_S:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
