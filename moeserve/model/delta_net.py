"""The gated delta net of Qwen3-Next and Qwen3.5: in place of attention a state that goes from token to token.

Source: https://arxiv.org/abs/2412.06464.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gated_delta_rule import DeltaHeads
from kernels.linear import Linear
from kernels.ops import NormWeights, Ops, StepInputs
from moeserve.model.spec import DeltaNetSpec


class GatedDeltaNet:
    """Projects a token, mixes it with the few tokens before it, applies the gated delta rule, and gates the result.

    projections: rows of all queries, keys and values, then the gate of the output, then beta and the decay of each
    value head. conv: [W, C]. norm: over the channels of a value head.
    """

    def __init__(
        self,
        spec: DeltaNetSpec,
        ops: Ops,
        projections: Linear,
        out: Linear,
        *,
        conv: Tensor,
        heads: DeltaHeads,
        norm: NormWeights,
    ) -> None:
        self._ops, self._projections, self._out = ops, projections, out
        self._conv, self._heads, self._norm = conv, heads, norm
        self._widths = [spec.conv_channels, spec.value_channels, 2 * spec.num_value_heads]

    def __call__(self, x: Tensor, step: StepInputs, conv_states: Tensor, states: Tensor | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Mutate the states of the step's chunks.

        conv_states [N, W - 1, C], states [N, HV, K, V] fp32.
        """
        assert states is not None
        assert step.states is not None
        ops, rows = self._ops, step.states
        qkv, gate, gates = torch.split(self._projections(x), self._widths, -1)
        qkv = ops.short_conv(qkv, self._conv, conv_states, rows)
        out = ops.gated_delta_rule(qkv, gates, self._heads, states, rows)
        return self._out(ops.gated_norm(out, gate, self._norm))


def by_part(spec: DeltaNetSpec) -> Tensor:
    """Return the order of rows that turns projections stored by key head into queries, keys, values, gate, beta, decay.

    The stored order is, per key head: query, key, the values and the gates of its value heads; after these, per key
    head, the betas and the decays of its value heads.
    """
    group = spec.num_value_heads // spec.num_key_heads
    values = group * spec.value_dim
    wide = torch.arange(spec.conv_channels + spec.value_channels).view(spec.num_key_heads, -1)
    narrow = torch.arange(2 * spec.num_value_heads).view(spec.num_key_heads, -1) + wide.numel()
    parts = (*wide.split([spec.key_dim, spec.key_dim, values, values], 1), *narrow.split([group, group], 1))
    return torch.cat([part.flatten() for part in parts])
