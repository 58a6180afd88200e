"""Decode steps in batches of fixed sizes, each captured once as a CUDA graph and replayed.

A replay costs one launch where a step of its own costs hundreds. Kernel variants are those of the captured size, and
rows beyond the step's are padding. All graphs share one memory pool, so the largest is captured first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.cuda.batches import AttentionLimits, DecodeBatch, DecodeTensors
from moeserve.cuda.routing import Computed, HeardDecoder
from moeserve.cuda.step_arrays import StepArrays, padded_size

_WARM_UP_ROUNDS = 2


class DecodeSteps:
    """Lasting batches of some sizes. Until `capture`, and on a CPU under the interpreter, they are computed as they
    are; captured ones are replayed."""

    def __init__(self, decoder: HeardDecoder, limits: AttentionLimits, sizes: Sequence[int]) -> None:
        """sizes: ascending, see `capture_sizes`."""
        self._decoder, self._sizes = decoder, tuple(sizes)
        tensors = DecodeTensors(limits, self._sizes[-1])
        self._batches = {size: DecodeBatch(limits, size, tensors) for size in self._sizes}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Computed]] = {}

    def fits(self, num_seqs: int) -> bool:
        return padded_size(num_seqs, self._sizes) is not None

    def run(self, arrays: StepArrays, drawn: Tensor | None) -> Computed:
        """A step whose chunks have one token each. What it gives lasts until the next replay."""
        size = padded_size(arrays.num_rows, self._sizes)
        if size is None:
            raise ValueError(f"{arrays.num_rows} sequences do not fit into {self._sizes[-1]}")
        batch = self._batches[size]
        batch.load(arrays, drawn)
        captured = self._graphs.get(size)
        if captured is None:
            return self._compute(batch).of_first(arrays.num_rows)
        graph, computed = captured
        graph.replay()
        return computed.of_first(arrays.num_rows)

    @torch.inference_mode()
    def capture(self) -> None:
        """Records a graph per size, largest first. The batches hold padding alone then: nothing is written to KV."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        for size in reversed(self._sizes):
            batch = self._batches[size]
            # Compiling, tuning and the matrix library's workspaces cannot happen inside a graph.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_ROUNDS):
                    self._compute(batch)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                computed = self._compute(batch)
            self._graphs[size] = (graph, computed)

    def _compute(self, batch: DecodeBatch) -> Computed:
        batch.update_works()
        return self._decoder(batch.batch)
