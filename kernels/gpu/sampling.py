"""Choosing tokens from logits on a GPU without sorting them.

A draw at temperature T is the argmax of logits / T plus Gumbel noise (Gumbel, 1954), which comes from a counter-based
generator (Philox 4x32-10; Salmon et al., 2011) keyed by the row's seed and counted by position and token: so it depends
on seed and position alone, not on the batch. It is another stream than that of `kernels.sampling`, which inverts the
distribution function: the two draw from the same distribution, but not the same tokens. Greedy tokens are the same.

Filters become one threshold per row (`kernels.gpu.sampling_filters`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.sampling_filters import filter_thresholds

# Both are part of the random stream: another unit draws other tokens.
_LANES = 1024
_UNIT = 4 * _LANES


@triton.jit
def _gumbel(word):
    """Gumbel noise from 32 random bits. Small uniforms keep their precision: they make the largest values."""
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333333))
    exponential = tl.where(uniform < 1e-3, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def _pick_kernel(
    logits,
    temperatures,
    thresholds,
    seeds,
    positions,
    best_scores,
    best_tokens,
    largest,
    row_stride: tl.int64,
    VOCAB: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    LANES: tl.constexpr,
    SAMPLE: tl.constexpr,
    FILTER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1)
    lanes = tl.arange(0, LANES)
    if SAMPLE:
        temperature = tl.load(temperatures + row)
        inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
        noisy = temperature > 0
        position = tl.load(positions + row)
        counter = (unit * LANES + lanes).to(tl.uint32)
        none = counter * 0
        low = none + (position & 0xFFFFFFFF).to(tl.uint32)
        high = none + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
        word_0, word_1, word_2, word_3 = tl.philox(tl.load(seeds + row), counter, low, high, none)
    if FILTER:
        threshold = tl.load(thresholds + row)
    scores = tl.full([LANES], float("-inf"), tl.float32)
    tokens = unit * 4 * LANES + lanes
    maxima = tl.full([LANES], float("-inf"), tl.float32)
    num_nan = tl.zeros([LANES], tl.int32)
    for quarter in tl.static_range(4):
        token = (unit * 4 + quarter) * LANES + lanes
        inside = token < VOCAB
        values = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
        num_nan += (values != values).to(tl.int32)
        maxima = tl.maximum(maxima, values)
        score = values
        if FILTER:
            score = tl.where(score >= threshold, score, float("-inf"))
        if SAMPLE:
            if quarter == 0:
                noise = _gumbel(word_0)
            elif quarter == 1:
                noise = _gumbel(word_1)
            elif quarter == 2:
                noise = _gumbel(word_2)
            else:
                noise = _gumbel(word_3)
            score = score * inverse + tl.where(noisy, noise, 0.0)
        # Strictly larger: of equal scores the first token wins, as in torch.
        better = (score > scores) & inside
        scores = tl.where(better, score, scores)
        tokens = tl.where(better, token, tokens)
    best = tl.max(scores, 0)
    token = tl.min(tl.where(scores == best, tokens, VOCAB - 1), 0)
    place = row * NUM_UNITS + unit
    tl.store(best_scores + place, best)
    tl.store(best_tokens + place, token)
    value = tl.max(maxima, 0)
    tl.store(largest + place, tl.where(tl.sum(num_nan, 0) > 0, float("nan"), value))


@triton.jit
def _finish_kernel(
    best_scores,
    best_tokens,
    largest_of_unit,
    token_ids,
    largest,
    VOCAB: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    units = tl.arange(0, BLOCK)
    inside = units < NUM_UNITS
    place = row * NUM_UNITS + units
    scores = tl.load(best_scores + place, mask=inside, other=float("-inf"))
    tokens = tl.load(best_tokens + place, mask=inside, other=VOCAB - 1)
    best = tl.max(scores, 0)
    tl.store(token_ids + row, tl.min(tl.where(scores == best, tokens, VOCAB - 1), 0).to(tl.int64))
    values = tl.load(largest_of_unit + place, mask=inside, other=float("-inf"))
    num_nan = tl.sum((values != values).to(tl.int32), 0)
    tl.store(largest + row, tl.where(num_nan > 0, float("nan"), tl.max(values, 0)))


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first token with the largest logit of each row of [S, V] (int64 [S]), and that logit (fp32 [S]).

    A row with a NaN has NaN for its largest logit, and some token.
    """
    return _pick(logits, None, None, None, None)


def sample(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A token of each row of logits [S, V] (int64 [S]), and the row's largest logit (fp32 [S]; NaN if there is one).

    temperatures [S] fp32, 0 for greedy rows. seeds, positions [S] int64. top_k [S] int32 (0: off), top_p [S] fp32 (1:
    off) and min_p [S] fp32 (0: off) are given together or not at all. Reads the logits once, with filters
    twice as a rule (`kernels.gpu.sampling_filters` says when oftener).
    """
    thresholds = None
    if top_k is not None and top_p is not None and min_p is not None:
        thresholds = filter_thresholds(logits, temperatures, top_k, top_p, min_p)
    return _pick(logits, temperatures, thresholds, seeds, positions)


def _pick(
    logits: Tensor,
    temperatures: Tensor | None,
    thresholds: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_rows, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("a row of logits must be contiguous")
    num_units = triton.cdiv(vocab, _UNIT)
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    largest = torch.empty(num_rows, dtype=torch.float32, device=device)
    if not num_rows:
        return token_ids, largest
    # Two tensors, not halves of one: where the second began would follow the number of rows, and with it what Triton
    # knows of its alignment and compiles for.
    scores = torch.empty((num_rows, num_units), dtype=torch.float32, device=device)
    of_unit = torch.empty_like(scores)
    tokens = torch.empty((num_rows, num_units), dtype=torch.int32, device=device)
    _pick_kernel[(num_rows, num_units)](
        logits,
        largest if temperatures is None else temperatures,
        largest if thresholds is None else thresholds,
        largest if seeds is None else seeds,
        largest if positions is None else positions,
        scores,
        tokens,
        of_unit,
        logits.stride(0),
        VOCAB=vocab,
        NUM_UNITS=num_units,
        LANES=_LANES,
        SAMPLE=temperatures is not None,
        FILTER=thresholds is not None,
        num_warps=4,
    )
    _finish_kernel[(num_rows,)](
        scores,
        tokens,
        of_unit,
        token_ids,
        largest,
        VOCAB=vocab,
        NUM_UNITS=num_units,
        BLOCK=triton.next_power_of_2(num_units),
        num_warps=1,
    )
    return token_ids, largest
