"""`moeserve launch` without a server: one is started for the agent, and ends with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forking import popen
from tests.support.service import ROOT, descendants, is_alive, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a stand-in for Claude Code, which tells its server and does as AGENT says."""
    program = tmp_path / "claude"
    program.write_text('#!/bin/sh\necho "agent $$ asks $ANTHROPIC_BASE_URL for $ANTHROPIC_MODEL: $*"\neval "$AGENT"\n')
    program.chmod(0o700)
    return tmp_path


def launch(folder: Path, agent: str) -> subprocess.Popen[str]:
    model = write_tiny_checkpoint(folder / "m")
    config = folder / "settings.toml"
    config.write_text('kv-cache-memory = "64MiB"\nserved-model-name = ["m"]\n')
    return popen(
        [
            sys.executable,
            "-m",
            "launcher.cli",
            "launch",
            "--serve",
            str(model),
            "--config",
            str(config),
            "claude",
            "hi",
        ],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "AGENT": agent, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_service_serves_the_agent_and_ends_with_it(folder: Path) -> None:
    ask = f"{sys.executable} -c \"import urllib.request as u; print(u.urlopen('$ANTHROPIC_BASE_URL/ready').read())\""
    with launch(folder, f"{ask}; exit 5") as launched:
        assert launched.stdout is not None
        first = launched.stdout.readline()
        started = descendants(launched.pid)
        assert re.fullmatch(r"agent \d+ asks http://127\.0\.0\.1:\d+ for m: hi\n", first)
        assert "ready" in launched.stdout.read()
        assert launched.wait(60) == 5
    assert started
    wait_until(lambda: not any(map(is_alive, started)))


def test_sigterm_is_passed_on_to_the_agent_and_ends_the_service(folder: Path) -> None:
    with launch(folder, "exec sleep 600") as launched:
        assert launched.stdout is not None
        launched.stdout.readline()
        started = descendants(launched.pid)
        launched.send_signal(signal.SIGTERM)
        assert launched.wait(60) == 128 + signal.SIGTERM
    wait_until(lambda: not any(map(is_alive, started)))
