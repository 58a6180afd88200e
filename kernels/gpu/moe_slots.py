"""Experts in slots of device memory: each is one run of bytes, copied in whole, and a table says who is where.

A slot holds, one after the other and each from a multiple of 16 bytes on: gate and up values, their scale, their bias,
then the same of the down projection. The matrices of all slots are views with the slot as their first stride, so the
kernels read experts where they were copied to.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.gpu.moe_config import WeightFormat
from kernels.gpu.moe_experts import TritonMoe, combine_products
from kernels.gpu.moe_weights import FORMAT_OF, GpuExperts, StoredMatrix, quantise_fp8, quantise_int4, quantise_int8
from kernels.packed_experts import ExpertLayout, ExpertShape, PackedExperts
from kernels.specs import Activation

_ALIGNMENT = 16


class SlotLayout(ExpertLayout):
    """Experts of a shape as the GPU kernels read them, in `num_slots` slots of `device`.

    moe: what multiplies. weights: the stored format, default the shape's weight dtype. group_size: for int4.
    num_slots: default one per expert.
    """

    def __init__(
        self,
        shape: ExpertShape,
        device: torch.device,
        moe: TritonMoe,
        *,
        weights: WeightFormat | None = None,
        group_size: int = 0,
        num_slots: int | None = None,
    ) -> None:
        self._device = device
        self._moe = moe
        self._num_slots = num_slots
        self._weights = weights or FORMAT_OF[shape.weight_dtype]
        self._group_size = group_size
        self._shape = shape
        self.name = f"gpu-{self._weights}" + (f"-g{group_size}" if group_size else "")
        sizes = ((2 * shape.intermediate_size, shape.hidden_size), (shape.hidden_size, shape.intermediate_size))
        self._probes = [self._stored(torch.zeros((1, *size), dtype=shape.weight_dtype), size[0]) for size in sizes]
        fields = [field for probe in self._probes for field in (probe.values, probe.scale, probe.bias)]
        self.num_bytes = sum(_padded(field) for field in fields if field is not None)

    def _stored(self, weights: Tensor, num_rows: int, bias: Tensor | None = None) -> StoredMatrix:
        """weights [1, N, K] in the stored format. The bias is zeros where the shape has one and none is given."""
        if bias is None and self._shape.has_bias:
            bias = torch.zeros(num_rows, dtype=self._shape.weight_dtype)
        bias = None if bias is None else bias.to(self._shape.weight_dtype)[None]
        if self._weights == "int8":
            return quantise_int8(weights, bias)
        if self._weights == "fp8":
            return quantise_fp8(weights, bias)
        if self._weights == "int4":
            return quantise_int4(weights, self._group_size, bias)
        return StoredMatrix(weights.to(self._shape.weight_dtype).contiguous(), bias=bias)

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

    def experts(self, num_experts: int) -> SlotExperts:
        """Takes the slots' memory."""
        num_slots = self._num_slots or num_experts
        arena = torch.zeros((num_slots, self.num_bytes), dtype=torch.uint8, device=self._device)
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
        expert_slot = torch.full((num_experts,), -1, dtype=torch.int32, device=self._device)
        return SlotExperts(arena, GpuExperts(matrices[0], matrices[1], expert_slot), self._moe)


def _padded(field: Tensor) -> int:
    return math.ceil(field.numel() * field.element_size() / _ALIGNMENT) * _ALIGNMENT


class SlotExperts(PackedExperts):
    """Some experts of one layer in slots. Copies and kernels follow each other in the order of the current stream."""

    def __init__(self, arena: Tensor, experts: GpuExperts, moe: TritonMoe) -> None:
        self._arena = arena
        self._moe = moe
        self._slots: dict[int, int] = {}
        self._free = list(range(arena.shape[0]))[::-1]
        self.resident = experts

    def __len__(self) -> int:
        return len(self.resident)

    def put(self, expert: int, packed: Tensor) -> None:
        """Copies packed bytes [num_bytes] into a slot. Raises ValueError if there is none free.

        From pinned memory the copy does not wait: the bytes stay as they are until the stream has come past it.
        """
        slot = self._slots.get(expert)
        if slot is None:
            if not self._free:
                raise ValueError(f"all {self._arena.shape[0]} slots of experts are taken")
            slot = self._free.pop()
            self._slots[expert] = slot
        self._arena[slot].copy_(packed, non_blocking=True)
        self._table[expert] = slot

    def drop(self, expert: int) -> None:
        """Forgets an expert; its slot is free for another."""
        self._free.append(self._slots.pop(expert))
        self._table[expert] = -1

    @property
    def _table(self) -> Tensor:
        assert self.resident.expert_slot is not None
        return self.resident.expert_slot

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, activation: Activation) -> Tensor:
        """See `moe_experts_partial`. A chosen expert that is not here adds nothing: to look for it would mean waiting
        for the device, so whoever keeps fewer slots than experts sees to it that the chosen ones are there."""
        return self._moe.partial(x, expert_ids, expert_weights, self.resident, activation)

    def multiply(self, x: Tensor, expert_ids: Tensor, activation: Activation, products: Tensor) -> None:
        """See `PackedExperts.multiply`; the places of experts that are not here stay as they are, too."""
        self._moe.products(x, expert_ids, self.resident, activation, products)

    def combine(self, products: Tensor, expert_weights: Tensor) -> Tensor:
        return combine_products(products, expert_weights)
