"""The experts of one layer of transformers' modelling code, computed by ours; the gate stays in its code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import _default_apply_gate

from experts.moe_layer import Dispatch
from experts.observer import AnyObserver
from kernels.ops import Experts
from kernels.specs import Activation, ActivationKind
from moeserve.model.spec import UnsupportedModel

_KINDS: dict[str, ActivationKind] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "silu": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
}


class ExpertLayer(nn.Module):
    """Stands where a module of experts was: dispatches rows to the experts that the model's own gate chose."""

    def __init__(
        self,
        experts: Experts,
        activation: Activation,
        dispatch: Dispatch,
        place: int,
        observers: Sequence[AnyObserver],
    ) -> None:
        """place: of the layer among those with experts; observers hear it."""
        super().__init__()
        self.experts, self.activation = experts, activation
        self._dispatch, self._place, self._observers = dispatch, place, observers

    def forward(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """rows [T, H], ids [T, k], weights [T, k] -> [T, H]."""
        ids, weights = ids.to(torch.int64), weights.float()
        for observer in self._observers:
            observer.chose(self._place, rows, ids, weights)
        return self._dispatch(rows, ids, weights, self.experts, self.activation)

    def serve_others(self, no_rows: Tensor, top_k: int) -> None:
        """Have the experts compute what other ranks send while this one has nothing. no_rows: [0, H]."""
        self.forward(no_rows, no_rows.new_empty((0, top_k), dtype=torch.int64), no_rows.new_empty((0, top_k)))


def activation_of(module: Any) -> Activation:
    """Return the activation of a module of experts. Raises UnsupportedModel for one that our kernels do not compute."""
    name = type(module).__name__
    if not module.has_gate:
        raise UnsupportedModel(f"{name} has no gate channels, which the expert kernels need.")
    if module.has_post_expert_norm:
        raise UnsupportedModel(f"{name} has a norm after each expert, which the expert kernels do not compute.")
    if type(module)._apply_gate is _default_apply_gate:
        function = module.act_fn
        kind = _KINDS.get(getattr(function, "__name__", type(function).__name__))
        if kind is not None:
            return Activation(kind)
        raise UnsupportedModel(f"{name} has the activation {type(function).__name__}, which is not supported.")
    for alpha, limit in (("alpha", "limit"), ("swiglu_alpha", "swiglu_limit")):
        if hasattr(module, alpha) and hasattr(module, limit):
            return Activation("swigluoai", alpha=float(getattr(module, alpha)), limit=float(getattr(module, limit)))
    raise UnsupportedModel(f"{name} has a gate of its own, which is not supported.")
