"""The memory that KV blocks live in. Which block holds what is not known here; `PrefixCache` decides it."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from moeserve.model.spec import KvLayerSpec


class KVPool:
    """Keys and values of every layer: pools [num_heads, num_slots, dim], slot = block id * block_size + offset.

    Heads lie outside slots, so that blocks in a row are one matrix per head, which attention reads without a copy.
    Where a layer's values are a prefix of its keys (`value_dim` 0) there is None in their place. On a CPU the memory is
    taken when it is first written.
    """

    def __init__(
        self,
        layers: Sequence[KvLayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: list[tuple[Tensor, Tensor | None]] = []
        for layer in layers:
            heads, slots = layer.num_heads, num_blocks * block_size
            keys = zeros_on_demand((heads, slots, layer.key_dim), dtype, device)
            values = zeros_on_demand((heads, slots, layer.value_dim), dtype, device) if layer.value_dim else None
            self.layers.append((keys, values))

    def zero_blocks(self, block_ids: array[int]) -> None:
        """Clears blocks that changed hands, so that nothing of a former owner, not even a NaN, is ever read."""
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self.layers[0][0].device)
        for pools in self.layers:
            for pool in pools:
                if pool is not None:
                    # torch fills no fp8 by index.
                    numbers = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
                    numbers.view(pool.shape[0], self.num_blocks, -1).index_fill_(1, ids, 0)


def kv_block_bytes(layers: Sequence[KvLayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return block_size * dtype.itemsize * sum(layer.num_heads * (layer.key_dim + layer.value_dim) for layer in layers)


def zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros. On a CPU their memory is taken page by page, when it is first written."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A block is spread over layers and heads: in huge pages its first use would clear hundreds of megabytes.
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
