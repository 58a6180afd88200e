"""The memory of recurrent states. The scheduler decides which row belongs to which request or snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from kernels.state_rows import StateRows
from moeserve.model.kv_pool import zeros_on_demand
from moeserve.model.spec import DecoderSpec, StateShape
from moeserve.plan import Chunk

# Pools of each layer: keys and values, or the states of a recurrent layer.
LayerPools = list[tuple[Tensor, Tensor | None]]

_ALIGNMENT = 64  # bytes, to whose multiples each state of a row is padded


class StatePool:
    """The states of all recurrent layers, one row for each slot of a running request and for each snapshot.

    A row is one run of bytes, so that a snapshot is one copy. `layers[i]` are the states of recurrent layer i, each
    [num_rows, *shape] and a view of the rows. On a CPU the memory is taken when it is first written.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[StateShape]],
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """dtype: of the states that are not kept in float32."""
        self.num_rows = num_rows
        self._rows = zeros_on_demand((num_rows, state_row_bytes(layers, dtype)), torch.uint8, device)
        self.layers: list[tuple[Tensor, ...]] = []
        offset = 0
        for shapes in layers:
            states = []
            for state in shapes:
                state_dtype, num_bytes = _layout(state, dtype)
                columns = self._rows[:, offset : offset + prod(state.shape) * state_dtype.itemsize]
                states.append(columns.view(state_dtype).unflatten(1, state.shape))
                offset += num_bytes
            self.layers.append(tuple(states))

    def row_bytes(self) -> Tensor:
        """Return the memory as bytes, [1, rows, bytes of a row], without a copy."""
        return self._rows.unsqueeze(0)

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Fill the chunks' slots: from a snapshot if the plan names one, with zeros at the start of a request."""
        for chunk in chunks:
            use = chunk.state
            assert use is not None, "a plan for a model with recurrent layers names the state of every chunk"
            if use.load is not None:
                self._rows[use.slot].copy_(self._rows[use.load])
            elif chunk.start == 0:
                self._rows[use.slot].zero_()

    def end(self, chunks: Sequence[Chunk]) -> None:
        """Copy the slots that the chunks have advanced to the snapshots that the plan names."""
        for chunk in chunks:
            use = chunk.state
            if use is not None and use.save is not None:
                self._rows[use.save].copy_(self._rows[use.slot])


def state_rows(chunks: Sequence[Chunk]) -> StateRows:
    """Return the rows of a step by slot."""
    bounds, slots = [0], []
    for chunk in chunks:
        assert chunk.state is not None
        bounds.append(bounds[-1] + len(chunk.token_ids))
        slots.append(chunk.state.slot)
    return StateRows(torch.tensor(bounds), torch.tensor(slots), max(len(chunk.token_ids) for chunk in chunks))


def state_row_bytes(layers: Sequence[Sequence[StateShape]], dtype: torch.dtype) -> int:
    """Return the bytes of one slot or snapshot over all recurrent layers."""
    return sum(_layout(state, dtype)[1] for shapes in layers for state in shapes)


def pools_by_layer(
    spec: DecoderSpec, kv_layers: Sequence[tuple[Tensor, Tensor | None]], state_pool: StatePool | None
) -> LayerPools:
    """Return the pools of every layer of a decoder, in its order, then that of an MTP layer.

    kv_layers: the pools of the layers with keys and values of their own. A layer without a mixer has an empty one.
    """
    kv, states = iter(kv_layers), iter(() if state_pool is None else state_pool.layers)
    pools: LayerPools = []
    for layer in range(spec.num_layers):
        if not spec.has("mixer", layer):
            pools.append((torch.empty(0), None))
        elif spec.is_recurrent(layer):
            conv, *heads = next(states)
            pools.append((conv, heads[0] if heads else None))
        else:
            source = spec.kv_source(layer)
            pools.append(next(kv) if source == layer else pools[source])
    return [*pools, *kv]


def _layout(state: StateShape, dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """Return the dtype of a state, and its bytes up to the start of the next state."""
    dtype = torch.float32 if state.keep_fp32 else dtype
    return dtype, -(-prod(state.shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
