"""Top-k, top-p and min-p as one threshold per row of logits, without sorting.

The k-th largest logit, and the smallest logit of the nucleus, are found digit by digit of their bit pattern, two bits
at a time (radix selection), among candidates that are held in registers. Tokens equal to the threshold are all kept,
where sorting would cut between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
