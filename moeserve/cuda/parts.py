"""The parts a decoder on a GPU is assembled from, beside attention: norms, projections and feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import Activation, glu
from kernels.gpu.moe_gate import select_experts
from kernels.gpu.moe_weights import GpuExperts
from kernels.gpu.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from kernels.specs import GateSpec

# (x [T, H], ids [T, k], weights [T, k], experts, activation) -> [T, H], a new tensor unless T is 0. One that reaches
# other ranks is called in every layer of every step, with no rows if need be.
GpuDispatch = Callable[[Tensor, Tensor, Tensor, GpuExperts, Activation], Tensor]


class GpuNorm:
    """RMS norm, or layer norm where there is a bias."""

    __slots__ = ("_bias", "_eps", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self._bias, self._eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D], a new tensor."""
        if self._bias is None:
            return rms_norm(x, self.weight, self._eps)
        return layer_norm(x, self.weight, self._bias, self._eps)

    def of_sum(self, x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
        """Adds x times `multiplier` to `residual` in place and returns the norm of that."""
        if self._bias is None:
            return add_rms_norm(x, residual, self.weight, self._eps, multiplier)
        return add_layer_norm(x, residual, self.weight, self._bias, self._eps, multiplier)


class Projection:
    """x [T, K] -> [T, N] by the vendor's matrix library, from weight [N, K] and bias [N]."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class GpuMlp:
    """A dense gated block: the shared expert of a sparse layer, or the whole of a dense one."""

    __slots__ = ("_activation", "_down", "_gate_up")

    def __init__(self, gate_up: Projection, down: Projection, activation: Activation) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation

    def __call__(self, x: Tensor, _num_valid: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H]."""
        return self._down(glu(self._gate_up(x), self._activation))


class GpuMoe:
    """Gate, choice, experts, shared expert.

    gate: computes in its own dtype, fp32 where the model asks for that. correction_bias: [E] fp32, for the choice only.
    shared_gate: projection [1, H] whose sigmoid scales the shared expert.
    """

    __slots__ = (
        "_activation",
        "_correction_bias",
        "_dispatch",
        "_experts",
        "_gate",
        "_gate_spec",
        "_shared",
        "_shared_gate",
    )

    def __init__(
        self,
        gate: Projection,
        gate_spec: GateSpec,
        experts: GpuExperts,
        activation: Activation,
        dispatch: GpuDispatch,
        *,
        correction_bias: Tensor | None = None,
        shared: GpuMlp | None = None,
        shared_gate: Projection | None = None,
    ) -> None:
        self._gate, self._gate_spec, self._experts = gate, gate_spec, experts
        self._activation, self._dispatch = activation, dispatch
        self._correction_bias, self._shared, self._shared_gate = correction_bias, shared, shared_gate

    def __call__(self, x: Tensor, num_valid: Tensor | None = None) -> Tensor:
        """x [T, H] -> [T, H], a new tensor. Rows from `num_valid` (int32 scalar) on are padding and meet no expert."""
        logits = self._gate(x.to(self._gate.weight.dtype))
        ids, weights = select_experts(logits, self._gate_spec, self._correction_bias, num_valid=num_valid)
        out = self._dispatch(x, ids, weights, self._experts, self._activation)
        if self._shared is not None:
            shared = self._shared(x)
            if self._shared_gate is not None:
                shared.mul_(torch.sigmoid(self._shared_gate(x)))
            out.add_(shared)
        return out

    @property
    def experts(self) -> GpuExperts:
        """Those that are here."""
        return self._experts

    def serve_others(self, no_rows: Tensor) -> None:
        """Has the experts compute what other ranks send while this one has nothing. no_rows: [0, H]."""
        ids = torch.empty((0, self._gate_spec.top_k), dtype=torch.int64, device=no_rows.device)
        self._dispatch(no_rows, ids, ids.float(), self._experts, self._activation)

    def preview(self, x: Tensor) -> Tensor:
        """See `experts.gates.GatedBlock`."""
        logits = self._gate(x.to(self._gate.weight.dtype))
        if self._correction_bias is None:
            return logits
        scores = torch.sigmoid(logits.float()) if self._gate_spec.score == "sigmoid" else logits.float().softmax(-1)
        return scores.add_(self._correction_bias)
