"""Short convolution, delta rules, Mamba and gated norm: transformers' numbers, and the same bits in any chunking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from transformers.models.jamba.modeling_jamba import mamba_selective_scan
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated, mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from kernels.gated_delta_rule import DeltaHeads, gated_delta_rule, gated_delta_rule_reference
from kernels.mamba import MambaHeads, mamba1_scan, mamba1_scan_reference, mamba2_scan, mamba2_scan_reference
from kernels.norm import gated_norm, gated_norm_reference, norm_of_gated, norm_of_gated_reference
from kernels.short_conv import short_conv, short_conv_reference
from kernels.state_rows import StateRows

pytestmark = pytest.mark.usefixtures("inference")

# Tokens of three requests, and in what chunks a second run computes them.
LENGTHS = (1, 23, 90)
STEPS = (((1, 5), (2, 1)), ((2, 64), (1, 1)), ((0, 1), (2, 2), (1, 15)), ((2, 23),), ((1, 2),))
SLOTS = (4, 0, 2)
NUM_SLOTS = 6

# A body of a kernel: rows of a step and their states -> results; mutates the states.
Body = Callable[[Tensor, Tensor, StateRows], Tensor]


def step_rows(chunks: Sequence[tuple[int, int]]) -> StateRows:
    """chunks: (request, number of rows)."""
    return StateRows(
        torch.tensor([0, *accumulate(count for _, count in chunks)]),
        torch.tensor([SLOTS[request] for request, _ in chunks]),
        max(count for _, count in chunks),
    )


def whole(body: Body, inputs: Sequence[Tensor], states: Tensor) -> list[Tensor]:
    """All requests in one step."""
    rows = step_rows([(request, len(x)) for request, x in enumerate(inputs)])
    return list(body(torch.cat(list(inputs)), states, rows).split(LENGTHS))


def pieces(body: Body, inputs: Sequence[Tensor], states: Tensor) -> list[Tensor]:
    """The requests chunk by chunk, as `STEPS` says."""
    done = [0] * len(inputs)
    found: list[list[Tensor]] = [[] for _ in inputs]
    for chunks in STEPS:
        parts = []
        for request, count in chunks:
            parts.append(inputs[request][done[request] : done[request] + count])
            done[request] += count
        out = body(torch.cat(parts), states, step_rows(chunks))
        for (request, _), part in zip(chunks, out.split([count for _, count in chunks]), strict=True):
            found[request].append(part)
    assert tuple(done) == LENGTHS
    return [torch.cat(parts) for parts in found]


def check_chunking(body: Body, width: int, state_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Equal bits of results and states in one step and in many; no other slot is touched."""
    inputs = [torch.randn(length, width).to(dtype) for length in LENGTHS]
    state_dtype = torch.float32 if len(state_shape) == 3 else dtype
    states = torch.full((NUM_SLOTS, *state_shape), torch.nan, dtype=state_dtype)
    states[list(SLOTS)] = 0
    other = states.clone()
    for left, right in zip(whole(body, inputs, states), pieces(body, inputs, other), strict=True):
        assert torch.equal(left, right)
        assert bool(left.isfinite().all())
    assert torch.equal(states[list(SLOTS)], other[list(SLOTS)])
    assert sorted(states.flatten(1).isnan().all(1).nonzero().flatten().tolist()) == [1, 3, 5]


