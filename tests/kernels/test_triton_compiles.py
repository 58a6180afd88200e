"""Kernels compile for a GPU that is not here, fit into it, keep their values in registers and use its tensor cores."""

import re

import pytest

from tests.support.recorded_gpus import SHARED_BYTES
from tests.support.separate_process import compiled, numbers, output_of

pytestmark = pytest.mark.kernel_change
# By set of cases and compute capability, where the table of docs/design/kernels.md has more.
_MOST_STACK = {("packed", 80): 0, ("packed", 90): 24, ("packed", 100): 8, ("in_fp8", 100): 376}
PRODUCT = re.compile(r"(?P<weights>\w+) (?P<tokens>\d+): _(gate_up|down)_kernel .*")


def test_norms_rotation_and_sampling_compile_for_compute_capability_9_without_spilling():
    compiled("others")


def test_recurrent_layers_compile_without_spilling():
    assert len(compiled("recurrent")) == 7


def test_attention_runs_long_rows_by_whole_warpgroups_and_short_ones_on_tensor_cores():
    lines = [line for line in compiled("attention") if "split_kernel" in line or "prefill_kernel" in line]
    assert len(lines) == 10
    for line in lines:
        whole = line.startswith(("prefill", "extend"))
        assert numbers(line)["wgmma"] == whole, line
        assert numbers(line)["mma"] != whole, line


def test_batches_of_all_sizes_share_one_compiled_variant_of_attention():
    found = {}
    for line in output_of("tests.support.compile_only", "attention_batches"):
        found.setdefault(line.split(": ")[1].split()[0], set()).add(numbers(line)["checksum"])
    assert {name: len(variants) for name, variants in found.items()} == {
        "_plan_kernel": 1,
        "split_kernel": 1,
        "reduce_kernel": 1,
        "prefill_kernel": 1,
    }


def test_products_of_experts_run_on_tensor_cores():
    lines = compiled("experts") + compiled("experts_fp8")
    products = [match for line in lines if (match := PRODUCT.fullmatch(line))]
    assert products
    for match in products:
        tokens, said = int(match["tokens"]), numbers(match[0])
        if match["weights"] != "float32":
            assert said["wgmma"] == (tokens >= 512), match[0]
            assert said["mma"] == (tokens < 512), match[0]


def test_experts_with_a_limit_or_without_a_gate_compile_without_spilling():
    assert len({line.split(": ")[0] for line in compiled("activations")}) == 6


@pytest.mark.parametrize("capability", [86, pytest.param(120, marks=pytest.mark.long)])
def test_what_a_service_with_heads_of_128_launches_fits_cards_of_little_shared_memory(capability: int):
    assert len(compiled("heads_of_128", capability)) >= 10


def test_products_with_quantised_weights_run_on_tensor_cores_and_fit_cards_of_little_shared_memory():
    lines = [line for line in compiled("packed_few", 86, most_stack=16) if "_kernel" in line]
    assert all(numbers(line)["mma"] for line in lines if "_linear_" in line or "_up_" in line or "_down_" in line)


def test_variants_that_serve_nothing_yet_compile_without_spilling():
    assert len({line.split(": ")[0] for line in compiled("variants")}) == 8


def test_weights_and_activations_in_fp8_multiply_on_the_tensor_cores_for_it():
    lines = [line for line in compiled("in_fp8", 89, most_stack=16) if re.search("_linear_|_up_|_down_", line)]
    assert len(lines) == 8
    assert all(numbers(line)["of_fp8"] for line in lines)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(
    "cases", ["served", "served_fp8", "experts", "experts_fp8", "packed", "in_fp8", "others", "recurrent"]
)
def test_what_a_service_can_launch_fits_every_card_since_ampere(cases: str, capability: int):
    if cases.endswith("fp8") and capability < 89:
        pytest.skip("fp8 takes compute capability 8.9")
    # Products of many rows spill some words where operands pass through registers; docs/design/kernels.md has a table.
    compiled(cases, capability, most_stack=_MOST_STACK.get((cases, capability), 336 if cases == "packed" else 256))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_configuration_of_the_shapes_that_are_measured_fits_too():
    compiled("benchmarked")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_configuration_of_attentions_table_spills():
    for line in output_of("tests.support.compile_only", "attention_table"):
        # In fp32, which serves comparisons only, heads that are no power of two spill some words.
        assert numbers(line)["stack"] <= (64 if "float32" in line else 0), line
        assert numbers(line)["shared"] <= 227 * 1024, line
