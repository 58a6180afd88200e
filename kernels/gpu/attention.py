"""Attention over paged keys and values on a GPU: decode, short extends, prefill, and batches of all of them.

Pools are [KV, num_slots, D] with any strides but the last; slot = block id * block_size + offset, and the block of
position p of sequence s is `block_table[s, p // block_size]` (int32). The new tokens' own keys and values are in the
pools already. Only slots of positions that a sequence sees are ever read. The reference is
`kernels.attention.paged_attention_reference`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.gpu.attention_config import PrefillConfig, head_blocks, power_of_two
from kernels.gpu.attention_kernels import SplitWork, prefill_kernel, reduce_kernel, split_kernel

_LOG2_E = math.log2(math.e)
_BLOCK_PARTS = 64
_REDUCE_DIM = 64
_MANY_ROWS = 2048


@dataclass(frozen=True, slots=True)
class PagedContext:
    """The positions of S sequences. keys, values: pools [KV, num_slots, D]. block_table: [S, N] int32. seq_lens: [S]
    int32, including new tokens."""

    keys: Tensor
    values: Tensor
    block_table: Tensor
    seq_lens: Tensor
    block_size: int

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pools, table and lengths in the order of the kernels' arguments."""
        return self.keys, self.values, self.block_table, self.seq_lens

    def part(self, first: int, end: int) -> PagedContext:
        return replace(self, block_table=self.block_table[first:end], seq_lens=self.seq_lens[first:end])


@dataclass(frozen=True, slots=True)
class Scoring:
    """The parameters that turn products of queries and keys into weights, and weights into outputs.

    scale: factor of the products, which are then squeezed into +-soft_cap if given. sinks: [H] logits of a key without
    value. key_scale, value_scale: pools (of fp8) hold keys and values divided by them.
    """

    scale: float
    soft_cap: float | None = None
    sinks: Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0

    def scalars(self) -> tuple[float, float, float]:
        """Return the factor of dots and the soft cap, both in the kernels' base-2 domain, and the factor of results."""
        scale = self.scale * self.key_scale
        if scale <= 0:
            raise ValueError(f"products scaled by {scale}, which is not positive")
        if self.soft_cap is None:
            return scale * _LOG2_E, 0.0, self.value_scale
        return scale * 2.0 * _LOG2_E / self.soft_cap, self.soft_cap * _LOG2_E, self.value_scale

    def flags(self) -> dict[str, bool]:
        return {"HAS_SOFT_CAP": self.soft_cap is not None, "HAS_SINKS": self.sinks is not None}