def heads_of(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> DeltaHeads:
    rate, bias = -torch.rand(value_heads) * 3, torch.randn(value_heads)
    return DeltaHeads(key_heads, value_heads, key_dim, value_dim, rate, bias)


def rule_body(rule: Callable[..., Tensor], heads: DeltaHeads) -> tuple[Body, int]:
    """The rule over rows that hold qkv and gates, and the width of such rows."""
    width = sum(heads.widths)

    def body(rows: Tensor, states: Tensor, places: StateRows) -> Tensor:
        return rule(rows[:, :width], rows[:, width:], heads, states, places)

    return body, width + 2 * heads.num_values


def channel_rule_body(rule: Callable[..., Tensor], heads: DeltaHeads) -> tuple[Body, int]:
    """The rule over rows that hold qkv, logits of beta, and what makes a decay of each key channel."""
    width = sum(heads.widths)

    def body(rows: Tensor, states: Tensor, places: StateRows) -> Tensor:
        betas, decays = rows[:, width:].split([heads.num_values, heads.num_values * heads.key_dim], 1)
        # Through fp64, so that the gates of a row are the same bits in any chunking.
        gates = torch.cat([betas.double().sigmoid(), -decays.double().exp()], 1).to(rows.dtype)
        return rule(rows[:, :width], gates, heads, states, places)

    return body, width + heads.num_values * (1 + heads.key_dim)


def mamba_body(scan: Callable[..., Tensor], heads: MambaHeads) -> tuple[Body, int]:
    """Mamba 2 over rows that hold xbc and steps, and the width of such rows."""
    width = sum(heads.widths)

    def body(rows: Tensor, states: Tensor, places: StateRows) -> Tensor:
        return scan(rows[:, :width], rows[:, width:], heads, states, places)

    return body, width + heads.num_heads


def mamba_heads(num_heads: int, num_groups: int, head_dim: int, state_dim: int) -> MambaHeads:
    rate, bias, skip = -torch.rand(num_heads) * 3, torch.randn(num_heads), torch.randn(num_heads)
    return MambaHeads(num_heads, num_groups, head_dim, state_dim, rate, bias, skip, (0.05, 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("body", [short_conv, short_conv_reference])
@pytest.mark.parametrize(("channels", "width"), [(37, 4), (64, 2), (16, 3)])
def test_the_convolution_has_the_same_bits_in_any_chunking(
    body: Callable[..., Tensor], channels: int, width: int, dtype: torch.dtype
) -> None:
    weight = torch.randn(width, channels).to(dtype)
    check_chunking(lambda x, states, rows: body(x, weight, states, rows), channels, (width - 1, channels), dtype)


@pytest.mark.parametrize(("bias", "activation"), [(None, "silu"), (torch.linspace(-1, 1, 37), "silu"), (None, None)])
@pytest.mark.parametrize("body", [short_conv, short_conv_reference])
def test_the_convolution_is_that_of_transformers(
    body: Callable[..., Tensor], bias: Tensor | None, activation: str | None
) -> None:
    weight = torch.randn(4, 37)
    inputs = [torch.randn(length, 37) for length in LENGTHS]
    found = whole(
        lambda x, states, rows: body(x, weight, states, rows, bias, activates=activation is not None),
        inputs,
        torch.zeros(NUM_SLOTS, 3, 37),
    )
    for x, out in zip(inputs, found, strict=True):
        expected = causal_conv1d_fn(x.T[None], weight.T.contiguous(), bias, activation=activation)[0].T
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", [gated_delta_rule, gated_delta_rule_reference])
@pytest.mark.parametrize("shape", [(2, 4, 24, 80), (1, 1, 16, 16), (2, 2, 8, 20)], ids=str)
def test_the_rule_has_the_same_bits_in_any_chunking(
    rule: Callable[..., Tensor], shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    body, width = rule_body(rule, heads_of(*shape))
    check_chunking(body, width, (shape[1], shape[2], shape[3]), dtype)


@pytest.mark.parametrize("rule", [gated_delta_rule, gated_delta_rule_reference])
@pytest.mark.parametrize("shape", [(2, 4, 24, 80), (1, 3, 128, 128)], ids=str)
def test_the_rule_is_that_of_transformers(rule: Callable[..., Tensor], shape: tuple[int, int, int, int]) -> None:
    heads = heads_of(*shape)
    body, width = rule_body(rule, heads)
    inputs = [torch.randn(length, width) for length in LENGTHS]
    states = torch.zeros(NUM_SLOTS, *shape[1:])
    found = whole(body, inputs, states)
    sizes = [heads.num_keys * heads.key_dim] * 2 + [heads.num_values * heads.value_dim] + [heads.num_values] * 2
    for x, out, slot in zip(inputs, found, SLOTS, strict=True):
        q, k, v, strength, step = x[None].split(sizes, -1)
        expected, state = torch_chunk_gated_delta_rule(
            q.unflatten(-1, (heads.num_keys, -1)),
            k.unflatten(-1, (heads.num_keys, -1)),
            v.unflatten(-1, (heads.num_values, -1)),
            g=heads.decay_rate * torch.nn.functional.softplus(step + heads.step_bias),
            beta=strength.sigmoid(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(out, expected[0], atol=3e-6, rtol=1e-4)
        torch.testing.assert_close(states[slot], state[0], atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize("rule", [gated_delta_rule, gated_delta_rule_reference])
@pytest.mark.parametrize("shape", [(2, 24, 80), (1, 16, 20)], ids=str)
def test_a_decay_for_each_key_channel_has_the_same_bits_in_any_chunking(
    rule: Callable[..., Tensor], shape: tuple[int, int, int]
) -> None:
    body, width = channel_rule_body(rule, DeltaHeads(shape[0], *shape))
    check_chunking(body, width, shape, torch.float32)


@pytest.mark.parametrize("rule", [gated_delta_rule, gated_delta_rule_reference])
@pytest.mark.parametrize("shape", [(2, 24, 80), (3, 128, 128)], ids=str)
def test_the_rule_with_a_decay_for_each_key_channel_is_that_of_transformers(
    rule: Callable[..., Tensor], shape: tuple[int, int, int]
) -> None:
    num_heads, key_dim, _ = shape
    heads = DeltaHeads(num_heads, *shape)
    body, width = channel_rule_body(rule, heads)
    inputs, states = [torch.randn(length, width) for length in LENGTHS], torch.zeros(NUM_SLOTS, *shape)
    found = whole(body, inputs, states)
    for x, out, slot in zip(inputs, found, SLOTS, strict=True):
        q, k, v, betas, decays = x[None].split([*heads.widths, num_heads, num_heads * key_dim], -1)
        expected, state = chunk_kimi_delta_attention(
            *(part.unflatten(-1, (num_heads, -1)) for part in (q, k, v)),
            g=-decays.exp().unflatten(-1, (num_heads, key_dim)),
            beta=betas.sigmoid(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(out, expected[0], atol=3e-6, rtol=1e-4)
        torch.testing.assert_close(states[slot], state[0], atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scan", [mamba2_scan, mamba2_scan_reference])
@pytest.mark.parametrize("shape", [(4, 2, 80, 24), (1, 1, 20, 8)], ids=str)
def test_mamba_2_has_the_same_bits_in_any_chunking(
    scan: Callable[..., Tensor], shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    heads = mamba_heads(*shape)
    body, width = mamba_body(scan, heads)
    check_chunking(body, width, (heads.num_heads, heads.state_dim, heads.head_dim), dtype)


@pytest.mark.parametrize("scan", [mamba2_scan, mamba2_scan_reference])
@pytest.mark.parametrize("shape", [(4, 2, 80, 24), (2, 1, 64, 128)], ids=str)
def test_mamba_2_is_that_of_transformers(scan: Callable[..., Tensor], shape: tuple[int, int, int, int]) -> None:
    heads = mamba_heads(*shape)
    body, width = mamba_body(scan, heads)
    inputs = [torch.randn(length, width) for length in LENGTHS]
    states = torch.zeros(NUM_SLOTS, heads.num_heads, heads.state_dim, heads.head_dim)
    found = whole(body, inputs, states)
    for row, out, slot in zip(inputs, found, SLOTS, strict=True):
        x, b, c, steps = row[None].split([*heads.widths, heads.num_heads], -1)
        expected, state = mamba2_chunk_scan(
            x.unflatten(-1, (heads.num_heads, -1)),
            steps,
            heads.rate,
            b.unflatten(-1, (heads.num_groups, -1)),
            c.unflatten(-1, (heads.num_groups, -1)),
            chunk_size=16,
            D=heads.skip,
            dt_bias=heads.step_bias,
            dt_softplus=True,
            dt_limit=heads.limits,
            return_final_states=True,
        )
        torch.testing.assert_close(out, expected[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(states[slot], state[0].mT, atol=1e-5, rtol=1e-4)


def mamba_1_body(scan: Callable[..., Tensor], rate: Tensor, skip: Tensor) -> tuple[Body, int]:
    """Mamba 1 over rows that hold x, d, and B and C; and the width of such rows."""
    num_states, num_channels = rate.shape
    widths = [num_channels, num_channels, 2 * num_states]

    def body(rows: Tensor, states: Tensor, places: StateRows) -> Tensor:
        x, sizes, bc = rows.split(widths, 1)
        return scan(x, sizes.abs(), bc, rate, skip, states, places)

    return body, sum(widths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scan", [mamba1_scan, mamba1_scan_reference])
@pytest.mark.parametrize("shape", [(5, 48), (16, 20)], ids=str)
def test_mamba_1_has_the_same_bits_in_any_chunking(
    scan: Callable[..., Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    body, width = mamba_1_body(scan, -torch.rand(shape) * 3, torch.randn(shape[1]))
    inputs = [torch.randn(length, width).to(dtype) for length in LENGTHS]
    states, other = torch.zeros(2, NUM_SLOTS, *shape)
    for left, right in zip(whole(body, inputs, states), pieces(body, inputs, other), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(states, other)


@pytest.mark.parametrize("scan", [mamba1_scan, mamba1_scan_reference])
def test_mamba_1_is_that_of_transformers(scan: Callable[..., Tensor]) -> None:
    rate, skip = -torch.rand(16, 48) * 3, torch.randn(48)
    body, width = mamba_1_body(scan, rate, skip)
    inputs, states = [torch.randn(length, width) for length in LENGTHS], torch.zeros(NUM_SLOTS, 16, 48)
    for row, out, slot in zip(inputs, whole(body, inputs, states), SLOTS, strict=True):
        x, sizes, b, c = row.T[None].split([48, 48, 16, 16], 1)
        expected, state = mamba_selective_scan(x, sizes.abs(), rate.T, b, c, skip, return_last_state=True)
        torch.testing.assert_close(out, expected[0].T, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(states[slot], state[0].T, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("norm", [gated_norm, gated_norm_reference])
@pytest.mark.parametrize("width", [16, 20, 128])
def test_the_gated_norm_is_that_of_transformers_and_a_row_has_the_same_bits_anywhere(
    norm: Callable[..., Tensor], width: int
) -> None:
    module = Qwen3NextRMSNormGated(width, eps=1e-5)
    module.weight.uniform_(0.5, 1.5)
    x, gate = torch.randn(40, 3, width), torch.randn(40, 3 * width + 5)[:, : 3 * width]
    out = norm(x, gate, module.weight, 1e-5)
    expected = module(x.reshape(-1, width), gate.reshape(-1, width)).view(40, -1)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(norm(x[7:8], gate[7:8], module.weight, 1e-5), out[7:8])


@pytest.mark.parametrize(("num_groups", "width"), [(1, 48), (4, 20), (8, 64)])
def test_a_norm_of_gated_groups_is_that_of_transformers_and_of_each_row_alone(num_groups: int, width: int) -> None:
    norm = NemotronHRMSNormGated(num_groups * width, group_size=width, eps=1e-5)
    norm.weight.data.uniform_(0.5, 1.5)
    x, gates = torch.randn(33, num_groups * width), torch.randn(33, 2 * num_groups * width)
    gate = gates[:, num_groups * width :]
    found = norm_of_gated(x, gate, norm.weight, 1e-5, num_groups)
    torch.testing.assert_close(found, norm(x, gate), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(found, norm_of_gated_reference(x, gate, norm.weight, 1e-5, num_groups))
    assert torch.equal(norm_of_gated(x[7:8], gate[7:8], norm.weight, 1e-5, num_groups), found[7:8])
