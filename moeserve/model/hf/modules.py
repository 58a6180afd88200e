"""Leaf modules of transformers' modelling code, exchanged for ours: projections, embeddings and norms.

A projection of ours gives a row the same bits in any batch and reads 16-bit weights as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.linear import Linear, pack_linear
from kernels.ops import NormWeights, Ops
from kernels.weight_formats import Matrix, QuantizedRows

_TRIED_ROWS = 3
# Functions that multiply a weight [N, K] by columns [..., K, T].
_COLUMN_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class Projection(nn.Module):
    """`nn.Linear` over a packed weight, which `fill` brings.

    It has no weight of its own: `is_read` tells whether modelling code has asked for one.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """linear: the module to stand in for, on the meta device."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.has_bias, self.is_read = linear.bias is not None, False
        self._packed: Linear | None = None
        self._dtype = torch.get_default_dtype()

    @property
    def weight(self) -> Tensor:
        """A tensor without data, for code that asks for its dtype and shape."""
        self.is_read = True
        return torch.empty((self.out_features, self.in_features), dtype=self._dtype, device="meta")

    @property
    def bias(self) -> Tensor | None:
        self.is_read = True
        return torch.empty(self.out_features, dtype=self._dtype, device="meta") if self.has_bias else None

    def fill(self, packed: Linear, dtype: torch.dtype) -> None:
        """dtype: of its input."""
        self._packed, self._dtype = packed, dtype

    @property
    def packed(self) -> Linear:
        """The bare product for contiguous rows, [T, in_features] -> [T, out_features]."""
        assert self._packed is not None
        return self._packed

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self._packed is None:  # On the meta device, where only shapes matter.
            return x.new_empty((*x.shape[:-1], self.out_features))
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        return self._packed(rows).view(*x.shape[:-1], self.out_features)


class ProductWeight(Tensor):
    """A parameter whose product with rows or columns is that of our kernel, packed at the first product.

    Gates multiply by a parameter of their own, without a module that could be exchanged. Everything else treats it as
    the plain tensor that it is.
    """

    def __new__(cls, weight: Tensor) -> ProductWeight:
        return weight.as_subclass(cls)

    def __init__(self, weight: Tensor) -> None:
        self._packed: Linear | None = None
        # `nn.Module` registers it as a parameter.
        self._is_param = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.linear and len(args) > 1 and isinstance(args[1], ProductWeight):
                return args[1]._multiply(*args[:1], *args[2:], **kwargs)
            if func in _COLUMN_PRODUCTS and isinstance(args[0], ProductWeight) and args[1].dim() > 1:
                return args[0]._multiply(args[1].transpose(-1, -2)).transpose(-1, -2)
            return func(*args, **kwargs)

    def _multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype != torch.float32:
            return functional.linear(x, self, bias)
        if self._packed is None:
            self._packed = pack_linear(self.as_subclass(Tensor))
        out = self._packed(x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias


class Table(Tensor):
    """The parameter of an embedding whose rows keep their bits, and are widened when they are looked up.

    It has the shape of the table, and no numbers of its own: any other use raises TypeError.
    """

    def __new__(cls, rows: Matrix, dtype: torch.dtype, ops: Ops) -> Table:
        return torch.zeros(1, dtype=dtype, device=ops.device).expand(rows.shape).as_subclass(cls)

    def __init__(self, rows: Matrix, dtype: torch.dtype, ops: Ops) -> None:
        """rows: of 16 bits, or quantised. dtype: of the rows that are looked up."""
        if isinstance(rows, QuantizedRows):  # Memory of its own: the rows may be pages of a file.
            rows = QuantizedRows(rows.format, rows.data.clone(), rows.depth, rows.order)
        self._rows = ops.pack_table(rows, dtype)
        # `nn.Module` registers it as a parameter.
        self._is_param = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.embedding and isinstance(args[1], Table):
                return args[1]._look_up(args[0])
            if func in _WITHOUT_NUMBERS or getattr(func, "__name__", "") == "__get__":
                return func(*args, **(kwargs or {}))
        raise TypeError(f"The code calls {func} with a table whose rows can only be looked up.")

    def _look_up(self, ids: Tensor) -> Tensor:
        return self._rows(ids.flatten()).view(*ids.shape, -1)


_WITHOUT_NUMBERS = (Tensor.dim, Tensor.size, Tensor.numel, Tensor.untyped_storage)


class Norm(nn.Module):
    """An RMS norm over the last dimension by our kernel."""

    def __init__(self, weight: Any, multiplier: Tensor, eps: float, ops: Ops) -> None:
        """multiplier: the factors of a normalised row, which may differ from the weight."""
        super().__init__()
        self.multiplier, self.eps = multiplier, eps
        self._norm, self._weights = ops.norm, NormWeights(multiplier, None, eps)
        # Modelling code may read it.
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.reshape(-1, x.shape[-1]), self._weights).view(x.shape)


def replaceable_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the plain projections with their names; subclasses do more than a product."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            yield name, module


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def exchange_weights(model: nn.Module) -> None:
    """Exchange every float32 matrix that is left as a parameter, of gates above all, for a `ProductWeight`."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.dim() == 2 and weight.dtype == torch.float32 and not weight.is_meta:
                module.register_parameter(name, ProductWeight(weight.data))  # type: ignore[arg-type]


@torch.no_grad()
def exchange_norms(model: nn.Module, dtype: torch.dtype, ops: Ops) -> None:
    """Exchange every RMS norm that multiplies by its weight w or by 1 + w, as its output for random rows shows.

    On a CPU our kernel is for float32 alone.
    """
    if ops.same_bits and dtype != torch.float32:
        return
    draw = torch.Generator().manual_seed(0)
    for name, module in list(model.named_modules()):
        if not _may_be_norm(module):
            continue
        weight: Any = module.weight
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if eps is None or weight.dim() != 1:
            continue
        rows = torch.randn((_TRIED_ROWS, len(weight)), generator=draw).to(ops.device)
        wanted = module(rows)
        for candidate in (weight, 1.0 + weight.float()):
            ours = Norm(weight, candidate.detach().contiguous(), float(eps), ops)
            if torch.allclose(ours(rows), wanted, rtol=1e-5, atol=1e-6):
                replace_module(model, name, ours)
                break


def _may_be_norm(module: nn.Module) -> bool:
    if "RMSNorm" not in type(module).__name__ or not isinstance(getattr(module, "weight", None), Tensor):
        return False
    parameters = inspect.signature(module.forward).parameters
    return len(parameters) == 1
