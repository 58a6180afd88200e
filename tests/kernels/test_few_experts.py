"""The variant for few rows chooses and computes what the kernels that serve do."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.variants.few_experts import few_rows_experts
from kernels.gpu.moe import moe_experts_reference
from kernels.gpu.moe_gate import select_experts
from kernels.gpu.moe_weights import GpuExperts, StoredMatrix, quantise_int8
from kernels.specs import Activation, GateSpec

pytestmark = pytest.mark.kernel_change

HIDDEN, WIDTH, EXPERTS, TOKENS = 72, 40, 6, 3


def experts_of(device: torch.device, *, gated: bool, biases: bool, quantised: bool, absent: bool) -> GpuExperts:
    held = EXPERTS - absent
    shapes = (((1 + gated) * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    matrices = [torch.randn(held, *shape, device=device) / shape[1] ** 0.5 for shape in shapes]
    own = [torch.randn(held, shape[0], device=device) if biases else None for shape in shapes]
    store = quantise_int8 if quantised else lambda values, bias: StoredMatrix(values, bias=bias)
    up, down = (store(values, bias) for values, bias in zip(matrices, own, strict=True))
    slots = torch.tensor([*range(held), -1], dtype=torch.int32, device=device) if absent else None
    return GpuExperts(up, down, slots)


@pytest.mark.parametrize(
    ("spec", "activation", "flags"),
    [
        (GateSpec(2, renormalise=True), Activation(), {}),
        (GateSpec(3, score="sigmoid", scale=2.5), Activation("swigluoai", alpha=1.7, limit=7.0), {"biases": True}),
        (GateSpec(2, num_groups=2, top_groups=1), Activation("relu2"), {"gated": False, "quantised": True}),
        (GateSpec(EXPERTS, renormalise=True), Activation("gelu"), {"absent": True}),
    ],
    ids=["qwen", "gpt-oss", "groups, no gate, int8", "an absent expert"],
)
def test_few_rows_choose_and_compute_as_the_kernels_that_serve(
    spec: GateSpec, activation: Activation, flags: dict[str, bool], device: torch.device
) -> None:
    torch.manual_seed(0)
    usual = {"gated": True, "biases": False, "quantised": False, "absent": False}
    experts = experts_of(device, **(usual | flags))
    x, logits = torch.randn(TOKENS, HIDDEN, device=device), torch.randn(TOKENS, EXPERTS, device=device)
    bias = torch.randn(EXPERTS, device=device) if spec.score == "sigmoid" else None
    found, ids, weights = few_rows_experts(x, logits, spec, experts, activation, bias)
    wanted_ids, wanted_weights = select_experts(logits, spec, bias)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights)
    torch.testing.assert_close(found, moe_experts_reference(x, ids, weights, experts, activation), rtol=1e-4, atol=1e-4)
    alone, _, _ = few_rows_experts(x[1:2], logits[1:2], spec, experts, activation, bias)
    assert torch.equal(alone, found[1:2])
