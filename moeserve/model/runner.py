"""Executes a plan: its chunks become tensors, the decoder runs once, sampled tokens come back."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import torch
from torch import Tensor

from experts.routing.tap import RoutingTap
from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.cpu.library import native_kernels
from kernels.ops import PagedRows
from moeserve.model.decoder import Decoder, ForwardBatch, StepDecoder
from moeserve.model.kv_pool import KVPool
from moeserve.model.repeated_steps import RepeatedSteps, StepRows
from moeserve.model.sampler import sample_step
from moeserve.model.spec import NO_NUMBERS, CheckpointError
from moeserve.model.state_pool import StatePool, state_rows
from moeserve.model.step_arrays import StepArrays, step_arrays
from moeserve.plan import Chunk, ChunkResult, Computed, StateUse, StepPlan, StepResult, wanted_logits

_WARM_UP_SIZES = (1, 2, 4, 8, 16, 64)


class ModelRunner:
    """Owns a decoder, its KV memory and the memory of recurrent states. Only plans tell their contents."""

    def __init__(
        self,
        decoder: StepDecoder,
        kv_pool: KVPool,
        tap: RoutingTap | None = None,
        state_pool: StatePool | None = None,
    ) -> None:
        """tap: observes the decoder's gates; results carry its observations. state_pool: None for a model without
        recurrent layers."""
        self._decoder = decoder
        self._kv_pool = kv_pool
        self._state_pool = state_pool
        self._pools = decoder.arrange_pools(kv_pool.layers, state_pool)
        self._tap = tap
        self._repeated = self._make_repeated()

    def _make_repeated(self) -> RepeatedSteps | None:
        decoder, kernels = self._decoder, native_kernels()
        if not isinstance(decoder, Decoder) or kernels is None or self._state_pool is not None:
            return None
        if not decoder.computes_alone:
            return None
        return RepeatedSteps(decoder, kernels, self._pools, self._kv_pool.block_size, self._tap)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Computed[StepResult]:
        """Compute one forward over all chunks; mutates the pools. Without chunks it only serves other ranks."""
        if self._tap is None:
            return Computed(StepResult(plan.step, self._compute(plan)))
        self._tap.clear()
        return Computed(StepResult(plan.step, self._compute(plan), self._tap.take()))

    def _compute(self, plan: StepPlan) -> list[ChunkResult]:
        if plan.zeroed_blocks:
            self._kv_pool.zero_blocks(plan.zeroed_blocks, plan.zeroed_windows)
        if not plan.chunks:
            self._decoder.serve_others()
            return []
        logit_rows, places = wanted_logits(plan.chunks)
        states = self._states(plan.chunks, logit_rows)
        return sample_step(self._decoder, plan.chunks, places, states).results()

    def _states(self, chunks: list[Chunk], logit_rows: list[int]) -> Tensor:
        """Return [S, hidden] after the last norm, of the rows that need logits."""
        arrays = step_arrays(chunks, self._kv_pool.block_size)
        if self._repeated is not None and len(logit_rows) == arrays.num_rows:
            rows = StepRows(
                [len(chunk.token_ids) for chunk in chunks],
                [chunk.start for chunk in chunks],
                arrays.slots,
                arrays.block_tables,
                arrays.window_slots,
                arrays.window_tables,
            )
            if self._repeated.takes(rows):
                token_ids, positions = (
                    torch.frombuffer(part, dtype=torch.int64) for part in (arrays.token_ids, arrays.positions)
                )
                return self._repeated.states(token_ids, positions, rows)
        if self._state_pool is not None:
            self._state_pool.begin(chunks)
        states = self._decoder.states(self._make_batch(chunks, arrays, logit_rows), self._pools)
        if self._state_pool is not None:
            self._state_pool.end(chunks)
        return states

    @torch.inference_mode()
    def warm_up(self, max_num_tokens: int, begin_step: Callable[[int], None] = lambda _: None) -> None:
        """Let the decoder settle, and compute a few steps of usual sizes, for which the matrix library prepares once.

        begin_step: receives each step's number of rows. Several ranks warm up together.

        Write into state slot 0 and into blocks from 0 on, as many as `max_num_tokens` tokens need or as exist; no
        request may hold them yet. Raise ModelError for a model that cannot be served. Raise CheckpointError if logits
        are not finite, but only after the last step, which other ranks wait for.
        """
        self._decoder.settle(begin_step)
        finite = True
        pool = self._kv_pool
        num_blocks = min(pool.num_blocks, pool.num_window_blocks or pool.num_blocks)
        capacity = num_blocks * pool.block_size
        largest = min(max_num_tokens, capacity, self._decoder.max_model_len)
        block_table = array("i", range(num_blocks))
        for count in sorted({min(size, largest) for size in (*_WARM_UP_SIZES, largest)}):
            # Spread tokens over the vocabulary, so that the gate spreads them over the experts.
            vocab_size = self._decoder.spec.vocab_size
            token_ids = array("i", (i * max(1, vocab_size // count) % vocab_size for i in range(count)))
            begin_step(count)
            chunk = Chunk("", token_ids, 0, block_table, None, state=None if self._state_pool is None else StateUse(0))
            logits = self._decoder.logits(self._states([chunk], [count - 1]))
            # As in sampling: a logit of minus infinity is a token that never comes.
            finite = finite and bool(logits.float().amax(-1).isfinite().all())
        if not finite:
            raise CheckpointError(NO_NUMBERS)

    def _make_batch(self, chunks: list[Chunk], arrays: StepArrays, logit_rows: list[int]) -> ForwardBatch:
        windows = arrays.window_tables
        return ForwardBatch(
            token_ids=torch.frombuffer(arrays.token_ids, dtype=torch.int64),
            positions=torch.frombuffer(arrays.positions, dtype=torch.int64),
            attention=self._paged_rows(chunks, arrays.slots, arrays.block_tables),
            logit_rows=None if len(logit_rows) == arrays.num_rows else torch.tensor(logit_rows, dtype=torch.int64),
            states=None if self._state_pool is None else state_rows(chunks),
            window_attention=self._paged_rows(chunks, arrays.window_slots, windows) if windows else None,
        )

    def _paged_rows(self, chunks: list[Chunk], slots: array[int], tables: list[array[int]]) -> PagedRows:
        spans = [
            ChunkSpan(len(chunk.token_ids), chunk.start, table) for chunk, table in zip(chunks, tables, strict=True)
        ]
        plan = AttentionPlan(spans, self._kv_pool.block_size)
        return PagedRows(torch.frombuffer(slots, dtype=torch.int64), plan)
