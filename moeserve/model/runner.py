"""Executes a plan: its chunks become tensors, the decoder runs once, sampled tokens come back."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

import torch
from torch import Tensor

from experts.routing.tap import RoutingTap
from moeserve.model.decoder import Decoder, ForwardBatch, StepDecoder
from moeserve.model.kv_pool import KVPool
from moeserve.model.mtp_drafts import MtpDrafts
from moeserve.model.paged_batch import make_batch
from moeserve.model.sampler import sample_step
from moeserve.model.spec import NO_NUMBERS, CheckpointError
from moeserve.model.state_pool import StatePool
from moeserve.plan import Chunk, ChunkResult, Computed, StateUse, StepPlan, StepResult, wanted_logits

_WARM_UP_SIZES = (1, 2, 4, 8, 16, 64)


class ModelRunner:
    """Owns a decoder, its KV memory and the memory of recurrent states. Only plans know their contents."""

    def __init__(
        self,
        decoder: StepDecoder,
        kv_pool: KVPool,
        tap: RoutingTap | None = None,
        state_pool: StatePool | None = None,
        num_drafts: int = 0,
        *,
        samples: bool = True,
    ) -> None:
        """tap: observes the decoder's gates; results carry its observations. state_pool: None for a model without
        recurrent layers. num_drafts: the tokens that the decoder's MTP layer drafts for a request, 0 without one.
        samples: False for a stage that is not the last; its results have no chunks."""
        self._decoder = decoder
        self._samples = samples
        self._kv_pool = kv_pool
        self._state_pool = state_pool
        self._pools = decoder.arrange_pools(kv_pool.layers, state_pool)
        self._tap = tap
        self._drafts: MtpDrafts | None = None
        if num_drafts:
            assert isinstance(decoder, Decoder)
            self._drafts = MtpDrafts(decoder, self._pools, kv_pool.block_size, num_drafts)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Computed[StepResult]:
        """Compute one forward over all chunks; mutates the pools. Without chunks it only serves other ranks."""
        if self._tap is None:
            return Computed(StepResult(plan.step, self._compute(plan)))
        self._tap.clear()
        return Computed(StepResult(plan.step, self._compute(plan), self._tap.take()))

    def _compute(self, plan: StepPlan) -> list[ChunkResult]:
        if plan.copied_blocks:
            self._kv_pool.copy_blocks(plan.copied_blocks)
        if plan.zeroed_blocks:
            self._kv_pool.zero_blocks(plan.zeroed_blocks, plan.zeroed_windows)
        if not plan.chunks:
            self._decoder.serve_others()
            return []
        if not self._samples:
            self._states(plan.chunks, self._batch(plan.chunks, None))
            return []
        logit_rows, places = wanted_logits(plan.chunks)
        if self._drafts is None:
            states = self._states(plan.chunks, self._batch(plan.chunks, logit_rows))
            return sample_step(self._decoder, plan.chunks, places, states).results()
        batch = self._batch(plan.chunks, None)
        states = self._states(plan.chunks, batch)
        results = sample_step(self._decoder, plan.chunks, places, states[logit_rows]).results()
        self._drafts.add(plan.chunks, results, batch, states)
        return results

    def _batch(self, chunks: list[Chunk], logit_rows: list[int] | None) -> ForwardBatch:
        return make_batch(chunks, self._kv_pool.block_size, logit_rows, has_states=self._state_pool is not None)

    def _states(self, chunks: list[Chunk], batch: ForwardBatch) -> Tensor:
        """Return [S, hidden] after the last norm, of the rows that need logits."""
        if self._state_pool is not None:
            self._state_pool.begin(chunks)
        states = self._decoder.states(batch, self._pools)
        if self._state_pool is not None:
            self._state_pool.end(chunks)
        return states

    @torch.inference_mode()
    def warm_up(
        self, max_num_tokens: int, begin_step: Callable[[int], None] = lambda _: None, only_size: int | None = None
    ) -> list[tuple[int, float]]:
        """Let the decoder settle, and compute a few steps of usual sizes, for which the matrix library prepares once.

        Return the tokens of each step, all of one prompt, and its seconds.

        begin_step: receives each step's number of rows. Several ranks warm up together. only_size: compute
        one step of this many tokens, and measure nothing.

        Write into state slot 0 and into blocks from 0 on, as many as `max_num_tokens` tokens need or as exist; no
        request may hold them yet. Raise ModelError for a model that cannot be served. Raise CheckpointError if logits
        are not finite, but only after the last step, which other ranks wait for.
        """
        self._decoder.settle(begin_step)
        finite, measured = True, list[tuple[int, float]]()
        pool = self._kv_pool
        num_blocks = min(pool.num_blocks, pool.num_window_blocks or pool.num_blocks)
        capacity = num_blocks * pool.block_size
        largest = min(max_num_tokens, capacity, self._decoder.max_model_len)
        block_table = array("i", range(num_blocks))
        sizes = (*_WARM_UP_SIZES, largest) if only_size is None else (only_size,)
        for count in sorted({min(size, largest) for size in sizes}):
            # Spread tokens over the vocabulary, so that the gate spreads them over the experts.
            vocab_size = self._decoder.spec.vocab_size
            token_ids = array("i", (i * max(1, vocab_size // count) % vocab_size for i in range(count)))
            begin_step(count)
            began = time.monotonic()
            chunk = Chunk("", token_ids, 0, block_table, None, state=None if self._state_pool is None else StateUse(0))
            batch = self._batch([chunk], [count - 1] if self._samples and self._drafts is None else None)
            states = self._states([chunk], batch)[-1:]
            if self._samples:
                # As in sampling: a logit of minus infinity is a token that never comes.
                finite = finite and bool(self._decoder.logits(states).float().amax(-1).isfinite().all())
            measured.append((count, time.monotonic() - began))
        if not finite:
            raise CheckpointError(NO_NUMBERS)
        return measured if only_size is None else []
