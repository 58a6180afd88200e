"""Modules run in a process of their own that has Triton's compiler, where this one has its interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def output_of(module: str, *arguments: str) -> list[str]:
    """The lines that `python -m module arguments` prints, which has to end well."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()


def numbers(line: str) -> dict[str, int]:
    """Its name=number parts."""
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)}
