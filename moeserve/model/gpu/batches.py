"""Turn the arrays of a step into a batch on the device.

`StepBatches` makes new tensors for a step; `DecodeBatch` loads a step into the lasting tensors that a graph reads.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kernels.gpu.attention import ExtendRun, Partials
from kernels.gpu.attention_config import AttentionShape, ExtendConfig, PrefillConfig, SplitConfig
from kernels.gpu.attention_kernels import SplitWork
from kernels.gpu.device import multiprocessor_of, multiprocessors_of
from kernels.gpu.ops import Sequences
from kernels.state_rows import StateRows
from kernels.transfer import to_device
from moeserve.model.decoder import ForwardBatch
from moeserve.model.gpu.kernels import attention_shape
from moeserve.model.spec import DecoderSpec, ModelSpec
from moeserve.model.step_arrays import ExtendLimits, StepArrays, share_prompts

# Table widths are multiples of this, because Triton compiles a variant for strides that are no multiples of 16.
_TABLE_STEP = 16
# Short append-prefills of one step may fill this number of waves of programs: with more, splitting costs scratch and
# gains nothing.
_EXTEND_WAVES = 4


Works = dict[int | None, SplitWork]


@dataclass(frozen=True, slots=True)
class AttentionLimits:
    """The sizes for scratch and work lists of attention of one shape.

    windows: of the layers that attend in this shape. windows_apart: True if layers with a window have blocks of their
    own. max_extend: the most new tokens of a short append-prefill, None for the table's number.
    """

    spec: ModelSpec
    shape: AttentionShape
    windows: frozenset[int | None]
    max_model_len: int
    device: torch.device
    windows_apart: bool = False
    max_extend: int | None = None

    @property
    def table_width(self) -> int:
        return _round_up(-(-self.max_model_len // self.shape.block_size))

    @property
    def extend(self) -> ExtendConfig:
        config = self.shape.extend()
        return config if self.max_extend is None else replace(config, max_query_len=self.max_extend)

    def works(self, max_seqs: int) -> Works:
        """Return a work list per window length for up to `max_seqs` sequences with one new token."""
        config = self.shape.split()
        return {window: self._work(max_seqs, max_seqs, config, window) for window in self.windows}

    def extend_works(self, max_seqs: int) -> Works:
        """Return a work list per window length for short append-prefills; empty if no prompt is computed as such."""
        config, limits = self.extend, self.extends(max_seqs)
        if limits is None:
            return {}
        return {window: self._work(max_seqs, limits.max_tiles, config.split, window, config) for window in self.windows}

    def extends(self, max_seqs: int) -> ExtendLimits | None:
        """Return the limits of short append-prefills in steps of up to `max_seqs` sequences; None if there are none."""
        config, group = self.extend, self.shape.group
        if not config.max_query_len:
            return None
        tokens = config.tokens_per_tile(group)
        per_tile = self._programs(config.split)
        slots = max(1, multiprocessors_of(self.device) * config.split.programs_per_sm // per_tile)
        tiles = min(max_seqs * -(-config.max_query_len // tokens), _EXTEND_WAVES * slots)
        return ExtendLimits(config.max_query_len, tokens, tiles)

    def prefill(self, max_query_len: int) -> PrefillConfig:
        return self.shape.prefill(max_query_len)

    def partials(self, *works: Works) -> Partials:
        """Allocate scratch for the largest of these work lists."""
        first, *others = (work for by_window in works for work in by_window.values())
        return Partials.allocate(first, self.shape.num_heads, self.shape.value_dim, *others)

    def _programs(self, config: SplitConfig) -> int:
        """Return the number of programs per piece of work."""
        return self.shape.kv_heads * -(-self.shape.group // config.rows)

    def _work(
        self, max_seqs: int, max_tiles: int, config: SplitConfig, window: int | None, extend: ExtendConfig | None = None
    ) -> SplitWork:
        return SplitWork(
            max_seqs,
            max_tiles,
            self.max_model_len,
            self._programs(config),
            config,
            self.device,
            num_sms=multiprocessors_of(self.device),
            max_query_len=1 if extend is None else extend.max_query_len,
            tokens_per_tile=1 if extend is None else extend.tokens_per_tile(self.shape.group),
            window=window,
        )


def native_limits(
    spec: DecoderSpec,
    block_size: int,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
    *,
    windows_apart: bool = False,
    max_extend: int | None = None,
) -> AttentionLimits:
    """Return the limits of a model on our own code. dtype: of the activations. kv_dtype: of the KV pools, None for
    `dtype`."""
    shape = attention_shape(spec, block_size, dtype, multiprocessor_of(device), kv_dtype)
    return AttentionLimits(spec, shape, frozenset(spec.windows), max_model_len, device, windows_apart, max_extend)


class Batches(Protocol):
    """Makes a batch of new tensors for every step that replays no graph."""

    def make(self, arrays: StepArrays, logit_rows: Sequence[int], drawn: Tensor | None) -> ForwardBatch:
        """See `StepBatches.make`."""


class StepBatches:
    """Implements `Batches` for attention of one shape."""

    def __init__(self, limits: AttentionLimits, max_seqs: int) -> None:
        self._limits = limits
        self._works = limits.works(max_seqs)
        self._extends = limits.extends(max_seqs)
        self._extend_works = limits.extend_works(max_seqs)
        self._partials = limits.partials(self._works, self._extend_works)

    def make(self, arrays: StepArrays, logit_rows: Sequence[int], drawn: Tensor | None) -> ForwardBatch:
        """Copy `arrays` to the device and launch the kernels that fill the work lists.

        logit_rows: the rows that need logits. drawn: the previous step's tokens [S] int64 on the device, needed if rows
        read them.
        """
        device = self._limits.device
        every = len(logit_rows) == arrays.num_rows
        sequences = self.sequences(arrays)
        return ForwardBatch(
            token_ids_of(arrays, drawn, device),
            to_device(arrays.positions, device),
            sequences,
            None if every else to_device(array("q", logit_rows), device),
            states=self._states(arrays, sequences) if self._limits.spec.state_layers else None,
            window_attention=self.windows(arrays, sequences) if arrays.window_tables else None,
        )

    def windows(self, arrays: StepArrays, sequences: Sequences) -> Sequences:
        """Return the same sequences over window blocks."""
        device = self._limits.device
        table = block_table(arrays.window_tables, sequences.block_table.shape[1], device)
        return replace(sequences, slots=to_device(arrays.window_slots, device), block_table=table)

    def _states(self, arrays: StepArrays, sequences: Sequences) -> StateRows:
        """Return the slots of the sequences' states. Sequences without slots, as at the start, advance no state."""
        slots = arrays.state_slots or array("q", [-1] * len(arrays.seq_lens))
        return StateRows(sequences.query_starts, to_device(slots, self._limits.device), arrays.max_query_len)

    def sequences(self, arrays: StepArrays) -> Sequences:
        """Copy the places of a step's sequences to the device."""
        device, num_decodes = self._limits.device, arrays.num_decodes
        seq_lens, starts = to_device(arrays.seq_lens, device), to_device(arrays.query_starts, device)
        for work in self._works.values() if num_decodes else ():
            work.update(seq_lens[:num_decodes])
        run, longest = share_prompts(arrays.prompt_lens, self._extends)
        extends = {}
        if run is not None:
            first, end = num_decodes + run[0], num_decodes + run[1]
            num_tokens = arrays.query_starts[end] - arrays.query_starts[first]
            for window, work in self._extend_works.items():
                work.update(seq_lens[first:end], starts[first : end + 1])
                extends[window] = ExtendRun(first, end, num_tokens, work)
        return Sequences(
            to_device(arrays.slots, device),
            block_table(arrays.block_tables, _round_up(max(len(table) for table in arrays.block_tables)), device),
            seq_lens,
            starts,
            num_decodes,
            self._limits.shape.block_size,
            self._works,
            self._partials,
            self._limits.prefill(longest) if longest else None,
            extends,
        )


