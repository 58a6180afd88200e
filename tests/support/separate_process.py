"""Modules run in a process of their own that has Triton's compiler, where this one has its interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.recorded_gpus import HOPPER, SHARED_BYTES

ROOT = Path(__file__).resolve().parents[2]


def output_of(module: str, *arguments: str) -> list[str]:
    """The lines that `python -m module arguments` prints; asserts that it succeeds."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()


def compiled(cases: str, capability: int = HOPPER, *, most_stack: int = 0) -> list[str]:
    """The lines of `tests.support.compile_only` about a set of `compile_cases`; asserts that every kernel fits a GPU of
    the compute capability, spilling at most `most_stack` bytes; with blocks of 16, no GPU's default, a few words."""
    lines = output_of("tests.support.compile_only", cases, "--capability", str(capability))
    assert lines
    for line in lines:
        said = numbers(line)
        assert said["stack"] <= max(most_stack, 32 if " 16 rows " in line else 0), line
        assert said["shared"] <= SHARED_BYTES[capability], line
        # 64 Ki registers of 32 bits per block of threads.
        assert said["registers"] * 32 * said["warps"] <= 1 << 16, line
    return lines


def numbers(line: str) -> dict[str, int]:
    """The name=number parts of a line."""
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)}
