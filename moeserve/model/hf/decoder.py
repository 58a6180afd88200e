"""A decoder on transformers' modelling code, behind the face of `moeserve.model.decoder.Decoder`.

Modelling code computes one text of all rows of a step; what mixes tokens is computed per request, over the paged
memory (`moeserve.model.hf.attention`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from experts.moe_layer import MoeLayer
from kernels.ops import Experts, Ops
from moeserve.model.decoder import ForwardBatch, KvPools
from moeserve.model.hf.caches import step_cache
from moeserve.model.hf.modelling import ModellingCode
from moeserve.model.hf.spec import TransformersSpec
from moeserve.model.hf.step import PAGED, Step


class TransformersDecoder:
    """A loaded model. Holds weights only; whatever belongs to requests comes with each call.

    step: what all parts of `code` see of the step.
    """

    def __init__(
        self,
        spec: TransformersSpec,
        code: ModellingCode,
        ops: Ops,
        step: Step,
        *,
        max_model_len: int,
        dtype: torch.dtype,
    ) -> None:
        self.spec, self.dtype, self.max_model_len = spec, dtype, max_model_len
        self.ops, self.device = ops, ops.device
        self._code, self._step = code, step
        self._cache = step_cache(code.config, spec.geometry, step)
        self._head = _Head(code)

    @property
    def experts(self) -> list[Experts]:
        """The local experts of each layer that has some."""
        return []

    def gated_blocks(self) -> list[tuple[MoeLayer, Tensor]]:
        """Return nothing: gates are transformers' own, which cannot be asked ahead."""
        return []

    def forward(self, batch: ForwardBatch, kv_pools: KvPools) -> Tensor:
        """Logits [S, vocab] of the wanted rows. See `states`."""
        return self.logits(self.states(batch, kv_pools))

    def logits(self, states: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab]."""
        return self._head(states)

    def states(self, batch: ForwardBatch, kv_pools: KvPools) -> Tensor:
        """[S, hidden] of the wanted rows behind the last norm. See `moeserve.model.decoder.Decoder.states`."""
        pools = [keys for keys, _ in kv_pools]
        self._step.begin(batch.attention.slots, batch.attention.plan, pools, ())
        self._code.config._attn_implementation_internal = PAGED
        try:
            out = self._code.body(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                past_key_values=self._cache,
                use_cache=True,
            )
        finally:
            self._code.config._attn_implementation_internal = "eager"
            self._step.end()
        hidden: Tensor = out.last_hidden_state[0]
        return hidden if batch.logit_rows is None else hidden.index_select(0, batch.logit_rows)

    def serve_others(self) -> Tensor:
        """A step in which this rank has no rows. Returns no rows."""
        return torch.empty((0, self.spec.hidden_size), dtype=self.dtype, device=self.device)


class _Head:
    """From the last states to logits, as the outer model computes them: projection, scale, cap.

    The outer model runs with a body that answers with given states.
    """

    def __init__(self, code: ModellingCode) -> None:
        self._outer = code.outer
        self._inner = code.outer.base_model if code.outer.base_model is not code.outer else code.body

    def __call__(self, states: Tensor) -> Tensor:
        answer = _States(last_hidden_state=states[None])
        self._inner.forward = lambda *_, **__: answer
        try:
            out: Any = self._outer(input_ids=torch.zeros((1, len(states)), dtype=torch.int64), use_cache=False)
        finally:
            del self._inner.forward
        logits: Tensor = out.logits[0]
        return logits


class _States(BaseModelOutputWithPast):
    """The answer of a body that has nothing to say but its last states, whatever else the outer model looks at."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
