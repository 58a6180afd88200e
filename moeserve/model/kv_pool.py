"""The memory of KV blocks. `PrefixCache` decides which block holds which tokens; the memory does not know."""

from __future__ import annotations

import mmap
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from kernels.kv_rows import row_width
from kernels.transfer import to_device
from moeserve.device import WindowDemand
from moeserve.model.spec import KvLayerSpec


class KVPool:
    """Keys and values of every layer: pools [num_heads, num_slots, width], slot = block id * block_size + offset.

    A row's width is the number of its channels, for int8 with room for its scale (`kernels.kv_rows`).

    Heads lie outside slots, so that blocks in a row are one matrix per head, which attention reads without a copy. If a
    layer's values are a prefix of its keys (`value_dim` 0), None takes their place, or the keys of its indexer. Pools
    of one shape are one memory, so that an operation on blocks is one for all of them. On a CPU the memory is taken
    when it is first written.

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
        has_windows = [num_window_blocks > 0 and layer.window is not None for layer in layers]
        widths = [(row_width(layer.key_dim, dtype), row_width(layer.value_dim, dtype)) for layer in layers]
        # The kind of a pool: whether it has window blocks, its heads, and its width.
        kinds = [
            [(own, layer.num_heads, width) for width in of_layer if width]
            for layer, own, of_layer in zip(layers, has_windows, widths, strict=True)
        ]
        memories = {
            (own, heads, width): zeros_on_demand(
                (count, heads, (num_window_blocks if own else num_blocks) * block_size, width), dtype, device
            )
            for (own, heads, width), count in Counter(kind for of_layer in kinds for kind in of_layer).items()
        }
        # The memories of KV blocks and of window blocks, [pools, heads, slots, width].
        self._memories = [
            [memory for (own, *_), memory in memories.items() if own == of_windows] for of_windows in (False, True)
        ]
        rest = {kind: iter(list(memory)) for kind, memory in memories.items()}
        self.layers: list[tuple[Tensor, Tensor | None]] = []
        for of_layer in kinds:
            keys, *values = [next(rest[kind]) for kind in of_layer]
            self.layers.append((keys, values[0] if values else None))

    def block_bytes(self) -> list[Tensor]:
        """Return the memory of KV blocks as bytes, [heads of all pools, blocks, bytes of a block] for each shape of
        pools, without a copy."""
        return [memory.view(torch.uint8).flatten(0, 1) for memory in self._blocks(0)]

    def window_bytes(self) -> list[Tensor]:
        """Return the memory of window blocks as `block_bytes` does; empty where layers have none of their own."""
        return [memory.view(torch.uint8).flatten(0, 1) for memory in self._blocks(1)]

    def layer_bytes(self) -> list[Tensor]:
        """Return the memory of blocks as bytes, [heads, blocks, bytes of a block] for each pool in the order of layers.

        To be called without window blocks.
        """
        pools = [pool for layer in self.layers for pool in layer if pool is not None]
        return [pool.view(pool.shape[0], pool.shape[1] // self.block_size, -1).view(torch.uint8) for pool in pools]

    def zero_blocks(self, block_ids: array[int], window_ids: Sequence[int] = ()) -> None:
        """Clear blocks that changed hands, so that no number of a former owner, not even a NaN, is ever read.

        window_ids: the ids of window blocks to clear.
        """
        for of_windows, numbers in enumerate((block_ids, window_ids)):
            if len(numbers) and self._memories[of_windows]:
                ids = to_device(array("q", numbers), self._memories[of_windows][0].device)
                for blocks in self._blocks(of_windows):
                    # torch fills no fp8 by index.
                    (blocks.view(torch.uint8) if blocks.dtype.itemsize == 1 else blocks).index_fill_(2, ids, 0)

    def copy_blocks(self, pairs: array[int]) -> None:
        """Copy blocks, without window blocks. pairs: the ids of source and target, one behind the other."""
        ids = to_device(array("q", pairs), self._memories[0][0].device)
        sources, targets = ids.view(-1, 2).unbind(1)
        for blocks in self.block_bytes():
            blocks.index_copy_(1, targets, blocks.index_select(1, sources))

    def _blocks(self, of_windows: int) -> Iterator[Tensor]:
        """Yield the memories of KV blocks, or of window blocks, as [pools, heads, blocks, numbers of a block]."""
        for memory in self._memories[of_windows]:
            yield memory.view(*memory.shape[:2], memory.shape[2] // self.block_size, -1)


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
