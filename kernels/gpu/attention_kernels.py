"""Triton kernels of attention over paged keys and values, and the work list of split contexts.

- split_kernel is for few query tokens over long contexts: decodes, and extends too short to fill tiles of one head. A
  program has one chunk of one sequence and one KV head. Its rows are all query heads of that KV head, for one or more
  tokens, so keys and values are read once (as in Flash-Decoding; Dao et al., 2023). reduce_kernel combines the chunks
  of a sequence by their log-sum-exp.
- prefill_kernel is for many query tokens. A program has a tile of tokens of one head, which suits the tensor cores.
  Only tiles of keys on the diagonal and at the far edge of a window need masks (as in FlashAttention-2; Dao, 2023).

Both run an online softmax of query rows over tiles of keys (`attend`). Scores live in the base-2 domain (exp2 is one
instruction): the softmax scale is folded with log2(e). A row that has seen nothing has maximum -inf and sum 0 and ends
as zeros. Only positions in [visible_begin, visible_end) are read, so slots that a sequence does not own, even if they
hold NaN, cannot affect a result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention_config import SplitConfig, power_of_two

# A constant for kernels too, which may read no other globals.
LOG2_E = tl.constexpr(1.4426950408889634)

# The costs of a program beside its positions, and of reading one more partial result, in positions. Estimates.
_PROGRAM_OVERHEAD = 128
_PARTIAL_OVERHEAD = 4
_MAX_CANDIDATES = 128


@triton.jit(
    do_not_specialize=[
        "table",
        "seq_lens",
        "query_starts",
        "offsets",
        "sequences",
        "chunk_ptr",
        "num_seqs",
        "table_stride",
        "window",
    ]
)
def split_kernel(
    q,
    keys,
    values,
    table,
    seq_lens,
    query_starts,
    offsets,
    sequences,
    chunk_ptr,
    sinks,
    out,
    partials,
    partial_lse,
    num_seqs,
    window,
    score_scale,
    cap_scale,
    value_scale,
    q_token_stride: tl.int64,
    q_head_stride: tl.int64,
    key_head_stride: tl.int64,
    key_stride: tl.int64,
    value_head_stride: tl.int64,
    value_stride: tl.int64,
    table_stride: tl.int64,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
):
    """Compute program (piece, KV head, head group), the last fastest: groups that share keys run side by side.

    A sequence with one chunk is written to `out`. Otherwise the piece's result, divided by its sum, goes to
    `partials` [capacity, TOKENS, heads, VALUE_DIM] and its base-2 log-sum-exp to `partial_lse` [capacity, TOKENS,
    heads], both fp32.
    """
    HEADS: tl.constexpr = GROUP if GROUP < ROWS else ROWS
    HEAD_GROUPS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    piece = pid // (KV_HEADS * HEAD_GROUPS)
    if piece >= tl.load(offsets + num_seqs):
        return
    kv_head = (pid // HEAD_GROUPS % KV_HEADS).to(tl.int64)
    seq = tl.load(sequences + piece)
    local = piece - tl.load(offsets + seq)
    chunk = tl.load(chunk_ptr)
    seq_len = tl.load(seq_lens + seq)
    if ONE_QUERY:
        first_token = seq
        query_len = 1
    else:
        first_token = tl.load(query_starts + seq)
        query_len = tl.load(query_starts + seq + 1) - first_token
    first_chunk, num_chunks = count_chunks(seq_len, query_len, chunk, window)
    tile_token = local // num_chunks * TOKENS
    part = local % num_chunks

    rows = tl.arange(0, ROWS)
    row_token = rows // HEADS
    head_in_group = (pid % HEAD_GROUPS) * HEADS + rows % HEADS
    row_valid = (row_token < TOKENS) & (tile_token + row_token < query_len) & (head_in_group < GROUP)
    heads = kv_head * GROUP + head_in_group
    tokens = (first_token + tile_token + row_token).to(tl.int64)
    first_position = seq_len - query_len + tile_token
    row_positions = first_position + row_token
    tile_tokens = tl.minimum(query_len - tile_token, TOKENS)

    q_rows = q + tokens * q_token_stride + heads * q_head_stride
    query, query_tail, row_scale = load_queries(q_rows, row_valid, keys, score_scale, KEY_DIM, BLOCK_KEY, BLOCK_TAIL)

    begin = (first_chunk + part) * chunk
    visible_begin = begin
    if HAS_WINDOW:
        visible_begin = tl.maximum(begin, first_position - window + 1)
        begin = tl.maximum(begin, visible_begin // TILE * TILE)
    visible_end = tl.minimum((first_chunk + part + 1) * chunk, first_position + tile_tokens)
    # 64 rows or more use whole warpgroups, whose values pass through shared memory in any case. Values within keys are
    # read again, from the cache: a single copy would be needed in two orders, and was not loaded ahead.
    FP8_PAIRS: tl.constexpr = (
        VALUE_DIM % 2 == 0
        and values.dtype.element_ty.primitive_bitwidth == 8
        and query.dtype == tl.float16
        and ROWS < 64
    )
    acc = tl.zeros([ROWS, BLOCK_VALUE // 2 if FP8_PAIRS else BLOCK_VALUE], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc, acc_odd, row_max, row_sum = attend(
        acc,
        acc,
        row_max,
        row_sum,
        query,
        query_tail,
        row_positions,
        begin,
        visible_end,
        visible_begin,
        visible_end,
        keys + kv_head * key_head_stride,
        values + kv_head * value_head_stride,
        table + seq.to(tl.int64) * table_stride,
        key_stride,
        value_stride,
        row_scale,
        cap_scale,
        window,
        KEY_DIM,
        VALUE_DIM,
        BLOCK_KEY,
        BLOCK_TAIL,
        BLOCK_VALUE,
        BLOCK_SIZE,
        TILE,
        True,
        TOKENS > 1,
        HAS_WINDOW,
        HAS_SOFT_CAP,
        VALUES_IN_KEYS,
        FP8_PAIRS,
    )
    if FP8_PAIRS:
        acc = tl.interleave(acc, acc_odd)

    dims = tl.arange(0, BLOCK_VALUE)
    stored = row_valid[:, None] & (dims < VALUE_DIM)[None, :]
    if num_chunks == 1:
        if HAS_SINKS:
            acc, row_max, row_sum = join_sink(
                acc, row_max, row_sum, tl.load(sinks + heads, mask=row_valid, other=float("-inf"))
            )
        places = out + (tokens * out_token_stride + heads * out_head_stride)[:, None] + dims[None, :]
        result = normalised(acc, row_sum) * value_scale
        tl.store(places, result.to(out.dtype.element_ty), mask=stored)
    else:
        entry = (piece.to(tl.int64) * TOKENS + row_token) * (KV_HEADS * GROUP) + heads
        tl.store(partials + entry[:, None] * VALUE_DIM + dims[None, :], normalised(acc, row_sum), mask=stored)
        seen = row_sum > 0.0
        lse = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), float("-inf"))
        tl.store(partial_lse + entry, lse, mask=row_valid)


@triton.jit(do_not_specialize=["seq_lens", "query_starts", "offsets", "chunk_ptr", "num_seqs", "window"])
def reduce_kernel(
    partials,
    partial_lse,
    seq_lens,
    query_starts,
    offsets,
    chunk_ptr,
    sinks,
    out,
    num_seqs,
    window,
    value_scale,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    HEADS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    TOKENS: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Compute program (token, heads, part of the dims): weight the token's parts, BLOCK_PARTS at once, by their sums.

    Tokens are counted from the first sequence's on. Tokens whose sequence has one chunk were written by split_kernel.
    """
    token = tl.program_id(0)
    if ONE_QUERY:
        seq = token
        in_seq = 0
        query_len = 1
    else:
        token += tl.load(query_starts)
        if token >= tl.load(query_starts + num_seqs):
            return
        seq = sequence_of(query_starts, token, num_seqs, 0)
        first_token = tl.load(query_starts + seq)
        in_seq = token - first_token
        query_len = tl.load(query_starts + seq + 1) - first_token
    _, num_chunks = count_chunks(tl.load(seq_lens + seq), query_len, tl.load(chunk_ptr), window)
    if num_chunks == 1:
        return
    first_piece = tl.load(offsets + seq) + in_seq // TOKENS * num_chunks

    dims = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    for head_in_program in range(HEADS_PER_PROGRAM):
        head = tl.program_id(1).to(tl.int64) * HEADS_PER_PROGRAM + head_in_program
        # The state of the online softmax has a leading axis of one row, as `join_sink` and `normalised` require.
        acc = tl.zeros([1, BLOCK_DIM], tl.float32)
        row_max = tl.full([1], float("-inf"), tl.float32)
        row_sum = tl.zeros([1], tl.float32)
        for start in range(0, num_chunks, BLOCK_PARTS):
            parts = start + tl.arange(0, BLOCK_PARTS)
            valid = parts < num_chunks
            entries = ((first_piece + parts).to(tl.int64) * TOKENS + in_seq % TOKENS) * HEADS + head
            lse = tl.load(partial_lse + entries, mask=valid, other=float("-inf"))
            tile = tl.load(
                partials + entries[:, None] * VALUE_DIM + dims[None, :],
                mask=valid[:, None] & (dims < VALUE_DIM)[None, :],
                other=0.0,
            )
            new_max = tl.maximum(row_max, tl.max(lse, 0))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            decay = tl.exp2(row_max - shift)
            weights = tl.exp2(lse - shift)
            acc = acc * decay[:, None] + tl.sum(weights[:, None] * tile, 0)[None, :]
            row_sum = row_sum * decay + tl.sum(weights, 0)
            row_max = new_max
        if HAS_SINKS:
            acc, row_max, row_sum = join_sink(acc, row_max, row_sum, tl.load(sinks + head))
        result = normalised(acc, row_sum) * value_scale
        places = out + token.to(tl.int64) * out_token_stride + head * out_head_stride + dims
        tl.store(places[None, :], result.to(out.dtype.element_ty), mask=(dims < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=["table", "seq_lens", "query_starts", "num_seqs", "table_stride", "window"])
def prefill_kernel(
    q,
    keys,
    values,
    table,
    seq_lens,
    query_starts,
    sinks,
    out,
    num_seqs,
    window,
    score_scale,
    cap_scale,
    value_scale,
    q_token_stride: tl.int64,
    q_head_stride: tl.int64,
    key_head_stride: tl.int64,
    key_stride: tl.int64,
    value_head_stride: tl.int64,
    value_stride: tl.int64,
    table_stride: tl.int64,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
):
    """Compute program (head, tile of ROWS tokens), heads fastest: heads of a KV head read the same keys from L2 cache.

    Tiles are counted from the back, since the last tiles see the most keys.
    """
    head = tl.program_id(0).to(tl.int64)
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    seq = sequence_of(query_starts, index, num_seqs, ROWS)
    first_token = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - first_token
    tile_token = (index - first_token // ROWS - seq) * ROWS
    # Indices before the first sequence, and indices beyond the tiles of a sequence, have no work.
    if (tile_token < 0) | (tile_token >= query_len):
        return
    seq_len = tl.load(seq_lens + seq)
    kv_head = head // GROUP

    rows = tl.arange(0, ROWS)
    row_valid = tile_token + rows < query_len
    tokens = (first_token + tile_token + rows).to(tl.int64)
    first_position = seq_len - query_len + tile_token
    row_positions = first_position + rows
    visible_end = first_position + tl.minimum(query_len - tile_token, ROWS)

    q_rows = q + tokens * q_token_stride + head * q_head_stride
    query, query_tail, row_scale = load_queries(q_rows, row_valid, keys, score_scale, KEY_DIM, BLOCK_KEY, BLOCK_TAIL)
    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride
    table += seq.to(tl.int64) * table_stride

    visible_begin = 0
    if HAS_WINDOW:
        visible_begin = tl.maximum(first_position - window + 1, 0)
    begin = visible_begin // TILE * TILE
    # [begin, full_begin) crosses the window's far edge, [full_begin, full_end) needs no mask, the rest is diagonal.
    full_end = tl.maximum((first_position + 1) // TILE * TILE, begin)
    full_begin = begin
    if HAS_WINDOW:
        last_begin = tl.maximum(visible_end - window, 0)
        full_begin = tl.minimum((last_begin + TILE - 1) // TILE * TILE, full_end)
    acc = tl.zeros([ROWS, BLOCK_VALUE], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for phase in tl.static_range(0 if HAS_WINDOW else 1, 3):
        acc, _, row_max, row_sum = attend(
            acc,
            acc,
            row_max,
            row_sum,
            query,
            query_tail,
            row_positions,
            begin if phase == 0 else (full_begin if phase == 1 else full_end),
            full_begin if phase == 0 else (full_end if phase == 1 else visible_end),
            visible_begin,
            visible_end,
            keys,
            values,
            table,
            key_stride,
            value_stride,
            row_scale,
            cap_scale,
            window,
            KEY_DIM,
            VALUE_DIM,
            BLOCK_KEY,
            BLOCK_TAIL,
            BLOCK_VALUE,
            BLOCK_SIZE,
            TILE,
            phase != 1,
            True,
            HAS_WINDOW,
            HAS_SOFT_CAP,
            VALUES_IN_KEYS,
            False,
        )

    if HAS_SINKS:
        sink = tl.load(sinks + head) + tl.zeros([ROWS], tl.float32)
        acc, row_max, row_sum = join_sink(acc, row_max, row_sum, sink)
    dims = tl.arange(0, BLOCK_VALUE)
    places = out + (tokens * out_token_stride + head * out_head_stride)[:, None] + dims[None, :]
    result = normalised(acc, row_sum) * value_scale
    tl.store(places, result.to(out.dtype.element_ty), mask=row_valid[:, None] & (dims < VALUE_DIM)[None, :])


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
    """Fold positions [begin, end), `begin` a multiple of TILE, into (acc, acc_odd, row_max, row_sum); return the state.

    `keys` and `values` point at slot 0 of one head. score_scale [rows] is positive. MASKED is false only if every row
    sees every position of every tile. With CAUSAL each row has its own position; without it all rows see
    [visible_begin, visible_end).
    Keys are read in a part of BLOCK_KEY and, if BLOCK_TAIL > 0, a second of BLOCK_TAIL (80 = 64 + 16, 576 = 512 + 64).
    With VALUES_IN_KEYS the first part is also the values, and is read once unless FP8_PAIRS is set. With FP8_PAIRS acc
    holds the even columns and acc_odd, which is not used otherwise, the odd ones.
    """
    # The block of the next tile is looked up a tile ahead: a load whose address depends on another load of the same
    # iteration halves the depth of Triton's pipeline.
    blocks = look_up(table, begin, visible_begin, visible_end, BLOCK_SIZE, TILE)
    for start in tl.range(begin, end, TILE):
        start = tl.multiple_of(start, TILE)
        offsets = tl.arange(0, TILE)
        positions = start + offsets
        visible = (positions >= visible_begin) & (positions < visible_end)
        if BLOCK_SIZE % TILE == 0:
            first_slot = blocks.to(tl.int64) * BLOCK_SIZE + start % BLOCK_SIZE
            # Within a tile 32 bits are enough: `AttentionArguments` refuses slot strides from 2^24 on.
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
def load_queries(
    rows, row_valid, keys, score_scale, KEY_DIM: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_TAIL: tl.constexpr
):
    """Load the queries at `rows` for `attend`: the first part, the part of BLOCK_TAIL, and the scales of their scores.

    Over keys of fp8, queries of bf16 become fp16.
    """
    query = load_rows(rows, row_valid, 0, KEY_DIM, BLOCK_KEY, True)
    tail = query
    if BLOCK_TAIL > 0:
        tail = load_rows(rows, row_valid, BLOCK_KEY, KEY_DIM, BLOCK_TAIL, True)
    row_scale = tl.full([row_valid.shape[0]], 1.0, tl.float32) * score_scale
    if keys.dtype.element_ty.primitive_bitwidth == 8 and rows.dtype.element_ty == tl.bfloat16:
        query, tail, power = half_queries(query, tail, BLOCK_TAIL)
        row_scale *= power
    return query, tail, row_scale


@triton.jit
def half_queries(query, tail, BLOCK_TAIL: tl.constexpr):
    """Divide each row by a power of two and round it to fp16, for products with fp8; also return the powers [rows].

    Fp8 widens to fp16 by one instruction for two elements, to bf16 by four. A row's largest element ends up between 1
    and 2, so nothing overflows, and bf16 loses bits only below 2^-14 of it.
    """
    largest = tl.max(tl.abs(query.to(tl.float32)), 1)
    if BLOCK_TAIL > 0:
        largest = tl.maximum(largest, tl.max(tl.abs(tail.to(tl.float32)), 1))
    power = (tl.maximum(largest, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    query, tail = query.to(tl.float32) / power[:, None], tail.to(tl.float32) / power[:, None]
    return query.to(tl.float16), tail.to(tl.float16), power


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
def fp8_pairs(rows, row_mask, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK / 2] elements at even places of fp8 rows, and as many at odd places, in fp16; see `load_rows`.

    A pair of elements is 16 bits wide, which the tensor cores' loads can transpose; bytes would be read one by one.
    """
    pairs = load_rows(rows.to(tl.pointer_type(tl.uint16), bitcast=True), row_mask, 0, DIM // 2, BLOCK // 2, True)
    even = (pairs & 0xFF).to(tl.uint8).to(rows.dtype.element_ty, bitcast=True)
    odd = (pairs >> 8).to(tl.uint8).to(rows.dtype.element_ty, bitcast=True)
    return even.to(tl.float16), odd.to(tl.float16)


@triton.jit
def look_up(table, start, visible_begin, visible_end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Load block ids of TILE positions from `start`: one if a tile never crosses a block; 0 where none is visible."""
    if BLOCK_SIZE % TILE == 0:
        blocks = tl.load(table + start // BLOCK_SIZE, mask=start < visible_end, other=0)
    else:
        positions = start + tl.arange(0, TILE)
        visible = (positions >= visible_begin) & (positions < visible_end)
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=visible, other=0)
    return blocks


@triton.jit
def join_sink(acc, row_max, row_sum, sink):
    """Add to each row one more key without a value, of logit `sink` [rows], once per row."""
    sink = sink.to(tl.float32) * LOG2_E
    new_max = tl.maximum(row_max, sink)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(row_max - shift)
    return acc * decay[:, None], new_max, row_sum * decay + tl.exp2(sink - shift)


@triton.jit
def normalised(acc, row_sum):
    """Return the rows divided by their sums; zeros where nothing was seen."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]


@triton.jit
def sequence_of(starts, index, num_seqs, TOKENS: tl.constexpr):
    """Return the last s < num_seqs with starts[s] // TOKENS + s <= index; with TOKENS 0, with starts[s] <= index.

    Each sequence of n tokens thus has at least ceil(n / TOKENS) consecutive indices from starts[s] // TOKENS + s on,
    and no list of tiles is needed. With TOKENS 0 indices are tokens.
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
def count_chunks(seq_len, query_len, chunk, window):
    """Return the first chunk that the earliest of `query_len` new tokens sees, and the number of chunks from it (>= 1).

    `window` 0 means no window.
    """
    visible = seq_len - query_len - window + 1
    first = tl.where((window > 0) & (visible > 0), visible, 0) // chunk
    return first, tl.maximum((seq_len + chunk - 1) // chunk - first, 1)


class SplitWork:
    """The work list of split attention, made on the device once per step and used by every layer.

    Each sequence's context is cut into chunks at multiples of the chunk length; a piece of work is one chunk seen by
    one tile of query tokens. Piece w belongs to `sequences[w]`; sequence s has the pieces from `offsets[s]` on. A
    sequence with query tokens has at least one piece, so that empty contexts get their zeros written too. The number of
    pieces is `offsets[num_seqs]`, at most `capacity`; programs beyond it return. `chunk` [1] is the chunk length.

    Lengths are read on the device and the capacity is fixed, so a captured graph stays valid while lengths change. With
    a fixed chunk length a sequence's result depends on nothing else in the batch. Otherwise the chunk length with the
    least estimated time is chosen: waves of programs times the length of a chunk (as in stream-K and FlashInfer's
    planner; Ye et al., 2025).
    """

    def __init__(
        self,
        max_seqs: int,
        max_tiles: int,
        max_len: int,
        programs_per_piece: int,
        config: SplitConfig,
        device: torch.device | str,
        *,
        num_sms: int,
        max_query_len: int = 1,
        tokens_per_tile: int = 1,
        window: int | None = None,
        fixed_chunk: int | None = None,
    ) -> None:
        """Allocate for batches of at most `max_seqs` sequences, `max_tiles` tiles of query tokens and `max_len`
        positions, `max_query_len` of them new.

        `programs_per_piece` is the number of KV heads (times head groups). `fixed_chunk`, a multiple of the tile, makes
        results independent of the batch. The capacity then grows with max_tiles * max_len / fixed_chunk, and with it
        the number of programs that start only to return. Raises ValueError for a chunk length that is no multiple.
        """
        if fixed_chunk is not None and (fixed_chunk <= 0 or fixed_chunk % config.tile):
            raise ValueError(f"the chunk length {fixed_chunk} is not a multiple of the tile {config.tile}")
        if window is not None and window <= 0:
            raise ValueError(f"the window {window} is not positive")
        self.max_seqs, self.config, self.window, self.fixed_chunk = max_seqs, config, window, fixed_chunk
        self.tokens_per_tile = tokens_per_tile
        self._slots = max(1, num_sms * config.programs_per_sm // programs_per_piece)
        if fixed_chunk is None:
            self.capacity = max_tiles + 2 * self._slots
        else:
            seen = max_len if window is None else min(max_len, window + max_query_len - 1)
            # A window may begin and end within a chunk.
            self.capacity = max_tiles * (-(-seen // fixed_chunk) + (window is not None))
        self.offsets = torch.zeros(max_seqs + 1, dtype=torch.int32, device=device)
        self.sequences = torch.zeros(self.capacity, dtype=torch.int32, device=device)
        self.chunk = torch.zeros(1, dtype=torch.int32, device=device)

    def update(self, seq_lens: Tensor, query_starts: Tensor | None = None) -> None:
        """Make the list for `seq_lens` [S] int32, S <= max_seqs, the lengths including new tokens.

        `query_starts` [S + 1] int32: the first new token of each sequence; without it each sequence has one. Launches
        one kernel and waits for nothing.
        """
        num_seqs = seq_lens.shape[0]
        if num_seqs > self.max_seqs:
            raise ValueError(f"{num_seqs} sequences where there is room for {self.max_seqs}")
        _plan_kernel[(1,)](
            seq_lens,
            seq_lens if query_starts is None else query_starts,
            self.offsets,
            self.sequences,
            self.chunk,
            num_seqs,
            self.capacity,
            self._slots,
            self.fixed_chunk or 0,
            self.config.min_chunk,
            self.window or 0,
            TOKENS=self.tokens_per_tile,
            ONE_QUERY=query_starts is None,
            STEP=self.config.tile,
            BLOCK_SEQS=max(16, power_of_two(self.max_seqs)),
            MAX_CANDIDATES=_MAX_CANDIDATES,
            PROGRAM_OVERHEAD=_PROGRAM_OVERHEAD,
            PARTIAL_OVERHEAD=_PARTIAL_OVERHEAD,
            num_warps=4,
        )


@triton.jit(
    do_not_specialize=[
        "seq_lens",
        "query_starts",
        "offsets",
        "sequences",
        "chunk_out",
        "num_seqs",
        "capacity",
        "slots",
        "fixed_chunk",
        "min_chunk",
        "window",
    ]
)
def _plan_kernel(
    seq_lens,
    query_starts,
    offsets,
    sequences,
    chunk_out,
    num_seqs,
    capacity,
    slots,
    fixed_chunk,
    min_chunk,
    window,
    TOKENS: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    PROGRAM_OVERHEAD: tl.constexpr,
    PARTIAL_OVERHEAD: tl.constexpr,
):
    """Choose the chunk length, count every sequence's pieces and write the sequence of each piece, in one program."""
    index = tl.arange(0, BLOCK_SEQS)
    valid = index < num_seqs
    lengths = tl.load(seq_lens + index, mask=valid, other=0)
    if ONE_QUERY:
        query_lens = tl.where(valid, 1, 0)
    else:
        ends = tl.load(query_starts + index + 1, mask=valid, other=0)
        query_lens = ends - tl.load(query_starts + index, mask=valid, other=0)
    tiles = (query_lens + TOKENS - 1) // TOKENS

    longest = tl.max(lengths, 0)
    # One chunk per sequence always fits: the capacity is at least the number of tiles.
    best = tl.maximum((longest + STEP - 1) // STEP, 1) * STEP
    if fixed_chunk > 0:
        best = fixed_chunk
    else:
        least_cost = 0x7FFFFFFF
        for parts in range(1, tl.minimum(longest // min_chunk, MAX_CANDIDATES) + 1):
            chunk = ((longest + parts - 1) // parts + STEP - 1) // STEP * STEP
            _, chunks = count_chunks(lengths, query_lens, chunk, window)
            pieces = tl.sum(tiles * chunks, 0)
            waves = (pieces + slots - 1) // slots
            cost = waves * (chunk + PROGRAM_OVERHEAD) + parts * PARTIAL_OVERHEAD
            better = (pieces <= capacity) & (cost < least_cost)
            best = tl.where(better, chunk, best)
            least_cost = tl.where(better, cost, least_cost)
    tl.store(chunk_out, best)

    _, chunks = count_chunks(lengths, query_lens, best, window)
    counts = tiles * chunks
    ends = tl.cumsum(counts, 0)
    begins = ends - counts
    tl.store(offsets, 0)
    tl.store(offsets + index + 1, ends, mask=valid)
    for piece in range(0, tl.max(counts, 0)):
        tl.store(sequences + begins + piece, index, mask=(piece < counts) & (begins + piece < capacity))
