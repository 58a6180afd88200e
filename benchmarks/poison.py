"""`python -m benchmarks.poison`: what the dearest requests do to everybody else in the HTTP process.

Each request of `benchmarks.poison_corpus` is sent alone and 16 times at once, over an engine that computes nothing,
while two processes of their own watch `/health` every 10 ms and a stream of a token every 20 ms. Before each request
they watch an idle server for as long as `--pause`, so that the noise of the machine itself shows.

Printed are the delays of both and the longest time for which the event loop did nothing but one thing: on the clock,
which counts what the machine takes too, in processor time of its own thread, and of all threads of the process, which
is the most that they can have held it up.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import click

from benchmarks.poison_corpus import SIZE, Poison, poisons
from benchmarks.scripted_engine import MODEL, ScriptedEngine, Send, run_context
from benchmarks.ticking_frontend import TICK
from moeserve.model.demo import ensure_demo
from moeserve.plan import FinishReason
from moeserve.wire import Abort, Admitted, Control, ControlResult, Generate, Message, Output, Outputs

STEP_S = 0.02
PROBE_S = 0.01
ENDLESS = 30_000
TOKEN = 72
ANSWER_TIMEOUT_S = 120

# When something was asked or seen, on `time.perf_counter`, and how long it took.
Sample = tuple[float, float]


class Endless:
    """The script of an engine: a request for `ENDLESS` tokens gets one every `STEP_S`, others get theirs at once."""

    def __init__(self) -> None:
        self._paced: set[str] = set()

    def receive(self, message: Message, send: Send) -> None:
        match message:
            case Generate():
                send(Admitted(message.request_id))
                tokens = [TOKEN] * min(message.sampling.max_tokens, 64)
                if message.sampling.max_tokens == ENDLESS:
                    self._paced.add(message.request_id)
                else:
                    send(Outputs([Output(message.request_id, tokens, FinishReason.LENGTH, 0, len(tokens))]))
            case Control():
                send(ControlResult(message.control_id, {}, "this engine keeps nothing"))
            case Abort():
                self._paced.discard(message.request_id)

    def turn(self, send: Send) -> None:
        if self._paced:
            send(Outputs([Output(name, [TOKEN]) for name in self._paced]))


class Memory:
    """The resident memory of a process and, apart, of the processes that it has started, in MiB."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def helpers(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()]

    def forget_peaks(self) -> None:
        for pid in (self._pid, *self.helpers()):
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def peaks(self) -> tuple[float, float]:
        """Return the most since `forget_peaks`: of the process, and of its helpers together."""
        return _peak(self._pid), sum(map(_peak, self.helpers()))


def _peak(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


@dataclass
class Ticks:
    """Turns of the event loop: when, and the processor time of its thread and of all threads until then."""

    turns: list[tuple[float, float, float]] = field(default_factory=list)

    def read(self, pipe: IO[bytes]) -> None:
        while len(record := pipe.read(TICK.size)) == TICK.size:
            self.turns.append(TICK.unpack(record))

    def longest(self, start: float, end: float) -> tuple[float, float, float]:
        """Return the longest time between two turns, in seconds: on the clock, and the processor time of the loop's
        thread and of all threads."""
        found = [turn for turn in self.turns if start <= turn[0] <= end]
        pairs = list(pairwise(found))
        clock, own, every = (max((b[which] - a[which] for a, b in pairs), default=0.0) for which in range(3))
        return clock, own, every


@dataclass
class Watched:
    """A frontend and its watchers."""

    port: int
    memory: Memory
    ticks: Ticks


@contextmanager
def watched_frontend(model: Path, folder: Path) -> Iterator[Watched]:
    """Yield a frontend that is ready."""
    run = run_context(model, folder, log_level="error")
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    beats, ticking = os.pipe()
    engine = ScriptedEngine(run, Endless(), vocab_size, max_num_seqs=64, turn_s=STEP_S)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener, engine:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "benchmarks.ticking_frontend", str(run.save())]
        command += ["--fd", str(listener.fileno()), "--beat-fd", str(ticking)]
        process = subprocess.Popen(command, pass_fds=[listener.fileno(), ticking])
        os.close(ticking)
        ticks = Ticks()
        reading = threading.Thread(target=ticks.read, args=(os.fdopen(beats, "rb"),))
        reading.start()
        try:
            while ask(port, b"GET", "/ready", b"") != 200:
                if process.poll() is not None:
                    raise click.ClickException("the HTTP process ended")
                time.sleep(0.05)
            yield Watched(port, Memory(process.pid), ticks)
        finally:
            process.kill()
            process.wait()
            reading.join()


