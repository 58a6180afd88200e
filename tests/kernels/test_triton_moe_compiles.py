"""The experts' products use the instructions that their variants are made for."""

import re

import pytest

from tests.support.machine_code import MOST_PER_KIB
from tests.support.separate_process import compiled, numbers

pytestmark = pytest.mark.kernel_change
LINE = re.compile(r"(?P<variant>\w+) (?P<weights>\w+) (?P<tokens>\d+): _(gate_up|down)_kernel .*")


@pytest.fixture(scope="module")
def products():
    """(variant, weights, tokens, instructions) of every product."""
    found = [match for line in compiled("compile_cases_moe") if (match := LINE.fullmatch(line))]
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


def test_weights_are_read_sixteen_bytes_at_a_time_and_where_tiles_are_made_ahead(products):
    for variant, weights, tokens, code in products:
        case = variant, weights, tokens
        assert (code["loop_async"] > 0) == (not variant.startswith("gemv")), case
        assert variant == "persistent" or code["loop_bytes"] > 0, case
        assert code["loop_narrow"] == code["loop_byte_reads"] == code["local"] == 0, case


def test_the_memory_and_not_the_schedulers_bound_few_rows(products):
    for variant, weights, tokens, code in products:
        # Of int4 each byte is two values to widen: more than the schedulers issue while the memory brings it.
        if tokens <= 256 and weights not in ("int4", "float32"):
            assert code["loop"] * 1024 / code["loop_bytes"] < MOST_PER_KIB, (variant, weights, tokens)


def test_the_tensor_cores_and_not_the_schedulers_bound_many_rows(products):
    assert any(code["loop_tensor_cycles"] for *_, code in products)
    for variant, weights, tokens, code in products:
        if code["loop_tensor_cycles"] and weights != "int4":
            assert code["loop"] < 0.8 * code["loop_tensor_cycles"], (variant, weights, tokens)
