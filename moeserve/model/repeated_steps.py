"""Steps of few rows on a CPU, whose layers are one call: kernels are recorded once for each shape and then repeated.

In such a step Python would take longer between two products than a product takes. A repeated step makes the calls that
the decoder made, with the same kernels on the same threads, so its bits are those of any other step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from experts.routing.tap import RoutingTap
from kernels.attention_plan import AttentionPlan, ChunkArrays, ChunkSpan
from kernels.cpu.library import NativeKernels
from kernels.cpu.tape import Tape, TapeMemory, record
from kernels.ops import PagedRows, StepInputs
from moeserve.model.decoder import Decoder, KvPools

# Rows of a step that is recorded: where there are more, products take long beside what is between them.
MOST_ROWS = 32
# Tapes that are kept, of the shapes that came last.
_MOST_TAPES = 64


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, all of which need logits, before they are tensors.

    tables: block ids of each chunk. window_slots, window_tables: of layers with window blocks, empty without any.
    """

    chunk_lens: Sequence[int]
    starts: Sequence[int]
    slots: array[int]
    tables: Sequence[array[int]]
    window_slots: array[int]
    window_tables: Sequence[array[int]]

    @property
    def shape(self) -> tuple[int, int, bool]:
        """The numbers of rows and chunks, and whether layers have window blocks: what a tape is for."""
        return len(self.slots), len(self.chunk_lens), bool(self.window_tables)


class _PagedInputs:
    """What attention reads of a step, at addresses that stay."""

    def __init__(self, most_blocks: int, block_size: int) -> None:
        self._slots = torch.zeros(MOST_ROWS, dtype=torch.int64)
        self._first_rows = torch.zeros(MOST_ROWS + 1, dtype=torch.int64)
        self._starts = torch.zeros(MOST_ROWS, dtype=torch.int64)
        self._offsets = torch.zeros(MOST_ROWS + 1, dtype=torch.int64)
        self._tables = torch.zeros(most_blocks, dtype=torch.int32)
        self._block_size = block_size

    def fill(self, rows: StepRows, slots: array[int], tables: Sequence[array[int]]) -> None:
        joined: array[int] = array("i")
        for table in tables:
            joined += table
        _copy(self._slots, slots)
        _copy(self._first_rows, array("q", accumulate(rows.chunk_lens, initial=0)))
        _copy(self._starts, array("q", rows.starts))
        _copy(self._offsets, array("q", accumulate(map(len, tables), initial=0)))
        _copy(self._tables, joined)

    def context(self, rows: StepRows, tables: Sequence[array[int]]) -> PagedRows:
        """Return the context of attention for the step that was filled in last."""
        arrays = ChunkArrays(self._first_rows, self._starts, self._offsets, self._tables)
        spans = [ChunkSpan(*chunk) for chunk in zip(rows.chunk_lens, rows.starts, tables, strict=True)]
        return PagedRows(self._slots[: len(rows.slots)], AttentionPlan(spans, self._block_size, {"arrays": arrays}))


def _copy(to: Tensor, values: array[int]) -> None:
    to[: len(values)] = torch.frombuffer(values, dtype=to.dtype)


class RepeatedSteps:
    """Computes the layers of small steps by tapes. One decoder and its pools, of one rank with all experts."""

    def __init__(
        self,
        decoder: Decoder,
        kernels: NativeKernels,
        kv_pools: KvPools,
        block_size: int,
        tap: RoutingTap | None,
    ) -> None:
        self._decoder, self._kernels, self._kv_pools, self._tap = decoder, kernels, kv_pools, tap
        most_blocks = MOST_ROWS * -(-decoder.max_model_len // block_size)
        self._paged, self._windowed = (_PagedInputs(most_blocks, block_size) for _ in range(2))
        self._memory = TapeMemory()
        self._inputs: tuple[Tensor, Tensor, Tensor] | None = None
        # None: a shape that was seen once.
        self._tapes: dict[tuple[int, int, bool], Tape[tuple[Tensor, list[Tensor]]] | None] = {}
        self._is_possible = True

    def takes(self, rows: StepRows) -> bool:
        """Return whether the step is small and of a shape that came before."""
        if not self._is_possible or len(rows.slots) > MOST_ROWS:
            return False
        if rows.shape in self._tapes:
            return True
        if len(self._tapes) >= _MOST_TAPES:
            del self._tapes[next(iter(self._tapes))]
        self._tapes[rows.shape] = None
        return False

    def states(self, token_ids: Tensor, positions: Tensor, rows: StepRows) -> Tensor:
        """Return what `Decoder.states` returns, for a step that `takes` allows. Mutates the pools in the same way."""
        residual, cos, sin = self._fill(token_ids, positions, rows)
        tape = self._tapes[rows.shape] = self._tapes.pop(rows.shape)
        if tape is not None:
            tape.run()
        else:
            step = windowed = StepInputs(cos, sin, self._paged.context(rows, rows.tables))
            if rows.window_tables:
                windowed = StepInputs(cos, sin, self._windowed.context(rows, rows.window_tables))
            result, tape = record(self._kernels, self._memory, lambda: self._pass_layers(residual, step, windowed))
            if tape is None:
                self._is_possible = False
                self._tapes.clear()
                return result[0]
            self._tapes[rows.shape] = tape
        states, ids = tape.result
        if self._tap is not None and ids:
            self._tap.repeat(ids)
        return states

    def _pass_layers(self, residual: Tensor, step: StepInputs, windowed: StepInputs) -> tuple[Tensor, list[Tensor]]:
        states = self._decoder.pass_layers(residual, step, windowed, self._kv_pools)
        return states, [] if self._tap is None else self._tap.chosen

    def _fill(self, token_ids: Tensor, positions: Tensor, rows: StepRows) -> tuple[Tensor, Tensor, Tensor]:
        self._paged.fill(rows, rows.slots, rows.tables)
        if rows.window_tables:
            self._windowed.fill(rows, rows.window_slots, rows.window_tables)
        found = self._decoder.embed(token_ids, positions)
        if self._inputs is None:
            hidden, cos, sin = (part.new_zeros((MOST_ROWS, *part.shape[1:])) for part in found)
            self._inputs = hidden, cos, sin
        hidden, cos, sin = (to[: len(token_ids)].copy_(part) for to, part in zip(self._inputs, found, strict=True))
        return hidden, cos, sin