def _request(method: bytes, path: str, body: bytes, keep: bool = False) -> bytes:
    connection = b"keep-alive" if keep else b"close"
    head = b"%b %b HTTP/1.1\r\nHost: x\r\nConnection: %b\r\n" % (method, path.encode(), connection)
    return head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def ask(port: int, method: bytes, path: str, body: bytes) -> int:
    """Return the status of the answer, read to its end; 0 without one."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_TIMEOUT_S) as connection:
            # An answer may come before the whole body has gone.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(_request(method, path, body))
            answer = b""
            while piece := connection.recv(1 << 16):
                answer = answer or piece
            return int(answer.split(b" ", 2)[1]) if answer else 0
    except OSError:
        return 0


def watch_health(port: int, stop: Connection) -> None:
    """Ask for `/health` every `PROBE_S`, or as soon as it has answered; give the samples back."""
    request, samples = _request(b"GET", "/health", b"", keep=True), []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while not stop.poll():
            started = time.perf_counter()
            connection.sendall(request)
            connection.recv(1 << 16)
            took = time.perf_counter() - started
            samples.append((started, took))
            time.sleep(max(0.0, PROBE_S - took))
    stop.send(samples)


def watch_stream(port: int, stop: Connection) -> None:
    """Read an endless stream; give back when each piece was due after the one before, and how late it was."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": ENDLESS, "stream": True}).encode()
    samples = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(_request(b"POST", "/v1/completions", body))
        connection.recv(1 << 16)
        latest = time.perf_counter()
        while not stop.poll():
            connection.recv(1 << 16)
            now = time.perf_counter()
            samples.append((latest + STEP_S, max(0.0, now - latest - STEP_S)))
            latest = now
    stop.send(samples)


@dataclass(frozen=True)
class Round:
    """One poison, sent several times at once: its first and last second, its answers, and memory in MiB."""

    poison: str
    copies: int
    quiet_from: float
    start: float
    end: float
    statuses: Counter[int]
    memory: float
    helpers: float


def play(watched: Watched, poison: Poison, copies: int, pause: float) -> Round:
    """Watch an idle server for `pause` seconds, then send a poison."""
    watched.memory.forget_peaks()
    quiet_from = time.perf_counter()
    time.sleep(pause)
    start = time.perf_counter()
    with ThreadPoolExecutor(copies) as pool:
        asked = [pool.submit(ask, watched.port, b"POST", poison.path, poison.body) for _ in range(copies)]
        statuses = Counter(answer.result() for answer in asked)
    # The time that freeing memory and remaining threads take belongs to it.
    time.sleep(0.1)
    memory, helpers = watched.memory.peaks()
    return Round(poison.name, copies, quiet_from, start, time.perf_counter(), statuses, memory, helpers)


def _within(samples: list[Sample], start: float, end: float) -> list[float]:
    """Return how long the samples took that fell between two times, wholly or in part; at least one number."""
    return [took for at, took in samples if at <= end and at + took >= start] or [0.0]


def _spread(values: list[float]) -> str:
    """Return median, 99th percentile and maximum in ms."""
    ordered = sorted(values)
    picked = (ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], ordered[-1])
    return " / ".join(f"{1000 * value:.1f}" for value in picked)


