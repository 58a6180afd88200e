"""Recurrent layers on a GPU: the reference's numbers, the same bits in any chunking, padding that leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from kernels.gated_delta_rule import DeltaHeads, gated_delta_rule_reference
from kernels.gpu.recurrent import gated_delta_rule, gated_norm, mamba1_scan, mamba2_scan, short_conv
from kernels.mamba import MambaHeads, mamba1_scan_reference, mamba2_scan_reference
from kernels.norm import gated_norm_reference
from kernels.short_conv import short_conv_reference
from kernels.state_rows import StateRows

pytestmark = pytest.mark.kernel_change

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# (slot, rows) of the chunks of a step; slot -1 pads.
STEPS = (((2, 7), (-1, 1), (0, 1)), ((0, 2), (2, 1), (-1, 3)), ((2, 9),), ((0, 2), (2, 2)))
NUM_SLOTS = 4

Body = Callable[[Tensor, Tensor, StateRows], Tensor]


def rows_of(step: Sequence[tuple[int, int]], device: torch.device) -> StateRows:
    counts = [count for _, count in step]
    bounds = torch.tensor([0, *accumulate(counts)], device=device)
    return StateRows(bounds, torch.tensor([slot for slot, _ in step], device=device), max(counts))


def run(body: Body, inputs: Sequence[Tensor], states: Tensor) -> list[Tensor]:
    """Results of the steps' rows that are no padding, by slot."""
    found: dict[int, list[Tensor]] = {0: [], 2: []}
    for step, x in zip(STEPS, inputs, strict=True):
        out = body(x, states, rows_of(step, x.device))
        for (slot, _), part in zip(step, out.split([count for _, count in step]), strict=True):
            if slot >= 0:
                found[slot].append(part)
    return [torch.cat(found[slot]) for slot in (0, 2)]


def run_whole(body: Body, inputs: Sequence[Tensor], states: Tensor) -> list[Tensor]:
    """The same requests, each in one chunk, without padding."""
    whole = []
    for slot in (0, 2):
        parts = [
            part
            for step, x in zip(STEPS, inputs, strict=True)
            for (of, _), part in zip(step, x.split([count for _, count in step]), strict=True)
            if of == slot
        ]
        x = torch.cat(parts)
        whole.append(body(x, states, rows_of([(slot, len(x))], x.device)))
    return whole


def check(
    body: Body, reference: Body, width: int, state: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    state_dtype = torch.float32 if len(state) == 3 else dtype
    # Rows of a wider tensor, as slices of a projection are.
    inputs = [
        torch.randn(sum(count for _, count in step), width + 8, device=device).to(dtype)[:, :width] for step in STEPS
    ]
    states = [torch.full((NUM_SLOTS, *state), torch.nan, dtype=state_dtype, device=device) for _ in range(3)]
    for pool in states:
        pool[[0, 2]] = 0
    found, whole = run(body, inputs, states[0]), run_whole(body, inputs, states[1])
    expected = run_whole(reference, inputs, states[2])
    for pieces, at_once, wanted in zip(found, whole, expected, strict=True):
        assert torch.equal(pieces, at_once)
        torch.testing.assert_close(pieces, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(states[0][[0, 2]], states[1][[0, 2]])
    torch.testing.assert_close(states[0][[0, 2]], states[2][[0, 2]], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert bool(states[0][[1, 3]].isnan().all())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("channels", "width", "activates"), [(70, 4, True), (64, 2, False), (16, 3, True)])
def test_the_convolution_is_the_reference(
    channels: int, width: int, activates: bool, dtype: torch.dtype, device: torch.device
) -> None:
    weight = torch.randn(width, channels, device=device).to(dtype)
    bias = torch.randn(channels, device=device).to(dtype) if width > 2 else None
    check(
        lambda x, states, rows: short_conv(x, weight, states, rows, bias, activates=activates),
        lambda x, states, rows: short_conv_reference(x, weight, states, rows, bias, activates=activates),
        channels,
        (width - 1, channels),
        dtype,
        device,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 24, 40), (1, 1, 80, 16)], ids=str)
