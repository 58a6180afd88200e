"""Tokens and log probabilities of a step, row by row: a pure function of logits, sampling data, seed and position."""

from __future__ import annotations

import math
from array import array

import torch
from torch import Tensor

from kernels.sampling import apply_penalties, draw, greedy, uniform_at
from moeserve.plan import Chunk, ChunkExtras, ChunkResult, TokenLogprobs
from moeserve.request import SamplingParams

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
