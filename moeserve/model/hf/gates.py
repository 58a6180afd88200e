"""The gates of transformers' modelling code as maps that can be asked ahead of time.

The code does not say which module is the gate or how its scores become a choice. Every candidate is tried on the rows
of a first forward. The gate is the candidate with the best recall of the model's choices, at least `_LEAST_RECALL`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeserve.model.hf.experts import ExpertLayer
from moeserve.model.hf.modules import Projection

# The share of the choices that a gate must rank first.
_LEAST_RECALL = 0.9
_FORMS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda logits: logits,
    torch.sigmoid,
    lambda logits: logits.softmax(-1),
)


@dataclass(frozen=True, slots=True)
class FoundGate:
    """Ranks experts for a state as `GatedBlock`: form(logits(x)), then a constant for each expert."""

    logits: Callable[[Tensor], Tensor]
    form: Callable[[Tensor], Tensor]
    constant: Tensor | None

    @property
    def product(self) -> None:
        """The model's own code computes the product."""
        return None

    def preview(self, x: Tensor) -> Tensor:
        scores = self.form(self.logits(x).float())
        return scores if self.constant is None else scores + self.constant


@dataclass(slots=True)
class _SeenLayer:
    """The tensors of one layer's first forward.

    x: [T, H], the input of its experts. ids: [T, k], the chosen experts. norm: the norm whose output is x. answers: the
    outputs of norms before the experts were called.
    """

    x: Tensor | None = None
    ids: Tensor | None = None
    norm: nn.Module | None = None
    answers: dict[nn.Module, Tensor] = field(default_factory=dict)


class GateSearch:
    """Context manager: listens to the first forward inside it. layers: the layers with experts, in order."""

    def __init__(self, layers: Mapping[nn.Module, ExpertLayer], num_experts: int) -> None:
        """layers: by layer, its experts."""
        self._layers, self._num_experts = layers, num_experts
        self._seen = {layer: _SeenLayer() for layer in layers}
        self._hooks: list[Any] = []

    def __enter__(self) -> GateSearch:
        for layer, experts in self._layers.items():
            seen = self._seen[layer]
            self._hooks.append(experts.register_forward_pre_hook(_listener(seen)))
            for module in layer.modules():
                if "Norm" in type(module).__name__:
                    self._hooks.append(module.register_forward_hook(_norm_listener(seen)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def gates(self) -> list[tuple[FoundGate, Tensor]]:
        """Return each layer's gate and the weight [H] of the norm before it, ones for none; [] if a gate is missing."""
        found = []
        for layer, seen in self._seen.items():
            gate = None if seen.x is None or seen.ids is None else self._gate(layer, seen.x, seen.ids)
            if gate is None or seen.x is None:
                return []
            found.append((gate, _norm_weight(seen.norm, seen.x)))
        return found

    def _gate(self, layer: nn.Module, x: Tensor, ids: Tensor) -> FoundGate | None:
        best, most = None, _LEAST_RECALL
        constants = [None, *self._constants(layer)]
        for logits, form, constant in product(_projections(layer, self._num_experts, x.shape[1]), _FORMS, constants):
            gate = FoundGate(logits, form, constant)
            ranked = gate.preview(x).topk(ids.shape[1], -1).indices
            recall = (ranked[:, :, None] == ids[:, None, :]).any(1).float().mean().item()
            if recall > most or (best is None and recall >= most):
                best, most = gate, recall
        return best

    def _constants(self, layer: nn.Module) -> list[Tensor]:
        named = (*layer.named_parameters(), *layer.named_buffers())
        vectors = (tensor for _, tensor in named if tensor.numel() == self._num_experts and tensor.is_floating_point())
        return [tensor.float().flatten() for tensor in vectors]


def _projections(layer: nn.Module, num_experts: int, width: int) -> Iterator[Callable[[Tensor], Tensor]]:
    for module in layer.modules():
        # A gate derived from `nn.Linear` may return more than the product.
        if type(module) is nn.Linear or isinstance(module, Projection):
            if (module.out_features, module.in_features) == (num_experts, width):
                yield module
        elif isinstance(weight := module._parameters.get("weight"), Tensor) and weight.shape == (num_experts, width):
            yield _Product(weight)


@dataclass(frozen=True, slots=True)
class _Product:
    """The product with a weight [E, H] of a module whose forward computes something else."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self.weight.dtype), self.weight)


def _norm_weight(norm: nn.Module | None, x: Tensor) -> Tensor:
    """Return the factors [H] by which a norm multiplies rows; ones without a norm."""
    if norm is not None:
        weight: Tensor = norm(x.new_ones((1, 1, x.shape[1]))).flatten()
        if weight.isfinite().all() and weight.abs().max() > 0:
            return weight
    return x.new_ones(x.shape[1])


def _listener(seen: _SeenLayer) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def listen(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if seen.x is None:
            x = seen.x = arguments[0].clone()
            seen.ids = arguments[1].clone()
            same = (norm for norm, answer in seen.answers.items() if torch.equal(answer.reshape(-1), x.reshape(-1)))
            seen.norm = next(same, None)
            seen.answers.clear()

    return listen


def _norm_listener(seen: _SeenLayer) -> Callable[[nn.Module, tuple[Tensor, ...], Any], None]:
    def listen(module: nn.Module, _: tuple[Tensor, ...], answer: Any) -> None:
        if seen.x is None and isinstance(answer, Tensor):
            seen.answers[module] = answer.clone()

    return listen
