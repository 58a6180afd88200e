"""The experts of one layer of transformers' modelling code, computed by our kernels; the gate stays in its code."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from experts.moe_layer import RoutedExperts
from kernels.activation import Activation, activate
from kernels.specs import ActivationKind

_TRIED_ROWS, _TRIED_WIDTH = 5, 16
# The scales of the rows for the trial, and the largest number of a module that may be a limit.
_SCALES, _LARGEST = (3.0, 30.0, 1000.0), 1000.0


class ExpertLayer(nn.Module):
    """Replaces a module of experts: sends rows to the experts that the model's own gate chose."""

    def __init__(self, routed: RoutedExperts) -> None:
        super().__init__()
        self.routed = routed

    def forward(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """rows [T, H], ids [T, k], weights [T, k] -> [T, H]."""
        return self.routed(rows, ids.to(torch.int64), weights.float())


def activation_of(module: Any) -> Activation | None:
    """Return the activation of an empty module of experts; None for experts that our kernels do not compute.

    The module's own activation is compared with each of our activations on random rows.
    """
    if module.has_post_expert_norm:
        return None
    draw = torch.Generator().manual_seed(0)
    # Some are larger than any limit among the candidates.
    merged = torch.cat([scale * torch.randn((_TRIED_ROWS, 2 * _TRIED_WIDTH), generator=draw) for scale in _SCALES])
    order = torch.arange(2 * _TRIED_WIDTH)
    if not module.is_concatenated:  # Gate and up channels alternate.
        order = order.view(2, -1).T.flatten()
    try:
        wanted = module._apply_gate(merged[:, order]) if module.has_gate else module.act_fn(merged)
    except Exception:  # An activation with weights, which are not loaded yet.
        return None
    for activation in _gated(module) if module.has_gate else (Activation("relu2"),):
        if torch.allclose(activate(merged.clone(), activation), wanted, rtol=1e-4, atol=1e-4):
            return activation
    return None


def _gated(module: Any) -> Iterator[Activation]:
    """Yield our gated activations, with numbers of the module as their parameters."""
    kinds: tuple[ActivationKind, ...] = ("silu", "gelu", "gelu_tanh", "relu")
    numbers = [float(value) for value in vars(module).values() if type(value) in (int, float) and 0 < value < _LARGEST]
    for limit in (0.0, *numbers):
        for kind in kinds:
            yield Activation(kind, limit=limit)
    for alpha, limit in itertools.product([1.0, *numbers], numbers):
        yield Activation("swigluoai", alpha=alpha, limit=limit)
