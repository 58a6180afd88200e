"""The chunks of one step for attention: their rows, their positions and the blocks of their contexts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """One request's rows of a step: `num_tokens` rows from position `start`; its KV lies in `block_ids`."""

    num_tokens: int
    start: int
    block_ids: array[int]


@dataclass(frozen=True, slots=True)
class ChunkArrays:
    """The chunks as tensors: first_rows [C + 1], starts [C], table_offsets [C + 1] (int64), block_tables (int32).

    Chunk c has the rows from first_rows[c], and its block ids lie in block_tables from table_offsets[c].
    """

    first_rows: Tensor
    starts: Tensor
    table_offsets: Tensor
    block_tables: Tensor


@dataclass(slots=True)
class AttentionPlan:
    """The chunks of a step, whose rows follow one another. `prepared`: data that a body of attention, under its own
    name, derives from the chunks once for all layers."""

    chunks: Sequence[ChunkSpan]
    block_size: int
    prepared: dict[str, object] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    def arrays(self) -> ChunkArrays:
        """Return the chunks as tensors on the CPU, made on first use."""
        arrays = self.prepared.get("arrays")
        if arrays is None:
            tables: array[int] = array("i")
            for chunk in self.chunks:
                tables += chunk.block_ids
            arrays = self.prepared["arrays"] = ChunkArrays(
                torch.tensor([0, *accumulate(chunk.num_tokens for chunk in self.chunks)]),
                torch.tensor([chunk.start for chunk in self.chunks]),
                torch.tensor([0, *accumulate(len(chunk.block_ids) for chunk in self.chunks)]),
                torch.frombuffer(tables, dtype=torch.int32),
            )
        assert isinstance(arrays, ChunkArrays)
        return arrays
