"""Matrix product with a weight that is packed once.

On a CPU a row of the result has the same bits whatever other rows are in the batch, so requests get the same logits in
any batch and any chunking. Plain `torch.nn.functional.linear` does not guarantee that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.library import native_kernels
from kernels.cpu.panels import PANEL_COLUMNS, PanelWeight, linear_kind
from kernels.cpu.quantised import pack_rows
from kernels.weight_formats import Arithmetic, Matrix, QuantizedRows, WeightFormat, widened

# Moves packed bytes to where they stay.
Keep = Callable[[Tensor], Tensor]


class Linear(ABC):
    """`x [M, in_features] -> [M, out_features]` in the dtype it was packed for. Build one with `pack_linear`."""

    def __init__(self, out_features: int, in_features: int, num_bytes: int) -> None:
        self.out_features, self.in_features, self.num_bytes = out_features, in_features, num_bytes

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the product to out [M, out_features], whose rows may lie apart."""
        out.copy_(self(x))


def pack_linear(
    weight: Matrix,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    arithmetic: Arithmetic = "int8",
    narrow_rows: bool = False,
    keep: Keep | None = None,
) -> Linear:
    """Pack weight [N, K] and bias [N] into a `Linear`; it keeps a copy, so the caller may drop the weight.

    It computes in `dtype`, by default the weight's. Weights of fewer bits may stay as they are: float32 products with
    bfloat16 weights are exact, and half as many bytes are read. Quantised weights are read in their own bits by float32
    products of compiled kernels, and `arithmetic` says how; others widen them. narrow_rows: round rows to bfloat16 for
    float32 products with bfloat16 weights, on machines with dot products of bfloat16. keep: for the packed weight.
    """
    if isinstance(weight, QuantizedRows):
        if dtype in (None, torch.float32) and native_kernels() is not None:
            return _QuantizedLinear(weight, bias, arithmetic, keep)
        weight = widened(weight)
    dtype = dtype or weight.dtype
    if weight.device.type == "cpu":
        if dtype == torch.float32 and native_kernels() is not None:
            return _NativeLinear(PanelWeight.pack(weight, keep), bias, *weight.shape, narrow_rows=narrow_rows)
        if _onednn_computes(dtype):
            return _OneDnnLinear(weight.to(dtype), bias)
    return TorchLinear(weight.to(dtype), bias)


def join(linears: Sequence[Linear]) -> Linear | None:
    """Return one product with the results of several side by side, [M, sum of out_features]; None if they cannot join.

    It needs no additional memory: from now on the joined products read their parts of its weight.
    """
    if not all(isinstance(linear, _NativeLinear) for linear in linears):
        return None
    return _NativeLinear.joined([linear for linear in linears if isinstance(linear, _NativeLinear)])


def side_by_side(linears: Sequence[Linear], bias: Tensor | None = None, order: Tensor | None = None) -> Linear:
    """Return one product with the results of several side by side, for weights of several formats.

    order: of the columns of the result, None to keep it. bias: [N], in the order of the weights.
    """
    return _SideBySide(linears, bias, order)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the product in plain torch."""
    return functional.linear(x, weight.to(x.dtype), bias)


class _NativeLinear(Linear):
    def __init__(
        self,
        weight: PanelWeight,
        bias: Tensor | None,
        out_features: int,
        in_features: int,
        *,
        narrow_rows: bool = False,
    ) -> None:
        kernels = native_kernels()
        assert kernels is not None
        self._run = kernels.linear
        self._weight = weight
        self._kind = linear_kind(weight.is_bf16, narrow_rows)
        self._bias = None if bias is None else bias.float().contiguous()
        super().__init__(out_features, in_features, weight.data.numel())

    @classmethod
    def joined(cls, linears: Sequence[_NativeLinear]) -> _NativeLinear | None:
        """See `join`. None if only some have biases, if dtypes of weights differ, or if columns do not fill panels."""
        first = linears[0]
        alike = {(linear._kind, linear.in_features, linear._bias is None) for linear in linears}
        if len(alike) > 1 or any(linear.out_features % PANEL_COLUMNS for linear in linears):
            return None
        data = torch.cat([linear._weight.data for linear in linears])
        for linear, part in zip(linears, data.split([linear.num_bytes for linear in linears]), strict=True):
            linear._move_to(part)
        biases = [linear._bias for linear in linears if linear._bias is not None]
        weight = PanelWeight(data, data.data_ptr(), first._weight.is_bf16)
        bias = torch.cat(biases) if biases else None
        width = sum(linear.out_features for linear in linears)
        return cls(weight, bias, width, first.in_features, narrow_rows=first._kind == linear_kind(True, True))

    def _move_to(self, data: Tensor) -> None:
        """Read the weight from its copy `data` from now on."""
        self._weight = PanelWeight(data, data.data_ptr(), self._weight.is_bf16)

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0], self.out_features))
        self.write(x, out)
        return out

    def write(self, x: Tensor, out: Tensor) -> None:
        if x.dtype is not torch.float32:
            raise TypeError(f"x is {x.dtype}, the product is in float32")
        self._run(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            self._weight.address,
            self._kind,
            self.in_features,
            self.out_features,
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
        )


class _QuantizedLinear(Linear):
    def __init__(self, rows: QuantizedRows, bias: Tensor | None, arithmetic: Arithmetic, keep: Keep | None) -> None:
        kernels = native_kernels()
        assert kernels is not None
        self._run = kernels.quantised_linear
        self._format: WeightFormat = rows.format
        self._exact = arithmetic == "exact"
        self._order = rows.order
        packed = pack_rows(rows, kernels)
        self._packed = packed if keep is None else keep(packed)
        self._bias = None if bias is None else bias.float().contiguous()
        super().__init__(*rows.shape, self._packed.numel())

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0], self.out_features))
        self.write(x, out)
        return out

    def write(self, x: Tensor, out: Tensor) -> None:
        if x.dtype is not torch.float32:
            raise TypeError(f"x is {x.dtype}, the product is in float32")
        if self._order is not None:
            x = x.index_select(1, self._order)
        self._run(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            self._packed.data_ptr(),
            self._format.number,
            self._exact,
            self.in_features,
            self.out_features,
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
        )


class _SideBySide(Linear):
    def __init__(self, linears: Sequence[Linear], bias: Tensor | None, order: Tensor | None) -> None:
        self._linears, self._bias, self._order = linears, bias, order
        num_bytes = sum(linear.num_bytes for linear in linears)
        super().__init__(sum(linear.out_features for linear in linears), linears[0].in_features, num_bytes)

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0], self.out_features))
        first = 0
        for linear in self._linears:
            linear.write(x, out[:, first : first + linear.out_features])
            first += linear.out_features
        if self._bias is not None:
            out += self._bias
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
