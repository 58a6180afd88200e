"""Kernels compile for a GPU that is not here, fit into it, and keep their values in registers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = sorted(path.stem for path in (ROOT / "tests" / "support").glob("compile_cases_*.py"))
MAX_SHARED = 227 * 1024


@pytest.mark.parametrize("cases", CASES)
def test_every_kernel_compiles_for_compute_capability_9_without_spilling(cases):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.compile_only", f"tests.support.{cases}"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    assert lines
    for line in lines:
        numbers = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)}
        assert numbers["stack"] == 0, line
        assert numbers["shared"] <= MAX_SHARED, line
