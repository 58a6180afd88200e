"""The memory of KV blocks. `PrefixCache` decides which block holds which tokens; the memory does not know."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from kernels.kv_rows import row_width
from moeserve.device import WindowDemand
from moeserve.model.spec import KvLayerSpec


class KVPool:
    """Keys and values of every layer: pools [num_heads, num_slots, width], slot = block id * block_size + offset.

    A row's width is the number of its channels, for int8 with room for its scale (`kernels.kv_rows`).

    Heads lie outside slots, so that blocks in a row are one matrix per head, which attention reads without a copy. If a
    layer's values are a prefix of its keys (`value_dim` 0), None takes their place. On a CPU the memory is taken when
    it is first written.

    With `num_window_blocks` layers with a window have that many blocks of their own, which window tables name.
    """

    def __init__(
        self,
        layers: Sequence[KvLayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_window_blocks: int = 0,
    ) -> None:
        """num_window_blocks: 0 where all layers keep their KV in the same blocks."""
        self.num_blocks = num_blocks
        self.num_window_blocks = num_window_blocks
        self.block_size = block_size
        self.layers: list[tuple[Tensor, Tensor | None]] = []
        self._has_windows = [num_window_blocks > 0 and layer.window is not None for layer in layers]
        for layer, has_window in zip(layers, self._has_windows, strict=True):
            heads, slots = layer.num_heads, (num_window_blocks if has_window else num_blocks) * block_size
            key_width, value_width = row_width(layer.key_dim, dtype), row_width(layer.value_dim, dtype)
            keys = zeros_on_demand((heads, slots, key_width), dtype, device)
            values = zeros_on_demand((heads, slots, value_width), dtype, device) if value_width else None
            self.layers.append((keys, values))

    def block_bytes(self) -> list[Tensor]:
        """Return the memory of KV blocks as bytes, [heads, blocks, bytes of a block] for each pool, without a copy."""
        return self._bytes(of_windows=False)

    def window_bytes(self) -> list[Tensor]:
        """Return the memory of window blocks as `block_bytes` does; empty where layers have none of their own."""
        return self._bytes(of_windows=True)

    def _bytes(self, *, of_windows: bool) -> list[Tensor]:
        layers = [layer for layer, own in zip(self.layers, self._has_windows, strict=True) if own == of_windows]
        pools = [pool for layer in layers for pool in layer if pool is not None]
        return [pool.view(pool.shape[0], pool.shape[1] // self.block_size, -1).view(torch.uint8) for pool in pools]

    def zero_blocks(self, block_ids: array[int], window_ids: Sequence[int] = ()) -> None:
        """Clear blocks that changed hands, so that no number of a former owner, not even a NaN, is ever read.

        window_ids: the ids of window blocks to clear.
        """
        device = self.layers[0][0].device
        ids, own = (torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in (block_ids, window_ids))
        for pools, has_window in zip(self.layers, self._has_windows, strict=True):
            for pool in pools:
                if pool is not None:
                    # torch fills no fp8 by index.
                    numbers = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
                    blocks = numbers.view(pool.shape[0], pool.shape[1] // self.block_size, -1)
                    blocks.index_fill_(1, own if has_window else ids, 0)

    def copy_blocks(self, block_pairs: array[int], window_pairs: Sequence[int] = ()) -> None:
        """Copy blocks to others: (source, target) ids, one after the other. window_pairs: the same of window blocks."""
        device = self.layers[0][0].device
        ids, own = (torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in (block_pairs, window_pairs))
        for pools, has_window in zip(self.layers, self._has_windows, strict=True):
            sources, targets = (own if has_window else ids).view(-1, 2).unbind(1)
            for pool in pools:
                if pool is not None:
                    # torch copies no fp8 by index.
                    numbers = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
                    blocks = numbers.view(pool.shape[0], pool.shape[1] // self.block_size, -1)
                    blocks.index_copy_(1, targets, blocks.index_select(1, sources))


def kv_pool_bytes(
    layers: Sequence[KvLayerSpec], num_blocks: int, num_window_blocks: int, block_size: int, dtype: torch.dtype
) -> int:
    """Return the bytes of a pool. num_window_blocks: for layers with a window, 0 without blocks of their own."""
    with_window = windowed(layers) if num_window_blocks else ()
    of_windows = kv_block_bytes(with_window, block_size, dtype)
    return num_blocks * (kv_block_bytes(layers, block_size, dtype) - of_windows) + num_window_blocks * of_windows


def window_demand(
    layers: Sequence[KvLayerSpec], block_size: int, dtype: torch.dtype, max_num_seqs: int, step_tokens: int
) -> WindowDemand | None:
    """Return the memory demand of the layers with a window, None without such layers."""
    with_window = windowed(layers)
    if not with_window:
        return None
    window = max(layer.window or 0 for layer in with_window)
    return WindowDemand(kv_block_bytes(with_window, block_size, dtype), window, max_num_seqs, step_tokens)


def windowed(layers: Sequence[KvLayerSpec]) -> list[KvLayerSpec]:
    return [layer for layer in layers if layer.window is not None]


def kv_block_bytes(layers: Sequence[KvLayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers."""
    widths = (row_width(layer.key_dim, dtype) + row_width(layer.value_dim, dtype) for layer in layers)
    return (
        block_size * dtype.itemsize * sum(layer.num_heads * width for layer, width in zip(layers, widths, strict=True))
    )


def zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros. On a CPU their memory is taken page by page, when it is first written."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A block is spread over layers and heads: in huge pages its first use would clear hundreds of megabytes.
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
