"""Packed products and experts against plain torch, and the independence of a row from its batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.activation import Activation
from kernels.cpu.experts import PanelLayout, RowLayout
from kernels.cpu.library import native_kernels
from kernels.linear import join, linear_reference, pack_linear
from kernels.moe import moe_experts, moe_experts_reference, pack_experts
from kernels.packed_experts import ExpertLayout, ExpertShape, PackedExperts
from kernels.weight_formats import Q4_K, Q6_K
from tests.support.quantised_rows import random_rows

pytestmark = pytest.mark.usefixtures("inference")

SILU, RELU2 = Activation(), Activation("relu2")
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 6, 80, 40
ACTIVATIONS = [
    SILU,
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("relu"),
    Activation("swigluoai", alpha=1.702, limit=1.0),
    Activation("silu", limit=0.7),
    Activation("clamped_silu", limit=0.7),
    RELU2,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 9, 25, 200])
def test_packed_linear_matches_plain_linear(dtype: torch.dtype, with_bias: bool, num_rows: int) -> None:
    weight, x = torch.randn(40, 24, dtype=dtype), torch.randn(num_rows, 24, dtype=dtype)
    bias = torch.randn(40, dtype=dtype) if with_bias else None
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(
        pack_linear(weight, bias)(x), linear_reference(x, weight, bias), atol=tolerance, rtol=tolerance
    )


def test_bfloat16_weights_give_the_bits_of_the_same_numbers_in_float32() -> None:
    weight, x = torch.randn(70, 50).bfloat16(), torch.randn(30, 50)
    narrow = pack_linear(weight, dtype=torch.float32)
    assert torch.equal(narrow(x), pack_linear(weight.float())(x))
    assert narrow.num_bytes < 4 * 96 * 50


@pytest.mark.parametrize(("in_features", "out_features"), [(576, 960), (64, 8), (768, 576), (48, 130)])
def test_a_row_of_a_packed_linear_has_the_same_bits_in_any_batch(in_features: int, out_features: int) -> None:
    linear = pack_linear(torch.randn(out_features, in_features))
    x = torch.randn(430, in_features)
    whole = linear(x)
    for first, last in [(0, 1), (5, 6), (0, 2), (3, 10), (7, 40), (0, 129), (129, 130), (100, 400)]:
        assert torch.equal(linear(x[first:last]), whole[first:last]), (first, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_joined_linears_give_the_bits_of_each_and_share_their_memory(dtype: torch.dtype, with_bias: bool) -> None:
    biases = [torch.randn(n) if with_bias else None for n in (96, 32, 64)]
    weights = [torch.randn(n, 24).to(dtype) for n in (96, 32, 64)]
    linears = [pack_linear(weight, bias, torch.float32) for weight, bias in zip(weights, biases, strict=True)]
    x = torch.randn(5, 24)
    wanted = [linear(x) for linear in linears]
    joined = join(linears)
    assert joined is not None
    assert torch.equal(joined(x), torch.cat(wanted, 1))
    assert all(torch.equal(linear(x), result) for linear, result in zip(linears, wanted, strict=True))
    assert joined.num_bytes == sum(linear.num_bytes for linear in linears)


def test_linears_of_other_kinds_widths_and_biases_are_joined_with_their_own_bits() -> None:
    numbers, rows = torch.randn(70, 256), random_rows(Q4_K, 40, 256)
    linears = [
        pack_linear(numbers[:33], torch.randn(33)),
        pack_linear(numbers.bfloat16(), dtype=torch.float32),
        pack_linear(rows),
        pack_linear(rows, arithmetic="exact"),
        pack_linear(random_rows(Q6_K, 64, 256), torch.randn(64)),
    ]
    joined = join(linears)
    assert joined is not None
    for num_rows in (1, 2, 5, 13, 200):
        x = torch.randn(num_rows, 256)
        assert torch.equal(joined(x), torch.cat([linear(x) for linear in linears], 1))


def test_linears_of_other_depths_or_of_another_library_are_not_joined() -> None:
    narrow = torch.randn(32, 24).bfloat16()
    assert join([pack_linear(torch.randn(32, 24)), pack_linear(torch.randn(32, 25))]) is None
    assert join([pack_linear(narrow), pack_linear(narrow)]) is None


def test_a_linear_refuses_rows_of_another_dtype() -> None:
    with pytest.raises(TypeError):
        pack_linear(torch.randn(8, 8))(torch.randn(2, 8, dtype=torch.float64))


def layout_of(
    kind: str, weight_dtype: torch.dtype, has_bias: bool = False, activation: Activation = SILU
) -> ExpertLayout:
    shape = ExpertShape(HIDDEN, INTERMEDIATE, torch.float32, weight_dtype, has_bias, activation.is_gated)
    kernels = native_kernels()
    assert kernels is not None
    return PanelLayout(shape, kernels) if kind == "panels" else RowLayout(shape)


def make_experts(weight_dtype: torch.dtype = torch.float32, activation: Activation = SILU) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(NUM_EXPERTS, (1 + activation.is_gated) * INTERMEDIATE, HIDDEN) / 8
    down = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE) / 8
    return gate_up.to(weight_dtype), down.to(weight_dtype)


def packed(layout: ExpertLayout, gate_up: Tensor, down: Tensor, *biases: Tensor) -> PackedExperts:
    experts = layout.experts(NUM_EXPERTS)
    for e in range(NUM_EXPERTS):
        data = layout.pack((gate_up[e], down[e], *([bias[e] for bias in biases] or [None, None])))
        assert data.dtype == torch.uint8
        assert len(data) == layout.num_bytes
        experts.put(e, data)
    return experts


def choose(num_tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:top_k] for _ in range(num_tokens)])
    return ids, torch.rand(num_tokens, top_k)


every_layout = pytest.mark.parametrize("kind", ["panels", "rows"])
every_weight_dtype = pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])


@every_layout
@every_weight_dtype
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_experts_match_the_token_by_token_reference(
    kind: str, weight_dtype: torch.dtype, num_tokens: int, top_k: int
) -> None:
    x = torch.randn(num_tokens, HIDDEN)
    ids, weights = choose(num_tokens, top_k)
    for activation in ACTIVATIONS:
        gate_up, down = make_experts(weight_dtype, activation)
        experts = packed(layout_of(kind, weight_dtype, activation=activation), gate_up, down)
        out = moe_experts(x, ids, weights, experts, activation)
        expected = moe_experts_reference(x, ids, weights, gate_up, down, activation)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@every_layout
@pytest.mark.parametrize("activation", [SILU, RELU2], ids=lambda activation: activation.kind)
def test_biases_stay_in_float32(kind: str, activation: Activation) -> None:
    gate_up, down = make_experts(torch.bfloat16, activation)
    biases = torch.randn(gate_up.shape[:2]), torch.randn(NUM_EXPERTS, HIDDEN)
    layout = layout_of(kind, torch.bfloat16, has_bias=True, activation=activation)
    experts = packed(layout, gate_up, down, *biases)
    x, ids = torch.randn(3, HIDDEN), torch.tensor([[2], [5], [0]])
    arguments = x, ids, torch.ones(3, 1)
    out = moe_experts(*arguments, experts, activation)
    expected = moe_experts_reference(*arguments, gate_up, down, activation, *biases)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@every_layout
def test_experts_on_a_cpu_refuse_an_activation_that_wants_other_matrices(kind: str) -> None:
    arguments = torch.randn(1, HIDDEN), torch.tensor([[0]]), torch.ones(1, 1)
    for own, other in ((SILU, RELU2), (RELU2, SILU)):
        experts = packed(layout_of(kind, torch.float32, activation=own), *make_experts(activation=own))
        with pytest.raises(ValueError, match=f"do not take {other.kind}"):
            moe_experts(*arguments, experts, other)


def test_what_is_not_a_number_stays_so() -> None:
    x, ids, weights = torch.full((1, HIDDEN), torch.nan), torch.tensor([[0]]), torch.ones(1, 1)
    for activation in ACTIVATIONS:
        experts = pack_experts(*make_experts(activation=activation))
        assert moe_experts(x, ids, weights, experts, activation).isnan().all(), activation


def test_all_tokens_on_one_expert_and_empty_experts() -> None:
    gate_up, down = make_experts()
    x = torch.randn(11, HIDDEN)
    ids, weights = torch.full((11, 1), 4), torch.ones(11, 1)
    activation = Activation()
    out = moe_experts(x, ids, weights, pack_experts(gate_up, down), activation)
    torch.testing.assert_close(
        out, moe_experts_reference(x, ids, weights, gate_up, down, activation), atol=1e-5, rtol=1e-5
    )


@every_layout
@every_weight_dtype
def test_a_token_gets_the_same_bits_from_its_experts_in_any_batch(kind: str, weight_dtype: torch.dtype) -> None:
    x = torch.randn(40, HIDDEN)
    ids, weights = choose(40, 3)
    for activation in ACTIVATIONS:
        layout = layout_of(kind, weight_dtype, activation=activation)
        experts = packed(layout, *make_experts(weight_dtype, activation))
        whole = moe_experts(x, ids, weights, experts, activation)
        for first, last in [(0, 1), (17, 18), (0, 2), (5, 30), (39, 40)]:
            part = moe_experts(x[first:last], ids[first:last], weights[first:last], experts, activation)
            assert torch.equal(part, whole[first:last]), (first, last)


@every_layout
def test_experts_elsewhere_add_nothing_and_parts_add_up(kind: str) -> None:
    experts = packed(layout_of(kind, torch.float32), *make_experts())
    x = torch.randn(9, HIDDEN)
    ids, weights = choose(9, 3)
    whole = moe_experts(x, ids, weights, experts, Activation())
    parts = [moe_experts(x, torch.where(here, ids, -1), weights, experts, Activation()) for here in (ids < 3, ids >= 3)]
    torch.testing.assert_close(parts[0] + parts[1], whole, atol=1e-6, rtol=1e-5)
    nowhere = moe_experts(x, torch.full_like(ids, -1), weights, experts, Activation())
    assert torch.equal(nowhere, torch.zeros_like(x))


@every_layout
def test_a_dropped_expert_is_missed_and_put_again_computes_the_same_bits(kind: str) -> None:
    layout = layout_of(kind, torch.float32)
    gate_up, down = make_experts()
    experts = packed(layout, gate_up, down)
    x, ids, weights = torch.randn(4, HIDDEN), torch.full((4, 1), 2), torch.ones(4, 1)
    before = moe_experts(x, ids, weights, experts, Activation())
    experts.drop(2)
    with pytest.raises(ValueError, match="expert 2 is not here"):
        moe_experts(x, ids, weights, experts, Activation())
    experts.put(2, layout.pack((gate_up[2], down[2], None, None)))
    assert torch.equal(moe_experts(x, ids, weights, experts, Activation()), before)
