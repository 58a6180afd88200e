"""Sample tokens from logits. Rows that are not greedy are sampled one at a time, so the batch never changes a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.library import native_kernels

_TOP_P_CANDIDATES = 1024
_MASK_64 = (1 << 64) - 1


class Draw(NamedTuple):
    """The parameters for sampling a token from a row of logits. `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing.

    temperature: 0 takes the likeliest token and ignores all other parameters.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0

    @property
    def filters(self) -> bool:
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Return a token for each row of logits [S, V] (int64 [S]), and the row's largest logit (fp32 [S]).

    The largest logit of a row with a NaN is NaN. If the largest is not finite, the token has no meaning.
    """
    largest, token_ids = likeliest(logits)
    largest = largest.float()
    for row, wanted in enumerate(draws):
        if wanted.temperature and math.isfinite(largest[row]):
            token_ids[row] = draw(
                logits[row].float(),
                wanted.temperature,
                wanted.top_k,
                wanted.top_p,
                wanted.min_p,
                uniform_at(wanted.seed, wanted.position),
            )
    return token_ids, largest


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each row of logits [S, V], the first of equal ones, and its place, as `logits.max(-1)`."""
    kernels = native_kernels()
    if kernels is None or logits.device.type != "cpu" or logits.dtype is not torch.float32 or logits.stride(1) != 1:
        return logits.max(-1)
    num_rows, width = logits.shape
    largest = logits.new_empty(num_rows)
    places = logits.new_empty(num_rows, dtype=torch.int64)
    kernels.largest(logits.data_ptr(), logits.stride(0), num_rows, width, largest.data_ptr(), places.data_ptr())
    return largest, places


def softmax(logits: Tensor, *, takes_logs: bool = False) -> Tensor:
    """Return the softmax of each row of logits [..., V] in fp32, or its logarithms: the same bits on every CPU."""
    kernels = native_kernels()
    if kernels is None or logits.device.type != "cpu" or logits.dtype is not torch.float32 or logits.stride(-1) != 1:
        return logits.float().log_softmax(-1) if takes_logs else logits.float().softmax(-1)
    rows, out = logits.view(-1, logits.shape[-1]), torch.empty(logits.shape)
    kernels.softmax(rows.data_ptr(), rows.stride(0), *rows.shape, takes_logs, out.data_ptr())
    return out


def draw(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """Sample a token from logits [V] (fp32) at `temperature` > 0, inverting the distribution at `uniform` in [0, 1).

    `top_k` (0: off) keeps the k likeliest tokens. Of these `top_p` keeps the fewest, likeliest first, whose
    probabilities reach it, and `min_p` the tokens with at least that share of the likeliest one's probability. The
    distribution function sums from the likeliest token down with top_k or top_p, and otherwise in the vocabulary's
    order.
    """
    scaled = row / temperature
    candidates: Tensor | None = None
    if 0 < top_k < scaled.shape[0]:
        scaled, candidates = scaled.topk(top_k)
    probabilities = softmax(scaled)
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
    """Return a number in [0, 1) that depends on seed and position alone (SplitMix64; Steele et al., 2014)."""
    state = (seed * 0x9E3779B97F4A7C15 + position * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) & _MASK_64
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


def _nucleus(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the fewest probabilities, likeliest first, that together reach `top_p`, and their places."""
    size = min(_TOP_P_CANDIDATES, probabilities.shape[0])
    values, places = probabilities.topk(size)
    cumulative = values.double().cumsum(0)
    if float(cumulative[-1]) < top_p and size < probabilities.shape[0]:
        values, places = probabilities.sort(descending=True, stable=True)
        cumulative = values.double().cumsum(0)
    count = int((cumulative < top_p).sum()) + 1
    return values[:count], places[:count]
