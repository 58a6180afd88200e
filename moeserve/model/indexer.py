"""The indexer of sparse attention: narrow heads that choose which positions a token attends to.

Source: https://arxiv.org/abs/2512.02556, section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.indexed_attention import choose_positions, has_choice
from kernels.linear import Linear
from kernels.ops import NormWeights, Ops, PagedRows, StepInputs
from kernels.rope_kv import apply_rotary, write_kv
from moeserve.model.spec import IndexerSpec


class Indexer:
    """Keeps one key per token for all its heads, and scores the keys of a context by queries and weights of a token.

    queries: from the low-rank form of attention's queries. keys, weights: from the hidden state; weights in float32.
    """

    def __init__(
        self, spec: IndexerSpec, ops: Ops, queries: Linear, keys: Linear, weights: Linear, key_norm: NormWeights
    ) -> None:
        self._spec, self._ops, self._key_norm = spec, ops, key_norm
        self._queries, self._keys, self._weights = queries, keys, weights
        self._scale = spec.num_heads**-0.5 * spec.head_dim**-0.5

    def __call__(self, x: Tensor, low: Tensor, step: StepInputs, pool: Tensor) -> Tensor | None:
        """x [T, hidden], low [T, rank] -> the chosen positions [T, top_k], or None if tokens attend to all.

        Write the new keys into the pool [1, num_slots, D].
        """
        spec, context = self._spec, step.context
        assert isinstance(context, PagedRows)  # Models with an indexer are computed on a CPU alone.
        key = self._ops.norm(self._keys(x), self._key_norm)
        write_kv(pool, None, context.slots, self._rotate(key.unsqueeze(1), step), None)
        if not has_choice(context.plan, spec.top_k):
            return None
        queries = self._rotate(self._queries(low).unflatten(1, (spec.num_heads, -1)), step)
        weights = self._weights(x.to(torch.float32)) * self._scale
        return choose_positions(queries, weights, pool, context.plan, spec.top_k)

    def _rotate(self, heads: Tensor, step: StepInputs) -> Tensor:
        return apply_rotary(heads, step.cos, step.sin, interleaved=self._spec.interleaved)
