"""Sample tokens from logits on a GPU without sorting: the same tokens as `kernels.sampling`, up to rounding.

Sampling inverts the distribution function at the uniform number of `kernels.sampling.uniform_at`, so a token depends on
seed and position and not on the batch. Without top-k and top-p the function sums tokens in the vocabulary's order:
programs sum the units of a row side by side, then one program per row finds the unit and the token in it. With top-k or
top-p it sums from the likeliest token down: radix selection, two bits of the logit's bit pattern at a time, finds the
smallest logit that the filters keep and the sampled logit, among candidates held in registers. Among tokens that share
the sampled logit, one is sampled in the vocabulary's order. Where the filters' limit falls among equal logits, all of
them are kept; `kernels.sampling` cuts between them.

Kernels speak of the worth of logits: their probability before it is divided by the sum of all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import Draw
from kernels.sampling import sample as draw_on_cpu

# Applies top-k, top-p and min-p to rows of logits and finds the logit to sample, see `_keep`.
Keep = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]

# The number of logits of a row that one program sums.
_UNIT = 4096
# The number of lanes of a row. Each lane keeps its four largest logits in registers.
_SCAN = 4096


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first token with the largest logit of each row of [S, V] (int64 [S]), and that logit (fp32 [S]).

    For a row with a NaN the largest logit is NaN, and the token has no meaning.
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
    keep: Keep | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a token for each row of logits [S, V] (int64 [S]), and its largest logit (fp32 [S]; NaN if it has one).

    temperatures [S] fp32, 0 for greedy rows. seeds, positions [S] int64. top_k [S] int32 (0: off), top_p [S] fp32 (1:
    off) and min_p [S] fp32 (0: off) are given together or not at all. keep: applies them, by default one program to
    each row. Logits are read once, with filters usually twice,
    and more often if a lane of the scan has more than four tokens that the filters keep.
    """
    kept = None
    if top_k is not None and top_p is not None and min_p is not None:
        kept = (keep or _keep)(logits, temperatures, seeds, positions, top_k, top_p, min_p)
    return _pick(logits, temperatures, seeds, positions, kept)


def filter_thresholds(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keep: Keep | None = None
) -> Tensor:
    """Return the smallest logit that the filters keep of each row [S, V] (fp32 [S]); minus infinity without filters."""
    anywhere = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return (keep or _keep)(logits, temperatures, anywhere, anywhere, top_k, top_p, min_p)[0]


