"""Top-k, top-p and min-p of logits with the programs of a row side by side: a variant of `kernels.gpu.sampling`.

A search for a logit takes four bits of its key at a time. At each level every program sums the worth of its unit's
logits from each of sixteen keys upwards, and the programs of the next level add up these sums, in the order of units.
The number of tokens that the filters keep changes nothing in it, where `kernels.gpu.sampling` reads a row sixteen times
by one program once a lane keeps more than four. Three searches follow each other: the k-th logit, the logit of top-p,
and the sampled one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.sampling import key_to_logit, to_key, uniform_of, worth_of

_UNIT = 4096  # Logits of a row that one program sums.
_PIVOTS = 16  # The keys of a level: four bits.
_TOP_K, _TOP_P, _SAMPLED = (tl.constexpr(search) for search in range(3))


def keep_by_split_rows(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what the filters keep, as `kernels.gpu.sampling.sample` takes it."""
    (num_rows, vocab), device = logits.shape, logits.device
    num_units = triton.cdiv(vocab, _UNIT)
    # bfloat16 has no more bits than these levels find.
    levels = 4 if logits.dtype == torch.bfloat16 else 8

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    thresholds, lows, highs, floors = (floats(num_rows) for _ in range(4))
    uniforms = torch.empty(num_rows, dtype=torch.float64, device=device)
    prefixes = torch.zeros((3 * levels + 1, num_rows), dtype=torch.int32, device=device)
    sums, largest, of_sampled = (
        floats(3 * levels, num_rows, num_units, _PIVOTS),
        floats(num_rows, num_units),
        floats(num_rows, num_units, 2),
    )
    if not num_rows:
        return thresholds, lows, highs, uniforms
    settings = (temperatures, top_k, top_p, min_p, seeds, positions)
    shared = {
        "VOCAB": vocab,
        "NUM_UNITS": num_units,
        "LEVELS": levels,
        "ROWS_OF_UNITS": triton.next_power_of_2(num_units),
    }
    grid = (num_rows, num_units)
    _largest_kernel[grid](logits, largest, logits.stride(0), VOCAB=vocab, NUM_UNITS=num_units, UNIT=_UNIT, num_warps=4)
    rows = (logits, largest, sums, prefixes, floors, thresholds, *settings, num_rows, logits.stride(0))
    for step in range(3 * levels):
        search, level = divmod(step, levels)
        _level_kernel[grid](
            *rows, step, SEARCH=search, FIRST=level == 0, **shared, UNIT=_UNIT, PIVOTS=_PIVOTS, num_warps=4
        )
    _weigh_kernel[grid](*rows, of_sampled, lows, **shared, UNIT=_UNIT, PIVOTS=_PIVOTS, num_warps=4)
    _finish_kernel[(num_rows,)](
        sums, of_sampled, thresholds, lows, highs, uniforms, *settings, num_rows, **shared, PIVOTS=_PIVOTS, num_warps=4
    )
    return thresholds, lows, highs, uniforms


