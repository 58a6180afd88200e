"""The attention kernels use the instructions they are made for, and no batch makes them compile anew."""

import pytest

from tests.support.separate_process import numbers, output_of


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