class DecodeTensors:
    """The tensors of all decode batches, as large as the largest. Each batch uses the first rows."""

    def __init__(self, limits: AttentionLimits, max_seqs: int) -> None:
        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=limits.device)

        self.token_ids = ints(max_seqs)
        self.positions = ints(max_seqs)
        self.slots = ints(max_seqs) - 1
        self.block_table = ints(max_seqs, limits.table_width, dtype=torch.int32)
        # For layers with window blocks. Without such layers the tensors of the other layers stand in.
        apart = limits.windows_apart
        self.window_slots = ints(max_seqs) - 1 if apart else self.slots
        self.window_table = torch.zeros_like(self.block_table) if apart else self.block_table
        self.seq_lens = ints(max_seqs, dtype=torch.int32)
        self.state_slots = ints(max_seqs) - 1
        self.query_starts = torch.arange(max_seqs + 1, dtype=torch.int32, device=limits.device)
        self.num_valid = ints(dtype=torch.int32)
        self.partials = limits.partials(limits.works(max_seqs))
        # What every graph writes: with outputs of their own graphs of all sizes would keep the logits of all sizes.
        dtype, device = limits.shape.dtype, limits.device
        self.states = torch.zeros((max_seqs, limits.spec.hidden_size), dtype=dtype, device=device)
        self.logits = torch.zeros((max_seqs, limits.spec.vocab_size), dtype=dtype, device=device)


