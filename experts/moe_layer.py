"""A mixture-of-experts block: gate, choice, experts, shared expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.activation import Activation, sigmoid
from kernels.linear import Linear
from kernels.moe import moe_experts, pack_experts
from kernels.moe_gate import GateSpec, select_experts
from kernels.packed_experts import PackedExperts

# A dense gated feed-forward block: the shared expert of a sparse layer, or the whole of a dense one.


class GluMlp:
    """``down(act(gate(x)) * up(x))``: an expert that every token chooses, with weight one."""

    __slots__ = ("_activation", "_expert")

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        activation: Activation,
        *,
        biases: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """gate_up [2I, H] (gate rows first), down [H, I], biases [2I + H]; it computes in `dtype`, by default the
        weights'."""
        of_each = (None, None) if biases is None else biases[None].split([gate_up.shape[0], down.shape[0]], 1)
        self._expert = pack_experts(gate_up[None], down[None], *of_each, dtype=dtype)
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        ids = torch.zeros((len(x), 1), dtype=torch.int64, device=x.device)
        weights = torch.ones((len(x), 1), device=x.device)
        return moe_experts(x, ids, weights, self._expert, self._activation)


# How tokens reach their experts: (x [T, H], ids [T, k], weights [T, k], experts, activation) -> [T, H], a new tensor
# unless T is 0. One that reaches other ranks is called in every layer of every step, with no rows if need be.
Dispatch = Callable[[Tensor, Tensor, Tensor, PackedExperts, Activation], Tensor]

# What computes rows with the experts that are here: as `kernels.moe.moe_experts_partial`.
LocalExperts = Callable[[Tensor, Tensor, Tensor, PackedExperts, Activation], Tensor]


class MoeLayer:
    """Applies the chosen experts to every token and adds the shared expert, if there is one.

    gate: the projection to E logits; it computes in its own dtype, fp32 where the model asks for that.
    correction_bias: [E] fp32, for the choice only. shared_gate: projection [1, H] whose sigmoid scales the shared
    expert. dispatch: ``moe_experts`` while all experts are here; who owns only some passes one that reaches the rest.
    """

    __slots__ = (
        "_activation",
        "_correction_bias",
        "_dispatch",
        "_experts",
        "_gate",
        "_gate_spec",
        "_gate_widens",
        "_shared",
        "_shared_gate",
    )

    def __init__(
        self,
        gate: Linear,
        gate_spec: GateSpec,
        experts: PackedExperts,
        activation: Activation,
        *,
        gate_widens: bool = False,
        correction_bias: Tensor | None = None,
        shared: GluMlp | None = None,
        shared_gate: Linear | None = None,
        dispatch: Dispatch = moe_experts,
    ) -> None:
        if dispatch is moe_experts and len(experts) != gate.out_features:
            raise ValueError(f"{len(experts)} of {gate.out_features} experts are here and nothing reaches the others")
        self._gate = gate
        self._gate_spec = gate_spec
        self._experts = experts
        self._activation = activation
        self._gate_widens = gate_widens
        self._correction_bias = correction_bias
        self._shared = shared
        self._shared_gate = shared_gate
        self._dispatch = dispatch

    @property
    def experts(self) -> PackedExperts:
        """Those that are here; who migrates some puts others in their slots, between two steps."""
        return self._experts

    @property
    def num_experts(self) -> int:
        """Those that the gate chooses from."""
        return self._gate.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H], a new tensor. T is at least 1."""
        logits = self._gate(x.float() if self._gate_widens else x)
        ids, weights = select_experts(logits, self._gate_spec, self._correction_bias)
        out = self._dispatch(x, ids, weights, self._experts, self._activation)
        if self._shared is not None:
            shared = self._shared(x)
            if self._shared_gate is not None:
                shared.mul_(sigmoid(self._shared_gate(x)))
            out.add_(shared)
        return out

    def preview(self, x: Tensor) -> Tensor:
        """What the gate would rank for a state x [T, H] that is not its own input: [T, E], the larger the likelier."""
        logits = self._gate(x.float() if self._gate_widens else x)
        if self._correction_bias is None:
            return logits
        scores = sigmoid(logits.float()) if self._gate_spec.score == "sigmoid" else logits.float().softmax(-1)
        return scores.add_(self._correction_bias)

    def gate_map(self, dtype: torch.dtype) -> Tensor | None:
        """[E, H + 1] float32: the gate as one linear map, the constant last. None where it does not rank by that alone.

        dtype: of its input.
        """
        if self._correction_bias is not None:
            return None
        width = self._gate.in_features
        logits = self.preview(torch.cat([torch.zeros(1, width), torch.eye(width)]).to(dtype)).float()
        return torch.cat([logits[1:] - logits[0], logits[:1]]).T.contiguous()

    def serve_others(self, no_rows: Tensor) -> None:
        """Has the experts compute what other ranks send while this one has nothing. no_rows: [0, H]."""
        if self._dispatch is not moe_experts:
            ids = torch.empty((0, self._gate_spec.top_k), dtype=torch.int64)
            self._dispatch(no_rows, ids, ids.float(), self._experts, self._activation)
