"""Logs: lines in their order, and nobody waits for a reader."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.logs import LogStream
from moeserve.frontend.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Pipe:
    reading: int
    writing: int

    def read_to_end(self) -> list[str]:
        os.close(self.writing)
        with os.fdopen(os.dup(self.reading), encoding="utf-8") as reader:
            return reader.read().splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe(*os.pipe())
    fcntl.fcntl(made.writing, fcntl.F_SETPIPE_SZ, 4096)
    yield made
    for descriptor in (made.reading, made.writing):
        with suppress(OSError):
            os.close(descriptor)


def test_lines_come_in_their_order(pipe: Pipe) -> None:
    stream = LogStream(pipe.writing)
    lines = [f"line {number} \u00e9\ud800" for number in range(30)]
    for line in lines:
        stream.write(line + "\n")
    assert stream.drain(10)
    assert pipe.read_to_end() == [line.replace("\ud800", "\\ud800") for line in lines]


def test_a_reader_that_stalls_costs_lines_and_no_time(pipe: Pipe) -> None:
    stream = LogStream(pipe.writing, max_waiting_chars=2000)
    line = "x" * 99 + "\n"
    for _ in range(1000):
        stream.write(line)
    num_dropped = stream.num_dropped
    assert 900 < num_dropped < 1000
    assert f"moeserve_log_lines_dropped_total {num_dropped}.0" in Metrics(lambda: num_dropped).render().decode()
    read = b""
    while read.count(b"\n") < 1000 - num_dropped:
        read += os.read(pipe.reading, 4096)
    assert stream.drain(10)
    stream.write("after\n")
    assert stream.drain(10)
    assert pipe.read_to_end() == [f"{num_dropped} log lines were dropped", "after"]


def test_a_reader_that_is_gone_ends_nothing(pipe: Pipe) -> None:
    stream = LogStream(pipe.writing)
    os.close(pipe.reading)
    stream.write("a\n")
    assert stream.drain(10)
    assert stream.num_dropped == 1


@pytest.mark.slow
def test_a_process_whose_logs_nobody_reads_works_and_ends(pipe: Pipe) -> None:
    script = """
import structlog
from launcher.logs import configure_logs
configure_logs("info", "json")
for number in range(5000):
    structlog.get_logger().info("request", number=number)
print("done", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=pipe.writing, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"done\n")


def test_the_last_lines_of_a_process_are_written_those_of_libraries_in_the_same_form(pipe: Pipe) -> None:
    script = """
import logging, structlog
from launcher.logs import configure_logs
configure_logs("info", "json")
structlog.get_logger().info("last")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("uvicorn.error").warning("more %s", "words", exc_info=True)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stderr=pipe.writing, timeout=60, check=False)
    assert done.returncode == 0
    first, second = pipe.read_to_end()
    assert '"event": "last"' in first
    words = json.loads(second)
    assert (words["event"], words["level"], words["logger"]) == ("more words", "warning", "uvicorn.error")
    assert words["exception"].endswith("ZeroDivisionError: division by zero")
