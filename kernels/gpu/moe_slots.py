"""Experts in slots of device memory: each is one run of bytes, and a table says who is where.

A slot holds, one after the other and each from a multiple of 16 bytes on: gate and up values, their scale, their bias,
then the same of the down projection. The matrices of all slots are views with the slot as their first stride, so the
kernels read experts where they were copied to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.gpu.moe_config import WeightStorage
from kernels.gpu.moe_experts import TritonMoe, combine_products
from kernels.gpu.moe_weights import FORMAT_OF, GpuExperts, StoredMatrix, store_weights
from kernels.packed_experts import ExpertPacking, ExpertShape
from kernels.specs import Activation

_ALIGNMENT = 16


class SlotLayout(ExpertPacking):
    """Experts of a shape as the GPU kernels read them.

    storage: of the weights, default the shape's weight dtype.
    """

    def __init__(self, shape: ExpertShape, storage: WeightStorage | None = None) -> None:
        self.storage = storage or WeightStorage(FORMAT_OF[shape.weight_dtype])
        self._shape = shape
        self.name = f"gpu-{self.storage.name()}"
        sizes = ((2 * shape.intermediate_size, shape.hidden_size), (shape.hidden_size, shape.intermediate_size))
        self._probes = [self._stored(torch.zeros((1, *size), dtype=shape.weight_dtype), size[0]) for size in sizes]
        fields = [field for probe in self._probes for field in (probe.values, probe.scale, probe.bias)]
        self.num_bytes = sum(_padded(field) for field in fields if field is not None)

    def _stored(self, weights: Tensor, num_rows: int, bias: Tensor | None = None) -> StoredMatrix:
        """weights [1, N, K] in the stored format. The bias is zeros where the shape has one and none is given."""
        if bias is None and self._shape.has_bias:
            bias = torch.zeros(num_rows, dtype=self._shape.weight_dtype)
        bias = None if bias is None else bias.to(self._shape.weight_dtype)[None]
        return store_weights(weights.to(self._shape.weight_dtype).contiguous(), self.storage, bias)

    def pack(
        self, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None
    ) -> Tensor:
        """gate_up [2I, H] (gate rows first), down [H, I], biases [2I] and [H], on the CPU -> uint8 [num_bytes]."""
        packed = torch.zeros(self.num_bytes, dtype=torch.uint8)
        first = 0
        for weights, bias in ((gate_up, gate_up_bias), (down, down_bias)):
            stored = self._stored(weights[None], weights.shape[0], bias)
            for field in (stored.values, stored.scale, stored.bias):
                if field is not None:
                    data = field.contiguous().flatten().view(torch.uint8)
                    packed[first : first + len(data)] = data
                    first += _padded(field)
        return packed

    def matrices(self, arena: Tensor) -> tuple[StoredMatrix, StoredMatrix]:
        """gate and up, and down, of the experts in the slots of `arena`: uint8 [slots, num_bytes or more], views.

        Slots start at multiples of 16 bytes.
        """
        matrices = []
        first = 0
        for probe in self._probes:
            views: list[Tensor | None] = []
            for field in (probe.values, probe.scale, probe.bias):
                if field is None:
                    views.append(None)
                    continue
                size = field.numel() * field.element_size()
                views.append(arena[:, first : first + size].view(field.dtype).unflatten(1, field.shape[1:]))
                first += _padded(field)
            values, scale, bias = views
            assert values is not None
            matrices.append(StoredMatrix(values, scale, bias))
        return matrices[0], matrices[1]


def _padded(field: Tensor) -> int:
    return math.ceil(field.numel() * field.element_size() / _ALIGNMENT) * _ALIGNMENT


class SlotExperts:
    """Those experts of one layer that are in slots. Everything follows in the order of the current stream.

    A chosen expert that is not shown adds nothing: to look for it would mean waiting for the device, so whoever keeps
    fewer slots than experts sees to it that the chosen ones are there.
    """

    def __init__(self, layout: SlotLayout, arena: Tensor, num_experts: int, moe: TritonMoe) -> None:
        """arena: see `SlotLayout.matrices`; others fill it. moe: what multiplies."""
        table = torch.full((num_experts,), -1, dtype=torch.int32, device=arena.device)
        self.resident = GpuExperts(*layout.matrices(arena), table)
        self._table = table
        self._moe = moe
        self._shown: list[int] = []

    def show(self, contents: Sequence[int]) -> None:
        """From now on these are the experts in the slots, -1 for none."""
        contents = list(contents)
        if self._shown == contents:
            return
        self._shown = contents
        table = torch.full(self._table.shape, -1, dtype=torch.int32)
        for slot, expert in enumerate(contents):
            if expert >= 0:
                table[expert] = slot
        if self._table.is_cuda:
            table = table.pin_memory()
        self._table.copy_(table, non_blocking=True)

    def multiply(self, x: Tensor, expert_ids: Tensor, activation: Activation, products: Tensor) -> None:
        """Writes what the shown experts among the chosen make of their tokens into products [T, k, H] fp32; other
        places stay as they are."""
        self._moe.products(x, expert_ids, self.resident, activation, products)

    def combine(self, products: Tensor, expert_weights: Tensor) -> Tensor:
        """Sums products by weight [T, k] -> [T, H] fp32: the same bits in however many parts they were made.

        Places of experts that are nowhere are zeros.
        """
        return combine_products(products, expert_weights)
