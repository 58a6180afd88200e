"""The state space layers of Mamba, token by token like the gated delta rule: CPU bodies and references.

Mamba 2 (https://arxiv.org/abs/2405.21060), for a head with the state S [N, P], an input x [P], and B and C [N] of its
group:

    d = softplus(step + bias);   S <- exp(rate d) S + B (d x)^T;   out = S^T C + skip x

Mamba 1 (https://arxiv.org/abs/2312.00752) does so for each channel alone (P = 1), with a rate for each of its N states
and the same B and C for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.library import NativeKernels, native_kernels
from kernels.cpu.panels import LANES
from kernels.gated_delta_rule import MOST_KEYS
from kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class MambaHeads:
    """Each of `num_groups` pairs of B and C serves equally many neighbouring heads.

    rate (below 0), step_bias, skip: [num_heads] fp32. limits: the bounds of a token's d.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    rate: Tensor
    step_bias: Tensor
    skip: Tensor
    limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def widths(self) -> list[int]:
        """The numbers of channels of all x, of all B and of all C."""
        shared = self.num_groups * self.state_dim
        return [self.num_heads * self.head_dim, shared, shared]


def mamba2_scan(xbc: Tensor, steps: Tensor, heads: MambaHeads, states: Tensor, rows: StateRows) -> Tensor:
    """Return the outputs [T, H, P] of the tokens. Mutates the chunks' states.

    xbc [T, H P + 2 G N]: x of each head, then B, then C of each group. steps [T, H]. states [num_slots, H, N, P] fp32.
    """
    kernels = native_kernels()
    fits = heads.head_dim % LANES == 0 and heads.state_dim <= MOST_KEYS
    if kernels is None or xbc.device.type != "cpu" or xbc.dtype == torch.float64 or not fits:
        return mamba2_scan_reference(xbc, steps, heads, states, rows)
    return _native_scan(kernels, xbc.float(), steps.float(), heads, states, rows).to(xbc.dtype)


def _native_scan(
    kernels: NativeKernels, xbc: Tensor, steps: Tensor, heads: MambaHeads, states: Tensor, rows: StateRows
) -> Tensor:
    out = xbc.new_empty((len(xbc), heads.num_heads, heads.head_dim))
    kernels.mamba2_scan(
        xbc.data_ptr(),
        xbc.stride(0),
        steps.data_ptr(),
        steps.stride(0),
        heads.rate.data_ptr(),
        heads.step_bias.data_ptr(),
        heads.skip.data_ptr(),
        *heads.limits,
        *rows.places_of(states),
        heads.num_heads,
        heads.num_groups,
        heads.state_dim,
        heads.head_dim,
        out.data_ptr(),
    )
    return out


def mamba2_scan_reference(xbc: Tensor, steps: Tensor, heads: MambaHeads, states: Tensor, rows: StateRows) -> Tensor:
    """Compute `mamba2_scan` in plain torch, one token at a time, in fp32 (fp64 for fp64 input)."""
    wide = torch.promote_types(xbc.dtype, torch.float32)
    group = heads.num_heads // heads.num_groups
    out = xbc.new_empty((len(xbc), heads.num_heads, heads.head_dim))
    # Through fp64: rounded from there, bits do not depend on a token's place.
    sizes = F.softplus(steps.double() + heads.step_bias.double()).clamp(*heads.limits)
    decays = (heads.rate.double() * sizes).exp().to(wide)
    sizes = sizes.to(wide)
    for chunk, slot in rows:
        state = states[slot].to(wide)
        for row in range(chunk.start, chunk.stop):
            flat, b, c = xbc[row].to(wide).split(heads.widths)
            x = flat.view(heads.num_heads, 1, -1)
            key, query = (part.view(heads.num_groups, -1, 1).repeat_interleave(group, 0) for part in (b, c))
            state = state * decays[row, :, None, None] + key * (x * sizes[row, :, None, None])
            out[row] = (state * query).sum(1) + heads.skip[:, None] * x[:, 0]
        states[slot] = state
    return out


def mamba1_scan(
    x: Tensor, sizes: Tensor, bc: Tensor, rate: Tensor, skip: Tensor, states: Tensor, rows: StateRows
) -> Tensor:
    """Return the outputs [T, C] of the tokens. Mutates the chunks' states.

    x [T, C]. sizes [T, C]: d. bc [T, 2 N]: B, then C. rate [N, C], below 0, and skip [C], fp32. states
    [num_slots, N, C] fp32.
    """
    kernels = native_kernels()
    if kernels is None or x.device.type != "cpu" or x.dtype == torch.float64 or x.shape[1] % LANES:
        return mamba1_scan_reference(x, sizes, bc, rate, skip, states, rows)
    wide, wide_sizes, wide_bc = x.float(), sizes.float(), bc.float()
    out = wide.new_empty(x.shape)
    kernels.mamba1_scan(
        wide.data_ptr(),
        wide.stride(0),
        wide_sizes.data_ptr(),
        wide_sizes.stride(0),
        wide_bc.data_ptr(),
        wide_bc.stride(0),
        rate.data_ptr(),
        skip.data_ptr(),
        *rows.places_of(states),
        *rate.shape,
        out.data_ptr(),
    )
    return out.to(x.dtype)


def mamba1_scan_reference(
    x: Tensor, sizes: Tensor, bc: Tensor, rate: Tensor, skip: Tensor, states: Tensor, rows: StateRows
) -> Tensor:
    """Compute `mamba1_scan` in plain torch, one token at a time, in fp32 (fp64 for fp64 input)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.empty_like(x)
    for chunk, slot in rows:
        state = states[slot].to(wide)
        for row in range(chunk.start, chunk.stop):
            value, size = x[row].to(wide), sizes[row].to(wide)
            key, query = bc[row].to(wide).unsqueeze(1).chunk(2)
            # Through fp64: rounded from there, bits do not depend on a channel's place.
            decay = (rate.double() * size.double()).exp().to(wide)
            state = state * decay + key * (size * value)
            out[row] = (state * query).sum(0) + skip * value
        states[slot] = state
    return out
