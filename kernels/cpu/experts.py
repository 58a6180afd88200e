"""The CPU's bodies of the expert product, each with its layout of packed experts.

- The compiled kernel reads panels of weights in place, quantised or not, and computes all chosen experts in one call.
- The matrix library computes one expert after another. It prepares itself for every new number of rows, which takes
  longer than a product with few rows. So an expert's number of rows is rounded up to one of a few numbers; the extra
  rows belong to the next expert, and their results are dropped.
"""

from __future__ import annotations

from ctypes import Structure, addressof, c_double, c_int64, c_void_p
from typing import get_args

import torch
from torch import Tensor

from kernels.activation import activate
from kernels.cpu.library import NativeKernels
from kernels.cpu.panels import (
    LANES,
    PANEL_COLUMNS,
    gate_beside_up,
    linear_kind,
    pack_panels,
    panel_elements,
    quantised_kind,
)
from kernels.cpu.quantised import pack_rows, packed_bytes, quantise
from kernels.linear import Linear, pack_linear
from kernels.packed_experts import ExpertLayout, ExpertMatrices, ExpertShape, SplitExperts
from kernels.specs import Activation, ActivationKind
from kernels.weight_formats import Matrix, QuantizedRows, WeightFormat, widened

# The order of `Activation` in experts.cpp.
_KINDS = {kind: number for number, kind in enumerate(get_args(ActivationKind))}


