"""Expert choice against a plain per-token rule, and its independence of the batch."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.activation import Activation, activate, sigmoid
from kernels.moe_gate import GateSpec, select_experts

_SPECS = {
    "softmax": GateSpec(3),
    "renormalised": GateSpec(3, renormalise=True),
    "after": GateSpec(3, softmax_after_top_k=True),
    "norm_min": GateSpec(3, renormalise=True, norm_min=0.9),
    "scaled": GateSpec(3, renormalise=True, scale=2.5),
    "sigmoid": GateSpec(3, score="sigmoid", renormalise=True, norm_min=1e-20),
    "groups-top2": GateSpec(3, score="sigmoid", num_groups=4, top_groups=2),
    "groups-max": GateSpec(3, num_groups=4, top_groups=2, group_score="max"),
    "sparsemixer": GateSpec(2, score="sparsemixer", jitter=0.1),
}


def _softmax(values: list[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / sum(weights) for weight in weights]


def _choose(logits: list[float], spec: GateSpec, bias: list[float]) -> dict[int, float]:
    """The rule for one token, in plain Python: expert -> weight."""
    experts = range(len(logits))
    scores = [1 / (1 + math.exp(-x)) for x in logits] if spec.score == "sigmoid" else _softmax(logits)
    choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(logits) // spec.num_groups
    groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(spec.num_groups)]
    worth = [group[0] if spec.group_score == "max" else sum(group[:2]) for group in groups]
    best = sorted(range(spec.num_groups), key=lambda g: -worth[g])[: spec.top_groups]
    allowed = [e for e in experts if spec.num_groups == 1 or e // size in best]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: spec.top_k]
    weights = _softmax([logits[e] for e in chosen]) if spec.softmax_after_top_k else [scores[e] for e in chosen]
    if spec.renormalise:
        total = max(sum(weights), spec.norm_min)
        weights = [weight / total for weight in weights]
    return {e: weight * spec.scale for e, weight in zip(chosen, weights, strict=True)}


# No model adds a bias to the choice and takes the softmax after it.
_WITH_BIAS = [(name, bias) for name in _SPECS if name != "sparsemixer" for bias in (False, True)]
_WITH_BIAS.remove(("after", True))


@pytest.mark.parametrize(("name", "with_bias"), _WITH_BIAS)
def test_choice_follows_the_rule_token_by_token(name: str, with_bias: bool) -> None:
    spec = _SPECS[name]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50, 8, generator=generator)
    bias = torch.randn(8, generator=generator) * 0.3 if with_bias else torch.zeros(8)
    ids, weights = select_experts(logits, spec, bias if with_bias else None)
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    for row, row_ids, row_weights in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        expected = _choose(row, spec, bias.tolist())
        found = dict(zip(row_ids, row_weights, strict=True))
        assert found.keys() == expected.keys()
        assert all(abs(found[e] - expected[e]) < 1e-6 for e in expected)


def test_sparsemixer_masks_far_experts_and_then_the_chosen_one() -> None:
    logits = torch.tensor([[2.0, 1.9, 0.1, -3.0]])
    ids, weights = select_experts(logits, GateSpec(2, score="sparsemixer", jitter=0.1))
    assert ids.tolist() == [[0, 1]]
    first = _softmax([2.0, 1.9])[0]  # Only these two are within a fifth of the best.
    assert weights[0, 0].item() == pytest.approx(first)
    assert weights[0, 1].item() == pytest.approx(1.0)  # Alone once the first is out.


@pytest.mark.parametrize("name", _SPECS)
@pytest.mark.parametrize("experts", [8, 60, 128])
def test_a_row_has_the_same_experts_and_weights_in_any_batch(name: str, experts: int) -> None:
    spec = _SPECS[name]
    logits = torch.randn(300, experts, generator=torch.Generator().manual_seed(4)) * 3
    ids, weights = select_experts(logits, spec)
    for first, last in ((0, 1), (7, 8), (5, 38), (299, 300)):
        part_ids, part_weights = select_experts(logits[first:last].clone(), spec)
        assert torch.equal(part_ids, ids[first:last])
        assert torch.equal(part_weights, weights[first:last])


def test_half_precision_logits_are_widened() -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(5)).bfloat16()
    ids, weights = select_experts(logits, GateSpec(2))
    wide_ids, wide_weights = select_experts(logits.float(), GateSpec(2))
    assert torch.equal(ids, wide_ids)
    assert torch.equal(weights, wide_weights)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "swigluoai", "clamped_silu"])
@pytest.mark.parametrize("width", [32, 50])
def test_gated_activation_is_right_and_has_the_same_bits_in_any_batch(kind: str, width: int) -> None:
    activation = Activation(kind, alpha=1.7, limit=1.5)  # type: ignore[arg-type]
    x = torch.randn(70, 2 * width, generator=torch.Generator().manual_seed(6)) * 2
    gate, up = x.double().chunk(2, -1)
    up = up.clamp(-1.5, 1.5)
    if kind != "clamped_silu":
        gate = gate.clamp(max=1.5)
    if kind == "clamped_silu":
        expected = torch.nn.functional.silu(gate).clamp(max=1.5) * up
    elif kind == "swigluoai":
        expected = (up + 1) * gate * torch.sigmoid(1.7 * gate)
    else:
        function = torch.nn.functional.gelu if kind.startswith("gelu") else getattr(torch.nn.functional, kind)
        expected = (function(gate, approximate="tanh") if kind == "gelu_tanh" else function(gate)) * up
    whole = activate(x.clone(), activation)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5)
    for first, last in ((0, 1), (3, 20), (69, 70)):
        assert torch.equal(activate(x[first:last].clone(), activation), whole[first:last])


def test_sigmoid_has_the_same_bits_wherever_an_element_stands() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(7)) * 4
    one_by_one = torch.cat([sigmoid(x[i : i + 1]) for i in range(1000)])
    assert torch.equal(sigmoid(x), one_by_one)
