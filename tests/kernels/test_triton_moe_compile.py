"""The experts' kernels compile for Hopper, without one: no spills, shared memory as planned, the right instructions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCTS = ("_gate_up_kernel", "_down_kernel")


@pytest.fixture(scope="module")
def compiled():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.compile_moe"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_no_kernel_spills_registers_or_asks_for_more_shared_memory_than_there_is(compiled):
    assert {row["variant"] for row in compiled} == {"gemv", "tiled", "persistent"}
    assert [row for row in compiled if row["stack"] > 0 or row["shared"] > 227 << 10] == []


def test_products_run_on_tensor_cores_and_by_whole_warpgroups_where_rows_suffice(compiled):
    products = [row for row in compiled if row["name"] in PRODUCTS and row["weights"] != "float32"]
    for row in products:
        assert row["wgmma"] == (row["variant"] != "gemv" and row["tokens"] >= 1024)
        assert row["mma"] == (row["variant"] == "tiled" and row["tokens"] < 1024)


def test_the_persistent_variant_fetches_through_the_copy_engine(compiled):
    for row in compiled:
        if row["name"] in PRODUCTS:
            assert row["tensor_copies"] == (row["variant"] == "persistent")