class DecodeBatch:
    """A batch of `size` sequences with one new token each, in tensors whose addresses never change."""

    def __init__(self, limits: AttentionLimits, size: int, tensors: DecodeTensors) -> None:
        self._works = limits.works(size)
        self._num_valid = tensors.num_valid
        self._sequences = Sequences(
            tensors.slots[:size],
            tensors.block_table[:size],
            tensors.seq_lens[:size],
            tensors.query_starts[: size + 1],
            size,
            limits.shape.block_size,
            self._works,
            tensors.partials,
        )
        self._windows: Sequences | None = None
        if limits.windows_apart:
            slots, table = tensors.window_slots[:size], tensors.window_table[:size]
            self._windows = replace(self._sequences, slots=slots, block_table=table)
        self._state_slots = tensors.state_slots[:size]
        self.batch = ForwardBatch(
            tensors.token_ids[:size],
            tensors.positions[:size],
            self._sequences,
            num_valid=self._num_valid,
            states=StateRows(self._sequences.query_starts, self._state_slots, 1) if limits.spec.state_layers else None,
            window_attention=self._windows,
        )

    def load(self, arrays: StepArrays, drawn: Tensor | None) -> None:
        """Copy a step's rows into the tensors, and make the rows after them padding, without length or slot."""
        count, batch, sequences = arrays.num_rows, self.batch, self._sequences
        if count:
            self._load_rows(arrays, drawn)
        batch.positions[count:].zero_()
        self._state_slots[len(arrays.state_slots) :].fill_(-1)
        sequences.slots[count:].fill_(-1)
        if self._windows is not None:
            self._windows.slots[count:].fill_(-1)
        sequences.seq_lens[count:].zero_()
        self._num_valid.fill_(count)

    def _load_rows(self, arrays: StepArrays, drawn: Tensor | None) -> None:
        count, batch, sequences = arrays.num_rows, self.batch, self._sequences
        device = batch.token_ids.device
        batch.token_ids[:count].copy_(token_ids_of(arrays, drawn, device))
        batch.positions[:count].copy_(to_device(arrays.positions, device))
        sequences.slots[:count].copy_(to_device(arrays.slots, device))
        sequences.seq_lens[:count].copy_(to_device(arrays.seq_lens, device))
        if arrays.state_slots:
            self._state_slots[:count].copy_(to_device(arrays.state_slots, device))
        width = max(len(table) for table in arrays.block_tables)
        sequences.block_table[:count, :width].copy_(block_table(arrays.block_tables, width, device))
        if self._windows is not None:
            # A step without window tables, as at the start, uses the same numbers for both kinds of blocks.
            slots, tables = arrays.window_slots or arrays.slots, arrays.window_tables or arrays.block_tables
            self._windows.slots[:count].copy_(to_device(slots, device))
            self._windows.block_table[:count, :width].copy_(block_table(tables, width, device))

    def update_works(self) -> None:
        """Fill the work lists for the loaded sequences. A graph records this too."""
        for work in self._works.values():
            work.update(self._sequences.seq_lens)


def token_ids_of(arrays: StepArrays, drawn: Tensor | None, device: torch.device) -> Tensor:
    """Return the rows' tokens [T] int64, from the host or from `drawn`. Raise ValueError if `drawn` is missing."""
    token_ids = to_device(arrays.token_ids, device)
    if not arrays.sources:
        return token_ids
    if drawn is None:
        raise ValueError("rows wait for tokens of a previous step, and there is none")
    sources = to_device(arrays.sources, device)
    return torch.where(sources >= 0, drawn.index_select(0, sources.clamp(min=0)), token_ids)


def block_table(tables: Sequence[array[int]], width: int, device: torch.device) -> Tensor:
    """Return the tables as [S, width] int32. No kernel reads the zeros after a table's end."""
    rows = array("i")
    for table in tables:
        rows += table
        rows.extend([0] * (width - len(table)))
    return to_device(rows, device).view(len(tables), width)


def _round_up(width: int) -> int:
    return -(-width // _TABLE_STEP) * _TABLE_STEP
