"""The same script makes the same plans, byte for byte, in whatever process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_script(policy: str, depth: int, hash_seed: str) -> str:
    command = [sys.executable, "-m", "tests.support.plan_script", policy, str(depth)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("policy", "depth"), [("fcfs", 0), ("lpm", 1)])
def test_two_processes_make_the_same_plans(policy: str, depth: int) -> None:
    first, second = (run_script(policy, depth, seed) for seed in ("1", "2"))
    assert first.count("\n") > 100
    assert first == second