@triton.jit
def _largest_kernel(
    logits, largest, row_stride: tl.int64, VOCAB: tl.constexpr, NUM_UNITS: tl.constexpr, UNIT: tl.constexpr
):
    """Store the largest logit of a unit; NaN counts as none."""
    row, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = unit * UNIT + tl.arange(0, UNIT)
    values = tl.load(logits + row * row_stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    tl.store(largest + row * NUM_UNITS + unit, tl.max(tl.where(values == values, values, float("-inf")), 0))


@triton.jit(do_not_specialize=["num_rows", "step"])
def _level_kernel(
    logits,
    largest,
    sums,
    prefixes,
    floors,
    thresholds,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    num_rows,
    row_stride: tl.int64,
    step,
    SEARCH: tl.constexpr,
    FIRST: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS_OF_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Store a unit's worth from each key of a level upwards. step: the level, counted over all searches."""
    row, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    top_p, min_p = tl.load(top_ps + row), tl.load(min_ps + row)
    has_top_k = (top_k > 0) & (top_k < VOCAB)
    best = _best(largest, row, NUM_UNITS, ROWS_OF_UNITS)
    prefix = tl.zeros([1], tl.uint32)
    floor = float("-inf")
    if SEARCH != _TOP_K or not FIRST:
        BEFORE: tl.constexpr = SEARCH - 1 if FIRST else SEARCH
        uniform = uniform_of(tl.load(seeds + row), tl.load(positions + row))
        found = _found(
            sums,
            prefixes,
            step - 1,
            BEFORE,
            row,
            num_rows,
            top_k,
            top_p,
            uniform,
            NUM_UNITS,
            LEVELS,
            ROWS_OF_UNITS,
            PIVOTS,
        )
        if not FIRST:
            prefix = found
            if SEARCH == _TOP_P:
                floor = tl.load(floors + row)
            if SEARCH == _SAMPLED:
                floor = tl.load(thresholds + row)
        elif SEARCH == _TOP_P:
            floor = tl.where(has_top_k, _logit(found, LEVELS), floor)
            tl.store(floors + row, floor, mask=unit == 0)
        else:
            floor = tl.maximum(tl.load(floors + row), tl.where(top_p < 1, _logit(found, LEVELS), floor))
            likely = best + temperature * tl.log(tl.maximum(min_p, 1e-37))
            floor = tl.maximum(floor, tl.where(min_p > 0, likely, float("-inf")))
            floor = tl.where(temperature > 0, floor, float("-inf"))
            tl.store(thresholds + row, floor, mask=unit == 0)
    tl.store(prefixes + step * num_rows + row + tl.arange(0, 1), prefix.to(tl.int32, bitcast=True), mask=unit == 0)
    wanted = has_top_k | (top_p < 1)
    if SEARCH == _TOP_K:
        wanted = has_top_k
    if SEARCH == _TOP_P:
        wanted = top_p < 1
    if wanted & (temperature > 0):
        token = unit * UNIT + tl.arange(0, UNIT)
        values = tl.load(logits + row * row_stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        inverse = 0.0 if SEARCH == _TOP_K else 1.0 / temperature
        worth = worth_of(values, token < VOCAB, floor, 0.0 if SEARCH == _TOP_K else best, inverse)
        keys = to_key(values)
        apart = tl.full([1], 1, tl.uint32) << _shift_of(step, LEVELS)
        place = sums + ((step * num_rows + row) * NUM_UNITS + unit) * PIVOTS
        for pivot in tl.static_range(PIVOTS):
            tl.store(place + pivot, tl.sum(tl.where(keys >= prefix + pivot * apart, worth, 0.0), 0))


@triton.jit
def _best(largest, row, NUM_UNITS: tl.constexpr, ROWS_OF_UNITS: tl.constexpr):
    unit = tl.arange(0, ROWS_OF_UNITS)
    return tl.max(tl.load(largest + row * NUM_UNITS + unit, mask=unit < NUM_UNITS, other=float("-inf")), 0)


@triton.jit
def _totals(sums, step, row, num_rows, NUM_UNITS: tl.constexpr, ROWS_OF_UNITS: tl.constexpr, PIVOTS: tl.constexpr):
    """Return the sums of a step over all units, [PIVOTS]."""
    unit = tl.arange(0, ROWS_OF_UNITS)
    places = ((step * num_rows + row) * NUM_UNITS + unit[:, None]) * PIVOTS + tl.arange(0, PIVOTS)[None, :]
    return tl.sum(tl.load(sums + places, mask=unit[:, None] < NUM_UNITS, other=0.0), 0)


@triton.jit
def _target(sums, search, row, num_rows, top_k, top_p, uniform, NUM_UNITS, LEVELS, ROWS_OF_UNITS, PIVOTS: tl.constexpr):
    """Return the worth that a search reaches. The sampled one stays positive, because every key reaches 0."""
    if search == _TOP_K:
        return top_k.to(tl.float32)
    else:
        totals = _totals(sums, search * LEVELS, row, num_rows, NUM_UNITS, ROWS_OF_UNITS, PIVOTS)
        total = tl.sum(tl.where(tl.arange(0, PIVOTS) == 0, totals, 0.0), 0)
        if search == _TOP_P:
            return top_p * total
        else:
            return tl.maximum(uniform.to(tl.float32) * total, 1e-37)


@triton.jit
def _found(
    sums,
    prefixes,
    step,
    search: tl.constexpr,
    row,
    num_rows,
    top_k,
    top_p,
    uniform,
    NUM_UNITS: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS_OF_UNITS: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Return the digits of the wanted key that are known after a step, uint32 [1]."""
    target = _target(sums, search, row, num_rows, top_k, top_p, uniform, NUM_UNITS, LEVELS, ROWS_OF_UNITS, PIVOTS)
    totals = _totals(sums, step, row, num_rows, NUM_UNITS, ROWS_OF_UNITS, PIVOTS)
    reached = (totals >= target) & (tl.arange(0, PIVOTS) > 0)
    digit = tl.sum(reached.to(tl.uint32), 0)
    prefix = tl.load(prefixes + step * num_rows + row + tl.arange(0, 1)).to(tl.uint32, bitcast=True)
    return prefix + (digit << _shift_of(step, LEVELS))


@triton.jit
def _shift_of(step, LEVELS: tl.constexpr):
    """Return the place of the last bit of a level's digit, uint32 [1]."""
    return (28 - 4 * (step % LEVELS) + tl.zeros([1], tl.int32)).to(tl.uint32)


@triton.jit
def _logit(key, LEVELS: tl.constexpr):
    """Return the logit of a key [1] as a scalar; minus infinity for a key that no logit has."""
    if LEVELS == 4:
        # The rest of a negative number's key are ones.
        key = tl.where(key < 0x80000000, key | 0xFFFF, key)
        key = tl.where(key == 0xFFFF, 0, key)
    return key_to_logit(key)


@triton.jit(do_not_specialize=["num_rows"])
def _weigh_kernel(
    logits,
    largest,
    sums,
    prefixes,
    floors,
    thresholds,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    num_rows,
    row_stride: tl.int64,
    of_sampled,
    lows,
    VOCAB: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS_OF_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Store a row's sampled logit, and for each unit the worth from that logit upwards and of its equals."""
    row, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    uniform = uniform_of(tl.load(seeds + row), tl.load(positions + row))
    found = _found(
        sums,
        prefixes,
        3 * LEVELS - 1,
        _SAMPLED,
        row,
        num_rows,
        0,
        0.0,
        uniform,
        NUM_UNITS,
        LEVELS,
        ROWS_OF_UNITS,
        PIVOTS,
    )
    low = _logit(found, LEVELS)
    tl.store(lows + row, low, mask=unit == 0)
    token = unit * UNIT + tl.arange(0, UNIT)
    values = tl.load(logits + row * row_stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    best = _best(largest, row, NUM_UNITS, ROWS_OF_UNITS)
    worth = worth_of(values, token < VOCAB, tl.load(thresholds + row), best, inverse)
    place = of_sampled + (row * NUM_UNITS + unit) * 2
    tl.store(place, tl.sum(tl.where(values >= low, worth, 0.0), 0))
    tl.store(place + 1, tl.sum(tl.where(values == low, worth, 0.0), 0))


@triton.jit(do_not_specialize=["num_rows"])
def _finish_kernel(
    sums,
    of_sampled,
    thresholds,
    lows,
    highs,
    uniforms,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    num_rows,
    VOCAB: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS_OF_UNITS: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Store the interval of logits to sample in, and the uniform number for it."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    uniform = uniform_of(tl.load(seeds + row), tl.load(positions + row))
    low, high = tl.load(thresholds + row), float("inf")
    if (temperature > 0) & (((top_k > 0) & (top_k < VOCAB)) | (top_p < 1)):
        unit = tl.arange(0, ROWS_OF_UNITS)
        place = of_sampled + (row * NUM_UNITS + unit) * 2
        reached = tl.sum(tl.load(place, mask=unit < NUM_UNITS, other=0.0), 0)
        equal = tl.sum(tl.load(place + 1, mask=unit < NUM_UNITS, other=0.0), 0)
        target = _target(sums, _SAMPLED, row, num_rows, top_k, top_p, uniform, NUM_UNITS, LEVELS, ROWS_OF_UNITS, PIVOTS)
        rest = 1.0 - (reached - target) / tl.where(equal > 0, equal, 1.0)
        uniform = tl.minimum(tl.maximum(rest, 0.0), 1.0).to(tl.float64)
        low = tl.load(lows + row)
        high = low
    tl.store(lows + row, low)
    tl.store(highs + row, high)
    tl.store(uniforms + row, uniform)