def _pick(
    logits: Tensor,
    temperatures: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    kept: tuple[Tensor, Tensor, Tensor, Tensor] | None,
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
    # Triton compiles for the alignment of each tensor. These are separate tensors because the alignment of parts of one
    # tensor would depend on the number of rows.
    bests, sums, largest_of_unit = (
        torch.empty((num_rows, num_units), dtype=torch.float32, device=device) for _ in range(3)
    )
    tokens = torch.empty((num_rows, num_units), dtype=torch.int32, device=device)
    # The kernels never read absent arguments; any tensor takes their place.
    lows, highs, uniforms = (largest, largest, largest) if kept is None else kept[1:]
    shared = {
        "VOCAB": vocab,
        "NUM_UNITS": num_units,
        "UNIT": _UNIT,
        "SAMPLE": temperatures is not None,
        "FILTER": kept is not None,
    }
    temperatures = largest if temperatures is None else temperatures
    _sum_kernel[(num_rows, num_units)](
        logits, temperatures, lows, highs, bests, tokens, sums, largest_of_unit, logits.stride(0), **shared, num_warps=4
    )
    _choose_kernel[(num_rows,)](
        logits,
        temperatures,
        lows,
        highs,
        uniforms,
        largest if seeds is None else seeds,
        largest if positions is None else positions,
        bests,
        tokens,
        sums,
        largest_of_unit,
        token_ids,
        largest,
        logits.stride(0),
        **shared,
        BLOCK=triton.next_power_of_2(num_units),
        num_warps=4,
    )
    return token_ids, largest


def _keep(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply the filters to each row of logits [S, V] and find the logit to sample.

    Return the smallest logit that is kept (fp32 [S], minus infinity without filters); then the lower and upper end of
    the interval of logits (fp32 [S] each) in which `_pick` samples in the vocabulary's order, and the uniform number
    for that (fp64 [S]). The filters have the order of `kernels.sampling.draw`.
    """
    num_rows, vocab = logits.shape
    thresholds, lows, highs = (torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    uniforms = torch.empty(num_rows, dtype=torch.float64, device=logits.device)
    if num_rows:
        _keep_kernel[(num_rows,)](
            logits,
            temperatures,
            top_k,
            top_p,
            min_p,
            seeds,
            positions,
            thresholds,
            lows,
            highs,
            uniforms,
            logits.stride(0),
            VOCAB=vocab,
            BLOCK=_SCAN,
            num_warps=8,
        )
    return thresholds, lows, highs, uniforms


@triton.jit
def uniform_of(seed, position):
    """Compute `kernels.sampling.uniform_at` of two int64 scalars as fp64."""
    state = seed.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    state += position.to(tl.uint64, bitcast=True) * 0xD1342543DE82EF95
    state += 0x2545F4914F6CDD1D
    for _ in tl.static_range(2):
        state += 0x9E3779B97F4A7C15
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB
        state = state ^ (state >> 31)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _load_unit(logits, low, high, unit, VOCAB: tl.constexpr, UNIT: tl.constexpr, FILTER: tl.constexpr):
    """Load the logits of a unit, and say which of them are kept. NaN is never kept."""
    token = unit * UNIT + tl.arange(0, UNIT)
    values = tl.load(logits + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    kept = (token < VOCAB) & (values == values)
    if FILTER:
        kept = kept & (values >= low) & (values <= high)
    return values, kept


@triton.jit
def _worth_below(values, kept, best, inverse):
    """Return the worth of kept logits relative to `best`, whose worth is 1."""
    # Bounded, since minus infinity times 0 and minus infinity less itself are NaN.
    best = tl.where(best > float("-inf"), best, 0.0)
    below = tl.where(kept & (values < best), tl.maximum(values - best, -1e30), 0.0)
    return tl.where(kept & (values > float("-inf")), tl.exp(below * inverse), 0.0)


@triton.jit
def _sum_kernel(
    logits,
    temperatures,
    lows,
    highs,
    bests,
    tokens,
    sums,
    largest,
    row_stride: tl.int64,
    VOCAB: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    SAMPLE: tl.constexpr,
    FILTER: tl.constexpr,
):
    """Store for one unit of a row: the largest logit, the largest kept one, its first token, and the sum of worths."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1)
    low = tl.load(lows + row) if FILTER else 0.0
    high = tl.load(highs + row) if FILTER else 0.0
    values, kept = _load_unit(logits + row * row_stride, low, high, unit, VOCAB, UNIT, FILTER)
    candidates = tl.where(kept, values, float("-inf"))
    best = tl.max(candidates, 0)
    token = unit * UNIT + tl.arange(0, UNIT)
    place = row * NUM_UNITS + unit
    tl.store(bests + place, best)
    tl.store(tokens + place, tl.min(tl.where(candidates == best, token, VOCAB - 1), 0))
    num_nan = tl.sum((values != values).to(tl.int32), 0)
    any_value = tl.max(tl.where(values == values, values, float("-inf")), 0)
    tl.store(largest + place, tl.where(num_nan > 0, float("nan"), any_value))
    if SAMPLE:
        temperature = tl.load(temperatures + row)
        inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
        tl.store(sums + place, tl.sum(_worth_below(values, kept, best, inverse), 0))


@triton.jit
def _choose_kernel(
    logits,
    temperatures,
    lows,
    highs,
    uniforms,
    seeds,
    positions,
    bests,
    tokens,
    sums,
    largest_of_unit,
    token_ids,
    largest,
    row_stride: tl.int64,
    VOCAB: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    SAMPLE: tl.constexpr,
    FILTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store a row's token and largest logit. Read one unit of the row again to sample. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    units = tl.arange(0, BLOCK)
    inside = units < NUM_UNITS
    place = row * NUM_UNITS + units
    best_of_unit = tl.load(bests + place, mask=inside, other=float("-inf"))
    first = tl.load(tokens + place, mask=inside, other=VOCAB - 1)
    best = tl.max(best_of_unit, 0)
    token = tl.min(tl.where(best_of_unit == best, first, VOCAB - 1), 0)
    largest_values = tl.load(largest_of_unit + place, mask=inside, other=float("-inf"))
    num_nan = tl.sum((largest_values != largest_values).to(tl.int32), 0)
    tl.store(largest + row, tl.where(num_nan > 0, float("nan"), tl.max(largest_values, 0)))
    if SAMPLE:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            inverse = 1.0 / temperature
            if FILTER:
                low, high, uniform = tl.load(lows + row), tl.load(highs + row), tl.load(uniforms + row)
            else:
                low, high = 0.0, 0.0
                uniform = uniform_of(tl.load(seeds + row), tl.load(positions + row))
            share = tl.load(sums + place, mask=inside, other=0.0).to(tl.float64)
            worth_of_unit = share * _worth_below(best_of_unit, inside, best, inverse).to(tl.float64)
            unit, rest = _invert(worth_of_unit, uniform)
            values, kept = _load_unit(logits + row * row_stride, low, high, unit, VOCAB, UNIT, FILTER)
            lane, _ = _invert(_worth_below(values, kept, best, inverse).to(tl.float64), rest)
            token = tl.minimum(unit * UNIT + lane, VOCAB - 1)
    tl.store(token_ids + row, token.to(tl.int64))


@triton.jit
def _invert(worth, uniform):
    """Return where the sum of worths [N] fp64 first exceeds `uniform` of the whole, and how far into it, in [0, 1)."""
    places = tl.arange(0, worth.shape[0])
    reached = tl.cumsum(worth, 0)
    target = uniform * tl.max(reached, 0)
    # The last place with a worth ends the search where rounding would not.
    last = tl.max(tl.where(worth > 0, places, 0), 0)
    place = tl.minimum(tl.sum((reached <= target).to(tl.int32), 0), last)
    here = tl.sum(tl.where(places == place, worth, 0.0), 0)
    before = tl.sum(tl.where(places == place, reached, 0.0), 0) - here
    rest = (target - before) / tl.where(here > 0, here, 1.0)
    return place, tl.minimum(tl.maximum(rest, 0.0), 1.0)


@triton.jit
def to_key(values):
    """Map fp32 to uint32 keys in the same order. Both zeros get the same key."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return flipped.to(tl.uint32, bitcast=True)


@triton.jit
def _from_key(keys):
    bits = keys.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _digit(worth_1, worth_2, worth_3, target):
    """Return the number of three descending worths that reach the target."""
    return (worth_1 >= target).to(tl.uint32) + (worth_2 >= target).to(tl.uint32) + (worth_3 >= target).to(tl.uint32)


@triton.jit
def key_to_logit(prefix):
    """Return the key [1] as a fp32 scalar; minus infinity if all keys together are worth less than the target."""
    key = _from_key(prefix)
    return tl.max(tl.where(key == key, key, float("-inf")), 0)


@triton.jit
def _worth_from(keys, worth, pivot):
    return tl.where(keys >= pivot, worth, 0.0)


@triton.jit
def _search(keys, worth, target):
    """Return the largest logit from which upwards keys are worth `target`; minus infinity without one."""
    prefix = tl.zeros([1], tl.uint32)
    shift = tl.full([1], 30, tl.uint32)
    one = tl.full([1], 1, tl.uint32)
    for _ in range(16):
        step = one << shift
        worth_1 = tl.sum(_worth_from(keys, worth, prefix + step), 0)
        worth_2 = tl.sum(_worth_from(keys, worth, prefix + 2 * step), 0)
        worth_3 = tl.sum(_worth_from(keys, worth, prefix + 3 * step), 0)
        prefix += _digit(worth_1, worth_2, worth_3, target) << shift
        shift -= 2
    return key_to_logit(prefix)


@triton.jit
def worth_of(values, inside, floor, largest, inverse):
    """Return the worth of logits relative to `largest`, 0 below `floor`. With `inverse` 0 each logit is worth 1."""
    # Bounded, since minus infinity times 0 is NaN.
    below = tl.maximum(values - largest, -1e30)
    return tl.where(inside & (values >= floor), tl.exp(below * inverse), 0.0)


@triton.jit
def _worth_of_keys(keys, floor, largest, inverse):
    values = _from_key(keys)
    return worth_of(values, values > float("-inf"), floor, largest, inverse)


@triton.jit
def _row_worth(logits, floor, ceiling, largest, inverse, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the worth of a row's logits from `floor` to `ceiling`."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, VOCAB, BLOCK):
        inside = first + lanes < VOCAB
        values = tl.load(logits + first + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        total += worth_of(values, inside & (values <= ceiling), floor, largest, inverse)
    return tl.sum(total, 0)


@triton.jit
def _search_row(logits, target, floor, largest, inverse, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Do `_search` over a whole row, and read the row once per digit."""
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
            worth = worth_of(values, inside, floor, largest, inverse)
            keys = to_key(values)
            worth_1 += _worth_from(keys, worth, prefix + step)
            worth_2 += _worth_from(keys, worth, prefix + 2 * step)
            worth_3 += _worth_from(keys, worth, prefix + 3 * step)
        prefix += _digit(tl.sum(worth_1, 0), tl.sum(worth_2, 0), tl.sum(worth_3, 0), target) << shift
        shift -= 2
    return key_to_logit(prefix)


@triton.jit
def _keep_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    thresholds,
    lows,
    highs,
    uniforms,
    row_stride: tl.int64,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do the work of `_keep`, one program per row. Read the row once and keep the four largest logits of each lane.

    These contain the wanted logits, unless the filters keep more than four of a lane; only then read the row again,
    once per digit.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    lanes = tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    uniform = uniform_of(tl.load(seeds + row), tl.load(positions + row))
    has_top_k = (top_k > 0) & (top_k < VOCAB)
    threshold = float("-inf")
    low = float("-inf")
    high = float("inf")
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
        # Any larger logit is among the four of its lane.
        hidden = tl.max(fourth, 0)
        # Registers have no room for logits and keys, so logits are computed from their keys.
        keys = to_key(tl.join(tl.join(best, second), tl.join(third, fourth)).reshape(4 * BLOCK))
        inverse = 1.0 / temperature
        if min_p > 0:
            threshold = largest + temperature * tl.log(min_p)
        # Top-p applies to what top-k keeps, and min-p comes last.
        floor = float("-inf")
        if has_top_k:
            floor = _search(keys, tl.full([4 * BLOCK], 1.0, tl.float32), top_k)
            if (hidden > float("-inf")) & (hidden >= floor):
                floor = _search_row(logits, top_k, float("-inf"), 0.0, 0.0, VOCAB, BLOCK)
            threshold = tl.maximum(threshold, floor)
        if top_p < 1:
            worth = _worth_of_keys(keys, floor, largest, inverse)
            held = tl.sum(worth, 0)
            total = held
            if (hidden >= floor) & (hidden > float("-inf")):
                total = _row_worth(logits, floor, float("inf"), largest, inverse, VOCAB, BLOCK)
            cut = _search(keys, worth, top_p * total)
            if (held < top_p * total) | ((hidden >= cut) & (hidden > float("-inf"))):
                cut = _search_row(logits, top_p * total, floor, largest, inverse, VOCAB, BLOCK)
            threshold = tl.maximum(threshold, cut)
        low = threshold
        if has_top_k | (top_p < 1):
            # From the likeliest down. The target stays positive, because every key reaches a target of 0.
            worth = _worth_of_keys(keys, threshold, largest, inverse)
            total = tl.sum(worth, 0)
            target = tl.maximum(uniform.to(tl.float32) * total, 1e-37)
            if (hidden >= threshold) & (hidden > float("-inf")):
                total = _row_worth(logits, threshold, float("inf"), largest, inverse, VOCAB, BLOCK)
                target = tl.maximum(uniform.to(tl.float32) * total, 1e-37)
                low = _search_row(logits, target, threshold, largest, inverse, VOCAB, BLOCK)
                reached = _row_worth(logits, low, float("inf"), largest, inverse, VOCAB, BLOCK)
                equal = _row_worth(logits, low, low, largest, inverse, VOCAB, BLOCK)
            else:
                low = _search(keys, worth, target)
                drawn = to_key(low)
                reached = tl.sum(_worth_from(keys, worth, drawn), 0)
                equal = tl.sum(tl.where(keys == drawn, worth, 0.0), 0)
            high = low
            rest = 1.0 - (reached - target) / tl.where(equal > 0, equal, 1.0)
            uniform = tl.minimum(tl.maximum(rest, 0.0), 1.0).to(tl.float64)
    tl.store(thresholds + row, threshold)
    tl.store(lows + row, low)
    tl.store(highs + row, high)
    tl.store(uniforms + row, uniform)


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
    """Sample with `kernels.sampling`. Arguments as in `sample`."""
    filters = [values.tolist() for values in (top_k, top_p, min_p) if values is not None]
    per_row = zip(*filters, seeds.tolist(), positions.tolist(), strict=True)
    draws = [
        Draw(temperature, *(numbers if filters else (0, 1.0, 0.0, *numbers)))
        for temperature, numbers in zip(temperatures.tolist(), per_row, strict=True)
    ]
    token_ids, largest = draw_on_cpu(logits.cpu(), draws)
    return token_ids.to(logits.device), largest.to(logits.device)


def filter_thresholds_reference(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Find by sorting what `filter_thresholds` returns."""
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
