"""The attention kernels use the instructions they are made for, and no batch makes them compile anew."""

import pytest

from tests.support.machine_code import MOST_PER_KIB
from tests.support.separate_process import compiled, numbers, output_of

pytestmark = pytest.mark.kernel_change


def test_batches_of_all_sizes_share_one_compiled_variant():
    counts = dict(line.split() for line in output_of("tests.support.attention_variants"))
    assert counts == {"_plan_kernel": "1", "split_kernel": "1", "reduce_kernel": "1", "prefill_kernel": "1"}


@pytest.fixture(scope="module")
def kernels():
    """(case, what its compiled code says) of every kernel that reads keys and values."""
    lines = compiled("compile_cases_attention")
    found = [line for line in lines if "split_kernel" in line or "prefill_kernel" in line]
    assert len(found) == 10
    return [(line.split(":")[0], numbers(line)) for line in found]


def test_long_rows_run_by_whole_warpgroups_and_short_ones_on_tensor_cores(kernels):
    for case, code in kernels:
        whole = case.startswith(("prefill", "extend"))
        assert (code["wgmma"] > 0) == whole, case
        assert (code["mma"] > 0) == (not whole), case


def test_keys_and_values_are_copied_ahead_sixteen_bytes_at_a_time(kernels):
    for case, code in kernels:
        assert code["loop_async"] > 0, case
        # The one that looks up a block per position reads their ids four bytes at a time.
        assert code["loop_narrow"] <= ("small blocks" in case), case
        assert code["loop_byte_reads"] == code["loop_divisions"] == 0, case


def test_the_memory_and_not_the_schedulers_bound_a_decode(kernels):
    assert {case for case, _ in kernels} >= {"decode", "decode small blocks", "decode fp8"}
    for case, code in kernels:
        if case in ("decode", "decode small blocks", "decode fp8"):
            assert code["loop"] * 1024 / code["loop_bytes"] < MOST_PER_KIB, case


def test_a_prefill_issues_less_than_its_products_take(kernels):
    for case, code in kernels:
        if case == "prefill":
            assert code["loop"] < 0.8 * code["loop_tensor_cycles"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_configuration_of_the_table_spills():
    for line in output_of("tests.support.compile_only", "tests.support.compile_table_attention"):
        # In fp32, which serves comparisons only, heads that are no power of two spill some words.
        assert numbers(line)["stack"] <= (64 if "float32" in line else 0), line
        assert numbers(line)["shared"] <= 227 * 1024, line
