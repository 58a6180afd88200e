"""What the attention kernels share: online softmax of query rows over tiles of paged keys and values.

Scores live in the base-2 domain (exp2 is one instruction): the softmax scale is folded with log2(e). A row that has
seen nothing has maximum -inf and sum 0 and ends as zeros. Nothing outside [visible_begin, visible_end) is read, so
whatever lies in slots that a sequence does not own, NaN included, has no way into a result.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A constant for kernels too, which may read no other globals.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sequence_of(starts, index, num_seqs, TOKENS: tl.constexpr):
    """The last s < num_seqs with starts[s] // TOKENS + s <= index.

    So each sequence of n tokens has at least ceil(n / TOKENS) consecutive indices from starts[s] // TOKENS + s on, and
    no list of tiles is needed. With TOKENS 0 indices are tokens: the last s with starts[s] <= index.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(starts + middle)
        if TOKENS > 0:
            start = start // TOKENS + middle
        if start <= index:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def load_rows(rows, row_mask, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BLOCK] elements from FIRST on of rows of length DIM, 0 where masked or past DIM; `rows` are pointers."""
    dims = FIRST + tl.arange(0, BLOCK)
    places = rows[:, None] + dims[None, :]
    if FIRST + BLOCK > DIM:
        if MASKED:
            tile = tl.load(places, mask=row_mask[:, None] & (dims < DIM)[None, :], other=0.0)
        else:
            tile = tl.load(places, mask=(dims < DIM)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(places, mask=row_mask[:, None], other=0.0)
    else:
        tile = tl.load(places)
    return tile


@triton.jit
def half_queries(query, tail, BLOCK_TAIL: tl.constexpr):
    """Rows in fp16 over a power of two each, and these powers [rows]: what keys and values of fp8 are multiplied in.

    Fp8 widens to fp16 by one instruction for two elements, to bf16 by four. A row's largest element comes to lie
    between 1 and 2, so nothing overflows, and bf16 loses bits only below 2^-14 of it.
    """
    largest = tl.max(tl.abs(query.to(tl.float32)), 1)
    if BLOCK_TAIL > 0:
        largest = tl.maximum(largest, tl.max(tl.abs(tail.to(tl.float32)), 1))
    power = (tl.maximum(largest, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    query, tail = query.to(tl.float32) / power[:, None], tail.to(tl.float32) / power[:, None]
    return query.to(tl.float16), tail.to(tl.float16), power


@triton.jit
def fp8_pairs(rows, row_mask, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK / 2] elements at even places of fp8 rows, and those at odd places, in fp16; as `load_rows`.

    Two at a time they are 16 bits wide, which the tensor cores' loads can transpose; bytes would be read one by one.
    """
    pairs = load_rows(rows.to(tl.pointer_type(tl.uint16), bitcast=True), row_mask, 0, DIM // 2, BLOCK // 2, True)
    even = (pairs & 0xFF).to(tl.uint8).to(rows.dtype.element_ty, bitcast=True)
    odd = (pairs >> 8).to(tl.uint8).to(rows.dtype.element_ty, bitcast=True)
    return even.to(tl.float16), odd.to(tl.float16)


@triton.jit
def look_up(table, start, visible_begin, visible_end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block ids of TILE positions from `start` on: one if a tile never crosses a block; 0 where none is visible."""
    if BLOCK_SIZE % TILE == 0:
        blocks = tl.load(table + start // BLOCK_SIZE, mask=start < visible_end, other=0)
    else:
        positions = start + tl.arange(0, TILE)
        visible = (positions >= visible_begin) & (positions < visible_end)
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=visible, other=0)
    return blocks


@triton.jit
def attend(
    acc,
    acc_odd,
    row_max,
    row_sum,
    q,
    q_tail,
    row_positions,
    begin,
    end,
    visible_begin,
    visible_end,
    keys,
    values,
    table,
    key_stride,
    value_stride,
    score_scale,
    cap_scale,
    window,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    FP8_PAIRS: tl.constexpr,
):
    """Folds the positions [begin, end), `begin` a multiple of TILE, into (acc, acc_odd, row_max, row_sum), its result.

    `keys` and `values` point at slot 0 of one head. score_scale [rows] is positive. MASKED is false only if every row
    sees every position of every tile. With CAUSAL each row has its own position; without it all rows see
    [visible_begin, visible_end).
    Keys are read in a part of BLOCK_KEY and, where BLOCK_TAIL > 0, a second of BLOCK_TAIL (80 = 64 + 16, 576 = 512 +
    64). With VALUES_IN_KEYS the first part is the values too and is read once. With FP8_PAIRS acc holds the even
    columns and acc_odd, which is not used otherwise, the odd ones.
    """
    # The block of the next tile is looked up a tile ahead: a load whose address hangs on another load of the same
    # iteration halves the depth of Triton's pipeline.
    blocks = look_up(table, begin, visible_begin, visible_end, BLOCK_SIZE, TILE)
    for start in tl.range(begin, end, TILE):
        start = tl.multiple_of(start, TILE)
        offsets = tl.arange(0, TILE)
        positions = start + offsets
        visible = (positions >= visible_begin) & (positions < visible_end)
        if BLOCK_SIZE % TILE == 0:
            first_slot = blocks.to(tl.int64) * BLOCK_SIZE + start % BLOCK_SIZE
            # Within a tile 32 bits are enough; the callers hold the slot stride below 2^24.
            key_rows = keys + first_slot * key_stride + offsets * key_stride.to(tl.int32)
            value_rows = values + first_slot * value_stride + offsets * value_stride.to(tl.int32)
        else:
            slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
            key_rows = keys + slots * key_stride
            value_rows = values + slots * value_stride
        blocks = look_up(table, start + TILE, visible_begin, visible_end, BLOCK_SIZE, TILE)

        k = load_rows(key_rows, visible, 0, KEY_DIM, BLOCK_KEY, MASKED).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if BLOCK_TAIL > 0:
            k_tail = load_rows(key_rows, visible, BLOCK_KEY, KEY_DIM, BLOCK_TAIL, MASKED).to(q.dtype)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
        if HAS_SOFT_CAP:
            # cap * tanh(x) = cap - 2 cap / (exp(2x) + 1); score_scale holds 2 log2(e) / cap, cap_scale cap * log2(e).
            scores = cap_scale - 2.0 * cap_scale / (tl.exp2(scores * score_scale[:, None]) + 1.0)
        if MASKED:
            if CAUSAL:
                seen = visible[None, :] & (positions[None, :] <= row_positions[:, None])
                if HAS_WINDOW:
                    seen = seen & (positions[None, :] > row_positions[:, None] - window)
                scores = tl.where(seen, scores, float("-inf"))
            else:
                scores = tl.where(visible[None, :], scores, float("-inf"))

        # Scaled after the maximum is taken: once per row there, and in one instruction with the subtraction.
        largest = tl.max(scores, 1) if HAS_SOFT_CAP else tl.max(scores, 1) * score_scale
        new_max = tl.maximum(row_max, largest)
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        exponents = scores if HAS_SOFT_CAP else scores * score_scale[:, None]
        weights = tl.exp2(exponents - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max
        weights = weights.to(q.dtype)
        if FP8_PAIRS:
            v, v_odd = fp8_pairs(value_rows, visible, VALUE_DIM, BLOCK_VALUE)
            acc_odd = tl.dot(weights, v_odd, acc_odd * decay[:, None])
        else:
            v = k if VALUES_IN_KEYS else load_rows(value_rows, visible, 0, VALUE_DIM, BLOCK_VALUE, MASKED).to(q.dtype)
        acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
    return acc, acc_odd, row_max, row_sum


@triton.jit
def join_sink(acc, row_max, row_sum, sink):
    """Adds to each row one more key without a value, of logit `sink` [rows]. To be done once per row."""
    sink = sink.to(tl.float32) * LOG2_E
    new_max = tl.maximum(row_max, sink)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(row_max - shift)
    return acc * decay[:, None], new_max, row_sum * decay + tl.exp2(sink - shift)


@triton.jit
def normalised(acc, row_sum):
    """Rows divided by their sums; zeros where nothing was seen."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
