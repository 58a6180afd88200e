"""The kernels compiled for each kind of processor that this one can stand in for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.library import find_library
from kernels.cpu.targets import OTHER, Target, suitable_targets

ROOT = Path(__file__).parents[2]
TESTS_OF_KERNELS = (
    "test_attention",
    "test_bfloat16_products",
    "test_checksum",
    "test_fewer_calls",
    "test_kv_dtypes",
    "test_linear_and_experts",
    "test_moe_gate",
    "test_native_kernels",
    "test_quantised_kernels",
    "test_recurrent_kernels",
)
TARGETS = [target for target in suitable_targets() if target != OTHER]
every_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


def run(target: Target, *arguments: str) -> str:
    """Run Python with the kernels of a target."""
    environment = os.environ | {"MOESERVE_CPU_KERNELS": target.name, "PYTEST_XDIST_WORKER": ""}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.kernel_change
@pytest.mark.timeout(1800)
@every_target
def test_the_kernels_of_every_target_pass_their_tests(target: Target) -> None:
    if target == find_library().target:
        pytest.skip("the suite computes with these")
    files = [f"tests/cpu/{name}.py" for name in TESTS_OF_KERNELS]
    run(target, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", *files)


def digests(target: Target) -> dict[str, str]:
    found: dict[str, str] = json.loads(run(target, "-m", "tests.support.kernel_bits", "20"))
    return found


@pytest.mark.kernel_change
@pytest.mark.timeout(1800)
def test_every_target_computes_the_same_bits() -> None:
    wanted = digests(TARGETS[0])
    for target in TARGETS[1:]:
        found = digests(target)
        assert {name: found[name] for name in wanted} == wanted, target.name
