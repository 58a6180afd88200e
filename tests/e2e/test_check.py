"""`moeserve check`: alone, and under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher import check as checking
from launcher.cli import main
from tests.support.service import ROOT


def test_a_cpu_answers_with_the_recorded_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "gpu_names", list)
    result = CliRunner().invoke(main, ["check"])
    assert result.exit_code == 0, result.output
    assert re.match(r"moeserve \S+, torch \S+, .*\nLinux .* GPUs: none\n", result.output)
    assert len(re.findall(r"CPU: tokens of a tiny \w+ .*passed", result.output)) == 3
    assert result.output.endswith("3 of 3 checks passed.\n")


def test_a_fault_is_told_and_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault() -> str:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(checking, "_alone", lambda: iter([checking.timed("a check", fault)]))
    result = CliRunner().invoke(main, ["check"])
    assert (result.exit_code, "RuntimeError: no kernel" in result.output) == (1, True)


@pytest.mark.parametrize("way", ["pipeline", "tensor"])
def test_a_model_is_planned_as_its_ranks_are_to_share_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(checking, "_alone", list)
    monkeypatch.setattr(checking.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0))
    flags = ["--device", "cpu", f"--{way}-parallel-size", "2"]
    said = CliRunner().invoke(main, ["check", str(model), *flags]).output
    assert f"moeserve serve MODEL --{way}-parallel-size 2: fits" in said[: said.index("checks passed")]


def test_one_command_plans_a_model_over_two_ranks_and_checks_what_they_send_each_other(model: Path) -> None:
    flags = ["--device", "cpu", "--expert-parallel-size", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "check", str(model), *flags],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "--expert-parallel-size 2" in done.stdout[: done.stdout.index("checks passed")]
    assert len(re.findall(r"gloo: \S+ of 2 ranks .*passed", done.stdout)) == 3
    assert re.search(r"gloo: experts over 2 ranks .*passed", done.stdout)
    assert "3 of 3 checks passed." in done.stdout
    assert "4 of 4 checks passed." in done.stdout
    assert done.stdout.endswith(f"Start it: moeserve serve {model} --device cpu --expert-parallel-size 2\n")
