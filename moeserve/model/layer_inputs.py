"""Inputs of each layer beside the residual stream, made of a token and its embedding (Gemma 4 E2B and E4B)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activation import Activation, activate
from kernels.linear import Linear
from kernels.ops import NormWeights, Ops, Table

_HALF = 2.0**-0.5  # A sum of two parts of variance 1 has it again.


class LayerInputs:
    """Makes the inputs of all layers: rows of a table by token, and projections of the embedding behind a norm.

    table: rows [L P]. projection: hidden -> L P. norm: over the P channels of a layer.
    """

    def __init__(self, ops: Ops, table: Table, projection: Linear, norm: NormWeights, *, hidden_size: int) -> None:
        self._ops, self._table, self._projection, self._norm = ops, table, projection, norm
        self._width, self._scale = norm.weight.shape[0], hidden_size**-0.5

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """token_ids [T], embedded [T, hidden] -> [T, L, P]."""
        projected = self._projection(embedded).mul_(self._scale)
        normed = self._ops.norm(projected.view(-1, self._width), self._norm)
        own = self._table(token_ids).mul_(self._width**0.5)
        return normed.view(own.shape).add_(own).mul_(_HALF).unflatten(1, (-1, self._width))


class LayerInput:
    """Adds a layer's input to the stream: gated by the stream, projected, and behind a norm."""

    def __init__(self, ops: Ops, gate: Linear, projection: Linear, norm: NormWeights, activation: Activation) -> None:
        self._ops, self._gate, self._projection, self._norm = ops, gate, projection, norm
        self._activation = activation

    def __call__(self, residual: Tensor, own: Tensor) -> Tensor:
        """residual [T, hidden], own [T, P] -> what the stream gets, [T, hidden]."""
        gated = activate(torch.cat([self._gate(residual), own], 1), self._activation)
        return self._ops.norm(self._projection(gated), self._norm)
