"""Norm, rotation and KV write in one kernel: every form of rotation, skipped slots, untouched neighbours, fp8."""

import pytest
import torch

from kernels.gpu.rope_kv import norm_rope_write_kv, norm_rope_write_kv_reference
from tests.support.far_memory import FAR, spread

NUM_SLOTS = 24


class Case:
    """Inputs of one call, with pools full of canaries."""

    def __init__(self, device, dtype, tokens, heads, kv_heads, dim, rotary, *, pool_dtype=None, slots_first=False):
        generator = torch.Generator().manual_seed(tokens * 100 + dim)

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(device)

        packed = randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
        self.q, self.k, self.v = packed.split([heads, kv_heads, kv_heads], 1)
        angles = randn(tokens, rotary // 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        order = torch.randperm(NUM_SLOTS, generator=generator)
        self.slots = order[:tokens].to(torch.int64).to(device)
        self.weights = randn(2, dim).to(dtype)
        self.shape = (NUM_SLOTS, kv_heads, dim) if slots_first else (kv_heads, NUM_SLOTS, dim)
        self.slots_first = slots_first
        self.pool_dtype = pool_dtype or dtype
        self.device = device

    def pools(self):
        pools = [torch.full(self.shape, 7.0, device=self.device).to(self.pool_dtype) for _ in range(2)]
        return [pool.transpose(0, 1) for pool in pools] if self.slots_first else pools

    def run(self, function, **options):
        keys, values = self.pools()
        out = torch.full(self.q.shape, torch.nan, dtype=self.q.dtype, device=self.device)
        result = function(self.q, self.k, self.v, self.cos, self.sin, self.slots, keys, values, out=out, **options)
        assert result is out
        return out.float(), keys.float(), values.float()


def check(case, rtol=2e-6, atol=2e-6, **options):
    actual = case.run(norm_rope_write_kv, **options)
    expected = case.run(norm_rope_write_kv_reference, **options)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "rotary"),
    [(3, 4, 2, 16, 16), (1, 1, 1, 64, 64), (2, 9, 3, 20, 8), (2, 10, 1, 24, 22), (0, 2, 1, 16, 16)],
)
def test_all_rotations_equal_the_reference(device, tokens, heads, kv_heads, dim, rotary, normed, interleaved):
    case = Case(device, torch.float32, tokens, heads, kv_heads, dim, rotary)
    options = {"interleaved": interleaved, "eps": 1e-6}
    if normed:
        options |= {"q_weight": case.weights[0], "k_weight": case.weights[1]}
    check(case, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once(device, dtype):
    case = Case(device, dtype, 4, 5, 2, 32, 32)
    options = {"interleaved": False, "eps": 1e-6, "q_weight": case.weights[0], "k_weight": case.weights[1]}
    # One unit in the last place: fp32 and fp64 may fall on different sides of a tie.
    check(case, rtol=8e-3 if dtype == torch.bfloat16 else 1e-3, atol=1e-5, **options)


def test_a_slot_of_minus_one_writes_nothing_and_its_query_is_rotated_all_the_same(device):
    case = Case(device, torch.float32, 5, 4, 2, 16, 16)
    case.slots[1] = -1
    case.slots[4] = -1
    check(case, interleaved=False)


def test_only_the_tokens_slots_of_the_pools_change(device):
    case = Case(device, torch.float32, 3, 4, 2, 16, 8)
    _, keys, values = case.run(norm_rope_write_kv, interleaved=True)
    others = torch.ones(NUM_SLOTS, dtype=torch.bool)
    others[case.slots.cpu()] = False
    for pool in (keys, values):
        assert bool((pool[:, others.to(pool.device)] == 7.0).all())


def test_pools_may_keep_slots_outside_heads(device):
    check(Case(device, torch.float32, 3, 4, 2, 16, 16, slots_first=True), interleaved=False)


def test_values_are_clipped_before_the_norm(device):
    case = Case(device, torch.float32, 3, 4, 2, 16, 8)
    check(case, interleaved=False, clip=0.5)
    check(case, interleaved=False, clip=0.5, eps=1e-6, q_weight=case.weights[0], k_weight=case.weights[1])


def test_keys_alone_into_a_part_of_the_pools_channels(device):
    case = Case(device, torch.float32, 3, 4, 1, 16, 16)
    wide = torch.full((1, NUM_SLOTS, 40), 7.0, device=device)
    expected = wide.clone()
    inputs = (case.q, case.k, None, case.cos, case.sin, case.slots)
    q = norm_rope_write_kv(*inputs, wide[..., 24:], None, interleaved=True)
    torch.testing.assert_close(
        q, norm_rope_write_kv_reference(*inputs, expected[..., 24:], None, interleaved=True), rtol=2e-6, atol=2e-6
    )
    torch.testing.assert_close(wide, expected, rtol=2e-6, atol=2e-6)


def test_fp8_pools_hold_scaled_values_and_clamp_what_is_too_large(device):
    case = Case(device, torch.bfloat16, 4, 4, 2, 16, 16, pool_dtype=torch.float8_e4m3fn)
    scales = {
        "k_scale": torch.tensor([0.01, 0.002], device=device),
        "v_scale": torch.tensor([0.02, 0.004], device=device),
    }
    actual = case.run(norm_rope_write_kv, interleaved=False, **scales)
    expected = case.run(norm_rope_write_kv_reference, interleaved=False, **scales)
    for ours, theirs in zip(actual, expected, strict=True):
        assert not ours.isnan().any()
        # A neighbour among the fp8 numbers is an eighth away.
        torch.testing.assert_close(ours, theirs, rtol=0.13, atol=1e-2)
        assert float((ours != theirs).float().mean()) < 0.02
    assert float(actual[1].max()) == 448.0


def test_fp8_pools_without_scales_clamp_what_is_too_large(device):
    case = Case(device, torch.bfloat16, 4, 4, 2, 16, 16, pool_dtype=torch.float8_e4m3fn)
    case.k.mul_(300)
    case.v.mul_(300)
    actual = case.run(norm_rope_write_kv, interleaved=True)
    expected = case.run(norm_rope_write_kv_reference, interleaved=True)
    for ours, theirs in zip(actual, expected, strict=True):
        assert not ours.isnan().any()
        torch.testing.assert_close(ours, theirs, rtol=0.13, atol=1e-2)
    assert float(actual[1].max()) == float(actual[2].max()) == 448.0


def test_a_token_has_the_same_bits_in_any_batch(device):
    case = Case(device, torch.bfloat16, 4, 6, 2, 32, 32)
    options = {"interleaved": False, "eps": 1e-6, "q_weight": case.weights[0], "k_weight": case.weights[1]}
    q, keys, values = case.run(norm_rope_write_kv, **options)
    order = torch.tensor([2, 0, 3, 1], device=device)
    for name in ("q", "k", "v", "cos", "sin", "slots"):
        setattr(case, name, getattr(case, name)[order])
    q_permuted, keys_permuted, values_permuted = case.run(norm_rope_write_kv, **options)
    assert torch.equal(q_permuted, q[order])
    assert torch.equal(keys_permuted, keys)
    assert torch.equal(values_permuted, values)


def test_slots_and_heads_that_lie_beyond_32_bits_are_addressed(device):
    case = Case(device, torch.float16, 3, 2, 2, 16, 16)
    expected = case.run(norm_rope_write_kv_reference, interleaved=False)
    # The second head begins beyond 2^31 elements.
    empty = torch.full((2, NUM_SLOTS, 16), 7.0, dtype=torch.float16, device=device)
    pools = [spread(empty, (FAR, 16, 1)) for _ in range(2)]
    q = norm_rope_write_kv(case.q, case.k, case.v, case.cos, case.sin, case.slots, *pools, interleaved=False)
    for ours, theirs in zip((q, *pools), expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-3, atol=1e-3)
