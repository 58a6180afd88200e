"""Attention over the keys and values of an earlier layer (Gemma 4 E2B and E4B)."""

from __future__ import annotations

from torch import Tensor

from kernels.linear import Linear
from kernels.ops import NormWeights, Ops, StepInputs
from kernels.rope_kv import apply_rotary
from moeserve.model.spec import AttentionSpec


class SharedKeysAttention:
    """Attention that has queries alone. norm: over the channels of a head."""

    def __init__(
        self,
        spec: AttentionSpec,
        ops: Ops,
        q: Linear,
        o: Linear,
        *,
        window: int | None,
        interleaved: bool,
        norm: NormWeights,
    ) -> None:
        self._spec, self._ops, self._q, self._o = spec, ops, q, o
        self._window, self._interleaved, self._norm = window, interleaved, norm

    def __call__(self, x: Tensor, step: StepInputs, keys: Tensor, values: Tensor | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. keys, values: pools [KV, num_slots, D] that an earlier layer has filled."""
        spec, ops = self._spec, self._ops
        heads = ops.norm(self._q(x).view(-1, spec.head_dim), self._norm).view(len(x), spec.num_heads, -1)
        q = apply_rotary(heads, step.cos, step.sin, interleaved=self._interleaved)
        out = ops.attend(q, keys, values, step.context, scale=spec.scale, window=self._window)
        return self._o(out.view(len(x), -1))
