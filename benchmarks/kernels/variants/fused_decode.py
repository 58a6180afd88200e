"""Decode attention that norms and rotates heads and stores keys and values itself: a variant that serves nothing yet.

A program norms and rotates its queries where `kernels.gpu.attention_kernels.split_kernel` loads them. The programs of a
sequence's last chunk make the new token's key too, fold it into their state from registers, and store it with its
value; no program reads it from the pool in this launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention import AttentionArguments, PagedContext, Partials, Scoring, reduce_parts
from kernels.gpu.attention_kernels import SplitWork, attend, count_chunks, normalised


@dataclass(frozen=True, slots=True)
class NewHeads:
    """The heads of one new token for each sequence, as a projection leaves them.

    q [S, H, D], k and v [S, KV, D]: views with contiguous channels. cos, sin [S, D / 2], contiguous. slots [S] int64,
    -1 for a token that is not stored. q_weight, k_weight [D] of the norms.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    q_weight: Tensor
    k_weight: Tensor
    eps: float


def rotate_store_and_attend(
    heads: NewHeads, context: PagedContext, work: SplitWork, partials: Partials, scale: float
) -> Tensor:
    """Do the work of `norm_rope_write_kv` and of `split_attention` over the whole context; return out [S, H, D].

    Raise ValueError for sizes of heads that are no power of two, pools of 8 bits and windows.
    """
    shape, scoring = AttentionArguments(heads.q, context), Scoring(scale)
    dim, config, keys = shape.key_dim, work.config, context.keys
    if dim & (dim - 1) or shape.value_dim != dim or keys.element_size() == 1 or work.window is not None:
        raise ValueError(f"heads of {dim} over {keys.dtype} with a window of {work.window} are not fused")
    out = shape.output(heads.q, None)
    head_groups = -(-shape.group // config.rows)
    score_scale, _, _ = scoring.scalars()
    _fused_kernel[(work.capacity * shape.kv_heads * head_groups,)](
        heads.q,
        heads.k,
        heads.v,
        heads.cos,
        heads.sin,
        heads.slots,
        heads.q_weight,
        heads.k_weight,
        *context.tensors,
        work.offsets,
        work.sequences,
        work.chunk,
        out,
        partials.parts,
        partials.logsumexps,
        context.num_seqs,
        heads.eps,
        score_scale,
        *(stride for each in (heads.q, heads.k, heads.v) for stride in each.stride()[:2]),
        *shape.strides(heads.q, context, out)[2:],
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        ROWS=config.rows,
        DIM=dim,
        BLOCK_SIZE=context.block_size,
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    reduce_parts(partials, context.seq_lens, None, work, shape, None, scoring, out)
    return out


@triton.jit(do_not_specialize=["table", "seq_lens", "offsets", "sequences", "chunk_ptr", "num_seqs", "table_stride"])
def _fused_kernel(
    q,
    k,
    v,
    cos,
    sin,
    slots,
    q_weight,
    k_weight,
    keys,
    values,
    table,
    seq_lens,
    offsets,
    sequences,
    chunk_ptr,
    out,
    partials,
    partial_lse,
    num_seqs,
    eps,
    score_scale,
    q_token: tl.int64,
    q_head: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    key_head_stride: tl.int64,
    key_stride: tl.int64,
    value_head_stride: tl.int64,
    value_stride: tl.int64,
    table_stride: tl.int64,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute program (piece, KV head, head group), the last fastest, as `split_kernel` with one query does."""
    HEADS: tl.constexpr = GROUP if GROUP < ROWS else ROWS
    HEAD_GROUPS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    piece = pid // (KV_HEADS * HEAD_GROUPS)
    if piece >= tl.load(offsets + num_seqs):
        return
    kv_head = (pid // HEAD_GROUPS % KV_HEADS).to(tl.int64)
    seq = tl.load(sequences + piece)
    token = seq.to(tl.int64)
    chunk, seq_len = tl.load(chunk_ptr), tl.load(seq_lens + seq)
    first_chunk, num_chunks = count_chunks(seq_len, 1, chunk, 0)
    part = piece - tl.load(offsets + seq)
    rows = tl.arange(0, ROWS)
    head_in_group = (pid % HEAD_GROUPS) * HEADS + rows
    row_valid = (rows < HEADS) & (head_in_group < GROUP)
    heads = kv_head * GROUP + head_in_group
    of_angles = token * (DIM // 2)
    queries = _normed_rotated(
        q + token * q_token + heads * q_head, row_valid, q_weight, cos + of_angles, sin + of_angles, eps, DIM
    )
    query = queries.to(q.dtype.element_ty)
    old_len = seq_len - 1
    end = tl.minimum((first_chunk + part + 1) * chunk, old_len)
    begin = (first_chunk + part) * chunk
    acc = tl.zeros([ROWS, DIM], tl.float32)
    row_max, row_sum = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    row_scale = tl.full([ROWS], 1.0, tl.float32) * score_scale
    acc, _, row_max, row_sum = attend(
        acc,
        acc,
        row_max,
        row_sum,
        query,
        query,
        old_len + rows * 0,
        begin,
        end,
        begin,
        end,
        keys + kv_head * key_head_stride,
        values + kv_head * value_head_stride,
        table + token * table_stride,
        key_stride,
        value_stride,
        row_scale,
        0.0,
        0,
        DIM,
        DIM,
        DIM,
        0,
        DIM,
        BLOCK_SIZE,
        TILE,
        True,
        False,
        False,
        False,
        False,
        False,
    )
    dims = tl.arange(0, DIM)
    if (part == num_chunks - 1) & (seq_len > 0):
        one = tl.arange(0, 1)
        key_row = k + token * k_token + kv_head * k_head + one
        key = _normed_rotated(key_row, one == 0, k_weight, cos + of_angles, sin + of_angles, eps, DIM)
        key = key.to(keys.dtype.element_ty)
        value = tl.load(v + token * v_token + kv_head * v_head + dims)
        scores = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * score_scale
        new_max = tl.maximum(row_max, scores)
        decay, weight = tl.exp2(row_max - new_max), tl.exp2(scores - new_max)
        acc = acc * decay[:, None] + weight.to(query.dtype).to(tl.float32)[:, None] * value.to(tl.float32)[None, :]
        row_sum = row_sum * decay + weight
        row_max = new_max
        slot = tl.load(slots + token)
        stores = (pid % HEAD_GROUPS == 0) & (slot >= 0)
        tl.store(
            keys + kv_head * key_head_stride + slot * key_stride + dims[None, :], key, mask=stores & (one == 0)[:, None]
        )
        places = values + kv_head * value_head_stride + slot * value_stride + dims
        tl.store(places, value.to(values.dtype.element_ty), mask=stores & (dims < DIM))
    stored = row_valid[:, None]
    if num_chunks == 1:
        places = out + (token * out_token_stride + heads * out_head_stride)[:, None] + dims[None, :]
        tl.store(places, normalised(acc, row_sum).to(out.dtype.element_ty), mask=stored)
    else:
        entry = piece.to(tl.int64) * (KV_HEADS * GROUP) + heads
        tl.store(partials + entry[:, None] * DIM + dims[None, :], normalised(acc, row_sum), mask=stored)
        seen = row_sum > 0.0
        lse = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), float("-inf"))
        tl.store(partial_lse + entry, lse, mask=row_valid)


@triton.jit
def _normed_rotated(rows, row_valid, weight, cos, sin, eps, DIM: tl.constexpr):
    """Return heads at pointers `rows` behind norm and rotation, in pairs (i, i + DIM / 2): fp32 [N, DIM]."""
    HALF: tl.constexpr = DIM // 2
    dims = tl.arange(0, DIM)
    partners = (dims + HALF) % DIM
    own = tl.load(rows[:, None] + dims[None, :], mask=row_valid[:, None], other=0.0).to(tl.float32)
    other = tl.load(rows[:, None] + partners[None, :], mask=row_valid[:, None], other=0.0).to(tl.float32)
    scale = (1.0 / tl.sqrt(tl.sum(own * own, 1) / DIM + eps))[:, None]
    own *= scale * tl.load(weight + dims).to(tl.float32)[None, :]
    other *= scale * tl.load(weight + partners).to(tl.float32)[None, :]
    cosine = tl.load(cos + dims % HALF).to(tl.float32)[None, :]
    sine = tl.load(sin + dims % HALF).to(tl.float32)[None, :]
    return own * cosine + tl.where(dims < HALF, -1.0, 1.0)[None, :] * other * sine
