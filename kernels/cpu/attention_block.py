"""Grouped-query attention from a layer's input to its output as one call of the compiled kernels.

In a step of few rows Python would take longer between the parts of attention than the parts take.
"""

from __future__ import annotations

from ctypes import Structure, addressof, c_double, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention_plan import AttentionPlan
from kernels.cpu.panels import LANES
from kernels.kv_rows import KINDS
from kernels.linear import Linear, PanelLinear


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of grouped-query attention and the numbers that go with them.

    qkv: rows of all query heads, then key heads, then value heads. norms: of whole queries and keys, each [width];
    head_norms: of each of their heads, [dim], and where there are three, of each value head. window: None for all
    tokens. sinks: [num_heads].
    """

    qkv: Linear
    out: Linear
    num_heads: int
    num_kv_heads: int
    dim: int
    norms: tuple[Tensor, Tensor] | None
    head_norms: tuple[Tensor, ...] | None
    eps: float
    scale: float
    interleaved: bool
    window: int | None
    sinks: Tensor | None


class _Attention(Structure):
    """`Attention` of block.cpp."""

    _fields_ = [
        ("qkv", c_void_p),
        ("num_qkv", c_int64),
        ("out", c_void_p),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("dim", c_int64),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("q_head_norm", c_void_p),
        ("k_head_norm", c_void_p),
        ("v_head_norm", c_void_p),
        ("eps", c_double),
        ("scale", c_double),
        ("interleaved", c_int64),
        ("window", c_int64),
        ("sinks", c_void_p),
    ]


class _Rows(Structure):
    """`Rows` of block.cpp."""

    _fields_ = [
        ("num_rows", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("half", c_int64),
        ("slots", c_void_p),
        ("block_size", c_int64),
        ("num_chunks", c_int64),
        ("first_rows", c_void_p),
        ("starts", c_void_p),
        ("table_offsets", c_void_p),
        ("block_tables", c_void_p),
    ]


class _Pools(Structure):
    """`Pools` of block.cpp."""

    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("num_slots", c_int64), ("kind", c_int64)]


@dataclass(frozen=True, slots=True)
class _PreparedRows:
    """The record of a step's rows, and the tensors whose addresses are in it, which it keeps alive."""

    cos: Tensor
    sin: Tensor
    slots: Tensor
    rows: _Rows

    def are_of(self, cos: Tensor, sin: Tensor, slots: Tensor) -> bool:
        return self.cos is cos and self.sin is sin and self.slots is slots


class AttentionBlock:
    """The attention of one layer. width: of its results. address: of its `Attention` of block.cpp."""

    def __init__(self, weights: AttentionWeights, qkv: PanelLinear, out: PanelLinear) -> None:
        def pointers(norms: tuple[Tensor, ...] | None, count: int) -> list[int | None]:
            found = [norm.data_ptr() for norm in norms or ()]
            return [*found, *[None] * (count - len(found))]

        # The weights keep the tensors alive whose addresses are in the record.
        self._weights = weights
        self.kernels, self.width = qkv.kernels, out.out_features
        self._record = _Attention(
            qkv.address,
            len(qkv.matrices),
            out.address,
            weights.num_heads,
            weights.num_kv_heads,
            weights.dim,
            *pointers(weights.norms, 2),
            *pointers(weights.head_norms, 3),
            weights.eps,
            weights.scale,
            weights.interleaved,
            weights.window or 0,
            None if weights.sinks is None else weights.sinks.data_ptr(),
        )
        self.address = addressof(self._record)
        self._pools: tuple[Tensor, Tensor, _Pools] | None = None

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, plan: AttentionPlan, keys: Tensor, values: Tensor
    ) -> Tensor:
        """x [T, hidden], cos, sin [T, R/2], all float32, slots [T] int64 -> [T, hidden].

        Mutates the pools [KV, num_slots, D].
        """
        if x.dtype is not torch.float32:
            raise TypeError(f"x is {x.dtype}, the product is in float32")
        rows, pools = self.rows_of(cos, sin, slots, plan), self.pools_of(keys, values)
        result = x.new_empty((x.shape[0], self.width))
        self.kernels.attention_block(
            self.address, addressof(rows), addressof(pools), x.data_ptr(), x.stride(0), result.data_ptr()
        )
        return result

    @staticmethod
    def rows_of(cos: Tensor, sin: Tensor, slots: Tensor, plan: AttentionPlan) -> Structure:
        """Return the `Rows` of block.cpp, which the plan keeps for all layers of a step."""
        name = f"block {cos.data_ptr()}"  # Layers with and without a window may have angles of their own.
        prepared = plan.prepared.get(name)
        if not isinstance(prepared, _PreparedRows) or not prepared.are_of(cos, sin, slots):
            prepared = plan.prepared[name] = _PreparedRows(cos, sin, slots, _rows(cos, sin, slots, plan))
        return prepared.rows

    def pools_of(self, keys: Tensor, values: Tensor) -> Structure:
        """Return the `Pools` of block.cpp, which is kept until other pools come."""
        pools = self._pools
        if pools is None or pools[0] is not keys or pools[1] is not values:
            record = _Pools(keys.data_ptr(), values.data_ptr(), keys.shape[1], KINDS[keys.dtype])
            pools = self._pools = keys, values, record
        return pools[2]


def _rows(cos: Tensor, sin: Tensor, slots: Tensor, plan: AttentionPlan) -> _Rows:
    arrays = plan.arrays()
    return _Rows(
        len(slots),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        slots.data_ptr(),
        plan.block_size,
        len(plan.chunks),
        arrays.first_rows.data_ptr(),
        arrays.starts.data_ptr(),
        arrays.table_offsets.data_ptr(),
        arrays.block_tables.data_ptr(),
    )


def attention_block(weights: AttentionWeights) -> AttentionBlock | None:
    """Return attention with these weights as one call; None where the compiled kernels do not compute all of it."""
    qkv, out = weights.qkv, weights.out
    if not isinstance(qkv, PanelLinear) or not isinstance(out, PanelLinear) or weights.dim % LANES:
        return None
    if qkv.order is not None or out.order is not None or len(out.matrices) != 1:
        return None
    if qkv.out_features != (weights.num_heads + 2 * weights.num_kv_heads) * weights.dim:
        return None
    return AttentionBlock(weights, qkv, out)
