"""Short convolution, gated delta rule and gated norm: transformers' numbers, and the same bits in any chunking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from kernels.gated_delta_rule import DeltaHeads, gated_delta_rule, gated_delta_rule_reference
from kernels.norm import gated_norm, gated_norm_reference
from kernels.short_conv import short_conv, short_conv_reference
from kernels.state_rows import StateRows

# Tokens of three requests, and in what chunks a second run computes them.
LENGTHS = (1, 23, 90)
STEPS = (((1, 5), (2, 1)), ((2, 64), (1, 1)), ((0, 1), (2, 2), (1, 15)), ((2, 23),), ((1, 2),))
SLOTS = (4, 0, 2)
NUM_SLOTS = 6

# A body of a kernel: rows of a step and their states -> results; mutates the states.
Body = Callable[[Tensor, Tensor, StateRows], Tensor]


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


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
    width = 2 * heads.num_keys * heads.key_dim + heads.num_values * heads.value_dim

    def body(rows: Tensor, states: Tensor, places: StateRows) -> Tensor:
        return rule(rows[:, :width], rows[:, width:], heads, states, places)

    return body, width + 2 * heads.num_values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("body", [short_conv, short_conv_reference])
@pytest.mark.parametrize(("channels", "width"), [(37, 4), (64, 2), (16, 3)])
def test_the_convolution_has_the_same_bits_in_any_chunking(
    body: Callable[..., Tensor], channels: int, width: int, dtype: torch.dtype
) -> None:
    weight = torch.randn(width, channels).to(dtype)
    check_chunking(lambda x, states, rows: body(x, weight, states, rows), channels, (width - 1, channels), dtype)


@pytest.mark.parametrize("body", [short_conv, short_conv_reference])
def test_the_convolution_is_that_of_transformers(body: Callable[..., Tensor]) -> None:
    weight = torch.randn(4, 37)
    inputs = [torch.randn(length, 37) for length in LENGTHS]
    found = whole(lambda x, states, rows: body(x, weight, states, rows), inputs, torch.zeros(NUM_SLOTS, 3, 37))
    for x, out in zip(inputs, found, strict=True):
        expected = causal_conv1d_fn(x.T[None], weight.T.contiguous(), activation="silu")[0].T
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
