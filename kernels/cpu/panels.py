"""Weights in the layout of the compiled kernels: panels of 32 output columns, depth after depth (see `panels.h`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

LANES = 16
PANEL_COLUMNS = 2 * LANES


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """A packed weight; `address` points to the bytes of `data`, which this object keeps alive."""

    data: Tensor
    address: int
    is_bf16: bool

    @staticmethod
    def pack(weight: Tensor, keep: Callable[[Tensor], Tensor] | None = None) -> PanelWeight:
        """Pack weight [N, K], bfloat16 as it is, any other dtype as float32. keep: moves the data to where it stays."""
        narrow = weight.dtype == torch.bfloat16
        data = pack_panels(weight if narrow else weight.float())
        if keep is not None:
            data = keep(data)
        return PanelWeight(data, data.data_ptr(), narrow)


def linear_kind(is_bf16: bool, narrow_rows: bool) -> int:
    """Return the number of a product in linear.cpp. narrow_rows: round rows to bfloat16 for weights of bfloat16."""
    return is_bf16 + (is_bf16 and narrow_rows)


def panel_elements(num_columns: int, depth: int) -> int:
    """Return the number of elements of a packed [num_columns, depth] weight."""
    return -(-num_columns // PANEL_COLUMNS) * PANEL_COLUMNS * depth


def pack_panels(weight: Tensor) -> Tensor:
    """Pack weight [N, K], bfloat16 or float32, into uint8 [bytes]. Columns beyond N are zeros."""
    num_columns, depth = weight.shape
    missing = -num_columns % PANEL_COLUMNS
    if missing:
        weight = functional.pad(weight, (0, 0, 0, missing))
    halves = weight.reshape(-1, 2, LANES, depth)
    # In bfloat16 the columns (j, 16 + j) are the halves of one word.
    order = (0, 3, 2, 1) if weight.dtype == torch.bfloat16 else (0, 3, 1, 2)
    return halves.permute(order).contiguous().view(torch.uint8).flatten()


def gate_beside_up(gate_up: Tensor) -> Tensor:
    """Order rows [2I, ...] (gate first) so that a panel has 16 gate columns beside their 16 up columns, zero-padded."""
    gate, up = gate_up.view(2, -1, *gate_up.shape[1:])
    missing = -gate.shape[0] % LANES
    if missing:
        padding = gate.new_zeros((missing, *gate.shape[1:]))
        gate, up = torch.cat([gate, padding]), torch.cat([up, padding])
    groups = torch.stack([half.reshape(-1, LANES, *gate.shape[1:]) for half in (gate, up)], 1)
    return groups.flatten(0, 2)
