"""Choosing tokens from logits on a GPU without sorting them.

A draw at temperature T is the argmax of logits / T plus Gumbel noise (Gumbel, 1954), which comes from a counter-based
generator (Philox 4x32-10; Salmon et al., 2011) keyed by the row's seed and counted by position and token: so it depends
on seed and position alone, not on the batch. It is another stream than that of `kernels.sampling`, which inverts the
distribution function: the two draw from the same distribution, but not the same tokens. Greedy tokens are the same.

Filters become one threshold per row (`kernels.gpu.sampling`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Top-k, top-p and min-p as one threshold per row of logits, without sorting. The k-th largest logit, and the
# smallest logit of the nucleus, are found digit by digit of their bit pattern, two bits at a time (radix selection),
# among candidates that are held in registers. Tokens equal to the threshold are all kept, where sorting would cut
# between them.


# Lanes of a row: of each the four largest logits are kept in registers.
_SCAN = 4096


@triton.jit
def _ordered(values):
    """fp32 as uint32 in the same order."""
    bits = values.to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return flipped.to(tl.uint32, bitcast=True)


@triton.jit
def _unordered(keys):
    bits = keys.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _digit(worth_1, worth_2, worth_3, target):
    """How many of three falling worths still reach the target."""
    return (worth_1 >= target).to(tl.uint32) + (worth_2 >= target).to(tl.uint32) + (worth_3 >= target).to(tl.uint32)


@triton.jit
def _found(prefix):
    """The key [1] as fp32; minus infinity where even all keys were worth less than the target."""
    key = _unordered(prefix)
    return tl.max(tl.where(key == key, key, float("-inf")), 0)


@triton.jit
def _reached(keys, worth, pivot):
    return tl.where(keys >= pivot, worth, 0.0)


@triton.jit
def _search(keys, worth, target):
    """The largest key, as fp32, that keys worth `target` together reach."""
    prefix = tl.zeros([1], tl.uint32)
    shift = tl.full([1], 30, tl.uint32)
    one = tl.full([1], 1, tl.uint32)
    for _ in range(16):
        step = one << shift
        worth_1 = tl.sum(_reached(keys, worth, prefix + step), 0)
        worth_2 = tl.sum(_reached(keys, worth, prefix + 2 * step), 0)
        worth_3 = tl.sum(_reached(keys, worth, prefix + 3 * step), 0)
        prefix += _digit(worth_1, worth_2, worth_3, target) << shift
        shift -= 2
    return _found(prefix)


@triton.jit
def _worth(values, inside, floor, largest, inverse):
    """Of logits: their share of the softmax, but for a factor; with `inverse` 0 each counts one. None below `floor`."""
    # Bounded, since minus infinity times 0 is NaN.
    below = tl.maximum(values - largest, -1e30)
    return tl.where(inside & (values >= floor), tl.exp(below * inverse), 0.0)


@triton.jit
def _row_worth(logits, floor, largest, inverse, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, VOCAB, BLOCK):
        inside = first + lanes < VOCAB
        values = tl.load(logits + first + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        total += _worth(values, inside, floor, largest, inverse)
    return tl.sum(total, 0)


@triton.jit
def _search_row(logits, target, floor, largest, inverse, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """`_search` over a whole row, read once per digit."""
    lanes = tl.arange(0, BLOCK)
    prefix = tl.zeros([1], tl.uint32)
    shift = tl.full([1], 30, tl.uint32)
    one = tl.full([1], 1, tl.uint32)
    for _ in range(16):
        step = one << shift
        worth_1 = tl.zeros([BLOCK], tl.float32)
        worth_2 = tl.zeros([BLOCK], tl.float32)
        worth_3 = tl.zeros([BLOCK], tl.float32)
        for first in range(0, VOCAB, BLOCK):
            inside = first + lanes < VOCAB
            values = tl.load(logits + first + lanes, mask=inside, other=float("-inf")).to(tl.float32)
            worth = _worth(values, inside, floor, largest, inverse)
            keys = _ordered(values)
            worth_1 += _reached(keys, worth, prefix + step)
            worth_2 += _reached(keys, worth, prefix + 2 * step)
            worth_3 += _reached(keys, worth, prefix + 3 * step)
        prefix += _digit(tl.sum(worth_1, 0), tl.sum(worth_2, 0), tl.sum(worth_3, 0), target) << shift
        shift -= 2
    return _found(prefix)


@triton.jit
def _threshold_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    thresholds,
    row_stride: tl.int64,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row. It reads the row once and keeps the four largest logits of each of BLOCK lanes.

    What both filters look for is among them unless a lane hides more of what is kept; only then is the row read again,
    once per digit.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    lanes = tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    has_top_k = (top_k > 0) & (top_k < VOCAB)
    threshold = float("-inf")
    if (temperature > 0) & (has_top_k | (top_p < 1) | (min_p > 0)):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        second = best
        third = best
        fourth = best
        for first in tl.range(0, VOCAB, BLOCK, num_stages=3):
            values = tl.load(logits + first + lanes, mask=first + lanes < VOCAB, other=float("-inf")).to(tl.float32)
            fourth = tl.maximum(fourth, tl.minimum(third, values))
            third = tl.maximum(third, tl.minimum(second, values))
            second = tl.maximum(second, tl.minimum(best, values))
            best = tl.maximum(best, values)
        largest = tl.max(best, 0)
        # Whatever exceeds this is among the four of its lane.
        hidden = tl.max(fourth, 0)
        values = tl.join(tl.join(best, second), tl.join(third, fourth)).reshape(4 * BLOCK)
        keys = _ordered(values)
        if min_p > 0:
            threshold = largest + temperature * tl.log(min_p)
        # The nucleus is taken of what top-k left; min-p comes after it.
        floor = float("-inf")
        if has_top_k:
            floor = _search(keys, tl.full([4 * BLOCK], 1.0, tl.float32), top_k)
            if (hidden > float("-inf")) & (hidden >= floor):
                floor = _search_row(logits, top_k, float("-inf"), 0.0, 0.0, VOCAB, BLOCK)
            threshold = tl.maximum(threshold, floor)
        if top_p < 1:
            inverse = 1.0 / temperature
            worth = _worth(values, values > float("-inf"), floor, largest, inverse)
            held = tl.sum(worth, 0)
            total = held
            if (hidden >= floor) & (hidden > float("-inf")):
                total = _row_worth(logits, floor, largest, inverse, VOCAB, BLOCK)
            cut = _search(keys, worth, top_p * total)
            if (held < top_p * total) | ((hidden >= cut) & (hidden > float("-inf"))):
                cut = _search_row(logits, top_p * total, floor, largest, inverse, VOCAB, BLOCK)
            threshold = tl.maximum(threshold, cut)
    tl.store(thresholds + row, threshold)


def filter_thresholds(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest logit of each row [S, V] that the filters keep (fp32 [S]); minus infinity for rows without any.

    As in `kernels.sampling`: top-k first, of those the fewest likeliest whose probabilities reach top_p, of those what
    has at least min_p of the likeliest's.
    """
    num_rows, vocab = logits.shape
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _threshold_kernel[(num_rows,)](
            logits,
            temperatures,
            top_k,
            top_p,
            min_p,
            thresholds,
            logits.stride(0),
            VOCAB=vocab,
            BLOCK=_SCAN,
            num_warps=8,
        )
    return thresholds


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
    twice as a rule (`kernels.gpu.sampling` says when oftener).
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


