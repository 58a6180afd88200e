"""`python -m benchmarks.schemas`: a stream beside many requests at once, each with a JSON schema of its own.

A service of the demo streams one answer. A process of its own reads it and records the times of its tokens, alone for
a while, then beside the requests: first without schemas, since many requests at once make longer steps anyway, then
with schemas that are new to the service, then with the same ones again.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import click

from launcher.own_service import own_service

MODEL = "m"
_ALONE_S = 3.0
_MAX_TOKENS = 8
_TIMEOUT_S = 300.0


def schema(number: int, num_properties: int) -> dict[str, Any]:
    """Return a schema that no other number has: an object of objects, each with three properties that may be left out.

    Such a schema is dear to compile for its size.
    """
    parts: dict[str, Any] = {}
    for first in range(0, num_properties, 3):
        names = [f"field_{number}_{place}" for place in range(first, min(first + 3, num_properties))]
        inner = {name: {"type": ["string", "integer", "null"]} for name in names}
        parts[f"part_{number}_{first}"] = {"type": "object", "properties": inner}
    return {"type": "object", "properties": parts, "required": list(parts)}


def chat(text: str, own: dict[str, Any] | None) -> dict[str, Any]:
    """Return a chat request for a few tokens, with a schema of its own or without one."""
    body = {"model": MODEL, "max_tokens": _MAX_TOKENS, "messages": [{"role": "user", "content": text}]}
    if own is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": own}}
    return body


def ask(address: str, body: dict[str, Any]) -> int:
    """Return the status of a chat request's answer, read to its end."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=_TIMEOUT_S)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def watch(address: str, times: Connection) -> None:
    """Send the time of each token of an endless stream."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=_TIMEOUT_S)
    body = {"model": MODEL, "prompt": "Count:", "max_tokens": 7000, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    while line := response.readline():
        if line.startswith(b"data: {"):
            times.send(time.monotonic())


def gaps_of(times: Connection, since: float) -> list[float]:
    """Return the seconds between the tokens that have come since a time."""
    found = []
    while times.poll():
        found.append(times.recv())
    return [after - before for before, after in pairwise(found) if before >= since]


def told(name: str, gaps: Sequence[float]) -> str:
    ordered = sorted(gaps)
    p99 = ordered[int(0.99 * (len(ordered) - 1))]
    numbers = f"median {1000 * statistics.median(ordered):.0f} ms, p99 {1000 * p99:.0f} ms, longest"
    return f"{name}: {len(gaps)} tokens; between them {numbers} {1000 * ordered[-1]:.0f} ms"


@click.command()
@click.option("--requests", "count", type=int, default=64, show_default=True, help="How many at once.")
@click.option("--properties", type=int, default=300, show_default=True, help="Of each schema.")
@click.option("--setting", "settings", multiple=True, help="Of `moeserve serve`, such as --slo=ttft:100s.")
def command(count: int, properties: int, settings: Sequence[str]) -> None:
    """Print the gaps between a stream's tokens, alone and beside the requests, and what these were answered."""
    schemas = [schema(number, properties) for number in range(count)]
    click.echo(f"{count} schemas of {properties} properties, {len(json.dumps(schemas[0]))} bytes each")
    with own_service([*settings, f"--served-model-name={MODEL}"]) as address:
        times, sender = multiprocessing.Pipe(duplex=False)
        watcher = multiprocessing.Process(target=watch, args=(address, sender), daemon=True)
        watcher.start()
        sender.close()
        times.recv()
        started = time.monotonic()
        time.sleep(_ALONE_S)
        click.echo(told("alone", gaps_of(times, started)))
        for name in ("without", "new", "known"):
            bodies = [
                chat(f"{name} {number}", own if name != "without" else None) for number, own in enumerate(schemas)
            ]
            started = time.monotonic()
            with ThreadPoolExecutor(count) as pool:
                statuses = Counter(pool.map(lambda body: ask(address, body), bodies))
            seconds = time.monotonic() - started
            answers = ", ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))
            click.echo(f"{told(name, gaps_of(times, started))}; {answers} in {seconds:.1f} s")
        watcher.terminate()


if __name__ == "__main__":
    command()
