"""Drives a Decoder over a paged pool the way an engine would: several requests, chunk by chunk, in scattered blocks."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.ops import PagedRows
from moeserve.model.decoder import Decoder, ForwardBatch, KvPools
from moeserve.model.state_pool import StatePool, pools_by_layer, state_rows
from moeserve.plan import Chunk, StateUse


def make_pools(decoder: Decoder, num_slots: int) -> list[tuple[Tensor, Tensor | None]]:
    """Return the pools of the layers with attention."""
    pools: list[tuple[Tensor, Tensor | None]] = []
    for layer in decoder.spec.kv_layers:
        keys = torch.zeros(layer.num_heads, num_slots, layer.key_dim, dtype=decoder.dtype)
        values = torch.zeros(layer.num_heads, num_slots, layer.value_dim, dtype=decoder.dtype)
        pools.append((keys, values if layer.value_dim else None))
    return pools


class PagedRunner:
    """Holds pools, and per request one scattered block table and a state slot."""

    def __init__(self, decoder: Decoder, requests: Sequence[Sequence[int]], block_size: int = 4, seed: int = 0) -> None:
        self._decoder = decoder
        self._requests = requests
        self._block_size = block_size
        counts = [-(-len(tokens) // block_size) for tokens in requests]
        blocks = list(range(sum(counts) + 3))
        random.Random(seed).shuffle(blocks)
        self._tables = [array("i", [blocks.pop() for _ in range(count)]) for count in counts]
        self._states: StatePool | None = None
        if decoder.spec.state_layers:
            self._states = StatePool(decoder.spec.state_layers, len(requests) + 1, decoder.dtype)
        kv_layers = make_pools(decoder, (sum(counts) + 3) * block_size)
        self._pools: KvPools = pools_by_layer(decoder.spec, kv_layers, self._states)

    def step(self, chunks: Sequence[tuple[int, int, int]], logit_rows: Sequence[int] | None = None) -> Tensor:
        """Compute tokens [start, end) of requests; chunks are (request, start, end). Logits of all or some rows."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans = []
        for request, start, end in chunks:
            table = self._tables[request]
            tokens += self._requests[request][start:end]
            positions += range(start, end)
            slots += [table[p // self._block_size] * self._block_size + p % self._block_size for p in range(start, end)]
            spans.append(ChunkSpan(end - start, start, table[: -(-end // self._block_size)]))
        planned = [
            Chunk(
                "",
                array("i", range(end - start)),
                start,
                array("i"),
                None,
                state=StateUse(len(self._requests) - request),
            )
            for request, start, end in chunks
        ]
        if self._states is not None:
            self._states.begin(planned)
        attention, of_windows = (
            PagedRows(torch.tensor(slots), AttentionPlan(spans, self._block_size)) for _ in range(2)
        )
        has_windows = any(window is not None for window in self._decoder.spec.windows)
        batch = ForwardBatch(
            torch.tensor(tokens),
            torch.tensor(positions),
            attention,
            None if logit_rows is None else torch.tensor(logit_rows, dtype=torch.int64),
            states=None if self._states is None else state_rows(planned),
            window_attention=of_windows if has_windows else None,
        )
        with torch.inference_mode():
            return self._decoder.forward(batch, self._pools)
