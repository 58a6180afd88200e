"""`moeserve run`, `ps` and `stop` with real services."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.running import find_running
from tests.support.forking import popen
from tests.support.service import ROOT, service, wait_until


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder whose path is short enough for the sockets of a service."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="run-") as folder:
        yield Path(folder)


def moeserve(*arguments: str, runtime: Path, said: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher.cli", *arguments]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "OMP_NUM_THREADS": "1"}
    with popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        output, errors = process.communicate(said, timeout=120)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def test_a_service_is_listed_and_stopped_by_its_model(model: Path, tmp_path: Path) -> None:
    with service(model, tmp_path) as running:
        (found,) = find_running(running.run_root)
        assert found.record.pid == running.process.pid
        assert found.record.url == str(running.http.base_url).rstrip("/")
        listed = moeserve("ps", runtime=running.run_root).stdout.splitlines()
        assert listed[0].split() == ["PID", "URL", "STATE", "MEMORY", "UP", "MODEL"]
        assert listed[1].split()[:3] == [str(found.record.pid), found.record.url, "ready"]
        refused = moeserve("stop", "other", runtime=running.run_root)
        assert (refused.returncode, "No service other runs" in refused.stderr) == (1, True)
        assert moeserve("stop", "m", runtime=running.run_root).stdout == f"{found.record.url} has ended (m).\n"
        assert running.end() == 0
        assert find_running(running.run_root) == []
        assert "No service runs" in moeserve("ps", runtime=running.run_root).stdout


def test_which_of_several_services_is_meant_has_to_be_said(model: Path, tmp_path: Path) -> None:
    with service(model, tmp_path / "a") as first, service(model, tmp_path / "b") as second:
        runtime = first.run_root
        for directory in second.run_root.glob("moeserve-*"):
            (runtime / directory.name).mkdir()
            for name in ("lock", "service.json"):
                os.link(directory / name, runtime / directory.name / name)
        refused = moeserve("stop", runtime=runtime)
        assert (refused.returncode, "2 services run, name one or give --all" in refused.stderr) == (1, True)
        assert moeserve("stop", "--all", runtime=runtime).stdout.count("has ended (m).") == 2
        assert (first.end(), second.end()) == (0, 0)


@pytest.mark.parametrize("lines", ["hello\n", "hello\n/reset\nagain\n/exit\n"])
def test_run_serves_a_model_for_one_conversation(lines: str, model: Path, tmp_path: Path) -> None:
    sets = ("--set", "kv-cache-memory=64MiB", "--max-tokens", "3")
    answered = moeserve("run", str(model), *sets, runtime=tmp_path, said=lines)
    assert answered.returncode == 0, answered.stderr
    wait_until(lambda: find_running(tmp_path) == [])
