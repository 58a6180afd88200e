"""A mixture-of-experts block: gate, choice, experts, shared expert."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from experts.observer import AnyObserver
from kernels.activation import Activation
from kernels.cpu.experts import NativeExperts
from kernels.cpu.layers import MoeParts
from kernels.linear import Linear
from kernels.moe_gate import native_choice
from kernels.ops import GatedBlock, MoeNorms, NormWeights, OneExpert, Ops
from kernels.packed_experts import Experts
from kernels.specs import GateSpec

# How tokens reach their experts: (x [T, H], ids [T, k], weights [T, k], experts, activation) -> [T, H], a new tensor
# unless T is 0. A dispatch to other ranks is called in every layer of every step, with no rows if need be.
Dispatch = Callable[[Tensor, Tensor, Tensor, Experts, Activation], Tensor]


class LoadingDispatch(ABC):
    """A `Dispatch` to local experts. It may have to load some of them first."""

    @abstractmethod
    def partial(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        _: object,
        activation: Activation,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Return the weighted sum over local experts, [T, H] fp32.

        ids: numbers in the model, -1 for remote experts. meanwhile: called once the missing experts are loading.
        """

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, _: object, activation: Activation) -> Tensor:
        return self.partial(x, ids, weights, _, activation).to(x.dtype) if len(x) else x

    def while_loading(
        self, x: Tensor, ids: Tensor, weights: Tensor, activation: Activation, other: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the result of the dispatch, and that of `other`, which is called once while missing experts load."""
        if not len(x):
            return x, other()
        done: list[Tensor] = []
        out = self.partial(x, ids, weights, None, activation, lambda: done.append(other()))
        return out.to(x.dtype), done[0]


class RoutedExperts:
    """The experts of one layer, behind any gate: observers get its choice, then rows go to their experts.

    experts: the local experts; a migration puts others in their slots, between two steps. dispatch: reaches all
    experts. place: the layer's number among the layers with experts.
    """

    def __init__(
        self,
        experts: Experts,
        activation: Activation,
        dispatch: Dispatch,
        place: int = 0,
        observers: Sequence[AnyObserver] = (),
    ) -> None:
        self.experts = experts
        self._activation, self._dispatch = activation, dispatch
        self._loading = dispatch if isinstance(dispatch, LoadingDispatch) else None
        self._place, self._observers = place, observers

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, gated: Tensor | None = None) -> Tensor:
        """x [T, H], ids [T, k] int64, weights [T, k] fp32 -> [T, H], a new tensor unless T is 0. gated: the input of
        the gate if it is not x."""
        self._observe(x if gated is None else gated, ids)
        return self._dispatch(x, ids, weights, self.experts, self._activation)

    def beside(
        self, x: Tensor, ids: Tensor, weights: Tensor, gated: Tensor, other: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the rows [T, H] as `__call__` does, and the result of `other`, computed while experts load."""
        if self._loading is None:
            return self(x, ids, weights, gated), other()
        self._observe(gated, ids)
        return self._loading.while_loading(x, ids, weights, self._activation, other)

    def attended(self, residual: Tensor | None, shared: Tensor | None) -> None:
        """Tell observers of the stream before the layer's experts; see `StepObserver.attended`."""
        if residual is not None:
            for observer in self._observers:
                observer.attended(self._place, residual, shared)

    def _observe(self, x: Tensor, ids: Tensor) -> None:
        for observer in self._observers:
            observer.gated(self._place, x, ids)
        for observer in self._observers:
            observer.chose(self._place, ids)

    def serve_others(self, no_rows: Tensor, top_k: int) -> None:
        """Compute the rows that other ranks send while this rank has none. no_rows: [0, H]."""
        ids = torch.empty((0, top_k), dtype=torch.int64, device=no_rows.device)
        self(no_rows, ids, ids.float())


class MoeLayer:
    """Applies the chosen experts to every token and adds the shared expert, if there is one.

    gate: the projection to E logits, for inputs of `gate_dtype`, fp32 if the model asks for that. correction_bias:
    [E] fp32, for the choice only. expert_scales: [E] fp32, a factor on the weight of each expert. norms: see
    `MoeNorms`, None if gate, experts and shared expert all take the block's input. latent: projections to the rows that
    experts take and from their results, None if experts take the block's input. shared_gate: projection [1, H] whose
    sigmoid scales the shared expert. dispatch: None if all experts are local; a rank that holds only some passes a
    dispatch that reaches all. place: the layer's number among the layers with experts, for observers.
    """

    def __init__(
        self,
        ops: Ops,
        gate: Linear,
        gate_spec: GateSpec,
        experts: Experts,
        activation: Activation,
        *,
        gate_dtype: torch.dtype,
        correction_bias: Tensor | None = None,
        expert_scales: Tensor | None = None,
        norms: MoeNorms | None = None,
        latent: tuple[Linear, Linear] | None = None,
        shared: GatedBlock | None = None,
        shared_gate: Linear | None = None,
        dispatch: Dispatch | None = None,
        place: int = 0,
        observers: Sequence[AnyObserver] = (),
    ) -> None:
        if dispatch is None and len(experts) != gate.out_features:
            raise ValueError(f"{len(experts)} of {gate.out_features} experts are here and nothing reaches the others")
        self._ops = ops
        self._gate, self._gate_spec, self._gate_dtype = gate, gate_spec, gate_dtype
        self._correction_bias, self._expert_scales, self._norms = correction_bias, expert_scales, norms
        self._latent = latent
        self._choose = native_choice(gate, gate_spec, correction_bias, expert_scales)
        self._shared, self._shared_gate = shared, shared_gate
        self._serves_others = dispatch is not None
        self._is_plain = dispatch is None and shared_gate is None and latent is None and gate_dtype is torch.float32
        self._activation = activation
        self._routed = RoutedExperts(experts, activation, dispatch or ops.compute_experts, place, observers)

    @property
    def experts(self) -> Experts:
        """The local experts, see `RoutedExperts`."""
        return self._routed.experts

    @property
    def num_experts(self) -> int:
        """The number of experts that the gate chooses from."""
        return self._gate.out_features

    def __call__(self, x: Tensor, num_valid: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """x [T, H] -> [T, H], a new tensor. T is at least 1. Rows from `num_valid` (int32 scalar on the device) on are
        padding, which no expert computes. residual: [T, H], the stream before the norm, for observers and for norms of
        the block's own."""
        ops, norms, x_of_gate, x_of_experts = self._ops, self._norms, x, x
        if norms is not None:
            assert residual is not None
            x_of_gate, x_of_experts = ops.norm(residual, norms.gate), ops.norm(residual, norms.experts)
        if self._latent is not None:
            x_of_experts = self._latent[0](x_of_experts)
        ids, weights = self._choice(x_of_gate, num_valid)
        shared = self._shared
        if shared is None:
            out = self._back(self._routed(x_of_experts, ids, weights, x_of_gate))
            self._routed.attended(residual, None)
            return out if norms is None else ops.norm(out, norms.after_experts)
        out, of_shared = self._routed.beside(
            x_of_experts, ids, weights, x_of_gate, lambda: self._of_shared(shared, x, residual)
        )
        out = self._back(out)
        if norms is None:
            return out.add_(of_shared)
        return ops.norm(out, norms.after_experts).add_(ops.norm(of_shared, norms.after_shared))

    def _back(self, rows: Tensor) -> Tensor:
        """Return the results of experts in the width of the stream."""
        return rows if self._latent is None else self._latent[1](rows)

    def _choice(self, x: Tensor, num_valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the chosen experts of rows, the gate's own input, and their weights."""
        x = x if x.dtype is self._gate_dtype else x.to(self._gate_dtype)
        if self._choose is not None:
            return self._choose(x)
        ids, weights = self._ops.select_experts(self._gate(x), self._gate_spec, self._correction_bias, num_valid)
        return ids, weights if self._expert_scales is None else weights * self._expert_scales[ids]

    def native(self) -> MoeParts | None:
        """Return the parts of the block if the compiled kernels compute all of them."""
        choose, experts, shared = self._choose, self.experts, self._shared
        if choose is None or not self._is_plain or not isinstance(experts, NativeExperts):
            return None
        if shared is None:
            return MoeParts(choose, experts, self._activation, norms=self._norms)
        if not isinstance(shared, OneExpert) or not isinstance(shared.expert, NativeExperts):
            return None
        return MoeParts(choose, experts, self._activation, (shared.expert, shared.activation), self._norms)

    @property
    def gate_norm(self) -> NormWeights | None:
        """The gate's own norm of the stream, None if it takes the block's input."""
        return None if self._norms is None else self._norms.gate

    def _of_shared(self, shared: GatedBlock, x: Tensor, residual: Tensor | None) -> Tensor:
        out = shared(x)
        if self._shared_gate is not None:
            out.mul_(self._ops.sigmoid(self._shared_gate(x)))
        # Behind a norm of its own, it is not what the stream gets.
        self._routed.attended(residual, out if self._norms is None else None)
        return out

    def serve_others(self, no_rows: Tensor) -> None:
        """Compute the rows that other ranks send while this rank has none. no_rows: [0, H]."""
        if self._serves_others:
            if self._latent is not None:
                no_rows = no_rows.new_empty((0, self._latent[0].out_features))
            self._routed.serve_others(no_rows, self._gate_spec.top_k)

    @property
    def product(self) -> Linear | None:
        """The gate's product, None if the largest of its results do not name the choice."""
        return self._gate if self._correction_bias is None else None

    def preview(self, x: Tensor) -> Tensor:
        """Rank the experts for a state x [T, H] that is not the gate's own input: [T, E], the larger the likelier."""
        logits = self._gate(x.to(self._gate_dtype))
        if self._correction_bias is None:
            return logits
        by_sigmoid = self._gate_spec.score == "sigmoid"
        scores = self._ops.sigmoid(logits.float()) if by_sigmoid else logits.float().softmax(-1)
        return scores.add_(self._correction_bias)

    def gate_map(self, dtype: torch.dtype) -> Tensor | None:
        """[E, H + 1] float32: the gate as one linear map, the constant last. None if it does not rank by a linear map.

        dtype: the dtype of its input.
        """
        if self._correction_bias is not None:
            return None
        width = self._gate.in_features
        units = torch.cat([torch.zeros(1, width), torch.eye(width)]).to(self._ops.device, dtype)
        logits = self.preview(units).float()
        return torch.cat([logits[1:] - logits[0], logits[:1]]).T.contiguous()
