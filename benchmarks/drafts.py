"""`python -m benchmarks.drafts`: tokens per second with draft tokens, over those without, on a whole service.

One service per method of `--speculative-config` runs beside the others, idle but in its turn. For each workload and
number of streams every service answers the same requests at once, `--rounds` times in turn, the order rotated; all
prompts are cached before. Printed is the median over rounds of each method's tokens per second, the ratio to the first
method's in the same round, and the share of drafts that were accepted. Texts are compared: drafts never change any.

- edit: a file of this repository is written out again with one name changed
- echo: a JSON document is written out again
- schema: JSON by a schema whose keys are long
- story: text that repeats little, drawn at temperature 1
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from moeserve.bench.client import Endpoint, exchange
from moeserve.model.demo import ensure_demo

_ROOT = Path(__file__).resolve().parent.parent
_READY = re.compile(r"ready on http://127\.0\.0\.1:(\d+)")
_COUNTER = re.compile(r"^moeserve_draft_(tokens|accepted_tokens)_total(?:{[^}]*})? (\S+)$", re.MULTILINE)
# Characters of a file in a prompt: some 500 tokens.
_EXCERPT = 1600
_Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Round:
    """The answers of one service to the requests of a round, in their order, and its tokens per second."""

    texts: list[str]
    pace: float


@contextmanager
def service(model: Path, folder: Path, method: str) -> Iterator[Endpoint]:
    """Run a service with a method of drafts; yield its address."""
    command = [sys.executable, "-m", "launcher.cli", "serve", str(model), "--port", "0", "--served-model-name", "m"]
    command += [
        "--kv-cache-memory",
        "1GiB",
        "--max-num-seqs",
        "16",
        "--speculative-config",
        method,
        "--slo",
        "ttft:600s",
    ]
    with (
        (folder / f"{method}.log").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(os.environ)) as process,
    ):
        try:
            assert process.stdout is not None
            port = next((found[1] for line in process.stdout if (found := _READY.search(line))), None)
            if port is None:
                raise click.ClickException((folder / f"{method}.log").read_text()[-2000:])
            yield Endpoint.parse(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()


def _chat(content: str, tokens: int, **fields: object) -> _Body:
    messages = [{"role": "user", "content": content}]
    base = {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return base | fields


def edit(number: int, tokens: int) -> _Body:
    files = sorted((_ROOT / "radix_cache").glob("*.py"))
    text = files[number % len(files)].read_text(encoding="utf-8")[: _EXCERPT + 40 * number]
    return _chat(f"Write this file out again, with `self` named `this`:\n```python\n{text}\n```", tokens)


def echo(number: int, tokens: int) -> _Body:
    records = [
        {"id": f"{number}-{place}", "path": path.name, "bytes": path.stat().st_size, "kind": "test"}
        for place, path in enumerate(sorted((_ROOT / "tests/unit").glob("*.py"))[number : number + 24])
    ]
    return _chat(f"Return this JSON unchanged:\n```json\n{json.dumps(records, indent=1)}\n```", tokens)


def schema(number: int, tokens: int) -> _Body:
    keys = [f"measured_seconds_of_phase_{number}_{place}" for place in range(40)]
    form = {
        "type": "object",
        "properties": {key: {"type": "integer", "minimum": 0, "maximum": 99} for key in keys},
        "required": keys,
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "phases", "schema": form, "strict": True}}
    return _chat(f"Invent measurements of run {number}.", tokens, response_format=asked, ignore_eos=False)


def story(number: int, tokens: int) -> _Body:
    return _chat(f"Tell a story with the number {number} in it.", tokens, temperature=1, seed=number)


WORKLOADS = {"edit": edit, "echo": echo, "schema": schema, "story": story}


async def _answer_all(endpoint: Endpoint, bodies: list[_Body]) -> Round:
    async def one(body: _Body) -> tuple[str, int]:
        response = await exchange(endpoint, "POST", "/v1/chat/completions", json.dumps(body).encode(), {}, 300)
        if response.status != 200:
            raise click.ClickException(response.body.decode()[:500])
        answer = json.loads(response.body)
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]

    begin = time.perf_counter()
    answers = await asyncio.gather(*map(one, bodies))
    return Round([text for text, _ in answers], sum(count for _, count in answers) / (time.perf_counter() - begin))


def accepted_share(endpoint: Endpoint, before: dict[str, float]) -> tuple[str, dict[str, float]]:
    """Return the share of drafts accepted since `before`, and the totals of now."""
    page = asyncio.run(exchange(endpoint, "GET", "/metrics", b"", {}, 60)).body.decode()
    now = {name: float(value) for name, value in _COUNTER.findall(page)}
    made = now.get("tokens", 0.0) - before.get("tokens", 0.0)
    accepted = now.get("accepted_tokens", 0.0) - before.get("accepted_tokens", 0.0)
    return (f"{accepted:.0f} of {made:.0f}" if made else "-"), now


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="Default: the demo.")
@click.option("--method", "methods", multiple=True, default=("none", "suffix", "auto"), show_default=True)
@click.option("--streams", multiple=True, default=(1, 4, 16), show_default=True, type=click.IntRange(1, 16))
@click.option("--workload", "names", multiple=True, default=tuple(WORKLOADS), type=click.Choice(list(WORKLOADS)))
@click.option("--tokens", default=160, show_default=True, help="Tokens of each answer.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
def main(
    model: Path | None,
    methods: tuple[str, ...],
    streams: tuple[int, ...],
    names: tuple[str, ...],
    tokens: int,
    rounds: int,
) -> None:
    click.echo("| workload | streams | " + " | ".join(f"{m}: tokens/s, ratio, accepted" for m in methods) + " |")
    click.echo("|---|---|" + "---|" * len(methods))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        source = model or ensure_demo()
        services = {method: stack.enter_context(service(source, Path(folder), method)) for method in methods}
        totals: dict[str, dict[str, float]] = {method: {} for method in methods}
        for name in names:
            for count in streams:
                bodies = [WORKLOADS[name](number, tokens) for number in range(count)]
                cells = compare(services, bodies, rounds, totals)
                click.echo(f"| {name} | {count} | " + " | ".join(cells) + " |")


def compare(
    services: dict[str, Endpoint], bodies: list[_Body], rounds: int, totals: dict[str, dict[str, float]]
) -> list[str]:
    """Return a table's cell of each service. Raise ClickException if texts differ. Mutates `totals`."""
    for endpoint in services.values():
        asyncio.run(_answer_all(endpoint, [body | {"max_tokens": 1} for body in bodies]))
    paces: dict[str, list[float]] = {method: [] for method in services}
    methods = list(services)
    for number in range(rounds):
        texts: dict[str, list[str]] = {}
        for method in methods[number % len(methods) :] + methods[: number % len(methods)]:
            found = asyncio.run(_answer_all(services[method], bodies))
            paces[method].append(found.pace)
            texts[method] = found.texts
        if len({tuple(each) for each in texts.values()}) > 1:
            raise click.ClickException("drafts changed a text")
    cells = []
    for method, endpoint in services.items():
        share, totals[method] = accepted_share(endpoint, totals[method])
        ratio = median(own / base for own, base in zip(paces[method], paces[methods[0]], strict=True))
        cells.append(f"{median(paces[method]):.0f}, {ratio:.2f}, {share}")
    return cells


if __name__ == "__main__":
    main()
