"""Matrix product with a weight that is packed once.

On a CPU a row of the result has the same bits whatever other rows are in the batch, so requests get the same logits in
any batch and any chunking. Plain `torch.nn.functional.linear` does not guarantee that.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.library import NativeKernels, native_kernels
from kernels.cpu.panels import (
    MatrixRecord,
    PanelMatrix,
    empty_bytes,
    linear_kind,
    pack_panels,
    panel_elements,
    quantised_kind,
)
from kernels.cpu.quantised import pack_rows, packed_bytes
from kernels.weight_formats import Arithmetic, Matrix, QuantizedRows, widened

# Takes a number of bytes and returns room for them, uint8 [size].
Take = Callable[[int], Tensor]


class Linear(ABC):
    """`x [M, in_features] -> [M, out_features]` in the dtype it was packed for. Build one with `pack_linear`."""

    def __init__(self, out_features: int, in_features: int, num_bytes: int) -> None:
        self.out_features, self.in_features, self.num_bytes = out_features, in_features, num_bytes

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...


def pack_linear(
    weight: Matrix,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    arithmetic: Arithmetic = "int8",
    narrow_rows: bool = False,
    take: Take = empty_bytes,
) -> Linear:
    """Pack weight [N, K] and bias [N] into a `Linear`; it keeps a copy, so the caller may drop the weight.

    It computes in `dtype`, by default the weight's. Weights of fewer bits may stay as they are: float32 products with
    bfloat16 weights are exact, and half as many bytes are read. Quantised weights are read in their own bits by float32
    products of compiled kernels, and `arithmetic` says how; others widen them. narrow_rows: round rows to bfloat16 for
    products in float32 with weights of bfloat16 or floats of 8 bits, on machines with dot products of
    bfloat16. take: makes the room for the packed weight.
    """
    kernels = native_kernels()
    if isinstance(weight, QuantizedRows):
        if dtype in (None, torch.float32) and kernels is not None:
            matrix = _pack_quantised(weight, bias, kernels, arithmetic, narrow_rows, take)
            return PanelLinear([matrix], kernels, weight.order)
        weight = widened(weight)
    dtype = dtype or weight.dtype
    if weight.device.type == "cpu":
        if dtype == torch.float32 and kernels is not None:
            return PanelLinear([_pack_numbers(weight, bias, kernels, narrow_rows, take)], kernels)
        if _onednn_computes(dtype):
            return _OneDnnLinear(weight.to(dtype), bias)
    return TorchLinear(weight.to(dtype), bias)


def join(linears: Sequence[Linear]) -> Linear | None:
    """Return one product with the results of several side by side, [M, sum of out_features]; None if they cannot join.

    It reads their weights where they are.
    """
    panels = [linear for linear in linears if isinstance(linear, PanelLinear) and linear.order is None]
    if len(panels) < len(linears) or len({linear.in_features for linear in panels}) != 1:
        return None
    return PanelLinear([matrix for linear in panels for matrix in linear.matrices], panels[0].kernels)


def side_by_side(linears: Sequence[Linear], order: Tensor | None = None) -> Linear:
    """Return one product with the results of several side by side, in as few calls as there can be.

    order: of the columns of the result, None to keep it.
    """
    joined = join(linears)
    if joined is not None and order is None:
        return joined
    return _SideBySide(linears if joined is None else [joined], order)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the product in plain torch."""
    return functional.linear(x, weight.to(x.dtype), bias)


def _pack_quantised(
    rows: QuantizedRows,
    bias: Tensor | None,
    kernels: NativeKernels,
    arithmetic: Arithmetic,
    narrow_rows: bool,
    take: Take,
) -> PanelMatrix:
    width, depth = rows.shape
    return PanelMatrix(
        pack_rows(rows, kernels, out=take(packed_bytes(rows.format, width, depth))),
        quantised_kind(rows.format, narrow_rows),
        depth,
        width,
        None if bias is None else bias.float().contiguous(),
        0 if arithmetic == "exact" else 2 if rows.is_fine else 1,
    )


def _pack_numbers(
    weight: Tensor, bias: Tensor | None, kernels: NativeKernels, narrow_rows: bool, take: Take
) -> PanelMatrix:
    """Pack bfloat16 as it is, any other dtype as float32."""
    is_narrow = weight.dtype == torch.bfloat16
    width, depth = weight.shape
    out = take(panel_elements(width, depth) * (2 if is_narrow else 4))
    return PanelMatrix(
        pack_panels(weight if is_narrow else weight.float(), kernels, out=out),
        linear_kind(is_narrow, narrow_rows),
        depth,
        width,
        None if bias is None else bias.float().contiguous(),
    )


class PanelLinear(Linear):
    """Products with one or several weights in panels, each of its own kind, in one call of the compiled kernels.

    order: of the columns of x, None to keep it.
    """

    def __init__(self, matrices: Sequence[PanelMatrix], kernels: NativeKernels, order: Tensor | None = None) -> None:
        self.matrices, self.kernels, self.order = tuple(matrices), kernels, order
        self._records = (MatrixRecord * len(matrices))(*(matrix.record for matrix in matrices))
        self.address = ctypes.addressof(self._records)
        width = sum(matrix.width for matrix in matrices)
        super().__init__(width, matrices[0].depth, sum(matrix.data.numel() for matrix in matrices))

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise TypeError(f"x is {x.dtype}, the product is in float32")
        if self.order is not None:
            x = x.index_select(1, self.order)
        num_rows, width = x.shape[0], self.out_features
        out = x.new_empty((num_rows, width))
        self.kernels.linear(
            self.address, len(self.matrices), x.data_ptr(), x.stride(0), num_rows, out.data_ptr(), width
        )
        return out


class _SideBySide(Linear):
    def __init__(self, linears: Sequence[Linear], order: Tensor | None) -> None:
        self._linears, self._order = linears, order
        num_bytes = sum(linear.num_bytes for linear in linears)
        super().__init__(sum(linear.out_features for linear in linears), linears[0].in_features, num_bytes)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.cat([linear(x) for linear in self._linears], 1)
        return out if self._order is None else out.index_select(1, self._order)


class _OneDnnLinear(Linear):
    """oneDNN's blocked layout: a row's bits do not depend on the number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[0], weight.shape[1], weight.numel() * weight.element_size())
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        return out


class TorchLinear(Linear):
    """torch's product on any device; the bits of rows may depend on their number."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[0], weight.shape[1], weight.numel() * weight.element_size())
        self._weight, self._bias = weight.contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


def _onednn_computes(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
