"""What the gates of later layers say of the state at an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

# A norm's weight below this share of the largest cannot be taken back out of the state.
_LEAST_SHARE = 1e-3


class GatedBlock(Protocol):
    """A layer's gate, apart from its experts."""

    def preview(self, x: Tensor) -> Tensor:
        """What the gate would rank for a state x [T, H] that is not its own input: [T, E], the larger the likelier."""


class GatePreview:
    """Applies the gate of layer l + d to the input of the gate of layer l (Eliseev and Mazur, arXiv 2312.17238).

    That input is a norm of the residual stream, scaled by the weights of layer l's norm; it is scaled anew by those of
    layer l + d. What the layers in between will add is not known yet.
    """

    def __init__(self, layers: Sequence[GatedBlock], norms: Sequence[Tensor], max_distance: int) -> None:
        """norms: [H], the weights of the norm in front of each layer's gate."""
        self.max_distance = max_distance
        self._layers = layers
        self._scales = [
            [_ratio(later, norm) for later in norms[layer + 1 : layer + 1 + max_distance]]
            for layer, norm in enumerate(norms)
        ]

    def __call__(self, layer: int, distance: int, x: Tensor) -> Tensor:
        """x [T, H] -> [T, E], the larger the likelier. The layer at that distance must exist."""
        return self._layers[layer + distance].preview(x * self._scales[layer][distance - 1])


def _ratio(wanted: Tensor, given: Tensor) -> Tensor:
    is_small = given.abs() < _LEAST_SHARE * given.abs().max()
    return torch.where(is_small, 0.0, wanted / given)
