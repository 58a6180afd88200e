"""The memory layout of experts' matrices for the GPU kernels, plain or quantised.

Matrices are [S, N, K]: S slots, N output channels, K contiguous. Formats:
- plain: fp32, fp16 or bf16.
- int8: symmetric, one fp32 scale per output channel, scale [S, N].
- fp8: e4m3, one fp32 scale per output channel, scale [S, N].
- int4: symmetric, one fp32 scale per output channel and group of `group_size` values along K, scale [S, K / group, N].
  Values -7..7 are stored plus 8 in nibbles, packed [S, N, K / 2] uint8. Within a group of g values, byte j holds
  value j in its low nibble and value j + g / 2 in its high one, so both halves of a group unpack contiguously.
- packed: the bits of a quantised checkpoint, [S, N, row bytes] uint8, see `kernels.gpu.packed_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.gpu.moe_config import PACKED, MoeShape, WeightFormat, WeightStorage
from kernels.gpu.packed_rows import PackedForm, pack_rows, packed_form
from kernels.packed_experts import ExpertMatrices, Experts, ExpertShape
from kernels.weight_formats import Matrix, QuantizedRows, widened

_FP8 = torch.float8_e4m3fn
FORMAT_OF: dict[torch.dtype, WeightFormat] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    _FP8: "fp8",
    torch.uint8: "int4",
}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One projection of all held experts: values [S, N, K] ([S, N, K / 2] for int4), scale as above, bias [S, N].

    form: of packed rows, else None.
    """

    values: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    form: PackedForm | None = None

    def __post_init__(self) -> None:
        if self.values.dim() != 3 or self.values.stride(2) != 1:
            raise ValueError("expert matrices are [slots, N, K] with contiguous rows")
        quantised = self.format in ("int8", "fp8", "int4")
        if quantised != (self.scale is not None):
            raise ValueError(f"{self.format} weights take {'a scale' if quantised else 'no scale'}")
        for vector in (self.scale, self.bias):
            if vector is not None and vector.stride(-1) != 1:
                raise ValueError("scales and biases have contiguous channels")

    @property
    def format(self) -> WeightFormat:
        return FORMAT_OF[self.values.dtype] if self.form is None else "packed"

    @property
    def num_slots(self) -> int:
        return self.values.shape[0]

    @property
    def num_rows(self) -> int:
        return self.values.shape[1]

    @property
    def depth(self) -> int:
        if self.form is not None:
            return self.form.depth
        return self.values.shape[2] * (2 if self.format == "int4" else 1)

    @property
    def group_size(self) -> int:
        """The number of values along K that share a scale; 0 unless int4."""
        return self.depth // self.scale.shape[1] if self.format == "int4" and self.scale is not None else 0

    def fields(self) -> list[Tensor]:
        return [field for field in (self.values, self.scale, self.bias) if field is not None]

    def copy_slot(self, slot: int, source: StoredMatrix) -> None:
        """Overwrite a slot with the first slot of `source`, stored in the same way, on any device."""
        fields = (self.values, self.scale, self.bias)
        for target, new in zip(fields, (source.values, source.scale, source.bias), strict=True):
            if target is not None and new is not None:
                target[slot].copy_(new[0])

    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return values, scale and bias as kernel arguments; the stand-in for an absent one is never read."""
        return (
            self.values,
            self.values if self.scale is None else self.scale,
            self.values if self.bias is None else self.bias,
        )

    def strides(self) -> tuple[int, int, int, int, int]:
        """Return strides in elements: slot and row of values, slot and group of scale, slot of bias."""
        scale_slot = 0 if self.scale is None else self.scale.stride(0)
        scale_group = self.scale.stride(1) if self.scale is not None and self.format == "int4" else 0
        bias_slot = 0 if self.bias is None else self.bias.stride(0)
        return (self.values.stride(0), self.values.stride(1), scale_slot, scale_group, bias_slot)

    def flags(self) -> dict[str, Any]:
        return {
            "FORMAT": self.format if self.format in ("int4", "packed") else "plain",
            "FORM": self.form,
            "HAS_SCALE": self.format in ("int8", "fp8"),
            "HAS_BIAS": self.bias is not None,
        }

    def expanded(self) -> Tensor:
        """Return the matrices [S, N, K] in fp32, of packed ones alone not."""
        if self.scale is None:
            return self.values.float()
        if self.format != "int4":
            return self.values.float() * self.scale[..., None]
        groups = unpack_int4(self.values, self.group_size).float().unflatten(-1, (-1, self.group_size))
        return (groups * self.scale.transpose(1, 2)[..., None]).flatten(-2)


@dataclass(frozen=True, slots=True)
class GpuExperts(Experts):
    """The experts of one layer on one device: gate_up [S, 2I, H], gate rows first, and down [S, H, I].

    Without a gate the first has I rows. expert_slot: [E] int32 on the device, the slot that holds each expert now, -1
    for none; None if expert e is in slot e. Its contents may change between steps, its address may not.
    """

    gate_up: StoredMatrix
    down: StoredMatrix
    expert_slot: Tensor | None = None

    def __post_init__(self) -> None:
        up, down = self.gate_up, self.down
        fit = up.num_rows in (down.depth, 2 * down.depth) and down.num_rows == up.depth
        if up.num_slots != down.num_slots or not fit:
            raise ValueError(f"experts of {tuple(up.values.shape)} and {tuple(down.values.shape)} do not fit together")
        if up.format != down.format or up.group_size != down.group_size:
            raise ValueError("both projections are stored in one format")

    def __len__(self) -> int:
        return self.num_experts

    def copy_slot(self, slot: int, source: GpuExperts) -> None:
        """See `StoredMatrix.copy_slot`."""
        self.gate_up.copy_slot(slot, source.gate_up)
        self.down.copy_slot(slot, source.down)

    @property
    def num_experts(self) -> int:
        return self.gate_up.num_slots if self.expert_slot is None else self.expert_slot.shape[0]

    @property
    def is_gated(self) -> bool:
        return self.gate_up.num_rows != self.down.depth

    def shape(self, top_k: int) -> MoeShape:
        up = self.gate_up
        return MoeShape(self.num_experts, self.down.depth, up.depth, top_k, up.format, up.group_size)


def store_weights(weights: Tensor, storage: WeightStorage, bias: Tensor | None = None) -> StoredMatrix:
    """Store weights [S, N, K] and bias [S, N] in a format; plain weights are kept, not copied.

    The bits are equal on every device. Raises ValueError for groups that do not divide the rows.
    """
    if storage.format == "int8":
        return quantise_int8(weights, bias)
    if storage.format == "fp8":
        return quantise_fp8(weights, bias)
    if storage.format == "int4":
        return quantise_int4(weights, storage.group_size, bias)
    if FORMAT_OF[weights.dtype] != storage.format:
        raise ValueError(f"{weights.dtype} weights are not {storage.format}")
    return StoredMatrix(weights, bias=bias)


def empty_weights(probe: StoredMatrix, num_slots: int, device: torch.device) -> StoredMatrix:
    """Return a matrix of `num_slots` uninitialised slots, stored like `probe`."""

    def empty(field: Tensor) -> Tensor:
        return torch.empty((num_slots, *field.shape[1:]), dtype=field.dtype, device=device)

    scale = None if probe.scale is None else empty(probe.scale)
    return StoredMatrix(empty(probe.values), scale, None if probe.bias is None else empty(probe.bias), probe.form)


def is_kept_packed(shape: ExpertShape) -> bool:
    """Return whether the kernels read experts in the bits of the checkpoint; others are widened.

    Experts whose columns have orders of their own would need one gathered input each.
    """
    return shape.formats is not None and not shape.has_order


class ExpertStorage:
    """How a layer's experts are stored: in the checkpoint's own bits, or as `storage` says where it has others."""

    def __init__(self, shape: ExpertShape, storage: WeightStorage) -> None:
        """storage: a `packed` format leaves experts that a checkpoint has in numbers in `shape.dtype`."""
        self._dtype, self._has_bias, self._fp8_products = shape.dtype, shape.has_bias, storage.fp8_products
        self._sizes = ((shape.gate_up_rows, shape.hidden_size), (shape.hidden_size, shape.intermediate_size))
        self.forms: tuple[PackedForm, PackedForm] | None = None
        if storage.format in PACKED:
            storage = WeightStorage(FORMAT_OF[shape.dtype])
            if is_kept_packed(shape) and shape.formats is not None:
                up, down = zip(shape.formats, self._sizes, strict=True)
                self.forms = (
                    packed_form(up[0], up[1][1], fp8_products=self._fp8_products),
                    packed_form(down[0], down[1][1], fp8_products=self._fp8_products),
                )
        self._storage = storage

    @property
    def name(self) -> str:
        """Identifies the bytes of stored experts."""
        return self._storage.name() if self.forms is None else " and ".join(form.name for form in self.forms)

    def probes(self) -> tuple[StoredMatrix, StoredMatrix]:
        """Return the matrices of an expert of zeros, on the default device."""
        up, down = range(2)
        return self._probe(up), self._probe(down)

    def _probe(self, place: int) -> StoredMatrix:
        num_rows, depth = self._sizes[place]
        bias = torch.zeros((1, num_rows), dtype=self._dtype) if self._has_bias else None
        if self.forms is not None:
            form = self.forms[place]
            return StoredMatrix(torch.zeros((1, num_rows, form.row_bytes), dtype=torch.uint8), None, bias, form)
        return store_weights(torch.zeros((1, num_rows, depth), dtype=self._dtype), self._storage, bias)

    def store(self, matrices: ExpertMatrices, device: torch.device) -> GpuExperts:
        """Store an expert on `device` as a layer's only one; bits are equal on all devices."""
        gate_up, down, up_bias, down_bias = matrices
        if isinstance(gate_up, QuantizedRows) and isinstance(down, QuantizedRows) and down.order is not None:
            # An order of down's depth is an order of the rows before it.
            rows = torch.cat([down.order, down.order + down.depth])[: gate_up.shape[0]]
            gate_up, down = gate_up.rows(rows), QuantizedRows(down.format, down.data, down.depth)
            up_bias = None if up_bias is None else up_bias[rows]
        return GpuExperts(
            self._store(gate_up, up_bias, 0, device),
            self._store(down, down_bias, 1, device),
        )

    def _store(self, matrix: Matrix, bias: Tensor | None, place: int, device: torch.device) -> StoredMatrix:
        if self._has_bias and bias is None:
            bias = torch.zeros(matrix.shape[0])
        bias = None if bias is None else bias.to(device, self._dtype)[None]
        if self.forms is None:
            return store_weights(widened(matrix).to(device, self._dtype)[None].contiguous(), self._storage, bias)
        form = self.forms[place]
        if not isinstance(matrix, QuantizedRows) or (
            packed_form(matrix.format, matrix.depth, fp8_products=self._fp8_products) != form
        ):
            raise ValueError(f"an expert is stored otherwise than in {form.name}")
        return StoredMatrix(pack_rows(matrix, device)[None], None, bias, form)


