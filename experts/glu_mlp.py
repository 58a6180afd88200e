"""A dense gated feed-forward block: the shared expert of a sparse layer, or the whole of a dense one."""

from __future__ import annotations

from torch import Tensor

from kernels.activation import Activation, glu
from kernels.linear import Linear


class GluMlp:
    """``down(act(gate(x)) * up(x))`` with gate and up packed into one projection [2I, H], gate rows first."""

    __slots__ = ("_activation", "_down", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self._down(glu(self._gate_up(x), self._activation))
