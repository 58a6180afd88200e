"""Choosing tokens from logits; one row at a time where it is not greedy, so that a draw ignores the batch."""

from __future__ import annotations

import torch
from torch import Tensor

_TOP_P_CANDIDATES = 1024
_MASK_64 = (1 << 64) - 1


def greedy(logits: Tensor) -> tuple[list[float], list[int]]:
    """The largest logit and its token of each row of [S, V]; a NaN in a row comes out as that row's value."""
    values, token_ids = logits.max(dim=-1)
    return values.tolist(), token_ids.tolist()


def apply_penalties(
    row: Tensor, history: Tensor, num_prompt_tokens: int, presence: float, frequency: float, repetition: float
) -> None:
    """Changes logits [V] of tokens that occurred in `history` (int64, prompt then output), in place.

    Repetition (Keskar et al., 2019) divides positive and multiplies negative logits of every token seen; presence and
    frequency subtract once, or once per occurrence, for tokens of the output.
    """
    if repetition != 1.0:
        seen = history.unique()
        logits = row[seen]
        row[seen] = torch.where(logits > 0, logits / repetition, logits * repetition)
    if presence or frequency:
        tokens, counts = history[num_prompt_tokens:].unique(return_counts=True)
        row[tokens] -= presence + frequency * counts.to(row.dtype)


def draw(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """A token from logits [V] (fp32) at `temperature` > 0, by inverting the distribution function at `uniform` [0, 1).

    `top_k` (0: off) keeps the likeliest k, `top_p` of those the fewest whose probabilities reach it, `min_p` those at
    least that share of the likeliest.
    """
    scaled = row / temperature
    candidates: Tensor | None = None
    if 0 < top_k < scaled.shape[0]:
        scaled, candidates = scaled.topk(top_k)
    probabilities = scaled.softmax(-1)
    if top_p < 1.0:
        probabilities, kept = _nucleus(probabilities, top_p)
        candidates = kept if candidates is None else candidates[kept]
    if min_p > 0.0:
        probabilities = probabilities.masked_fill(probabilities < min_p * probabilities.max(), 0.0)
    cumulative = probabilities.double().cumsum(0)
    target = cumulative[-1:] * uniform
    index = min(int(torch.searchsorted(cumulative, target, right=True)), len(cumulative) - 1)
    return index if candidates is None else int(candidates[index])


def uniform_at(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position alone (SplitMix64; Steele et al., 2014)."""
    state = (seed * 0x9E3779B97F4A7C15 + position * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) & _MASK_64
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


def _nucleus(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest likeliest probabilities that together reach `top_p`, best first, and their places."""
    size = min(_TOP_P_CANDIDATES, probabilities.shape[0])
    values, places = probabilities.topk(size)
    cumulative = values.double().cumsum(0)
    if float(cumulative[-1]) < top_p and size < probabilities.shape[0]:
        values, places = probabilities.sort(descending=True, stable=True)
        cumulative = values.double().cumsum(0)
    count = int((cumulative < top_p).sum()) + 1
    return values[:count], places[:count]
