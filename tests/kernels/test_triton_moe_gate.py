"""Expert selection: every gate option against the CPU's, ties, and logits that are not numbers."""

import pytest
import torch

import kernels.moe_gate as on_cpu
from kernels.gpu.moe_gate import select_experts
from kernels.specs import GateSpec

pytestmark = pytest.mark.kernel_change

SPECS = {
    "softmax": GateSpec(2),
    "softmax of chosen": GateSpec(4, softmax_after_top_k=True),
    "renormalised": GateSpec(8, renormalise=True, scale=0.5),
    "renormalised with a floor": GateSpec(3, renormalise=True, norm_min=1e-9),
    "sigmoid": GateSpec(1, score="sigmoid", scale=2.0),
    "sigmoid renormalised": GateSpec(3, score="sigmoid", renormalise=True, norm_min=1e-20, scale=2.5),
    "groups by two best": GateSpec(3, score="sigmoid", renormalise=True, num_groups=4, top_groups=2),
    "groups by best": GateSpec(4, num_groups=4, top_groups=3, group_score="max", scale=16.0),
    "softmax after top-k, with groups": GateSpec(3, softmax_after_top_k=True, num_groups=2, renormalise=True),
    "ones": GateSpec(3, score="ones"),
    "sparsemixer": GateSpec(2, score="sparsemixer", jitter=0.01),
}


def on(device, spec, logits, bias=None, **options):
    ids, weights = select_experts(logits.to(device), spec, None if bias is None else bias.to(device), **options)
    return ids.cpu(), weights.cpu()


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_experts", [8, 20, 64])
@pytest.mark.parametrize("name", SPECS)
def test_the_choice_is_that_of_the_cpu(device, name, num_experts, has_bias):
    torch.manual_seed(0)
    logits = torch.randn(4, num_experts)
    bias = torch.randn(num_experts) * 0.2 if has_bias else None
    ids, weights = on(device, SPECS[name], logits, bias)
    expected_ids, expected_weights = on_cpu.select_experts(logits, SPECS[name], bias)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in SPECS if name != "sparsemixer"])
def test_among_equal_scores_the_lowest_expert_is_chosen(device, name):
    torch.manual_seed(1)
    logits = torch.randint(0, 3, (6, 16)).float()
    ids, weights = on(device, SPECS[name], logits)
    expected_ids, expected_weights = on_cpu.select_experts_reference(logits, SPECS[name])
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", SPECS)
def test_ids_are_distinct_and_valid_whatever_the_logits_are(device, name):
    logits = torch.zeros(5, 12)
    logits[0] = torch.nan
    logits[1, 3:] = torch.nan
    logits[2] = -torch.inf
    logits[3] = torch.inf
    ids, _ = on(device, SPECS[name], logits)
    for row in ids.tolist():
        assert len(set(row)) == len(row)
        assert all(0 <= expert < 12 for expert in row)


def test_reads_rows_of_half_precision_that_lie_apart(device):
    torch.manual_seed(2)
    wide = torch.randn(3, 40).bfloat16()
    ids, weights = on(device, GateSpec(4), wide[:, 8:24])
    expected_ids, expected_weights = on_cpu.select_experts(wide[:, 8:24], GateSpec(4))
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_rows_that_pad_a_batch_choose_nobody(device):
    torch.manual_seed(3)
    logits = torch.randn(4, 8)
    logits[2:] = torch.nan
    num_valid = torch.tensor(2, dtype=torch.int32, device=device)
    ids, weights = on(device, GateSpec(3, renormalise=True), logits, num_valid=num_valid)
    expected_ids, expected_weights = on_cpu.select_experts(logits[:2], GateSpec(3, renormalise=True))
    assert torch.equal(ids[:2], expected_ids)
    torch.testing.assert_close(weights[:2], expected_weights, rtol=1e-5, atol=1e-7)
    assert (ids[2:] == -1).all()
    assert (weights[2:] == 0).all()


def test_no_tokens_choose_nothing(device):
    ids, weights = on(device, GateSpec(3), torch.empty(0, 8))
    assert ids.shape == weights.shape == (0, 3)


def test_refuses_groups_that_do_not_divide_the_experts(device):
    with pytest.raises(ValueError, match="3 groups"):
        on(device, GateSpec(2, num_groups=3), torch.zeros(1, 8))
