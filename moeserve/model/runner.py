"""Executes a plan: its chunks become tensors, the decoder runs once, sampled tokens come back."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

import torch
from torch import Tensor

from experts.routing_tap import RoutingTap
from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.ops import PagedRows
from kernels.sampling import apply_penalties, draw, greedy, uniform_at
from moeserve.model.decoder import Decoder, ForwardBatch
from moeserve.model.kv_pool import KVPool
from moeserve.plan import (
    Chunk,
    ChunkExtras,
    ChunkResult,
    Computed,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
    wanted_logits,
)

# Tokens and log probabilities of a step, row by row: a pure function of logits, sampling data, seed and position.


NOT_FINITE = "the model produced logits that are not finite"


def sample(logits: Tensor, chunks: list[Chunk]) -> list[ChunkResult]:
    """One result per row of logits [S, V] (any float dtype); row i belongs to `chunks[i]`, which has `sampling`.

    A row with NaN or infinite logits gives an error for its request alone. Mutates nothing.
    """
    logits = logits.float()
    largest, likeliest = greedy(logits)
    results = []
    for index, chunk in enumerate(chunks):
        sampling = chunk.sampling
        assert sampling is not None
        if not math.isfinite(largest[index]):
            results.append(ChunkResult(error=NOT_FINITE))
            continue
        is_plain = sampling.temperature == 0.0 and chunk.extras is None and not sampling.logit_bias
        token_id = likeliest[index] if is_plain else _choose(logits[index], chunk, sampling)
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = token_logprobs(logits[index : index + 1], [token_id], sampling.logprobs)[0]
        results.append(ChunkResult(token_id, logprobs))
    return results


def token_logprobs(logits: Tensor, token_ids: list[int] | array[int], num_top: int) -> list[TokenLogprobs]:
    """Log probabilities of one token per row of logits [S, V], with the `num_top` likeliest of each row."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64)[:, None])[:, 0].tolist()
    if not num_top:
        return [TokenLogprobs(value) for value in chosen]
    values, places = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    tops = zip(places.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(value, tuple(zip(ids, best, strict=True)))
        for value, (ids, best) in zip(chosen, tops, strict=True)
    ]


def _choose(row: Tensor, chunk: Chunk, sampling: SamplingParams) -> int:
    row = adjusted_row(row, chunk, sampling)
    if sampling.temperature == 0.0:
        return int(row.argmax())
    uniform = uniform_at(sampling.seed, chunk.start + len(chunk.token_ids))
    return draw(row, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, uniform)


def adjusted_row(row: Tensor, chunk: Chunk, sampling: SamplingParams) -> Tensor:
    """A copy of logits [V] with the penalties, then the biases, then the bans that the chunk wishes."""
    row = row.clone()
    if chunk.extras is not None:
        _apply_extras(row, chunk.extras, sampling)
    if sampling.logit_bias:
        places = torch.tensor(list(sampling.logit_bias), dtype=torch.int64)
        row[places] += torch.tensor(list(sampling.logit_bias.values()), dtype=row.dtype)
    if chunk.extras is not None and chunk.extras.banned_token_ids:
        row[list(chunk.extras.banned_token_ids)] = -torch.inf
    return row


def _apply_extras(row: Tensor, extras: ChunkExtras, sampling: SamplingParams) -> None:
    if extras.history is None:
        return
    apply_penalties(
        row,
        torch.tensor(extras.history, dtype=torch.int64),
        extras.num_prompt_tokens,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )


_WARM_UP_SIZES = (1, 2, 4, 8, 16, 64)


class ModelRunner:
    """Owns a decoder and its KV memory. It keeps no state of requests: a plan says everything."""

    def __init__(self, decoder: Decoder, kv_pool: KVPool, tap: RoutingTap | None = None) -> None:
        """tap: observes the decoder's gates; results carry what it heard."""
        self._decoder = decoder
        self._kv_pool = kv_pool
        self._tap = tap

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Computed[StepResult]:
        """Compute one forward over all chunks; mutates the KV pool. Without chunks it only serves other ranks."""
        if self._tap is None:
            return Computed(StepResult(plan.step, self._compute(plan)))
        self._tap.clear()
        return Computed(StepResult(plan.step, self._compute(plan), self._tap.take()))

    def _compute(self, plan: StepPlan) -> list[ChunkResult]:
        if plan.zeroed_blocks:
            self._kv_pool.zero_blocks(plan.zeroed_blocks)
        if not plan.chunks:
            self._decoder.serve_others()
            return []
        logit_rows, rows_of_chunk = wanted_logits(plan.chunks)
        logits = self._decoder.forward(self._make_batch(plan.chunks, logit_rows), self._kv_pool.layers)
        sampled = [chunk for chunk in plan.chunks if chunk.sampling is not None]
        last_rows = [rows[-1] for chunk, rows in zip(plan.chunks, rows_of_chunk, strict=True) if chunk.sampling]
        whole = len(last_rows) == len(logit_rows)
        drawn = iter(sample(logits if whole else logits[last_rows], sampled) if sampled else ())
        results = []
        for chunk, rows in zip(plan.chunks, rows_of_chunk, strict=True):
            result = next(drawn) if chunk.sampling is not None else ChunkResult()
            if chunk.extras is not None and chunk.extras.prompt_targets:
                targets = chunk.extras.prompt_targets
                of_targets = logits[rows.start : rows.start + len(targets)]
                result.prompt_logprobs = token_logprobs(of_targets, targets, chunk.extras.num_top_logprobs)
            results.append(result)
        return results

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
