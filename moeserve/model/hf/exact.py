"""Functions of torch whose last bits depend on what else is computed, in float64 and rounded once.

torch's vectorised and scalar exponentials differ in the last bit, and an element's place in the tensor selects one of
the two; products and sums take other orders for other numbers of rows. In float64 these differences are about 1e-16 of
a number, so the float32 nearest to it is the same wherever a row stands, but for about one number in 10^8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_NAMES = (
    *("cos", "erf", "exp", "expm1", "log", "log1p", "pow", "sigmoid", "sin", "tanh"),
    *("cumsum", "log_softmax", "logsumexp", "mean", "norm", "softmax", "std", "sum", "var"),
    *("baddbmm", "bmm", "conv1d", "einsum", "matmul", "mm"),
)
_FUNCTIONAL = (
    *("elu", "gelu", "logsigmoid", "mish", "silu", "softplus"),
    *("conv1d", "group_norm", "layer_norm", "linear", "log_softmax", "normalize", "rms_norm", "softmax"),
)


def _functions() -> frozenset[Callable[..., Any]]:
    places = ((torch, _NAMES), (Tensor, (*_NAMES, "__matmul__", "__rmatmul__", "__pow__")), (functional, _FUNCTIONAL))
    named = (getattr(place, name, None) for place, names in places for name in names)
    return frozenset((*(function for function in named if function is not None), torch.linalg.vector_norm))


_WIDENED = _functions()
_POWERS = frozenset((torch.pow, Tensor.pow, Tensor.__pow__))
# torch multiplies for these; every other exponent goes through a logarithm.
_EXACT_POWERS = (1, 2, 3)


class ExactFunctions(TorchFunctionMode):
    """Computes such functions of float32 numbers in float64 while it is entered.

    Products by a model's own parameters are left to torch: widening weights would read them several times.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._weights = frozenset(each.untyped_storage().data_ptr() for each in parameters if not each.is_meta)

    def __torch_function__(
        self, func: Any, types: Collection[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _WIDENED or "out" in kwargs or not self._needs(func, args, kwargs):
            return func(*args, **kwargs)
        answer = func(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})
        return answer.float() if isinstance(answer, Tensor) and answer.dtype == torch.float64 else answer

    def _needs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if func in _POWERS and args[-1] in _EXACT_POWERS:
            return False
        tensors = list(_tensors((*args, *kwargs.values())))
        return any(tensor.dtype == torch.float32 for tensor in tensors) and not any(
            tensor.dim() > 1 and tensor.untyped_storage().data_ptr() in self._weights for tensor in tensors
        )


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    if isinstance(value, tuple | list):
        return type(value)(map(_wide, value))
    return torch.float64 if value is torch.float32 else value
