"""Norms over the channels of all heads, where each rank computes some of the heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.ops import NormWeights, Ops
from moeserve.model.shards import Shard
from moeserve.model.spec import AttentionSpec


class Partners(Protocol):
    """The ranks that compute every layer together, each with its shard. All call the same methods in the same order."""

    @property
    def shard(self) -> Shard: ...

    def add_up(self, parts: Tensor) -> Tensor:
        """Return the sum [T, hidden] of the parts of all ranks, in the order of ranks. The parts may be overwritten."""

    def gather(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the rows of all ranks, which have one shape."""


class NormsOverRanks:
    """Norms the queries and keys of a shard in place: gathers those of all ranks, so the bits are those of one rank."""

    def __init__(
        self, spec: AttentionSpec, ops: Ops, partners: Partners, q_norm: NormWeights, k_norm: NormWeights
    ) -> None:
        """spec: of the shard. q_norm, k_norm: of all heads."""
        self._ops, self._partners, self._norms = ops, partners, (q_norm, k_norm)
        self._widths = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim]
        shard, num_kv_heads = partners.shard, len(k_norm.weight) // spec.head_dim
        self._firsts = shard.number * self._widths[0], shard.kv_heads(num_kv_heads).start * spec.head_dim
        # Neighbouring ranks share a KV head where there are fewer than ranks.
        self._every = (1, max(1, shard.count // num_kv_heads))

    def __call__(self, queries_and_keys: Tensor) -> None:
        """queries_and_keys [T, channels of both], a view."""
        of_ranks = [part.split(self._widths, 1) for part in self._partners.gather(queries_and_keys.contiguous())]
        own = queries_and_keys.split(self._widths, 1)
        for number, (part, norm, first) in enumerate(zip(own, self._norms, self._firsts, strict=True)):
            whole = torch.cat([parts[number] for parts in of_ranks[:: self._every[number]]], 1)
            part.copy_(self._ops.norm(whole, norm)[:, first : first + part.shape[1]])