@dataclass(frozen=True, slots=True)
class Partials:
    """Scratch of split attention, fp32: parts [pieces * tokens per tile, H, Dv] and base-2 log-sum-exps without Dv.

    All layers share it: a layer's parts are read before the next layer writes.
    """

    parts: Tensor
    logsumexps: Tensor

    @classmethod
    def allocate(cls, work: SplitWork, num_heads: int, value_dim: int, *others: SplitWork) -> Partials:
        """Allocate the most that any of the work lists may need for this many query heads."""
        shape = (max(each.capacity * each.tokens_per_tile for each in (work, *others)), num_heads)
        device = work.offsets.device
        return cls(
            torch.empty((*shape, value_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class ExtendRun:
    """The sequences first ... end - 1 of a batch, with few new tokens each, `num_tokens` in all.

    `work` is their work list, updated with their lengths and starts.
    """

    first: int
    end: int
    num_tokens: int
    work: SplitWork


def paged_attention(
    q: Tensor,
    context: PagedContext,
    query_starts: Tensor,
    work: SplitWork,
    partials: Partials,
    scoring: Scoring,
    *,
    num_decodes: int,
    config: PrefillConfig | None,
    out: Tensor | None = None,
    extends: ExtendRun | None = None,
) -> Tensor:
    """Compute a mixed batch: the first `num_decodes` sequences have one new token each, the others any number.

    `work` has been updated with the lengths of the decodes; its window applies to all sequences. `extends` are
    sequences behind the decodes whose few new tokens are packed into tiles and whose contexts are split; all others are
    prompts, computed by `config`. `partials` must be large enough for decodes and extends. For the rest see
    `split_attention` and `prefill_attention`.
    """
    if out is None:
        out = q.new_empty((*q.shape[:2], context.values.shape[2]))
    if num_decodes:
        split_attention(q, context.part(0, num_decodes), work, partials, scoring, out=out)
    prompts = [(num_decodes, context.num_seqs)]
    if extends is not None:
        first, end = extends.first, extends.end
        prompts = [(num_decodes, first), (end, context.num_seqs)]
        split_attention(
            q,
            context.part(first, end),
            extends.work,
            partials,
            scoring,
            query_starts=query_starts[first : end + 1],
            num_tokens=extends.num_tokens,
            out=out,
        )
    for first, end in prompts:
        if first < end:
            assert config is not None
            prefill_attention(
                q,
                context.part(first, end),
                query_starts[first : end + 1],
                scoring,
                config,
                window=work.window,
                out=out,
            )
    return out


def split_attention(
    q: Tensor,
    context: PagedContext,
    work: SplitWork,
    partials: Partials,
    scoring: Scoring,
    *,
    query_starts: Tensor | None = None,
    num_tokens: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute attention of few new tokens per sequence; return out [T, H, Dv].

    q [T, H, Dk]: one token for each of the S sequences (zeros for length 0), or, with `query_starts` [S + 1] int32, the
    tokens from query_starts[s] on for sequence s, `num_tokens` in all if they are fewer than T. `work` has been updated
    with the same lengths and starts since they changed, and holds the window. Rows that belong to no sequence stay as
    they are. Launches two kernels and waits for nothing, so a graph can hold it. Overwrites `partials`.
    """
    shape = AttentionArguments(q, context)
    _check_room(work, partials, shape)
    config, out = work.config, shape.output(q, out)
    head_groups = -(-shape.group // config.rows)
    split_kernel[(work.capacity * shape.kv_heads * head_groups,)](
        q,
        *context.tensors,
        context.seq_lens if query_starts is None else query_starts,
        work.offsets,
        work.sequences,
        work.chunk,
        q if scoring.sinks is None else scoring.sinks,
        out,
        partials.parts,
        partials.logsumexps,
        context.num_seqs,
        work.window or 0,
        *scoring.scalars(),
        *shape.strides(q, context, out),
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        TOKENS=work.tokens_per_tile,
        ONE_QUERY=query_starts is None,
        ROWS=config.rows,
        **shape.constants(config.tile),
        HAS_WINDOW=work.window is not None,
        **scoring.flags(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    reduce_parts(partials, context.seq_lens, query_starts, work, shape, num_tokens, scoring, out)
    return out


def prefill_attention(
    q: Tensor,
    context: PagedContext,
    query_starts: Tensor,
    scoring: Scoring,
    config: PrefillConfig,
    *,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of many new tokens over cached prefixes; return out [T, H, Dv].

    q [T, H, Dk] holds the tokens query_starts[s] ... query_starts[s + 1] - 1 (int32 [S + 1]) of sequence s, at the end
    of its positions. For the rest see `split_attention`.
    """
    shape = AttentionArguments(q, context)
    out = shape.output(q, out)
    prefill_kernel[(shape.num_heads, q.shape[0] // config.rows + context.num_seqs)](
        q,
        *context.tensors,
        query_starts,
        q if scoring.sinks is None else scoring.sinks,
        out,
        context.num_seqs,
        window or 0,
        *scoring.scalars(),
        *shape.strides(q, context, out),
        GROUP=shape.group,
        ROWS=config.rows,
        **shape.constants(config.tile),
        HAS_WINDOW=window is not None,
        **scoring.flags(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def _check_room(work: SplitWork, partials: Partials, shape: AttentionArguments) -> None:
    config, tokens = work.config, work.tokens_per_tile
    if tokens > 1 and tokens * shape.group > config.rows:
        raise ValueError(f"{tokens} tokens of {shape.group} heads do not fit {config.rows} rows")
    if partials.logsumexps.numel() < work.capacity * tokens * shape.num_heads:
        raise ValueError("the scratch is too small for this work list")


def reduce_parts(
    partials: Partials,
    seq_lens: Tensor,
    query_starts: Tensor | None,
    work: SplitWork,
    shape: AttentionArguments,
    num_tokens: int | None,
    scoring: Scoring,
    out: Tensor,
) -> None:
    """Write the tokens whose contexts were split. num_tokens: None for one per sequence or, with starts, all."""
    if num_tokens is None:
        num_tokens = seq_lens.shape[0] if query_starts is None else out.shape[0]
    block_dim = min(_REDUCE_DIM, max(16, power_of_two(shape.value_dim)))
    # With many tokens most have one part: fewer programs then start only to return. A program takes its heads one after
    # the other, so they are few: 64 tokens of 32 heads with three parts each took 14 us by eight heads.
    many = work.max_seqs * shape.num_heads >= _MANY_ROWS
    heads_per_program = math.gcd(shape.num_heads, 2) if many else 1
    reduce_kernel[(num_tokens, shape.num_heads // heads_per_program, -(-shape.value_dim // block_dim))](
        partials.parts,
        partials.logsumexps,
        seq_lens,
        seq_lens if query_starts is None else query_starts,
        work.offsets,
        work.chunk,
        out if scoring.sinks is None else scoring.sinks,
        out,
        seq_lens.shape[0],
        work.window or 0,
        scoring.value_scale,
        out.stride(0),
        out.stride(1),
        HEADS=shape.num_heads,
        HEADS_PER_PROGRAM=heads_per_program,
        TOKENS=work.tokens_per_tile,
        ONE_QUERY=query_starts is None,
        VALUE_DIM=shape.value_dim,
        BLOCK_DIM=block_dim,
        BLOCK_PARTS=_BLOCK_PARTS,
        HAS_SINKS=scoring.sinks is not None,
        num_warps=4,
    )


class AttentionArguments:
    """Sizes, strides and constants of a launch. Raises ValueError for tensors that the kernels would misread."""

    def __init__(self, q: Tensor, context: PagedContext) -> None:
        keys_pool, values_pool, block_size = context.keys, context.values, context.block_size
        self.num_heads, self.key_dim = q.shape[1:]
        self.kv_heads, self.value_dim, self.block_size = keys_pool.shape[0], values_pool.shape[2], block_size
        self.group = self.num_heads // self.kv_heads
        if self.group * self.kv_heads != self.num_heads or keys_pool.shape[2] != self.key_dim:
            raise ValueError(f"queries {tuple(q.shape)} do not fit keys {tuple(keys_pool.shape)}")
        if any(tensor.stride(2) != 1 for tensor in (q, keys_pool, values_pool)):
            raise ValueError("the elements of a head must lie side by side")
        if block_size & (block_size - 1) or block_size < 1:
            raise ValueError(f"the block size {block_size} is not a power of two")
        if max(keys_pool.stride(1), values_pool.stride(1)) >= 1 << 24:
            raise ValueError("slots lie too far apart")
        if values_pool.element_size() == 1 and any(stride % 2 for stride in values_pool.stride()[:2]):
            raise ValueError("slots of fp8 must lie an even number of bytes apart")
        self._values_in_keys = (
            keys_pool.data_ptr() == values_pool.data_ptr()
            and keys_pool.stride() == values_pool.stride()
            and head_blocks(self.key_dim, self.value_dim).key == self.value_dim
        )

    def output(self, q: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            return q.new_empty((q.shape[0], self.num_heads, self.value_dim))
        if out.shape != (q.shape[0], self.num_heads, self.value_dim) or out.stride(2) != 1:
            raise ValueError(f"an output of shape {tuple(out.shape)} does not fit queries {tuple(q.shape)}")
        return out

    @staticmethod
    def strides(q: Tensor, context: PagedContext, out: Tensor) -> tuple[int, ...]:
        keys, values, table, _ = context.tensors
        pools = (keys.stride(0), keys.stride(1), values.stride(0), values.stride(1))
        return q.stride(0), q.stride(1), *pools, table.stride(0), out.stride(0), out.stride(1)

    def constants(self, tile: int) -> dict[str, int | bool]:
        blocks = head_blocks(self.key_dim, self.value_dim)
        return {
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "BLOCK_KEY": blocks.key,
            "BLOCK_TAIL": blocks.tail,
            "BLOCK_VALUE": blocks.value,
            "BLOCK_SIZE": self.block_size,
            "TILE": tile,
            "VALUES_IN_KEYS": self._values_in_keys,
        }
