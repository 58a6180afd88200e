"""The experts' products use the instructions that their variants are made for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"(?P<variant>\w+) (?P<weights>\w+) (?P<tokens>\d+): _(gate_up|down)_kernel .*")


@pytest.fixture(scope="module")
def products():
    """(variant, weights, tokens, instructions) of every product."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.compile_only", "tests.support.compile_cases_moe"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    found = [match for line in result.stdout.splitlines() if (match := LINE.fullmatch(line))]
    counts = [{name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", match[0])} for match in found]
    assert {match["variant"] for match in found} == {"gemv", "gemv_split", "tiled", "persistent"}
    return [
        (match["variant"], match["weights"], int(match["tokens"]), count)
        for match, count in zip(found, counts, strict=True)
    ]


def test_products_run_on_tensor_cores_and_by_whole_warpgroups_where_rows_suffice(products):
    for variant, weights, tokens, instructions in products:
        if weights != "float32":
            assert (instructions["wgmma"] > 0) == (not variant.startswith("gemv") and tokens >= 512)
            assert (instructions["mma"] > 0) == (variant == "tiled" and tokens < 512)


def test_only_the_persistent_variant_fetches_through_the_copy_engine(products):
    for variant, _, _, instructions in products:
        assert (instructions["tensor_copies"] > 0) == (variant == "persistent")