class PanelLayout(ExpertLayout):
    """Panels of gate and up, panels of down, then float32 biases; weights are bfloat16, float32 or quantised.

    Last, where the shape has one, is the order of the depth of gate and up, int32. An order of down's depth is an order
    of the rows of gate and up.
    """

    def __init__(self, shape: ExpertShape, kernels: NativeKernels) -> None:
        """Raise ValueError if the rows of a matrix are not whole blocks of its format."""
        self.shape = shape
        self._kernels = kernels
        self._dtype = torch.bfloat16 if shape.weight_dtype == torch.bfloat16 else torch.float32
        # A panel has 16 gate columns and their 16 up columns, or 32 up columns.
        channels = LANES if shape.is_gated else PANEL_COLUMNS
        columns = -(-shape.intermediate_size // channels) * PANEL_COLUMNS, shape.hidden_size
        depths = shape.hidden_size, shape.intermediate_size
        if shape.formats is None:
            self.name = f"panels of {str(self._dtype).removeprefix('torch.')}"
            self._matrix_bytes = [self._dtype.itemsize * count for count in map(panel_elements, columns, depths)]
        else:
            self.name = f"panels of {' and '.join(form.name for form in shape.formats)}"
            self._matrix_bytes = list(map(packed_bytes, shape.formats, columns, depths))
        if shape.has_order:
            self.name += " with orders"
        # The row of gate and up in each column of their panels, -1 for none.
        self._columns = self._ordered(torch.arange(1, shape.gate_up_rows + 1)) - 1
        self.num_bytes = sum(self._matrix_bytes) + 4 * (
            sum(columns) * shape.has_bias + shape.hidden_size * shape.has_order
        )

    @property
    def kinds(self) -> tuple[int, int]:
        """The packings of the matrices in matrix.h."""
        if self.shape.formats is None:
            kind = linear_kind(self._dtype == torch.bfloat16, self.shape.narrow_rows)
            return kind, kind
        first, second = self.shape.formats
        return quantised_kind(first, self.shape.narrow_rows), quantised_kind(second, self.shape.narrow_rows)

    def pack_into(self, out: Tensor, matrices: ExpertMatrices) -> None:
        gate_up, down, gate_up_bias, down_bias = matrices
        if isinstance(gate_up, QuantizedRows) and isinstance(down, QuantizedRows) and down.order is not None:
            rows = torch.cat([down.order, down.order + down.depth])[: gate_up.shape[0]]
            gate_up, down = gate_up.rows(rows), QuantizedRows(down.format, down.data, down.depth)
            gate_up_bias = None if gate_up_bias is None else gate_up_bias[rows]
        first_out, second_out, rest = out.split([*self._matrix_bytes, self.num_bytes - sum(self._matrix_bytes)])
        if self.shape.formats is not None:
            first, second = self.shape.formats
            self._pack_rows(gate_up, first, self._columns, first_out)
            self._pack_rows(down, second, None, second_out)
        else:
            if isinstance(gate_up, QuantizedRows) or isinstance(down, QuantizedRows):
                raise ValueError(f"quantised weights do not go into {self.name}")
            pack_panels(gate_up.to(self._dtype), self._kernels, self._columns, first_out)
            pack_panels(down.to(self._dtype), self._kernels, None, second_out)
        parts = []
        if gate_up_bias is not None and down_bias is not None:
            parts += [bias.float().view(torch.uint8) for bias in (self._ordered(gate_up_bias), down_bias)]
        if self.shape.has_order:
            assert isinstance(gate_up, QuantizedRows)
            order = torch.arange(gate_up.depth) if gate_up.order is None else gate_up.order
            parts.append(order.int().view(torch.uint8))
        if parts:
            rest.copy_(torch.cat(parts))

    def _pack_rows(self, matrix: Matrix, form: WeightFormat, order: Tensor | None, out: Tensor) -> None:
        rows = matrix if isinstance(matrix, QuantizedRows) else quantise(matrix, form, self._kernels)
        if rows.order is not None and not self.shape.has_order:
            raise ValueError(f"rows in an order of their own do not go into {self.name}")
        if rows.format is not form:
            raise ValueError(f"rows of {rows.format.name} do not go into panels of {form.name}")
        pack_rows(rows, self._kernels, order, out)

    def _ordered(self, rows: Tensor) -> Tensor:
        """Order rows of gate and up, [2I, ...] or [I, ...], like a panel's columns, padded with zeros."""
        if self.shape.is_gated:
            return gate_beside_up(rows)
        return torch.cat([rows, rows.new_zeros((-len(rows) % PANEL_COLUMNS, *rows.shape[1:]))])

    def experts(self, num_experts: int) -> SplitExperts:
        return NativeExperts(self, self._kernels, num_experts)


class _Experts(Structure):
    """`MoeExperts` of experts.cpp."""

    _fields_ = [
        ("experts", c_void_p),
        ("num_experts", c_int64),
        ("gate_up", c_int64),
        ("down", c_int64),
        ("times", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("has_bias", c_int64),
        ("has_order", c_int64),
        ("activation", c_int64),
        ("alpha", c_double),
        ("limit", c_double),
    ]


class NativeExperts(SplitExperts):
    """Experts in panels, computed by the compiled kernels."""

    def __init__(self, layout: PanelLayout, kernels: NativeKernels, num_experts: int) -> None:
        self._layout = layout
        self._run = kernels.experts
        self._combine = kernels.combine
        self._packed: list[Tensor | None] = [None] * num_experts
        self._addresses = torch.zeros(num_experts, dtype=torch.int64)
        self._activation: Activation | None = None
        self._record = _Experts()

    def __len__(self) -> int:
        return len(self._packed)

    def put(self, expert: int, packed: Tensor) -> None:
        self._packed[expert] = packed
        self._addresses[expert] = packed.data_ptr()

    def replace(self, expert: int, packed: Tensor) -> None:
        """Copy the bytes over the former expert's, in place: its memory may be shared with experts that stay."""
        former = self._packed[expert]
        if former is None:
            self.put(expert, packed)
        else:
            former.copy_(packed)

    def packed(self, expert: int) -> Tensor | None:
        return self._packed[expert]

    def drop(self, expert: int) -> None:
        self._packed[expert] = None
        self._addresses[expert] = 0

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, activation: Activation) -> Tensor:
        out = x.new_empty((expert_ids.shape[0], self._layout.shape.hidden_size))
        self._run_all(x, expert_ids, expert_weights.contiguous(), activation, out)
        return out

    def multiply(self, x: Tensor, expert_ids: Tensor, activation: Activation, products: Tensor) -> None:
        self._run_all(x, expert_ids, None, activation, products)

    def combine(self, products: Tensor, expert_weights: Tensor) -> Tensor:
        num_tokens, top_k, hidden_size = products.shape
        out = products.new_empty((num_tokens, hidden_size))
        expert_weights = expert_weights.contiguous()
        self._combine(
            products.data_ptr(), num_tokens, top_k, hidden_size, expert_weights.data_ptr(), out.data_ptr(), hidden_size
        )
        return out

    def _run_all(
        self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor | None, activation: Activation, out: Tensor
    ) -> None:
        """Write the sums to out [T, H], or without weights the products to out [T, k, H]."""
        num_tokens, top_k = expert_ids.shape
        if not num_tokens:
            return
        # A contiguous copy must outlive the call.
        expert_ids = expert_ids.contiguous()
        missing = self._run(
            addressof(self.record_for(activation)),
            x.data_ptr(),
            x.stride(0),
            num_tokens,
            expert_ids.data_ptr(),
            None if expert_weights is None else expert_weights.data_ptr(),
            top_k,
            out.data_ptr(),
            self._layout.shape.hidden_size,
        )
        if missing >= 0:
            raise ValueError(f"expert {missing} is not here")

    def record_for(self, activation: Activation) -> Structure:
        """Return the `MoeExperts` of experts.cpp, a new one for another activation than before.

        It names memory of these experts, and must outlive the calls that get its address.
        """
        if self._activation is not activation:
            shape = self._layout.shape
            check_gate(shape, activation)
            self._record = _Experts(
                self._addresses.data_ptr(),
                len(self._packed),
                *self._layout.kinds,
                0 if shape.arithmetic == "exact" else 2 if shape.is_fine else 1,
                shape.hidden_size,
                shape.intermediate_size,
                shape.has_bias,
                shape.has_order,
                _KINDS[activation.kind],
                activation.alpha,
                activation.limit,
            )
            self._activation = activation
        return self._record


class RowLayout(ExpertLayout):
    """gate_up [2I, H], or [I, H] without a gate, down [H, I] and float32 biases one after another, row by row."""

    def __init__(self, shape: ExpertShape) -> None:
        self.shape = shape
        self.name = f"rows of {str(shape.weight_dtype).removeprefix('torch.')}"
        hidden, width, dtype = shape.hidden_size, shape.intermediate_size, shape.weight_dtype
        self._parts: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((shape.gate_up_rows, hidden), dtype),
            ((hidden, width), dtype),
        ]
        if shape.has_bias:
            self._parts += [((shape.gate_up_rows,), torch.float32), ((hidden,), torch.float32)]
        self._part_bytes = [torch.Size(size).numel() * dtype.itemsize for size, dtype in self._parts]
        self.num_bytes = sum(self._part_bytes)

    def pack_into(self, out: Tensor, matrices: ExpertMatrices) -> None:
        parts = [widened(part) for part in matrices if part is not None]
        flat = [
            part.to(dtype).contiguous().view(torch.uint8).flatten()
            for part, (_, dtype) in zip(parts, self._parts, strict=True)
        ]
        torch.cat(flat, out=out)

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Return views of packed bytes: gate_up, down and, if there are any, their biases."""
        pieces = packed.split(self._part_bytes)
        return [piece.view(dtype).view(size) for piece, (size, dtype) in zip(pieces, self._parts, strict=True)]

    def experts(self, num_experts: int) -> SplitExperts:
        return _TorchExperts(self, num_experts)


class _TorchExperts(SplitExperts):
    def __init__(self, layout: RowLayout, num_experts: int) -> None:
        self._layout = layout
        self._linears: list[tuple[Linear, Linear] | None] = [None] * num_experts

    def __len__(self) -> int:
        return len(self._linears)

    def put(self, expert: int, packed: Tensor) -> None:
        gate_up, down, *biases = self._layout.unpack(packed)
        dtype = self._layout.shape.dtype
        gate_up_bias, down_bias = (bias.to(dtype) for bias in biases) if biases else (None, None)
        # Always copy the weights, even if packing would not: the bytes belong to the caller.
        self._linears[expert] = (
            pack_linear(gate_up.clone(), gate_up_bias, dtype),
            pack_linear(down.clone(), down_bias, dtype),
        )

    def drop(self, expert: int) -> None:
        self._linears[expert] = None

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, activation: Activation) -> Tensor:
        products = torch.zeros((*expert_ids.shape, x.shape[1]), dtype=torch.float32)
        self.multiply(x, expert_ids, activation, products)
        return self.combine(products, expert_weights)

    def multiply(self, x: Tensor, expert_ids: Tensor, activation: Activation, products: Tensor) -> None:
        check_gate(self._layout.shape, activation)
        flat_ids = expert_ids.flatten()
        chosen = (flat_ids >= 0).nonzero().flatten()
        ids = flat_ids[chosen]
        order = torch.sort(ids, stable=True).indices
        counts = torch.bincount(ids, minlength=len(self._linears)).tolist()
        places = chosen[order]
        results = self._run_sorted(x, places // expert_ids.shape[1], counts, activation)
        products.view(-1, x.shape[1])[places] = results.float()

    def combine(self, products: Tensor, expert_weights: Tensor) -> Tensor:
        out = products.new_zeros((products.shape[0], products.shape[2]))
        for k, of_choice in enumerate(products.unbind(1)):
            out.addcmul_(of_choice, expert_weights[:, k : k + 1])
        return out

    def _run_sorted(self, x: Tensor, tokens: Tensor, counts: list[int], activation: Activation) -> Tensor:
        """Return results [rows, H] of the rows `tokens` of x, which are sorted by expert."""
        num_rows = len(tokens)
        rows = x.new_zeros((num_rows + padded_rows(max(counts)), x.shape[1]))
        torch.index_select(x, 0, tokens, out=rows[:num_rows])
        results = torch.empty_like(rows[:num_rows])
        first = 0
        for expert, (linears, count) in enumerate(zip(self._linears, counts, strict=True)):
            if count:
                if linears is None:
                    raise ValueError(f"expert {expert} is not here")
                gate_up, down = linears
                hidden = activate(gate_up(rows[first : first + padded_rows(count)]), activation)
                results[first : first + count] = down(hidden)[:count]
                first += count
        return results


def check_gate(shape: ExpertShape, activation: Activation) -> None:
    """Raise ValueError unless both experts of this shape and the activation have a gate, or neither has."""
    if shape.is_gated != activation.is_gated:
        raise ValueError(f"experts {'with' if shape.is_gated else 'without'} a gate do not take {activation.kind}")


def padded_rows(count: int) -> int:
    """Return the number of rows to run an expert with for `count` rows: from 16 on at most an eighth more."""
    if count <= 16:
        return count
    step = 8 if count <= 64 else 1 << ((count - 1).bit_length() - 4)
    return -(-count // step) * step
