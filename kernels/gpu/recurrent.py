"""Triton bodies of recurrent layers: short convolution, delta rules, Mamba and gated norm.

A chunk whose slot is -1 pads a batch: it starts from zeros and leaves no state. Tokens are computed one by one on a
state in fp32, so that a request has the same bits in any chunking and any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_delta_rule import UNIT_EPS, DeltaHeads, num_decays
from kernels.mamba import MambaHeads
from kernels.state_rows import StateRows

_CHANNELS = 64
_ROWS = 16
# The number of value channels of a head that one program advances; their state [K, 32] stays in its registers.
_VALUES = 32


def short_conv(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    rows: StateRows,
    bias: Tensor | None = None,
    *,
    activates: bool = True,
) -> Tensor:
    """See `kernels.short_conv.short_conv`."""
    width, num_channels = weight.shape
    out = torch.empty((len(x), num_channels), dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    num_chunks, parts = len(rows.slots), triton.cdiv(num_channels, _CHANNELS)
    arguments = (x, states, rows.first_rows, rows.slots, x.stride(0), states.stride(0), num_channels)
    _conv_kernel[(num_chunks, triton.cdiv(rows.max_rows, _ROWS), parts)](
        *arguments,
        weight,
        weight if bias is None else bias,
        out,
        HAS_BIAS=bias is not None,
        ACTIVATES=activates,
        WIDTH=width,
        ROWS=_ROWS,
        CHANNELS=_CHANNELS,
        num_warps=4,
    )
    # Written only now, because every program of a chunk reads its old state.
    _conv_state_kernel[(num_chunks, parts)](
        *arguments, WIDTH=width, PLACES=triton.next_power_of_2(width - 1), CHANNELS=_CHANNELS, num_warps=4
    )
    return out


def gated_delta_rule(qkv: Tensor, gates: Tensor, heads: DeltaHeads, states: Tensor, rows: StateRows) -> Tensor:
    """See `kernels.gated_delta_rule.gated_delta_rule`."""
    out = torch.empty((len(qkv), heads.num_values, heads.value_dim), dtype=qkv.dtype, device=qkv.device)
    if not len(qkv):
        return out
    values = min(_VALUES, triton.next_power_of_2(heads.value_dim))
    _rule_kernel[(len(rows.slots), heads.num_values, triton.cdiv(heads.value_dim, values))](
        qkv,
        gates,
        gates if heads.decay_rate is None else heads.decay_rate,
        gates if heads.step_bias is None else heads.step_bias,
        states,
        rows.first_rows,
        rows.slots,
        out,
        qkv.stride(0),
        gates.stride(0),
        states.stride(0),
        heads.key_dim**-0.5,
        UNIT_EPS,
        READY=heads.decay_rate is None,
        DECAYS=num_decays(gates, heads),
        KEY_HEADS=heads.num_keys,
        VALUE_HEADS=heads.num_values,
        KEY_DIM=heads.key_dim,
        VALUE_DIM=heads.value_dim,
        KEYS=triton.next_power_of_2(heads.key_dim),
        VALUES=values,
        num_warps=4,
    )
    return out


def mamba2_scan(xbc: Tensor, steps: Tensor, heads: MambaHeads, states: Tensor, rows: StateRows) -> Tensor:
    """See `kernels.mamba.mamba2_scan`."""
    out = torch.empty((len(xbc), heads.num_heads, heads.head_dim), dtype=xbc.dtype, device=xbc.device)
    if not len(xbc):
        return out
    values = min(_VALUES, triton.next_power_of_2(heads.head_dim))
    _mamba2_kernel[(len(rows.slots), heads.num_heads, triton.cdiv(heads.head_dim, values))](
        xbc,
        steps,
        heads.rate,
        heads.step_bias,
        heads.skip,
        states,
        rows.first_rows,
        rows.slots,
        out,
        xbc.stride(0),
        steps.stride(0),
        states.stride(0),
        *heads.limits,
        HEADS=heads.num_heads,
        GROUPS=heads.num_groups,
        KEY_DIM=heads.state_dim,
        VALUE_DIM=heads.head_dim,
        KEYS=triton.next_power_of_2(heads.state_dim),
        VALUES=values,
        num_warps=4,
    )
    return out


def mamba1_scan(
    x: Tensor, sizes: Tensor, bc: Tensor, rate: Tensor, skip: Tensor, states: Tensor, rows: StateRows
) -> Tensor:
    """See `kernels.mamba.mamba1_scan`."""
    num_states, num_channels = rate.shape
    out = torch.empty((len(x), num_channels), dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    _mamba1_kernel[(len(rows.slots), triton.cdiv(num_channels, _CHANNELS))](
        x,
        sizes,
        bc,
        rate,
        skip,
        states,
        rows.first_rows,
        rows.slots,
        out,
        x.stride(0),
        sizes.stride(0),
        bc.stride(0),
        states.stride(0),
        NUM_CHANNELS=num_channels,
        NUM_STATES=num_states,
        STATES=triton.next_power_of_2(num_states),
        CHANNELS=_CHANNELS,
        num_warps=4,
    )
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.norm.gated_norm`."""
    num_rows, num_heads, width = x.shape
    out = torch.empty((num_rows, num_heads * width), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    _gated_norm_kernel[(num_rows, num_heads)](
        x, gate, weight, out, gate.stride(0), eps, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=1
    )
    return out


@triton.jit
def _inputs(x, states, x_stride, first, slot, state_stride, num_channels, sources, channels, mask, WIDTH: tl.constexpr):
    """Load the inputs of a chunk at rows `sources` in fp32; negative rows lie in its state."""
    at_rows = x + (first + sources)[:, None] * x_stride + channels[None, :]
    at_states = states + slot * state_stride + (sources + WIDTH - 1)[:, None] * num_channels + channels[None, :]
    new = tl.load(at_rows, mask=mask & (sources >= 0)[:, None], other=0.0).to(tl.float32)
    old = tl.load(at_states, mask=mask & (sources < 0)[:, None] & (slot >= 0), other=0.0).to(tl.float32)
    return new + old


@triton.jit
def _conv_kernel(
    x,
    states,
    first_rows,
    slots,
    x_stride: tl.int64,
    state_stride: tl.int64,
    num_channels: tl.int64,
    weight,
    bias,
    out,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    chunk = tl.program_id(0)
    first = tl.load(first_rows + chunk)
    count = tl.load(first_rows + chunk + 1) - first
    if tl.program_id(1) * ROWS >= count:
        return
    slot = tl.load(slots + chunk)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channels = tl.program_id(2).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    mask = (rows < count)[:, None] & (channels < num_channels)[None, :]
    total = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        sources = rows - (WIDTH - 1) + tap
        inputs = _inputs(x, states, x_stride, first, slot, state_stride, num_channels, sources, channels, mask, WIDTH)
        factor = tl.load(weight + tap * num_channels + channels, mask=channels < num_channels, other=0.0)
        total += inputs * factor.to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=channels < num_channels, other=0.0).to(tl.float32)[None, :]
    result = total
    if ACTIVATES:
        result = total / (1.0 + tl.exp(-total))
    place = out + (first + rows)[:, None] * num_channels + channels[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _conv_state_kernel(
    x,
    states,
    first_rows,
    slots,
    x_stride: tl.int64,
    state_stride: tl.int64,
    num_channels: tl.int64,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    chunk = tl.program_id(0)
    slot = tl.load(slots + chunk)
    if slot < 0:
        return
    first = tl.load(first_rows + chunk)
    count = tl.load(first_rows + chunk + 1) - first
    places = tl.arange(0, PLACES).to(tl.int64)
    channels = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    mask = (places < WIDTH - 1)[:, None] & (channels < num_channels)[None, :]
    sources = count - (WIDTH - 1) + places
    inputs = _inputs(x, states, x_stride, first, slot, state_stride, num_channels, sources, channels, mask, WIDTH)
    # If the chunk is shorter, the state moves within itself: all of it is read before any is written.
    tl.debug_barrier()
    place = states + slot * state_stride + places[:, None] * num_channels + channels[None, :]
    tl.store(place, inputs.to(states.dtype.element_ty), mask=mask)


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _rule_kernel(
    qkv,
    gates,
    decay_rate,
    step_bias,
    states,
    first_rows,
    slots,
    out,
    row_stride: tl.int64,
    gate_stride: tl.int64,
    state_stride: tl.int64,
    scale,
    eps,
    READY: tl.constexpr,
    DECAYS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + chunk)
    first, end = tl.load(first_rows + chunk), tl.load(first_rows + chunk + 1)
    keys = tl.arange(0, KEYS)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    of_key, of_value = keys < KEY_DIM, values < VALUE_DIM
    mask = of_key[:, None] & of_value[None, :]
    place = states + slot * state_stride + head * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + values[None, :]
    state = tl.load(place, mask=mask & (slot >= 0), other=0.0)
    if not READY:
        rate, bias = tl.load(decay_rate + head), tl.load(step_bias + head)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    for number in range(first, end):
        row = tl.cast(number, tl.int64)
        heads = qkv + row * row_stride
        query = tl.load(heads + key_head * KEY_DIM + keys, mask=of_key, other=0.0).to(tl.float32)
        key = tl.load(heads + (KEY_HEADS + key_head) * KEY_DIM + keys, mask=of_key, other=0.0).to(tl.float32)
        value = tl.load(heads + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values, mask=of_value, other=0.0)
        query *= scale / tl.sqrt(tl.sum(query * query, 0) + eps)
        key *= 1.0 / tl.sqrt(tl.sum(key * key, 0) + eps)
        gate = gates + row * gate_stride
        beta = tl.load(gate + head).to(tl.float32)
        if DECAYS > 1:
            logs = tl.load(gate + VALUE_HEADS + head * DECAYS + keys, mask=of_key, other=0.0).to(tl.float32)
            state *= tl.exp(logs)[:, None]
        else:
            log = tl.load(gate + VALUE_HEADS + head).to(tl.float32)
            if not READY:
                beta = 1.0 / (1.0 + tl.exp(-beta))
                log = rate * _softplus(log + bias)
            state *= tl.exp(log)
        known = tl.sum(state * key[:, None], 0)
        state += key[:, None] * ((value.to(tl.float32) - known) * beta)[None, :]
        result = tl.sum(state * query[:, None], 0)
        target = out + (row * VALUE_HEADS + head) * VALUE_DIM + values
        tl.store(target, result.to(out.dtype.element_ty), mask=of_value)
    tl.store(place, state, mask=mask & (slot >= 0))


@triton.jit
def _mamba2_kernel(
    xbc,
    steps,
    rates,
    step_bias,
    skips,
    states,
    first_rows,
    slots,
    out,
    row_stride: tl.int64,
    step_stride: tl.int64,
    state_stride: tl.int64,
    least,
    most,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + chunk)
    first, end = tl.load(first_rows + chunk), tl.load(first_rows + chunk + 1)
    keys = tl.arange(0, KEYS)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    of_key, of_value = keys < KEY_DIM, values < VALUE_DIM
    mask = of_key[:, None] & of_value[None, :]
    place = states + slot * state_stride + head * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + values[None, :]
    state = tl.load(place, mask=mask & (slot >= 0), other=0.0)
    rate, bias, skip = tl.load(rates + head), tl.load(step_bias + head), tl.load(skips + head)
    group = head // (HEADS // GROUPS)
    for number in range(first, end):
        row = tl.cast(number, tl.int64)
        x = tl.load(xbc + row * row_stride + head * VALUE_DIM + values, mask=of_value, other=0.0).to(tl.float32)
        shared = xbc + row * row_stride + HEADS * VALUE_DIM + group * KEY_DIM + keys
        key = tl.load(shared, mask=of_key, other=0.0).to(tl.float32)
        query = tl.load(shared + GROUPS * KEY_DIM, mask=of_key, other=0.0).to(tl.float32)
        size = _softplus(tl.load(steps + row * step_stride + head).to(tl.float32) + bias)
        size = tl.minimum(tl.maximum(size, least), most)
        state = state * tl.exp(rate * size) + key[:, None] * (x * size)[None, :]
        result = tl.sum(state * query[:, None], 0) + skip * x
        target = out + (row * HEADS + head) * VALUE_DIM + values
        tl.store(target, result.to(out.dtype.element_ty), mask=of_value)
    tl.store(place, state, mask=mask & (slot >= 0))


@triton.jit
def _mamba1_kernel(
    x,
    sizes,
    bc,
    rates,
    skips,
    states,
    first_rows,
    slots,
    out,
    row_stride: tl.int64,
    size_stride: tl.int64,
    bc_stride: tl.int64,
    state_stride: tl.int64,
    NUM_CHANNELS: tl.constexpr,
    NUM_STATES: tl.constexpr,
    STATES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    chunk = tl.program_id(0)
    slot = tl.load(slots + chunk)
    first, end = tl.load(first_rows + chunk), tl.load(first_rows + chunk + 1)
    numbers = tl.arange(0, STATES)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    of_state, of_channel = numbers < NUM_STATES, channels < NUM_CHANNELS
    mask = of_state[:, None] & of_channel[None, :]
    offsets = numbers[:, None] * NUM_CHANNELS + channels[None, :]
    place = states + slot * state_stride + offsets
    state = tl.load(place, mask=mask & (slot >= 0), other=0.0)
    rate = tl.load(rates + offsets, mask=mask, other=0.0)
    skip = tl.load(skips + channels, mask=of_channel, other=0.0)
    for number in range(first, end):
        row = tl.cast(number, tl.int64)
        value = tl.load(x + row * row_stride + channels, mask=of_channel, other=0.0).to(tl.float32)
        size = tl.load(sizes + row * size_stride + channels, mask=of_channel, other=0.0).to(tl.float32)
        key = tl.load(bc + row * bc_stride + numbers, mask=of_state, other=0.0).to(tl.float32)
        query = tl.load(bc + row * bc_stride + NUM_STATES + numbers, mask=of_state, other=0.0).to(tl.float32)
        state = state * tl.exp(rate * size[None, :]) + key[:, None] * (value * size)[None, :]
        result = tl.sum(state * query[:, None], 0) + skip * value
        tl.store(out + row * NUM_CHANNELS + channels, result.to(out.dtype.element_ty), mask=of_channel)
    tl.store(place, state, mask=mask & (slot >= 0))


@triton.jit
def _gated_norm_kernel(x, gate, weight, out, gate_stride: tl.int64, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    place = (row * num_heads + head) * WIDTH + columns
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + row * gate_stride + head * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / WIDTH + eps)
    normed = values * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = normed * (opening / (1.0 + tl.exp(-opening)))
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
