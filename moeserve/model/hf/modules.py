"""Leaf modules of transformers' modelling code, exchanged for ours: projections, embeddings and norms.

A projection of ours gives a row the same bits in any batch and reads 16-bit weights as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.linear import Linear
from kernels.norm import rms_norm

_TRIED_ROWS = 3


class Projection(nn.Module):
    """`nn.Linear` over a packed weight, which `fill` brings. It has no `weight` that modelling code could read."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._packed: Linear | None = None

    def fill(self, packed: Linear) -> None:
        self._packed = packed

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self._packed is None:  # On the meta device, where shapes alone are of interest.
            return x.new_empty((*x.shape[:-1], self.out_features))
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        return self._packed(rows).view(*x.shape[:-1], self.out_features)


class NarrowEmbedding(nn.Module):
    """`nn.Embedding` whose table of 16-bit numbers is widened when rows are looked up."""

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self._table, self._dtype = table, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self._table).to(self._dtype)


class Norm(nn.Module):
    """An RMS norm over the last dimension by our kernel."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self._weight, self._eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.reshape(-1, x.shape[-1]), self._weight, self._eps).view(x.shape)


def replaceable_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the plain projections with their names; subclasses do more than a product."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            yield name, module


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


@torch.no_grad()
def exchange_norms(model: nn.Module, dtype: torch.dtype) -> None:
    """Exchange every norm that is an RMS norm with a weight w or 1 + w, which its answer to random rows tells."""
    draw = torch.Generator().manual_seed(0)
    for name, module in list(model.named_modules()):
        if not _may_be_norm(module) or dtype != torch.float32:
            continue
        weight: Tensor = module.weight.detach()
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if eps is None or weight.dim() != 1:
            continue
        rows = torch.randn((_TRIED_ROWS, len(weight)), generator=draw).to(dtype)
        wanted = module(rows)
        for candidate in (weight, 1.0 + weight):
            ours = Norm(candidate.contiguous(), float(eps))
            if torch.allclose(ours(rows), wanted, rtol=1e-5, atol=1e-6):
                replace_module(model, name, ours)
                break


def _may_be_norm(module: nn.Module) -> bool:
    if "RMSNorm" not in type(module).__name__ or not isinstance(getattr(module, "weight", None), Tensor):
        return False
    parameters = inspect.signature(module.forward).parameters
    return len([p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]) == 1
