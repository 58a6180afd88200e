"""Matrices of transformers' modelling code out of whole rows of stored matrices, which then keep their blocks.

A conversion joins, splits and turns tensors. To see which stored row each row of a parameter is, it runs once on
tensors whose elements tell their own place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernels.weight_formats import QuantizedRows, joined_rows

# How the last part of a projection's name says its key in a plan of weights; see `moeserve.model.rounding`.
_KEYS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "qkv_proj": "q",
    "Wqkv": "q",
    "q_a_proj": "q_a",
    "q_b_proj": "q_b",
    "kv_a_proj_with_mqa": "kv_a",
    "kv_b_proj": "kv_b",
    "down_proj": "down",
    "output_linear": "down",
    "w2": "down",
    "gate": "moe_gate",
    "router": "moe_gate",
    "router_logits": "moe_gate",
    "shared_expert_gate": "shared_gate",
}


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows of a matrix: for each stored matrix in order its name in the conversion, and which rows of all of them,
    None for all in order."""

    names: tuple[str, ...]
    order: Tensor | None

    def of(self, read: Callable[[str], QuantizedRows]) -> QuantizedRows | None:
        """Return the matrix; None if the stored ones differ in format or in the order of their columns."""
        joined = joined_rows([read(name) for name in self.names])
        return joined if joined is None or self.order is None else joined.rows(self.order)


def keys_of(outer: Any, num_experts: int) -> dict[str, str]:
    """Return the keys in a plan of weights of the projections and tables of a model, by module name."""
    head, keys = outer.get_output_embeddings(), {}
    for name, module in outer.named_modules():
        if module is head:
            keys[name] = "lm_head"
        elif isinstance(module, nn.Embedding):
            keys[name] = "embedding"
        elif type(module) is nn.Linear:
            is_gate = num_experts and module.out_features == num_experts
            keys[name] = "moe_gate" if is_gate else _KEYS.get(name.rpartition(".")[2], "o")
    return keys


def whole_rows(
    shapes: Mapping[str, Sequence[int]],
    convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
) -> dict[str, StoredRows]:
    """Return the matrices of a conversion that consist of whole rows of stored matrices, by name.

    shapes: of the stored matrices, [N, K] behind dimensions of 1. convert: the conversion, of tensors by these names.
    """
    depths = {shape[-1] for shape in shapes.values()}
    if len(depths) != 1 or min(depths) < 2:
        return {}
    (depth,) = depths
    names, first = tuple(shapes), 0
    places = {}
    for name, shape in shapes.items():
        num_rows = int(torch.Size(shape).numel()) // depth
        places[name] = torch.arange(first * depth, (first + num_rows) * depth, dtype=torch.float64).view(tuple(shape))
        first += num_rows
    found = {}
    for name, turned in convert(places).items():
        rows = _rows_of(turned, depth)
        if rows is not None:
            in_order = torch.equal(rows, torch.arange(first))
            found[name] = StoredRows(names, None if in_order else rows)
    return found


def _rows_of(turned: Tensor, depth: int) -> Tensor | None:
    """Return the number of the stored row in each row of a matrix, None unless all its rows are whole."""
    if turned.shape[-1] != depth or turned.numel() % depth or turned.dtype != torch.float64:
        return None
    matrix = turned.reshape(-1, depth)
    starts = matrix[:, :1]
    if not torch.equal(matrix, starts + torch.arange(depth, dtype=torch.float64)) or (starts % depth).any():
        return None
    return (starts[:, 0] / depth).long()
