"""Causal attention of many new tokens over paged contexts that hold the new tokens' keys and values already.

A program has a tile of query tokens of one head, as the tensor cores want it. Keys in which all its rows see all
positions need no masks; only the diagonal, and the far edge of a window, do (as in FlashAttention-2; Dao, 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.attention_tile import attend, half_queries, join_sink, load_rows, normalised, sequence_of


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
    """Program (head, tile of ROWS tokens), heads fastest: those of one KV head read the same keys from the L2 cache.

    Tiles are counted from the back, since the last ones see the most keys.
    """
    head = tl.program_id(0).to(tl.int64)
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    seq = sequence_of(query_starts, index, num_seqs, ROWS)
    first_token = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - first_token
    tile_token = (index - first_token // ROWS - seq) * ROWS
    # Before the first sequence, and where a sequence has fewer tiles than indices, there is nothing.
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
    query = load_rows(q_rows, row_valid, 0, KEY_DIM, BLOCK_KEY, True)
    query_tail = query
    if BLOCK_TAIL > 0:
        query_tail = load_rows(q_rows, row_valid, BLOCK_KEY, KEY_DIM, BLOCK_TAIL, True)
    row_scale = tl.full([ROWS], 1.0, tl.float32) * score_scale
    if keys.dtype.element_ty.primitive_bitwidth == 8 and q.dtype.element_ty == tl.bfloat16:
        query, query_tail, power = half_queries(query, query_tail, BLOCK_TAIL)
        row_scale *= power
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
