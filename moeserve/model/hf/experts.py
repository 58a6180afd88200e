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
from moeserve.model.hf.expert_form import ExpertForm

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
        return self.routed(rows.contiguous(), ids.to(torch.int64).contiguous(), weights.float().contiguous())


class ScaledExperts(nn.Module):
    """Replaces a module of experts that gets the rows of all experts, scaled by their weights, zeros if not chosen.

    One expert of each row is chosen.
    """

    def __init__(self, routed: RoutedExperts, num_experts: int) -> None:
        super().__init__()
        self.layer, self._num_experts = ExpertLayer(routed), num_experts

    def forward(self, scaled: Tensor) -> Tensor:
        """[E T, H] -> [E T, H]."""
        by_expert = scaled.view(self._num_experts, -1, scaled.shape[-1])
        chosen, places = by_expert.ne(0).any(-1).int().argmax(0), torch.arange(by_expert.shape[1])
        out = torch.zeros_like(by_expert)
        ids, weights = chosen[:, None], torch.ones((len(places), 1))
        out[chosen, places] = self.layer(by_expert[chosen, places], ids, weights)
        return out.view(scaled.shape)


def replacement_of(form: ExpertForm, routed: RoutedExperts, num_experts: int) -> nn.Module:
    return ScaledExperts(routed, num_experts) if form.is_scaled else ExpertLayer(routed)


def activation_of(module: Any, form: ExpertForm) -> Activation | None:
    """Return the activation of an empty module of experts; None for experts that our kernels do not compute.

    The module's own activation is compared with each of our activations on random rows.
    """
    if form.has_post_expert_norm:
        return None
    draw = torch.Generator().manual_seed(0)
    # Some are larger than any limit among the candidates.
    merged = torch.cat([scale * torch.randn((_TRIED_ROWS, 2 * _TRIED_WIDTH), generator=draw) for scale in _SCALES])
    order = torch.arange(2 * _TRIED_WIDTH)
    if not form.is_concatenated:  # Gate and up channels alternate.
        order = order.view(2, -1).T.flatten()
    try:
        wanted = _activated(module, form, merged[:, order])
    except Exception:  # An activation with weights, which are not loaded yet.
        return None
    for activation in _gated(module) if form.has_gate else (Activation("relu2"),):
        if torch.allclose(activate(merged.clone(), activation), wanted, rtol=1e-4, atol=1e-4):
            return activation
    return None


def _activated(module: Any, form: ExpertForm, merged: Tensor) -> Any:
    if not form.has_gate:
        return module.act_fn(merged)
    if hasattr(module, "_apply_gate"):
        return module._apply_gate(merged)
    gate, up = merged.chunk(2, -1)
    return module.act_fn(gate) * up


def _gated(module: Any) -> Iterator[Activation]:
    """Yield our gated activations, with numbers of the module as their parameters."""
    kinds: tuple[ActivationKind, ...] = ("silu", "gelu", "gelu_tanh", "relu")
    numbers = [float(value) for value in vars(module).values() if type(value) in (int, float) and 0 < value < _LARGEST]
    for limit in (0.0, *numbers):
        for kind in kinds:
            yield Activation(kind, limit=limit)
    for limit in numbers:
        yield Activation("clamped_silu", limit=limit)
    for alpha, limit in itertools.product([1.0, *numbers], numbers):
        yield Activation("swigluoai", alpha=alpha, limit=limit)
