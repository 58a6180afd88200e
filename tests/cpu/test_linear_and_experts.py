"""Packed products and experts against plain torch, and the independence of a row from its batch."""

from __future__ import annotations

import pytest
import torch

from kernels.activation import Activation
from kernels.linear import linear_reference, pack_linear
from kernels.moe_gemm import moe_experts, moe_experts_reference, pack_experts

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 6, 64, 48


@pytest.fixture(autouse=True)
def _inference_mode():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_linear_matches_plain_linear(dtype: torch.dtype, with_bias: bool) -> None:
    weight, x = torch.randn(40, 24, dtype=dtype), torch.randn(9, 24, dtype=dtype)
    bias = torch.randn(40, dtype=dtype) if with_bias else None
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(
        pack_linear(weight, bias)(x), linear_reference(x, weight, bias), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize(("in_features", "out_features"), [(576, 960), (64, 8), (768, 576), (48, 130)])
def test_a_row_of_a_packed_linear_has_the_same_bits_in_any_batch(in_features: int, out_features: int) -> None:
    linear = pack_linear(torch.randn(out_features, in_features))
    x = torch.randn(130, in_features)
    whole = linear(x)
    for first, last in [(0, 1), (5, 6), (0, 2), (3, 10), (7, 40), (0, 129), (129, 130)]:
        assert torch.equal(linear(x[first:last]), whole[first:last]), (first, last)


def make_experts() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 8, torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE) / 8


def choose(num_tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:top_k] for _ in range(num_tokens)])
    return ids, torch.rand(num_tokens, top_k)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_experts_match_the_token_by_token_reference(num_tokens: int, top_k: int) -> None:
    gate_up, down = make_experts()
    x = torch.randn(num_tokens, HIDDEN)
    ids, weights = choose(num_tokens, top_k)
    activation = Activation()
    out = moe_experts(x, ids, weights, pack_experts(gate_up, down), activation)
    torch.testing.assert_close(
        out, moe_experts_reference(x, ids, weights, gate_up, down, activation), atol=1e-5, rtol=1e-5
    )


def test_all_tokens_on_one_expert_and_empty_experts() -> None:
    gate_up, down = make_experts()
    x = torch.randn(11, HIDDEN)
    ids, weights = torch.full((11, 1), 4), torch.ones(11, 1)
    activation = Activation()
    out = moe_experts(x, ids, weights, pack_experts(gate_up, down), activation)
    torch.testing.assert_close(
        out, moe_experts_reference(x, ids, weights, gate_up, down, activation), atol=1e-5, rtol=1e-5
    )


def test_a_token_gets_the_same_bits_from_its_experts_in_any_batch() -> None:
    experts = pack_experts(*make_experts())
    x = torch.randn(40, HIDDEN)
    ids, weights = choose(40, 3)
    whole = moe_experts(x, ids, weights, experts, Activation())
    for first, last in [(0, 1), (17, 18), (0, 2), (5, 30), (39, 40)]:
        part = moe_experts(x[first:last], ids[first:last], weights[first:last], experts, Activation())
        assert torch.equal(part, whole[first:last]), (first, last)
