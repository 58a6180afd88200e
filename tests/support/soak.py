"""A long run over a whole service: requests of every kind, some given up at any time, every answer compared.

`python -m tests.support.soak --requests 20000` starts a service, plays, and prints what became of memory.

The requests are drawn from a fixed set that was answered before, one at a time by an idle service with a cold cache,
and from prompts that come once. Nothing depends on the clock but when a client leaves.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import click

from moeserve.bench.client import Endpoint, ExchangeError, exchange
from moeserve.model.demo import ensure_demo
from tests.support.service import Service, children_of, descendants, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint

# The fields that differ from answer to answer, or with the contents of the cache.
_OWN = {
    "id", "created", "created_at", "completed_at", "item_id", "call_id", "request_id", "cached_tokens", "input_tokens",
    "cache_read_input_tokens", "cache_creation_input_tokens", "cached_tokens_details",
}  # fmt: skip
_TEXT = "the quick brown fox jumps over a lazy dog while rain falls on seven grey hills and nobody minds"
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "describe", "parameters": _PERSON}}
_LETTERS = {str(token): 100.0 for token in b"abcdefgh "}
_TIMEOUT_S = 120.0
_GIVEN_UP = 0.5  # The share of the requests that is given up; a part of these is answered before.


@dataclass(slots=True)
class Asked:
    """One request of the set; the answer's status, comparable content and duration once it was asked alone."""

    kind: str
    path: str
    body: bytes
    status: int = 0
    content: str = ""
    seconds: float = 0.0


def _text(random: Random, num_words: int) -> str:
    return " ".join(random.choice(_TEXT.split()) for _ in range(num_words))