def quantise_int8(weights: Tensor, bias: Tensor | None = None) -> StoredMatrix:
    """Quantise weights [S, N, K], any float dtype, to int8 per output channel."""
    wide = weights.float()
    scale = _scale_of(wide, 127.0)
    values = (wide / scale[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return StoredMatrix(values, scale, bias)


def quantise_fp8(weights: Tensor, bias: Tensor | None = None) -> StoredMatrix:
    """Quantise weights [S, N, K], any float dtype, to fp8 e4m3 per output channel."""
    wide = weights.float()
    limit = torch.finfo(_FP8).max
    scale = _scale_of(wide, limit)
    return StoredMatrix((wide / scale[..., None]).clamp_(-limit, limit).to(_FP8), scale, bias)


def quantise_int4(weights: Tensor, group_size: int, bias: Tensor | None = None) -> StoredMatrix:
    """Quantise weights [S, N, K], any float dtype, to int4. group_size: a power of two from 32 on that divides K."""
    if group_size < 32 or group_size & (group_size - 1) or weights.shape[-1] % group_size:
        raise ValueError(f"groups of {group_size} do not cut rows of {weights.shape[-1]}")
    groups = weights.float().unflatten(-1, (-1, group_size))
    scale = _scale_of(groups, 7.0)
    values = (groups / scale[..., None]).round_().clamp_(-7, 7).to(torch.int8).flatten(-2)
    return StoredMatrix(pack_int4(values, group_size), scale.transpose(1, 2).contiguous(), bias)


def pack_int4(values: Tensor, group_size: int) -> Tensor:
    """Pack values -8..7 int8 [.., K] into uint8 [.., K / 2] in the layout above."""
    halves = (values + 8).to(torch.uint8).unflatten(-1, (-1, 2, group_size // 2))
    return (halves[..., 0, :] | (halves[..., 1, :] << 4)).flatten(-2)


def unpack_int4(packed: Tensor, group_size: int) -> Tensor:
    """Invert `pack_int4`: return int8 [.., K]."""
    groups = packed.unflatten(-1, (-1, group_size // 2))
    return torch.stack((groups & 0xF, groups >> 4), -2).flatten(-3).to(torch.int8) - 8


def _scale_of(values: Tensor, limit: float) -> Tensor:
    # A channel of zeros keeps a scale that does not divide by zero.
    largest = values.abs().amax(-1).clamp_(min=torch.finfo(torch.float32).tiny * limit)
    # Divided by a tensor: by a number, a GPU would multiply by the reciprocal and round otherwise than a CPU.
    return largest / torch.full_like(largest, limit)