def report(rounds: list[Round], health: list[Sample], stream: list[Sample], ticks: Ticks, worst: int) -> None:
    """Print a table of the worst rounds, and one of all."""
    for copies in sorted({one.copies for one in rounds}):
        some = [one for one in rounds if one.copies == copies]
        figures = []
        for one in some:
            clock, thread, threads = ticks.longest(one.start, one.end)
            asked, late = (max(_within(seen, one.start, one.end)) for seen in (health, stream))
            figures.append((threads, asked, late, clock, thread, one))
        figures.sort(key=lambda figure: -figure[0])
        click.echo(f"\n{copies} at once, the worst {worst} of {len(some)}: longest times in ms, memory in MiB\n")
        click.echo("| request | answers | s | `/health` | stream | loop, clock | CPU | all CPU | memory | helpers |")
        click.echo("|---|---|---|---|---|---|---|---|---|---|")
        for threads, asked, late, clock, thread, one in figures[:worst]:
            answers = ", ".join(f"{count} x {status}" for status, count in sorted(one.statuses.items()))
            told = " | ".join(f"{1000 * value:.0f}" for value in (asked, late, clock, thread, threads))
            seconds = one.end - one.start
            click.echo(f"| {one.poison} | {answers} | {seconds:.1f} | {told} | {one.memory:.0f} | {one.helpers:.0f} |")
    click.echo("\n| | `/health` p50 / p99 / max, ms | stream late p50 / p99 / max, ms | loop, clock | CPU | all CPU |")
    click.echo("|---|---|---|---|---|---|")
    spans = {"quiet": [(one.quiet_from, one.start) for one in rounds]}
    for copies in sorted({one.copies for one in rounds}):
        spans[f"{copies} at once"] = [(one.start, one.end) for one in rounds if one.copies == copies]
    for name, times in spans.items():
        spreads = [_spread([took for span in times for took in _within(seen, *span)]) for seen in (health, stream)]
        held = [ticks.longest(*span) for span in times]
        longest = " | ".join(f"{1000 * max(column):.0f}" for column in zip(*held, strict=True))
        click.echo(f"| {name} | {' | '.join(spreads)} | {longest} |")
    most, helpers = max(one.memory for one in rounds), max(one.helpers for one in rounds)
    click.echo(f"\nmemory of the HTTP process at most {most:.0f} MiB, of its helpers together {helpers:.0f} MiB")
    statuses = sum((one.statuses for one in rounds), Counter[int]())
    click.echo("answers: " + ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())))


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a model; the demo unless given.")
@click.option("--only", default="", help="Poisons whose names contain one of these, separated by semicolons.")
@click.option("--copies", default="1,16", show_default=True, help="How many times at once, separated by commas.")
@click.option("--size", default=SIZE, show_default=True, help="Bytes of a body at most.")
@click.option("--pause", default=0.3, show_default=True, help="Seconds of quiet before each.")
@click.option("--skip", default=0, show_default=True, help="Poisons to leave out at the beginning.")
@click.option("--seconds", default=1e9, help="Begin no further one after this number of seconds.")
@click.option("--worst", default=15, show_default=True, help="Rows of the tables.")
def command(
    model: Path | None, only: str, copies: str, size: int, pause: float, skip: int, seconds: float, worst: int
) -> None:
    """Print tables."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, watched_frontend(model or ensure_demo(), Path(folder)) as watched:
        watchers = []
        for watch in (watch_health, watch_stream):
            mine, its = spawn.Pipe()
            process = spawn.Process(target=watch, args=(watched.port, its), daemon=True)
            process.start()
            watchers.append(mine)
        time.sleep(2.0)  # Until the watchers have started.
        rounds: list[Round] = []
        end = time.monotonic() + seconds
        for number, poison in enumerate(poisons(size)):
            if not any(part in poison.name for part in only.split(";")) or number < skip or time.monotonic() > end:
                continue
            for count in map(int, copies.split(",")):
                rounds.append(play(watched, poison, count, pause))
                click.echo(f"{number} {poison.name} x {count}: {dict(rounds[-1].statuses)}", err=True)
        for watcher in watchers:
            watcher.send(None)
        health, stream = (watcher.recv() for watcher in watchers)
        report(rounds, health, stream, watched.ticks, worst)


if __name__ == "__main__":
    command()
