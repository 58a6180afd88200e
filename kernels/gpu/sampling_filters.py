"""Top-k, top-p and min-p as one threshold per row of logits, without sorting.

The k-th largest logit, and the smallest logit of the nucleus, are found digit by
digit of their bit pattern, eight passes of sixteen pivots each (radix selection). Tokens equal to the threshold are all
kept, where sorting would cut between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SCAN = 512


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
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    lanes = tl.arange(0, BLOCK)
    digits = tl.arange(0, 16)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    threshold = float("-inf")
    if temperature > 0:
        largest = float("-inf")
        for first in range(0, VOCAB, BLOCK):
            values = tl.load(logits + first + lanes, mask=first + lanes < VOCAB, other=float("-inf")).to(tl.float32)
            largest = tl.maximum(largest, tl.max(values, 0))
        if min_p > 0:
            threshold = largest + temperature * tl.log(min_p)
        # The nucleus is taken of what top-k left; min-p comes after it.
        floor = float("-inf")
        if (top_k > 0) & (top_k < VOCAB):
            prefix = tl.zeros([1], tl.uint32)
            shift = tl.full([1], 28, tl.uint32)
            for _ in range(8):
                pivots = prefix + (digits.to(tl.uint32) << shift)
                counts = tl.zeros([16], tl.int32)
                for first in range(0, VOCAB, BLOCK):
                    inside = first + lanes < VOCAB
                    values = tl.load(logits + first + lanes, mask=inside, other=float("-inf")).to(tl.float32)
                    reached = (_ordered(values)[:, None] >= pivots[None, :]) & inside[:, None]
                    counts += tl.sum(reached.to(tl.int32), 0)
                digit = tl.sum((counts >= top_k).to(tl.int32), 0) - 1
                prefix += digit.to(tl.uint32) << shift
                shift -= 4
            floor = tl.max(_unordered(prefix), 0)
            threshold = tl.maximum(threshold, floor)
        if top_p < 1:
            inverse = 1.0 / temperature
            prefix = tl.zeros([1], tl.uint32)
            shift = tl.full([1], 28, tl.uint32)
            target = 0.0
            for step in range(8):
                pivots = prefix + (digits.to(tl.uint32) << shift)
                masses = tl.zeros([16], tl.float32)
                for first in range(0, VOCAB, BLOCK):
                    inside = first + lanes < VOCAB
                    values = tl.load(logits + first + lanes, mask=inside, other=float("-inf")).to(tl.float32)
                    weights = tl.where(inside & (values >= floor), tl.exp((values - largest) * inverse), 0.0)
                    reached = _ordered(values)[:, None] >= pivots[None, :]
                    masses += tl.sum(tl.where(reached, weights[:, None], 0.0), 0)
                if step == 0:
                    # Every token reaches the pivot zero.
                    target = top_p * tl.max(masses, 0)
                digit = tl.maximum(tl.sum((masses >= target).to(tl.int32), 0) - 1, 0)
                prefix += digit.to(tl.uint32) << shift
                shift -= 4
            threshold = tl.maximum(threshold, tl.max(_unordered(prefix), 0))
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
