"""Attention of few query tokens over long paged contexts: split over keys and values, then reduced by log-sum-exp.

Decode attention, and extends too short to fill tiles of one head. A program has one KV head, one chunk of one sequence
and all query heads of that KV head, for one or more tokens, as its rows, so keys and values are read once (as in
Flash-Decoding; Dao et al., 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.attention_tile import attend, half_queries, join_sink, load_rows, normalised, sequence_of
from kernels.gpu.attention_work import count_chunks


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
    """Program (piece, KV head, head group), the last fastest: groups that share keys run side by side.

    A sequence with one chunk is written to `out`. Otherwise the piece's part, divided by its sum, goes to
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
    query = load_rows(q_rows, row_valid, 0, KEY_DIM, BLOCK_KEY, True)
    query_tail = query
    if BLOCK_TAIL > 0:
        query_tail = load_rows(q_rows, row_valid, BLOCK_KEY, KEY_DIM, BLOCK_TAIL, True)
    row_scale = tl.full([ROWS], 1.0, tl.float32) * score_scale
    if keys.dtype.element_ty.primitive_bitwidth == 8 and q.dtype.element_ty == tl.bfloat16:
        query, query_tail, power = half_queries(query, query_tail, BLOCK_TAIL)
        row_scale *= power

    begin = (first_chunk + part) * chunk
    visible_begin = begin
    if HAS_WINDOW:
        visible_begin = tl.maximum(begin, first_position - window + 1)
        begin = tl.maximum(begin, visible_begin // TILE * TILE)
    visible_end = tl.minimum((first_chunk + part + 1) * chunk, first_position + tile_tokens)
    # More rows go by whole warpgroups, whose values pass through shared memory in any case. Values within keys are read
    # again, from the cache: one copy would be wanted in two orders, and was not made ahead.
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
    """Program (token, heads, part of the dims): weighs the token's parts, BLOCK_PARTS at once, by their sums.

    Tokens are counted from the first sequence's on. Those whose sequence has one chunk are left alone: they are written
    already.
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
        # The state of the online softmax has a leading axis of one row, as `join_sink` and `normalised` take it.
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
