"""What the attention kernels are launched with, out of the tensors that a caller has."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from kernels.gpu.attention_config import head_blocks

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class PagedContext:
    """The positions of S sequences. keys, values: pools [KV, num_slots, D]. block_table: [S, N] int32. seq_lens: [S]
    int32, with the new tokens."""

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
        """In the order of the kernels' arguments."""
        return self.keys, self.values, self.block_table, self.seq_lens

    def part(self, first: int, end: int) -> PagedContext:
        """Of the sequences first ... end - 1."""
        return replace(self, block_table=self.block_table[first:end], seq_lens=self.seq_lens[first:end])


@dataclass(frozen=True, slots=True)
class Scoring:
    """How products of queries and keys become weights, and weights outputs.

    scale: products are multiplied by it, then squeezed into +-soft_cap where that is given. sinks: [H] logits of a key
    without value. key_scale, value_scale: pools (of fp8) hold keys and values divided by them.
    """

    scale: float
    soft_cap: float | None = None
    sinks: Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0

    def scalars(self) -> tuple[float, float, float]:
        """What dots are multiplied by, the soft cap, both in the base-2 domain of the kernels (see `attend`), and what
        results are multiplied by."""
        scale = self.scale * self.key_scale
        if scale <= 0:
            raise ValueError(f"products scaled by {scale}, which is not positive")
        if self.soft_cap is None:
            return scale * _LOG2_E, 0.0, self.value_scale
        return scale * 2.0 * _LOG2_E / self.soft_cap, self.soft_cap * _LOG2_E, self.value_scale

    def flags(self) -> dict[str, bool]:
        return {"HAS_SOFT_CAP": self.soft_cap is not None, "HAS_SINKS": self.sinks is not None}


class AttentionArguments:
    """What the launches need to know of the tensors' shapes; refuses those that the kernels would misread."""

    __slots__ = ("_values_in_keys", "block_size", "group", "key_dim", "kv_heads", "num_heads", "value_dim")

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
        """In the order of the kernels' arguments."""
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
