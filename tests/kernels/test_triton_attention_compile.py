"""The attention kernels use the instructions they are made for, and no batch makes them compile anew."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def output_of(*command):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", *command]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()


def numbers(line):
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)}


def test_batches_of_all_sizes_share_one_compiled_variant():
    counts = dict(line.split() for line in output_of("tests.support.attention_variants"))
    assert counts == {"_plan_kernel": "1", "split_kernel": "1", "reduce_kernel": "1", "prefill_kernel": "1"}


def test_long_rows_run_by_whole_warpgroups_and_short_ones_on_tensor_cores():
    lines = output_of("tests.support.compile_only", "tests.support.compile_cases_attention")
    kernels = [line for line in lines if "split_kernel" in line or "prefill_kernel" in line]
    assert len(kernels) == 10
    for line in kernels:
        whole = line.startswith(("prefill", "extend"))
        assert (numbers(line)["wgmma"] > 0) == whole, line
        assert (numbers(line)["mma"] > 0) == (not whole), line


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_configuration_of_the_table_spills():
    for line in output_of("tests.support.compile_only", "tests.support.compile_table_attention"):
        # In fp32, which serves comparisons only, heads that are no power of two spill some words.
        assert numbers(line)["stack"] <= (64 if "float32" in line else 0), line
        assert numbers(line)["shared"] <= 227 * 1024, line
