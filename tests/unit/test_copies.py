"""Copies of a process that serve one after another: real forks, without a model."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeserve.config import ServeConfig
from moeserve.run_context import RunContext

ROOT = Path(__file__).resolve().parents[2]
# Tells its incarnation and its pid, and serves until it is told to stop.
SCRIPT = """
import os, sys, time
from launcher.copies import Copies
from launcher.processes import reporter
from moeserve.run_context import load_run_context

def serve(context, stop):
    report({"event": "serving", "incarnation": context.incarnation, "pid": os.getpid()})
    # Polls, as the engine does: waiting for an event that a handler of this thread sets can wait for ever.
    while not stop.is_set():
        time.sleep(0.01)
    return 5

report = reporter(sys.stdout)
sys.exit(Copies(serve, sys.stdin, report, 0).run(load_run_context(sys.argv[1])))
"""


@pytest.fixture
def contexts(tmp_path: Path) -> list[str]:
    first = RunContext(
        config=ServeConfig(),
        model_dir="none",
        model_hash="none",
        run_dir=str(tmp_path),
        incarnation=7,
        secret="00",
        served_model_names=("none",),
    )
    return [str(replace(first, incarnation=incarnation).save()) for incarnation in (7, 8)]


@pytest.fixture
def holder(contexts: list[str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SCRIPT, contexts[0]]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def hear_any(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    said: dict[str, Any] = json.loads(process.stdout.readline())
    return said


def hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a copy says first, after the report that it was made."""
    forked, said = hear_any(process), hear_any(process)
    assert forked == {"event": "forked", "rank": 0, "pid": said["pid"]}
    return said


def test_a_dead_copy_is_reported_and_another_serves_when_ordered(
    holder: subprocess.Popen[str], contexts: list[str]
) -> None:
    first = hear(holder)
    assert first["incarnation"] == 7
    os.kill(first["pid"], signal.SIGKILL)
    assert hear_any(holder) == {"event": "ended", "rank": 0, "pid": first["pid"], "code": -signal.SIGKILL}
    assert holder.stdin is not None
    holder.stdin.write(f"{contexts[1]}\n")
    holder.stdin.flush()
    second = hear(holder)
    assert second["incarnation"] == 8
    assert second["pid"] != first["pid"]
    os.kill(second["pid"], signal.SIGTERM)
    assert hear_any(holder) == {"event": "ended", "rank": 0, "pid": second["pid"], "code": 5}
    holder.terminate()
    assert holder.wait(60) == 0


def test_sigterm_ends_the_copy_and_then_the_process(holder: subprocess.Popen[str]) -> None:
    copy = hear(holder)["pid"]
    holder.terminate()
    assert holder.wait(60) == 5
    assert not Path(f"/proc/{copy}").exists()


def test_a_copy_dies_with_the_process(holder: subprocess.Popen[str]) -> None:
    copy = os.pidfd_open(hear(holder)["pid"])
    holder.kill()
    # Readable once the process has ended.
    assert select.select([copy], [], [], 60)[0]
    os.close(copy)


def test_the_end_of_orders_ends_the_process(holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None
    holder.stdin.close()
    os.kill(hear(holder)["pid"], signal.SIGSEGV)
    assert hear_any(holder)["code"] == -signal.SIGSEGV
    assert holder.wait(60) != 0
