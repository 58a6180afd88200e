"""Executes a plan: its chunks become tensors, the decoder runs once, sampled tokens come back."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import torch

from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.ops import PagedRows
from moeserve.model.decoder import Decoder, ForwardBatch
from moeserve.model.kv_pool import KVPool
from moeserve.model.sampler import ScoredTokens, draw_tokens
from moeserve.plan import Chunk, ChunkResult, StepPlan, StepResult, wanted_logits

_WARM_UP_SIZES = (1, 2, 4, 8, 16, 64)


class ModelRunner:
    """Owns a decoder and its KV memory. It keeps no state of requests: a plan says everything."""

    def __init__(self, decoder: Decoder, kv_pool: KVPool) -> None:
        self._decoder = decoder
        self._kv_pool = kv_pool

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One forward over all chunks; mutates the KV pool. Without chunks it only serves other ranks."""
        if plan.zeroed_blocks:
            self._kv_pool.zero_blocks(plan.zeroed_blocks)
        if not plan.chunks:
            self._decoder.serve_others()
            return StepResult(plan.step, [])
        logit_rows, rows_of_chunk = wanted_logits(plan.chunks)
        states = self._decoder.states(self._make_batch(plan.chunks, logit_rows), self._kv_pool.layers)
        sampled = [chunk for chunk in plan.chunks if chunk.sampling is not None]
        last = [rows[-1] for chunk, rows in zip(plan.chunks, rows_of_chunk, strict=True) if chunk.sampling is not None]
        drawn: Iterator[ChunkResult] = iter(())
        if sampled:
            of_sampled = states if len(last) == len(logit_rows) else states[last]
            drawn = iter(draw_tokens(self._decoder.ops, self._decoder.logits(of_sampled), sampled).results())
        results = []
        for chunk, rows in zip(plan.chunks, rows_of_chunk, strict=True):
            result = next(drawn) if chunk.sampling is not None else ChunkResult()
            if chunk.extras is not None and chunk.extras.prompt_targets:
                targets = chunk.extras.prompt_targets
                scored = states[rows.start : rows.start + len(targets)]
                num_top = chunk.extras.num_top_logprobs
                result.prompt_logprobs = ScoredTokens(self._decoder.logits, scored, targets, num_top).all()
            results.append(result)
        return StepResult(plan.step, results)

    @torch.inference_mode()
    def warm_up(self, max_num_tokens: int, begin_step: Callable[[int], None] = lambda _: None) -> None:
        """Computes a few steps of usual sizes, for which the matrix library prepares itself once.

        `begin_step` is told each step's number of rows. Several ranks warm up together.

        Writes into blocks from 0 on, as many as `max_num_tokens` tokens need or there are; nobody may hold them yet.
        """
        capacity = self._kv_pool.num_blocks * self._kv_pool.block_size
        largest = min(max_num_tokens, capacity, self._decoder.max_model_len)
        block_table = array("i", range(self._kv_pool.num_blocks))
        for count in sorted({min(size, largest) for size in (*_WARM_UP_SIZES, largest)}):
            # Spread over the vocabulary, so that the gate spreads them over the experts.
            vocab_size = self._decoder.spec.vocab_size
            token_ids = array("i", (i * max(1, vocab_size // count) % vocab_size for i in range(count)))
            begin_step(count)
            self._decoder.forward(
                self._make_batch([Chunk("", token_ids, 0, block_table, None)], [count - 1]), self._kv_pool.layers
            )

    def _make_batch(self, chunks: list[Chunk], logit_rows: list[int]) -> ForwardBatch:
        block_size = self._kv_pool.block_size
        token_ids: array[int] = array("i")
        positions: array[int] = array("q")
        slots: array[int] = array("q")
        spans = []
        for chunk in chunks:
            count = len(chunk.token_ids)
            first, last = chunk.start, chunk.start + count
            token_ids += chunk.token_ids
            positions.extend(range(first, last))
            if count == 1:
                slots.append(chunk.block_table[first // block_size] * block_size + first % block_size)
            else:
                for block in range(first // block_size, (last - 1) // block_size + 1):
                    base = (chunk.block_table[block] - block) * block_size
                    start, stop = max(first, block * block_size), min(last, (block + 1) * block_size)
                    slots.extend(range(base + start, base + stop))
            spans.append(ChunkSpan(count, first, chunk.block_table))
        return ForwardBatch(
            token_ids=torch.frombuffer(token_ids, dtype=torch.int32).to(torch.int64),
            positions=torch.frombuffer(positions, dtype=torch.int64),
            attention=PagedRows(torch.frombuffer(slots, dtype=torch.int64), AttentionPlan(spans, block_size)),
            logit_rows=None if len(logit_rows) == len(token_ids) else torch.tensor(logit_rows, dtype=torch.int64),
        )
