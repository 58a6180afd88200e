"""Penalties, biases and bans on the logits of a step on the GPU: all rows together, and the host waits for nothing."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.cuda.batches import to_device
from moeserve.plan import Chunk, SamplingParams

# Rows that are penalised together: counts of every token of the vocabulary are kept for each.
_ROWS_AT_ONCE = 32


def adjusted_logits(logits: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """A copy of logits [S, V] in fp32 with what `chunks`, one per row, wish; the same tensor if no row wishes any.

    The same numbers as row by row on a CPU: penalties, then biases, then bans.
    """
    penalised = [row for row, chunk in enumerate(chunks) if chunk.extras is not None and chunk.extras.history]
    places, biases, banned = _changes(chunks, logits.shape[1])
    if not (penalised or places or banned):
        return logits
    adjusted, device = logits.float() if logits.dtype != torch.float32 else logits.clone(), logits.device
    for first in range(0, len(penalised), _ROWS_AT_ONCE):
        rows = penalised[first : first + _ROWS_AT_ONCE]
        _penalise(adjusted, to_device(array("q", rows), device), [chunks[row] for row in rows])
    flat = adjusted.view(-1)
    if places:
        # A row names a token once, so nothing is added twice.
        flat.index_add_(0, to_device(places, device), to_device(biases, device))
    if banned:
        flat.index_fill_(0, to_device(banned, device), -torch.inf)
    return adjusted


def _changes(chunks: Sequence[Chunk], vocab_size: int) -> tuple[array[int], array[float], array[int]]:
    """Biased places among all rows' logits, their biases, and banned places."""
    places, biases, banned = array("q"), array("f"), array("q")
    for row, chunk in enumerate(chunks):
        first = row * vocab_size
        if chunk.sampling is not None and chunk.sampling.logit_bias:
            places.extend(first + token for token in chunk.sampling.logit_bias)
            biases.extend(chunk.sampling.logit_bias.values())
        if chunk.extras is not None:
            banned.extend(first + token for token in chunk.extras.banned_token_ids)
    return places, biases, banned


def _penalise(logits: Tensor, rows: Tensor, chunks: Sequence[Chunk]) -> None:
    """Changes rows [R] int64 of `logits` as `kernels.sampling.apply_penalties` does, each by its chunk's history."""
    num_rows, vocab_size, device = len(chunks), logits.shape[1], logits.device
    joined, lengths, num_prompt, samplings = array("i"), array("q"), array("q"), list[SamplingParams]()
    for chunk in chunks:
        extras = chunk.extras
        assert chunk.sampling is not None
        assert extras is not None
        assert extras.history is not None
        joined.extend(extras.history)
        lengths.append(len(extras.history))
        num_prompt.append(extras.num_prompt_tokens)
        samplings.append(chunk.sampling)

    num_tokens = to_device(lengths, device)
    row_of = torch.repeat_interleave(num_tokens, output_size=len(joined))
    place_in_row = torch.arange(len(joined), device=device) - (num_tokens.cumsum(0) - num_tokens)[row_of]
    flat = row_of * vocab_size + to_device(joined, device)
    seen = torch.zeros(num_rows * vocab_size, dtype=torch.bool, device=device).index_fill_(0, flat, value=True)
    is_output = place_in_row >= to_device(num_prompt, device)[row_of]
    # Whole numbers, whose sum does not depend on the order.
    counts = torch.zeros(num_rows * vocab_size, device=device).index_add_(0, flat, is_output.float())

    def column(values: Sequence[float]) -> Tensor:
        return to_device(array("f", values), device)[:, None]

    repetition = column([sampling.repetition_penalty for sampling in samplings])
    presence = column([sampling.presence_penalty for sampling in samplings])
    frequency = column([sampling.frequency_penalty for sampling in samplings])
    found, counts = logits[rows], counts.view(num_rows, vocab_size)
    repeated = torch.where(found > 0, found / repetition, found * repetition)
    found = torch.where(seen.view(num_rows, vocab_size), repeated, found)
    logits.index_copy_(0, rows, torch.where(counts > 0, found - (presence + frequency * counts), found))