# The draws of `kernels.gpu.sampling` in plain torch: the same random stream, filters by sorting.


_MASK_32 = 0xFFFFFFFF
_KEYS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = (0xD2511F53, 0xCD9E8D57)


def sample_reference(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.gpu.sampling.sample`."""
    values = logits.float()
    largest = values.max(-1).values
    kept = values
    if top_k is not None and top_p is not None and min_p is not None:
        thresholds = filter_thresholds_reference(logits, temperatures, top_k, top_p, min_p)
        kept = values.masked_fill(values < thresholds[:, None], -torch.inf)
    token_ids = torch.empty(len(values), dtype=torch.int64, device=logits.device)
    for row, (temperature, seed, position) in enumerate(
        zip(temperatures.tolist(), seeds.tolist(), positions.tolist(), strict=True)
    ):
        scores = kept[row]
        if temperature > 0:
            noise = gumbel_noise(seed, position, values.shape[1]).to(values.device)
            scores = scores.double() / temperature + noise
        token_ids[row] = int((scores == scores.max()).nonzero()[0]) if not scores.isnan().any() else 0
    return token_ids, largest


def filter_thresholds_reference(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """See `kernels.gpu.sampling.filter_thresholds`."""
    thresholds = torch.full((len(logits),), -torch.inf, device=logits.device)
    filters = zip(temperatures.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    for row, (temperature, k, p, share) in enumerate(filters):
        if temperature == 0.0:
            continue
        values = logits[row].float().sort(descending=True).values
        if 0 < k < len(values):
            thresholds[row] = values[k - 1]
            values = values[values >= values[k - 1]]
        if p < 1.0:
            cumulative = (values.double() / temperature).softmax(0).cumsum(0)
            reached = int((cumulative < p).sum())
            thresholds[row] = torch.maximum(thresholds[row], values[min(reached, len(values) - 1)])
        if share > 0.0:
            least = values[0] + temperature * torch.tensor(share).log()
            thresholds[row] = torch.maximum(thresholds[row], least)
    return thresholds


def gumbel_noise(seed: int, position: int, vocab: int) -> Tensor:
    """The noise [V] (fp64) of every token at one position."""
    tokens = torch.arange(vocab)
    counter = tokens // (4 * _LANES) * _LANES + tokens % _LANES
    words = philox(seed, counter, position)
    word = words.gather(0, (tokens // _LANES % 4)[None])[0]
    uniform = ((word.double() + 0.5) * 2.0**-32).clamp(max=0.99999994)
    return -(-torch.log1p(-uniform)).log()


def philox(seed: int, counter: Tensor, position: int) -> Tensor:
    """Four words of 32 random bits [4, N] (int64) per counter [N], keyed by `seed` (Philox 4x32-10)."""
    key = [seed & _MASK_32, (seed >> 32) & _MASK_32]
    zero = torch.zeros_like(counter)
    words = [counter, zero + (position & _MASK_32), zero + ((position >> 32) & _MASK_32), zero]
    for _ in range(10):
        product_0, product_1 = words[0] * _ROUNDS[0], words[2] * _ROUNDS[1]
        # The products need 64 bits unsigned; as signed ones they wrap, and the mask takes the sign off again.
        high_0, high_1 = (product_0 >> 32) & _MASK_32, (product_1 >> 32) & _MASK_32
        words = [
            high_1 ^ words[1] ^ key[0],
            product_1 & _MASK_32,
            high_0 ^ words[3] ^ key[1],
            product_0 & _MASK_32,
        ]
        key = [(key[0] + _KEYS[0]) & _MASK_32, (key[1] + _KEYS[1]) & _MASK_32]
    return torch.stack(words)
