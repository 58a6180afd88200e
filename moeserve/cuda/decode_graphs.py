"""Decode steps in batches of fixed sizes, each captured once as a CUDA graph and replayed.

A replay costs one launch where a step of its own costs hundreds. Kernel variants are those of the captured size, and
rows beyond the step's are padding. All graphs share one memory pool, so the largest is captured first.

With several ranks a graph holds what they send each other: all capture the same sizes in the same order, and replay the
same size in the same step, one without rows too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeserve.cuda.batches import AttentionLimits, DecodeBatch, DecodeTensors
from moeserve.cuda.peers import Peers, Traffic
from moeserve.cuda.routing import Computed, HeardDecoder
from moeserve.cuda.step_arrays import StepArrays, padded_size

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_WARM_UP_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, the tensors that it writes, and what it sends to other ranks; None without any."""

    graph: torch.cuda.CUDAGraph
    computed: Computed
    traffic: Traffic | None

    def replay(self) -> Computed:
        with self.traffic.replayed() if self.traffic is not None else nullcontext():
            self.graph.replay()
        return self.computed


class DecodeSteps:
    """Lasting batches of some sizes. Until `capture`, and on a CPU under the interpreter, they are computed as they
    are; captured ones are replayed."""

    def __init__(
        self, decoder: HeardDecoder, limits: AttentionLimits, sizes: Sequence[int], peers: Peers | None = None
    ) -> None:
        """sizes: ascending, see `capture_sizes`. peers: the other ranks, if there are any."""
        self._decoder, self._sizes, self._peers = decoder, tuple(sizes), peers
        tensors = DecodeTensors(limits, self._sizes[-1])
        self._batches = {size: DecodeBatch(limits, size, tensors) for size in self._sizes}
        self._graphs: dict[int, _Captured] = {}

    def size_of(self, arrays: StepArrays, num_logit_rows: int) -> int | None:
        """Of the batch that a step is computed in; None for one of its own. Ranks have agreed on it when it began."""
        if self._peers is not None:
            return self._peers.decode_size
        is_decode = arrays.max_query_len == 1 and num_logit_rows == arrays.num_rows
        return padded_size(arrays.num_rows, self._sizes) if is_decode else None

    def run(self, arrays: StepArrays, drawn: Tensor | None, size: int) -> Computed:
        """A step whose chunks, at most `size`, have one token each. What it gives lasts until the next replay."""
        batch = self._batches[size]
        batch.load(arrays, drawn)
        captured = self._graphs.get(size)
        computed = self._compute(batch) if captured is None else captured.replay()
        return computed.of_first(arrays.num_rows)

    @torch.inference_mode()
    def capture(self) -> None:
        """Records a graph per size, largest first. The batches hold padding alone then: nothing is written to KV."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        for size in reversed(self._sizes):
            if self._peers is not None:
                self._peers.begin_decodes(size)
            self._warm_up(self._batches[size], stream)
            self._graphs[size] = self._captured(self._batches[size], pool, stream)

    def release(self) -> None:
        """Gives the graphs up. A group of ranks cannot be left while graphs hold its collectives."""
        self._graphs.clear()

    def _warm_up(self, batch: DecodeBatch, stream: torch.cuda.Stream) -> None:
        """Compiling, tuning, the matrix library's workspaces and connections of ranks cannot happen inside a graph."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_ROUNDS):
                self._compute(batch)
        torch.cuda.current_stream().wait_stream(stream)

    def _captured(self, batch: DecodeBatch, pool: _POOL_HANDLE, stream: torch.cuda.Stream) -> _Captured:
        graph, peers = torch.cuda.CUDAGraph(), self._peers
        if peers is None:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                return _Captured(graph, self._compute(batch), None)
        # To begin a capture torch waits for the device without end.
        peers.wait_for_device()
        traffic = peers.traffic()
        # Threads of the collectives and of migrations are no part of it, and may call CUDA meanwhile.
        with traffic.recorded(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            return _Captured(graph, self._compute(batch), traffic)

    def _compute(self, batch: DecodeBatch) -> Computed:
        batch.update_works()
        return self._decoder(batch.batch)