class Mix:
    """Makes requests; prompts begin with one of a few texts, or with none."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._beginnings = ["", *(_text(self._random, count) for count in (8, 12, 20, 30))]
        self._kinds: dict[str, Callable[[], tuple[str, Any]]] = {
            "completion": lambda: self._completion(),
            "sampled": lambda: self._completion(temperature=1.2, seed=self._seed(), top_p=0.9, top_k=50),
            "penalties": lambda: self._completion(
                temperature=0.9, seed=self._seed(), presence_penalty=0.5, repetition_penalty=1.2
            ),
            "log probabilities": lambda: self._completion(logprobs=3, echo=self._random.random() < 0.5),
            "choices": lambda: self._completion(n=self._random.randrange(2, 5), temperature=1.0, seed=self._seed()),
            "prompts": lambda: self._completion(prompt=[self.prompt(), self.prompt()], temperature=0),
            "stop string": lambda: self._completion(
                stop=["ab", "cde"], logit_bias=_LETTERS, temperature=1.0, seed=self._seed(), max_tokens=60
            ),
            "pattern": lambda: self._completion(guided_regex="[a-f ]{5,30}", temperature=1.0, seed=self._seed()),
            "chat": lambda: self._chat(),
            "chat with log probabilities": lambda: self._chat(logprobs=True, top_logprobs=2),
            "tool": lambda: self._chat(tools=[_TOOL], tool_choice="required", max_tokens=60),
            "schema": lambda: self._chat(
                response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": _PERSON}}, max_tokens=60
            ),
            "message": self._message,
            "response": self._response,
            "tokenize": lambda: ("/tokenize", {"prompt": self.prompt()}),
            "detokenize": lambda: ("/detokenize", {"tokens": [self._random.randrange(260) for _ in range(50)]}),
            "refused": self._refused,
        }

    def once(self) -> Asked:
        """Return a request whose prompt was never there: tokens, since the tokenizer remembers texts."""
        path, body = self._completion(prompt=[self._random.randrange(256) for _ in range(100)])
        return Asked("once", path, json.dumps({"model": "m", **body}).encode())

    def prompt(self) -> str:
        return f"{self._random.choice(self._beginnings)} {_text(self._random, self._random.randrange(1, 12))}"

    def requests(self, count: int) -> list[Asked]:
        """Return requests of all kinds in turn."""
        names = list(self._kinds)
        return [self.request(names[number % len(names)]) for number in range(count)]

    def request(self, kind: str) -> Asked:
        path, body = self._kinds[kind]()
        data = body if isinstance(body, bytes) else json.dumps({"model": "m", **body}).encode()
        return Asked(kind, path, data)

    def _seed(self) -> int:
        return self._random.getrandbits(31)

    def _length(self) -> int:
        return self._random.choice((1, 4, 8, 16, 24, 40))

    def _streamed(self) -> bool:
        return self._random.random() < 0.6

    def _completion(self, **fields: Any) -> tuple[str, Any]:
        body = {"prompt": self.prompt(), "max_tokens": self._length(), "ignore_eos": True, "temperature": 0}
        return "/v1/completions", {**body, "stream": self._streamed(), **fields}

    def _chat(self, **fields: Any) -> tuple[str, Any]:
        body = {"messages": [{"role": "user", "content": self.prompt()}], "max_tokens": self._length()}
        body |= {"temperature": 1.1, "seed": self._seed(), "stream": self._streamed()}
        return "/v1/chat/completions", {**body, **fields}

    def _message(self) -> tuple[str, Any]:
        said = [{"role": "user", "content": self.prompt()}]
        body = {"messages": said, "max_tokens": self._length(), "temperature": 0, "stream": self._streamed()}
        return "/v1/messages", body

    def _response(self) -> tuple[str, Any]:
        body = {"input": self.prompt(), "max_output_tokens": self._length(), "temperature": 0, "store": False}
        return "/v1/responses", {**body, "stream": self._streamed()}

    def _refused(self) -> tuple[str, Any]:
        return self._random.choice(
            [
                ("/v1/completions", b"{"),
                ("/v1/completions", b'{"model":"other","prompt":"x"}'),
                ("/v1/completions", {"prompt": [1] * 5000}),
                ("/v1/completions", {"prompt": [999_999]}),
                ("/v1/completions", {"prompt": "x", "temperature": -1}),
                ("/v1/completions", {"prompt": "x", "guided_regex": "("}),
                ("/v1/chat/completions", {"messages": []}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
                ("/v1/responses", {"input": "x", "previous_response_id": "resp_none"}),
                ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}),
                ("/nothing", {}),
            ]
        )


def comparable(body: bytes, content_type: str) -> str:
    """Return an answer without what differs each time. Events of several choices are put in the order of choices."""
    if "event-stream" not in content_type:
        return json.dumps(_without_own(json.loads(body)))
    lines = [line for line in body.decode().splitlines() if line and not line.startswith(":")]
    events = [_without_own(json.loads(line[6:])) if line.startswith("data: {") else line for line in lines]
    for event in events:
        if isinstance(event, dict) and event.get("type") == "message_start":
            del event["message"]["usage"]  # It counts the tokens that are there by then.
    return json.dumps(sorted(events, key=_choice))


def _choice(event: Any) -> int:
    choices = event.get("choices") if isinstance(event, dict) else None
    return choices[0].get("index", 0) if choices else 1000


def _without_own(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_own(item) for key, item in value.items() if key not in _OWN}
    return [_without_own(item) for item in value] if isinstance(value, list) else value


@dataclass
class Memory:
    """Resident memory of the two processes, in MiB, by the number of requests that had ended."""

    requests: list[int] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    frontend: list[float] = field(default_factory=list)

    def slopes(self, warm_up: int) -> dict[str, float]:
        """Return the MiB by which each grows in 10,000 requests, by least squares, from `warm_up` requests on."""
        first = next(place for place, count in enumerate(self.requests) if count >= warm_up)
        counts = self.requests[first:]
        return {
            name: 10_000 * statistics.linear_regression(counts, values[first:]).slope
            for name, values in (("engine", self.engine), ("frontend", self.frontend))
        }


@dataclass
class Soak:
    """One run against a service."""

    service: Service
    known: list[Asked]
    seed: int
    others: Mix
    statuses: Counter[int] = field(default_factory=Counter)
    given_up: int = 0
    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    progress: Callable[[str], object] = lambda _: None
    _slowdown: float = 1.0

    def __post_init__(self) -> None:
        self._endpoint = Endpoint.parse(str(self.service.http.base_url))
        pids = children_of(self.service.process.pid)
        self._frontend = pids["frontend"]
        # The pid of the process that computes: a copy of the one that has loaded the model.
        self._engine = max(descendants(pids["worker"]), default=pids["worker"])

    async def answer_alone(self) -> None:
        """Ask all requests of the set, one at a time, each with a cold cache."""
        for asked in self.known:
            await exchange(self._endpoint, "POST", "/reset_prefix_cache", b"", {}, _TIMEOUT_S)
            started = time.perf_counter()
            asked.status, asked.content = await self._ask(asked)
            asked.seconds = time.perf_counter() - started

    async def play(self, count: int, clients: int) -> None:
        """Ask `count` requests of the set by `clients` at once. Requests that were given up count as well."""
        numbers = iter(range(count))
        ended = 0

        async def client() -> None:
            nonlocal ended
            for number in numbers:
                await self._one(Random(f"{self.seed} {number}"))
                ended += 1
                if ended % max(1, count // 400) == 0:
                    self._note_memory(ended)

        await asyncio.gather(*(client() for _ in range(clients)))

    async def _one(self, random: Random) -> None:
        known = random.random() < 0.9
        asked = random.choice(self.known) if known else self.others.once()
        usual = (asked.seconds or 0.05) * self._slowdown
        patience = random.random() * 0.8 * usual if random.random() < _GIVEN_UP else _TIMEOUT_S
        started = time.perf_counter()
        try:
            async with asyncio.timeout(patience):
                status, content = await self._ask(asked)
        except TimeoutError:
            self.given_up += 1
            return
        except ExchangeError as error:
            self.wrong.append(f"{asked.kind}: {error}")
            return
        self.statuses[status] += 1
        if known:
            self.compared += 1
            self._slowdown += 0.01 * ((time.perf_counter() - started) / asked.seconds - self._slowdown)
            if (status, content) != (asked.status, asked.content):
                self.wrong.append(
                    f"{asked.kind}: {status} {content[:2000]}\nalone: {asked.status} {asked.content[:2000]}"
                )

    async def _ask(self, asked: Asked) -> tuple[int, str]:
        response = await exchange(self._endpoint, "POST", asked.path, asked.body, {}, _TIMEOUT_S)
        return response.status, comparable(response.body, response.headers.get("content-type", ""))

    def _note_memory(self, ended: int) -> None:
        self.memory.requests.append(ended)
        self.memory.engine.append(_resident_mib(self._engine))
        self.memory.frontend.append(_resident_mib(self._frontend))
        self.progress(f"{ended}: engine {self.memory.engine[-1]:.1f} MiB, frontend {self.memory.frontend[-1]:.1f} MiB")

    def blocks(self) -> dict[str, float]:
        """Return the KV blocks by state."""
        # All of one answer: the engine moves blocks from state to state between two.
        told = self.service.http.get("/metrics").text
        return {
            state: _metric(told, f'moeserve_kv_blocks{{state="{state}"}}') for state in ("free", "cached", "leased")
        }

    def metric(self, name: str) -> float:
        return _metric(self.service.http.get("/metrics").text, name)

    def assert_nothing_is_lost(self) -> None:
        """Every block is free or cached, all of them free after a reset, and no connection is left."""
        num_blocks = self.service.http.get("/v1/cache").json()["num_blocks"]
        wait_until(lambda: self.blocks()["leased"] == 0)
        assert self.service.http.post("/reset_prefix_cache").status_code == 200
        wait_until(lambda: self.blocks() == {"free": num_blocks, "cached": 0.0, "leased": 0.0})


def _metric(told: str, name: str) -> float:
    """Return a value in an answer of `/metrics`."""
    return next(float(line.rpartition(" ")[2]) for line in told.splitlines() if line.startswith(name + " "))


def _resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


# For the tiny model: memory for 1,300 tokens, so that requests push each other out of it.
# Small blocks: a request that is admitted beside others grows beyond the block that each of them is left.
SETTINGS = (
    "--kv-cache-memory",
    "320KiB",
    "--block-size",
    "4",
    "--max-model-len",
    "512",
    "--slo",
    "ttft:60s",
    "--log-level",
    "warning",
)


def soak(
    service: Service,
    *,
    known: int,
    count: int,
    clients: int,
    seed: int,
    progress: Callable[[str], object] = lambda _: None,
) -> Soak:
    """Answer a set of `known` requests alone, then play `count` of them by `clients` at once."""
    run = Soak(service, Mix(seed).requests(known), seed, Mix(seed + 1), progress=progress)
    asyncio.run(run.answer_alone())
    asyncio.run(run.play(count, clients))
    return run


@click.command()
@click.option("--requests", "count", default=20_000, show_default=True)
@click.option("--clients", default=24, show_default=True)
@click.option("--known", default=340, show_default=True, help="Requests of the set that are asked again and again.")
@click.option("--seed", default=1, show_default=True)
@click.option("--demo", is_flag=True, help="With the demo model, not with a tiny random one.")
@click.option("--setting", "more", multiple=True, help="Of the service, as --setting=--num-frontends=3.")
def command(count: int, clients: int, known: int, seed: int, demo: bool, more: tuple[str, ...]) -> None:
    """Play, and print what happened."""
    with tempfile.TemporaryDirectory() as folder:
        model = ensure_demo() if demo else write_tiny_checkpoint(Path(folder) / "model")
        settings = ("--kv-cache-memory", "128MiB", *SETTINGS[2:]) if demo else SETTINGS
        with service(model, Path(folder), *settings, *more, forked=False) as running:
            started = time.monotonic()
            tell = partial(click.echo, err=True)
            run = soak(running, known=known, count=count, clients=clients, seed=seed, progress=tell)
            click.echo(
                f"{count} requests in {time.monotonic() - started:.0f} s, {run.given_up} given up by their clients"
            )
            click.echo(f"answers by status: {dict(sorted(run.statuses.items()))}")
            click.echo(f"{run.compared} compared with those of an idle service, {len(run.wrong)} differ")
            click.echo(f"blocks: {run.blocks()}, preemptions: {run.metric('moeserve_preemptions_total'):.0f}")
            run.assert_nothing_is_lost()
            for name, slope in run.memory.slopes(count // 4).items():
                click.echo(f"{name}: {slope:+.2f} MiB per 10,000 requests after the first {count // 4}")
            for name in ("engine", "frontend"):
                values = getattr(run.memory, name)
                click.echo(f"{name}: MiB {' '.join(f'{value:.1f}' for value in values[:: max(1, len(values) // 20)])}")
            for line in run.wrong[:5]:
                click.echo(line)


if __name__ == "__main__":
    command()