def test_the_rule_is_the_reference(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    key_heads, value_heads, key_dim, value_dim = shape
    rate, bias = -torch.rand(value_heads, device=device) * 3, torch.randn(value_heads, device=device)
    heads = DeltaHeads(*shape, rate, bias)
    width = 2 * key_heads * key_dim + value_heads * value_dim
    check(
        lambda x, states, rows: gated_delta_rule(x[:, :width], x[:, width:], heads, states, rows),
        lambda x, states, rows: gated_delta_rule_reference(x[:, :width], x[:, width:], heads, states, rows),
        width + 2 * value_heads,
        (value_heads, key_dim, value_dim),
        dtype,
        device,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_rule_with_a_decay_for_each_key_channel_is_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    heads = DeltaHeads(2, 2, 24, 40)
    width = sum(heads.widths)

    def over_rows(rule: Callable[..., Tensor]) -> Body:
        def body(x: Tensor, states: Tensor, rows: StateRows) -> Tensor:
            gates = torch.cat([x[:, width : width + 2].sigmoid(), -x[:, width + 2 :].exp()], 1)
            return rule(x[:, :width], gates, heads, states, rows)

        return body

    extra = heads.num_values * (1 + heads.key_dim)
    check(over_rows(gated_delta_rule), over_rows(gated_delta_rule_reference), width + extra, (2, 24, 40), dtype, device)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(4, 2, 16, 24), (1, 1, 40, 16)], ids=str)
def test_mamba_2_is_the_reference(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    num_heads, _, head_dim, state_dim = shape
    rate, bias, skip = -torch.rand(num_heads, device=device) * 3, *torch.randn(2, num_heads, device=device)
    heads = MambaHeads(*shape, rate, bias, skip, (0.1, 1.5))
    width = sum(heads.widths)
    check(
        lambda x, states, rows: mamba2_scan(x[:, :width], x[:, width:], heads, states, rows),
        lambda x, states, rows: mamba2_scan_reference(x[:, :width], x[:, width:], heads, states, rows),
        width + num_heads,
        (num_heads, state_dim, head_dim),
        dtype,
        device,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_mamba_1_is_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    num_states, channels = 12, 70
    rate, skip = -torch.rand(num_states, channels, device=device) * 3, torch.randn(channels, device=device)

    def over_rows(scan: Callable[..., Tensor]) -> Body:
        def body(rows: Tensor, states: Tensor, places: StateRows) -> Tensor:
            x, sizes, bc = rows.split([channels, channels, 2 * num_states], 1)
            return scan(x, sizes.abs(), bc, rate, skip, states[:, 0], places)

        return body

    width = 2 * (channels + num_states)
    check(over_rows(mamba1_scan), over_rows(mamba1_scan_reference), width, (1, num_states, channels), dtype, device)


def test_rows_whose_results_lie_beyond_32_bits_are_written(device: torch.device) -> None:
    heads, dtype = DeltaHeads(1, 1, 16, 2048), torch.bfloat16
    count, width = (1 << 20) + 2, sum(heads.widths)
    # Memory that nobody touches takes no room: of all rows the last two are computed.
    qkv = torch.empty(count, width, dtype=dtype, device=device)
    gates = torch.empty(count, 2, device=device)
    torch.manual_seed(0)
    qkv[-2:], gates[-2:] = torch.randn(2, width), torch.rand(2, 2)
    bounds = torch.tensor([count - 2, count], dtype=torch.int32, device=device)
    rows = StateRows(bounds, torch.tensor([0], device=device), 2)
    states = torch.zeros(2, 1, 1, 16, 2048, device=device)
    found = gated_delta_rule(qkv, gates, heads, states[0], rows)[-2:]
    expected = gated_delta_rule(qkv[-2:].clone(), gates[-2:].clone(), heads, states[1], rows_of([(0, 2)], device))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [16, 20, 128])
def test_the_gated_norm_is_the_reference(width: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, width, device=device).to(dtype)
    gate = torch.randn(5, 3 * width + 8, device=device).to(dtype)[:, : 3 * width]
    weight = torch.rand(width, device=device).to(dtype)
    out = gated_norm(x, gate, weight, 1e-5)
    expected = gated_norm_reference(x, gate, weight, 1e-5)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(gated_norm(x[3:4], gate[3:4], weight, 1e-5), out[3:4])
