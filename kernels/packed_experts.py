"""Interfaces of packed experts: the shape of an expert, its packed bytes, and a layer's packed experts.

The bytes are the same in a file, in a slot of memory and for the kernel, so an expert that was dropped and loaded again
computes the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kernels.specs import Activation
from kernels.weight_formats import Arithmetic, Matrix, WeightFormat

PackingT = TypeVar("PackingT", bound="ExpertPacking", covariant=True)
# gate_up [2I, H] (gate rows first; [I, H] without a gate), down [H, I] and their biases [2I] and [H], or None.
ExpertMatrices = tuple[Matrix, Matrix, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of one expert of a layer. It computes in `dtype`; its weights are kept in `weight_dtype`.

    is_gated: True if there are gate channels beside the up channels. formats: of the first and the second matrix where
    they are quantised; `arithmetic` then says how they multiply. has_order: the depth of the first matrix is in an
    order of the expert's own. narrow_rows: rows are rounded to bfloat16 for products with weights of bfloat16, on
    machines with dot products of bfloat16. is_fine: where rows are rounded for products with weights of 8
    bits, the rest of a row is rounded once more.
    """

    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    has_bias: bool = False
    is_gated: bool = True
    formats: tuple[WeightFormat, WeightFormat] | None = None
    arithmetic: Arithmetic = "int8"
    has_order: bool = False
    narrow_rows: bool = False
    is_fine: bool = False

    @property
    def gate_up_rows(self) -> int:
        """The number of rows of the first matrix."""
        return (2 if self.is_gated else 1) * self.intermediate_size


class Experts(Sized):
    """The experts of one layer in the form of one device's kernels: `PackedExperts`, or `GpuExperts` on a GPU."""

    __slots__ = ()


class PackedExperts(Experts):
    """Some experts of one layer, numbered from 0; each may be absent."""

    @abstractmethod
    def put(self, expert: int, packed: Tensor) -> None:
        """Take packed bytes [num_bytes] for an expert. They may be used in place: the caller must not change them until
        the expert is dropped or put again."""

    def replace(self, expert: int, packed: Tensor) -> None:
        """Put an expert in the place of another one. The bytes may be copied."""
        self.put(expert, packed)

    def packed(self, expert: int) -> Tensor | None:
        """Return the packed bytes from which an expert is computed, None where it was copied into another form."""
        return None

    @abstractmethod
    def drop(self, expert: int) -> None:
        """Forget an expert's bytes."""

    @abstractmethod
    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, activation: Activation) -> Tensor:
        """See `moe_experts_partial`. Raises ValueError if a chosen expert is absent, or if only one of experts and
        activation has a gate."""


class SplitExperts(PackedExperts):
    """Experts whose products can be computed in parts, as experts arrive, and summed at the end."""

    @abstractmethod
    def multiply(self, x: Tensor, expert_ids: Tensor, activation: Activation, products: Tensor) -> None:
        """Write each chosen expert's product into products [T, k, H] fp32; leave the places of ids -1.

        Raises ValueError if a chosen expert is absent."""

    @abstractmethod
    def combine(self, products: Tensor, expert_weights: Tensor) -> Tensor:
        """Sum products [T, k, H] by weight [T, k] -> [T, H] fp32, with the bits of `__call__` however many parts the
        products were computed in."""


class ExpertPacking(ABC):
    """A format of packed experts of one shape. `name` identifies it: bytes of one format are meaningless in another."""

    name: str
    num_bytes: int

    @abstractmethod
    def pack(self, matrices: ExpertMatrices) -> Tensor:
        """Pack an expert into uint8 [num_bytes]. Numbers are rounded to the format; a matrix of another format is a
        ValueError."""


class ExpertLayout(ExpertPacking):
    """A packing that a CPU computes with in place."""

    @abstractmethod
    def pack_into(self, out: Tensor, matrices: ExpertMatrices) -> None:
        """Do as `pack`, and write the bytes to `out`, uint8 [num_bytes]."""

    def pack(self, matrices: ExpertMatrices) -> Tensor:
        packed = torch.empty(self.num_bytes, dtype=torch.uint8)
        self.pack_into(packed, matrices)
        return packed

    @abstractmethod
    def experts(self, num_experts: int) -> PackedExperts:
        """Return packed experts of this layout, all absent."""


@dataclass(frozen=True, slots=True)
class LayerPackings(Generic[PackingT]):
    """The packings of the experts of each layer with experts; memory for one expert holds any of them."""

    layers: tuple[PackingT, ...]

    @property
    def name(self) -> str:
        """Identifies the packings together."""
        return " | ".join(dict.fromkeys(packing.name for packing in self.layers))

    @property
    def num_bytes(self) -> int:
        return max(packing.num_bytes for packing in self.layers)
