"""`make venv TORCH=cuda` can be installed: the CUDA build of torch takes the versions that are pinned for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def pins(*names: str) -> dict[str, str]:
    lines = [line for name in names for line in (ROOT / name).read_text().splitlines()]
    return dict(line.split("==") for line in lines if re.match(r"[\w.-]+==", line))


def test_only_what_torch_asks_for_otherwise_is_pinned_otherwise() -> None:
    assert set(pins("constraints-cuda.txt")) == {"triton"} <= set(pins("constraints.txt"))
    assert f"'torch==={pins('constraints.txt')['torch']}'" in (ROOT / "Makefile").read_text()


@pytest.mark.long
def test_the_cuda_build_of_torch_resolves_with_its_constraints(tmp_path: Path) -> None:
    merged, report = tmp_path / "constraints.txt", tmp_path / "report.json"
    merged.write_text(
        "\n".join(f"{name}=={pin}" for name, pin in pins("constraints.txt", "constraints-cuda.txt").items())
    )
    wanted = f"torch==={pins('constraints.txt')['torch']}"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    done = subprocess.run(
        [*command, "--report", str(report), "--constraint", str(merged), wanted, "triton"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "No matching distribution" in done.stderr and wanted in done.stderr:
        pytest.skip("no index here has the CUDA build")
    assert done.returncode == 0, done.stderr[-2000:]
    found = {one["metadata"]["name"]: one["metadata"]["version"] for one in json.loads(report.read_text())["install"]}
    assert found["triton"] == pins("constraints-cuda.txt")["triton"]
