"""`python -m benchmarks.frontend`: what the HTTP process costs, over an engine that computes nothing.

- CPU per streamed token, all threads of the process, between the tenth and the last step: chat without tools, and with
  tools offered, so that a parser reads the answers.
- CPU per refusal of a server that has too much to do, for clients with a connection each.
- Time to validate and render an agent's request of 44 KB with ten tools, in every dialect, without tokenising.
- Time from starting the process to the first `/ready`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import click

from benchmarks.scripted_engine import MODEL, Lockstep, Overloaded, Script, ScriptedEngine, run_context
from moeserve.frontend.dialects import chat, completions, messages, responses
from moeserve.frontend.dialects.internal import ChatPrompt, GenerateRequest, ModelFacts
from moeserve.frontend.dialects.responses_items import Earlier
from moeserve.frontend.prepare.templates import guard_prompt, load_chat_template
from moeserve.frontend.services import Services
from moeserve.model.demo import ensure_demo

PROSE = "The harbour lay quiet under a thin fog, and the boats moved no more than the houses did behind them. "
FIRST_STEP = 10
REQUEST_BYTES = 44_000
# A tenth of a core has 2.8 ms for each of 35 refusals per second: the demo gets five times as many as it serves.
TARGETS = {"stream": 80.0, "refusal": 2.8, "request": 3.0, "start": 1.5}


@dataclass(frozen=True)
class Row:
    """One figure of the table."""

    name: str
    value: float
    unit: str
    target: float

    def __str__(self) -> str:
        verdict = "met" if self.value <= self.target else "missed"
        return f"| {self.name} | {self.value:.2f} {self.unit} | {self.target:g} {self.unit} | {verdict} |"


class Frontend:
    """A frontend process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, started: float) -> None:
        """started: when, on `time.perf_counter`."""
        self.started = started
        self.process = process
        self.port = port

    def wait_ready(self) -> None:
        while True:
            connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
            try:
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            if self.process.poll() is not None:
                raise click.ClickException("the frontend ended")
            time.sleep(0.005)

    def cpu_s(self) -> float:
        """Return the CPU seconds of all threads so far."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextmanager
def frontend(model: Path, make_script: Callable[[list[int]], Script], max_num_seqs: int = 1) -> Iterator[Frontend]:
    """Yield a frontend that was just started, over an engine with a script, which is made from the tokens of a text."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_context(model, Path(folder))
        tokens = Services.load(run).tokenizer.encode(PROSE)
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            ScriptedEngine(run, make_script(tokens), 1 + max(tokens), max_num_seqs=max_num_seqs),
        ):
            port, fd = listener.getsockname()[1], listener.fileno()
            command = [sys.executable, "-m", "launcher.frontend_main", str(run.save()), "--fd", str(fd)]
            started = time.perf_counter()
            process = subprocess.Popen(command, pass_fds=[fd], stderr=subprocess.DEVNULL)
            try:
                yield Frontend(process, port, started)
            finally:
                process.kill()
                process.wait()


def stream_cost(model: Path, streams: int, steps: int, step_s: float, tools: list[dict[str, Any]]) -> float:
    """Return the microseconds of CPU that a token of a chat costs."""
    cpu: dict[int, float] = {}

    def note(step: int) -> None:
        if step in (FIRST_STEP, steps - 1):
            cpu[step] = running.cpu_s()

    def script(tokens: list[int]) -> Lockstep:
        return Lockstep(tokens, streams=streams, step_s=step_s, on_step=note)

    with frontend(model, script, streams) as running:
        running.wait_ready()
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "stream": True,
            "max_tokens": steps,
        }
        asyncio.run(_read_streams(running.port, json.dumps(body | ({"tools": tools} if tools else {})), streams))
    return (cpu[steps - 1] - cpu[FIRST_STEP]) / (streams * (steps - 1 - FIRST_STEP)) * 1e6


async def _read_streams(port: int, body: str, streams: int) -> None:
    """Read answers to their ends, each from a connection of its own. Raise ClickException for any other answer."""

    async def read() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write((head + body).encode())
        tail = b""
        while piece := await reader.read(65_536):
            tail = (tail + piece)[-64:]
        writer.close()
        if b"[DONE]" not in tail:
            raise click.ClickException(f"a stream ended in {tail!r}")

    await asyncio.gather(*(read() for _ in range(streams)))


def refusal_cost(model: Path, requests: int) -> float:
    """Return the milliseconds of CPU to refuse a chat of 40 words of a client with a new connection."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": PROSE * 2}], "stream": True})
    with frontend(model, lambda _: Overloaded()) as running:
        while b"overloaded" not in _exchange(running.port, "GET", "/ready"):
            time.sleep(0.05)
        before = running.cpu_s()
        for _ in range(requests):
            if b"too busy" not in _exchange(running.port, "POST", "/v1/chat/completions", body):
                raise click.ClickException("a request was not refused")
        return 1000 * (running.cpu_s() - before) / requests


def _exchange(port: int, method: str, path: str, body: str = "") -> bytes:
    """Return the body of a response, empty without an answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, body, {"connection": "close"})
        return connection.getresponse().read()
    except OSError:
        return b""
    finally:
        connection.close()


