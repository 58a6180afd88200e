"""Batches on a GPU for a model whose layers may attend in several shapes, as on transformers' code.

Each shape has work lists and scratch of its own, which are made when a layer first attends in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.gpu.attention_config import AttentionShape
from kernels.gpu.device import multiprocessor_of
from kernels.gpu.ops import LayerShape, SequencesByShape
from kernels.state_rows import StateRows
from kernels.transfer import to_device
from moeserve.model.decoder import ForwardBatch
from moeserve.model.gpu.batches import AttentionLimits, StepBatches, token_ids_of
from moeserve.model.spec import ModelSpec
from moeserve.model.step_arrays import StepArrays, step_arrays
from moeserve.plan import Chunk


class ShapedBatches:
    """Makes a batch of new tensors for every step."""

    def __init__(
        self,
        spec: ModelSpec,
        block_size: int,
        max_model_len: int,
        max_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """dtype: of the activations and of the KV pools."""
        self._spec, self._block_size, self._max_model_len, self._max_seqs = spec, block_size, max_model_len, max_seqs
        self._dtype, self._device = dtype, device
        self._by_shape: dict[LayerShape, StepBatches] = {}

    def make(self, arrays: StepArrays, logit_rows: Sequence[int], drawn: Tensor | None) -> ForwardBatch:
        """Copy the rows of a step to the device; for the arguments see `StepBatches`."""
        device = self._device
        states = windows = None
        if self._spec.state_layers:
            starts, slots = to_device(arrays.query_starts, device), to_device(arrays.state_slots, device)
            states = StateRows(starts, slots, arrays.max_query_len)
        if arrays.window_tables:
            windows = self._rows(replace(arrays, slots=arrays.window_slots, block_tables=arrays.window_tables))
        return ForwardBatch(
            token_ids_of(arrays, drawn, device),
            to_device(arrays.positions, device),
            self._rows(arrays),
            None if len(logit_rows) == arrays.num_rows else to_device(array("q", logit_rows), device),
            states=states,
            window_attention=windows,
        )

    def of_chunks(self, chunks: Sequence[Chunk], logit_rows: Sequence[int]) -> ForwardBatch:
        """Make the batch of these chunks, none of which waits for a token of an earlier step."""
        return self.make(step_arrays(chunks, self._block_size), logit_rows, None)

    def _rows(self, arrays: StepArrays) -> SequencesByShape:
        spans = [
            ChunkSpan(end - first, seq_len - (end - first), table)
            for (first, end), seq_len, table in zip(
                pairwise(arrays.query_starts), arrays.seq_lens, arrays.block_tables, strict=True
            )
        ]
        plan = AttentionPlan(spans, self._block_size)
        slots = to_device(arrays.slots, self._device)
        return SequencesByShape(slots, plan, lambda shape: self._batches(shape).sequences(arrays))

    def _batches(self, shape: LayerShape) -> StepBatches:
        if shape not in self._by_shape:
            num_heads, kv_heads, key_dim, value_dim, window = shape
            multiprocessor = multiprocessor_of(self._device)
            dtypes = self._dtype, self._dtype
            sizes = num_heads, kv_heads, key_dim, value_dim, self._block_size
            attention = AttentionShape(*sizes, *dtypes, multiprocessor)
            limits = AttentionLimits(self._spec, attention, frozenset((window,)), self._max_model_len, self._device)
            self._by_shape[shape] = StepBatches(limits, self._max_seqs)
        return self._by_shape[shape]
