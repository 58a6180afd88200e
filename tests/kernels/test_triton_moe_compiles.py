"""The experts' products use the instructions that their variants are made for."""

import re

import pytest

from tests.support.separate_process import numbers, output_of

LINE = re.compile(r"(?P<variant>\w+) (?P<weights>\w+) (?P<tokens>\d+): _(gate_up|down)_kernel .*")


@pytest.fixture(scope="module")
def products():
    """(variant, weights, tokens, instructions) of every product."""
    lines = output_of("tests.support.compile_only", "tests.support.compile_cases_moe")
    found = [match for line in lines if (match := LINE.fullmatch(line))]
    assert {match["variant"] for match in found} == {"gemv", "gemv_split", "tiled", "persistent"}
    return [(match["variant"], match["weights"], int(match["tokens"]), numbers(match[0])) for match in found]


def test_products_run_on_tensor_cores_and_by_whole_warpgroups_where_rows_suffice(products):
    for variant, weights, tokens, instructions in products:
        if weights != "float32":
            assert (instructions["wgmma"] > 0) == (not variant.startswith("gemv") and tokens >= 512)
            assert (instructions["mma"] > 0) == (variant == "tiled" and tokens < 512)


def test_only_the_persistent_variant_fetches_through_the_copy_engine(products):
    for variant, _, _, instructions in products:
        assert (instructions["tensor_copies"] > 0) == (variant == "persistent")
