"""Kernels compile for a GPU that is not here, fit into it, and keep their values in registers."""

import pytest

from tests.support.separate_process import ROOT, numbers, output_of

CASES = sorted(path.stem for path in (ROOT / "tests" / "support").glob("compile_cases_*.py"))
MAX_SHARED = 227 * 1024


def assert_fit(lines):
    assert lines
    for line in lines:
        assert numbers(line)["stack"] == 0, line
        assert numbers(line)["shared"] <= MAX_SHARED, line
        # 64 Ki registers of 32 bits per block of threads.
        assert numbers(line)["registers"] * 32 * numbers(line)["warps"] <= 1 << 16, line


@pytest.mark.parametrize("cases", CASES)
def test_every_kernel_compiles_for_compute_capability_9_without_spilling(cases):
    assert_fit(output_of("tests.support.compile_only", f"tests.support.{cases}"))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_configuration_of_the_shapes_that_are_measured_fits_too():
    assert_fit(output_of("tests.support.compile_only", "tests.support.compile_targets"))
