"""A plan's chunks as the tensors that a decoder on a CPU computes with."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.ops import PagedRows
from moeserve.model.decoder import ForwardBatch
from moeserve.model.state_pool import state_rows
from moeserve.model.step_arrays import step_arrays
from moeserve.plan import Chunk


def make_batch(
    chunks: Sequence[Chunk], block_size: int, logit_rows: Sequence[int] | None = None, *, has_states: bool = False
) -> ForwardBatch:
    """Return the rows of a step. logit_rows: the rows that need logits, None for all."""
    arrays = step_arrays(chunks, block_size)
    windows = arrays.window_tables
    some = logit_rows is not None and len(logit_rows) < arrays.num_rows
    return ForwardBatch(
        token_ids=torch.frombuffer(arrays.token_ids, dtype=torch.int64),
        positions=torch.frombuffer(arrays.positions, dtype=torch.int64),
        attention=_paged_rows(chunks, arrays.slots, arrays.block_tables, block_size),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64) if some else None,
        states=state_rows(chunks) if has_states else None,
        window_attention=_paged_rows(chunks, arrays.window_slots, windows, block_size) if windows else None,
    )


def _paged_rows(chunks: Sequence[Chunk], slots: array[int], tables: Sequence[array[int]], block_size: int) -> PagedRows:
    spans = [ChunkSpan(len(chunk.token_ids), chunk.start, table) for chunk, table in zip(chunks, tables, strict=True)]
    return PagedRows(torch.frombuffer(slots, dtype=torch.int64), AttentionPlan(spans, block_size))
