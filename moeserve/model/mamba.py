"""The Mamba-2 layers of hybrid models: in place of attention a state that goes from token to token.

Source: https://arxiv.org/abs/2405.21060.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear import Linear
from kernels.mamba import MambaHeads
from kernels.ops import NormWeights, Ops, StepInputs


class Mamba2:
    """Projects a token, mixes it with the few tokens before it, scans, and normalises the gated result.

    projections: rows of the gate of the output, then x of all heads, B and C, then the step of each head. conv: [W, C],
    conv_bias: [C] or None. norm: over equally wide groups of channels, one for each pair of B and C.
    """

    def __init__(
        self,
        ops: Ops,
        projections: Linear,
        out: Linear,
        *,
        conv: Tensor,
        conv_bias: Tensor | None,
        heads: MambaHeads,
        norm: NormWeights,
    ) -> None:
        self._ops, self._projections, self._out = ops, projections, out
        self._conv, self._conv_bias, self._heads, self._norm = conv, conv_bias, heads, norm
        self._widths = [heads.widths[0], sum(heads.widths), heads.num_heads]

    def __call__(self, x: Tensor, step: StepInputs, conv_states: Tensor, states: Tensor | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Mutate the states of the step's chunks.

        conv_states [N, W - 1, C], states [N, H, state channels, head channels] fp32.
        """
        assert states is not None
        assert step.states is not None
        ops, rows, heads = self._ops, step.states, self._heads
        gate, xbc, steps = torch.split(self._projections(x), self._widths, -1)
        xbc = ops.short_conv(xbc, self._conv, conv_states, rows, self._conv_bias)
        out = ops.mamba2_scan(xbc, steps, heads, states, rows)
        return self._out(ops.norm_of_gated(out.flatten(1), gate, self._norm, heads.num_groups))
