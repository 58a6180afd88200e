"""The short convolutions of LFM2: in place of attention a token is mixed with the few tokens before it."""

from __future__ import annotations

from torch import Tensor

from kernels.linear import Linear
from kernels.ops import Ops, StepInputs


class ShortConv:
    """Projects a token to an input and two gates: one before the convolution of each channel, one behind it.

    projections: rows of the first gate, of the second one, and of the input. conv: [W, C], conv_bias: [C] or None.
    """

    def __init__(self, ops: Ops, projections: Linear, out: Linear, *, conv: Tensor, conv_bias: Tensor | None) -> None:
        self._ops, self._projections, self._out = ops, projections, out
        self._conv, self._conv_bias = conv, conv_bias

    def __call__(self, x: Tensor, step: StepInputs, conv_states: Tensor, states: Tensor | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Mutate conv_states [N, W - 1, C] of the step's chunks; states are None."""
        assert step.states is not None
        before, behind, own = self._projections(x).chunk(3, -1)
        mixed = self._ops.short_conv(
            before * own, self._conv, conv_states, step.states, self._conv_bias, activates=False
        )
        return self._out(mixed.mul_(behind))