def function_tools() -> list[dict[str, Any]]:
    """Return ten functions with schemas as agents have them, in no dialect."""
    properties = {
        f"field_{number}": {"type": "string", "description": PROSE, "enum": [f"value {i}" for i in range(5)]}
        for number in range(6)
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return [{"name": f"tool_{number}", "description": PROSE * 2, "parameters": parameters} for number in range(10)]


def chat_tools() -> list[dict[str, Any]]:
    return [{"type": "function", "function": tool} for tool in function_tools()]


ARGUMENTS = {f"field_{number}": "value 1" for number in range(6)}
RESULT = PROSE * 4


def _chat_body(system: str, turns: int) -> dict[str, Any]:
    said: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": PROSE}]
    for turn in range(turns):
        function = {"name": f"tool_{turn % 10}", "arguments": json.dumps(ARGUMENTS, separators=(",", ":"))}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        said.append({"role": "assistant", "content": None, "tool_calls": [call]})
        said.append({"role": "tool", "tool_call_id": call["id"], "content": RESULT})
    return {"model": MODEL, "messages": said, "tools": chat_tools()}


def _responses_body(system: str, turns: int) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"role": "user", "content": PROSE}]
    for turn in range(turns):
        call_id, arguments = f"call_{turn}", json.dumps(ARGUMENTS, separators=(",", ":"))
        items.append({"type": "function_call", "call_id": call_id, "name": f"tool_{turn % 10}", "arguments": arguments})
        items.append({"type": "function_call_output", "call_id": call_id, "output": RESULT})
    tools = [{"type": "function", **tool} for tool in function_tools()]
    return {"model": MODEL, "instructions": system, "input": items, "tools": tools}


def _messages_body(system: str, turns: int) -> dict[str, Any]:
    said: list[dict[str, Any]] = [{"role": "user", "content": PROSE}]
    for turn in range(turns):
        call_id = f"toolu_{turn}"
        call = {"type": "tool_use", "id": call_id, "name": f"tool_{turn % 10}", "input": ARGUMENTS}
        said.append({"role": "assistant", "content": [call]})
        said.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": RESULT}]})
    tools = [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
        for tool in function_tools()
    ]
    return {"model": MODEL, "max_tokens": 100, "system": system, "messages": said, "tools": tools}


def _completions_body(system: str, turns: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": system + RESULT * turns}


def filled(make: Callable[[str, int], dict[str, Any]]) -> bytes:
    """Return a body of `REQUEST_BYTES` bytes with ten turns, the remainder in its system message."""
    missing = REQUEST_BYTES - len(json.dumps(make("", 10)))
    system = (PROSE * (missing // len(PROSE) + 1))[:missing]
    return json.dumps(make(system, 10)).encode()


def request_costs(model: Path, rounds: int) -> Iterator[tuple[str, float]]:
    """Yield the name of each dialect and the median milliseconds that a request's body takes to become a text."""
    with tempfile.TemporaryDirectory() as folder:
        services = Services.load(run_context(model, Path(folder)))
    template = load_chat_template(model)
    if template is None:
        raise click.ClickException("this model has no chat template")
    facts = ModelFacts((MODEL,), 65_536, 1_000_000, (0,), {}, 20)
    parsers: dict[str, tuple[Callable[[bytes, ModelFacts], GenerateRequest], bytes]] = {
        "chat": (chat.parse, filled(_chat_body)),
        "responses": (partial(responses.parse, earlier=Earlier()), filled(_responses_body)),
        "messages": (messages.parse, filled(_messages_body)),
        "completions": (completions.parse, filled(_completions_body)),
    }
    for name, (parse, body) in parsers.items():
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            request = parse(body, facts)
            if isinstance(request.prompts[0], ChatPrompt):
                guarded = guard_prompt(services.tokenizer, request.prompts[0])
                template.render(guarded.messages, **guarded.arguments)
            times.append(time.perf_counter() - started)
        yield name, 1000 * statistics.median(times)


def start_time(model: Path, rounds: int) -> float:
    """Return the median seconds from starting a frontend, whose engine is ready, until it is."""
    times = []
    for _ in range(rounds):
        with frontend(model, lambda tokens: Lockstep(tokens, streams=1, step_s=0, on_step=lambda _: None)) as running:
            running.wait_ready()
            times.append(time.perf_counter() - running.started)
    return statistics.median(times)


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a model; the demo unless given.")
@click.option("--streams", default=64, show_default=True, help="Streams at once.")
@click.option("--steps", type=click.IntRange(min=50), default=300, show_default=True, help="Tokens of each stream.")
@click.option("--step-ms", default=25.0, show_default=True, help="Time between two steps of the engine.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Starts of the frontend.")
def command(model: Path | None, streams: int, steps: int, step_ms: float, rounds: int) -> None:
    """Print a table of the figures, each beside its target."""
    model = model or ensure_demo()
    click.echo("| figure | measured | target | |\n|---|---|---|---|")
    for name, tools in (("no tools", []), ("tools offered", chat_tools())):
        cost = stream_cost(model, streams, steps, step_ms / 1000, tools)
        click.echo(Row(f"CPU per token of {streams} chat streams, {name}", cost, "µs", TARGETS["stream"]))
    click.echo(Row("CPU per refusal", refusal_cost(model, 400 * rounds), "ms", TARGETS["refusal"]))
    for name, cost in request_costs(model, 20 * rounds):
        click.echo(Row(f"validate and render {REQUEST_BYTES // 1000} KB, {name}", cost, "ms", TARGETS["request"]))
    click.echo(Row("start to ready", start_time(model, rounds), "s", TARGETS["start"]))


if __name__ == "__main__":
    command()
