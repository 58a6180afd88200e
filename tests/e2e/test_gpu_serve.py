"""The driver that proves a service on a GPU meets no error of its own: it runs here in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_serve.stages import STAGES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.kernel_change
@pytest.mark.timeout(900)
def test_every_stage_of_the_driver_passes_in_the_interpreter(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_serve", "--interpret", "--out-dir", str(tmp_path)]
    done = subprocess.run([*command, "--time-limit", "900"], cwd=ROOT, capture_output=True, text=True, check=False)
    table = (tmp_path / "serve-interpreter.md").read_text()
    assert done.returncode == 0, table + done.stderr
    assert done.stdout.count("passed") == len(STAGES)
    assert "| texts as with all resident | 2 of 2 |" in table
