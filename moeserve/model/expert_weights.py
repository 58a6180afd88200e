"""Reads experts from any layout in which checkpoints store them, and packs them for a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from kernels.moe import expert_layout
from kernels.packed_experts import ExpertLayout, ExpertMatrices, ExpertPacking, ExpertShape, LayerPackings
from kernels.weight_formats import MXFP4, QuantizedRows, WeightFormat, joined_rows
from moeserve.model.checkpoint import (
    KEPT_IN_BFLOAT16,
    ExpertsPlan,
    OwnedExperts,
    StoredTensor,
    WeightPlan,
    plan_experts,
    plan_weights,
    read_index,
)
from moeserve.model.rounding import NO_ROUNDING, Rounding, format_in_file, has_fine_experts, lies_in_blocks
from moeserve.model.spec import CheckpointError, DecoderSpec, Progress
from moeserve.model.stored import TensorInfo
from moeserve.model.tensor_reader import Progress as ReadProgress
from moeserve.model.tensor_reader import TensorReader


class LayerExperts(Protocol):
    """Reads and packs the owned experts of one layer, one at a time.

    owned: the experts in the order of their places. shape: of each. layout: of the packed bytes.
    """

    @property
    def owned(self) -> Sequence[int]: ...

    @property
    def shape(self) -> ExpertShape: ...

    @property
    def layout(self) -> ExpertLayout: ...

    def read(self, place: int) -> Tensor:
        """Return the packed bytes of the expert at a place, uint8 [layout.num_bytes], in memory of their own."""

    def read_matrices(self, place: int) -> ExpertMatrices:
        """Return the matrices of the expert at a place."""


class StoredExperts(Protocol):
    """The experts of a checkpoint, whichever code computes the model. layers: the layers with experts, in order.

    All methods raise CheckpointError for tensors that are missing or of another shape.
    """

    @property
    def index(self) -> Mapping[str, TensorInfo]: ...

    @property
    def layers(self) -> Sequence[int]: ...

    def shapes(self) -> tuple[ExpertShape, ...]:
        """Return the shape of the experts of each of `layers`."""

    def num_bytes(self, owned: OwnedExperts | None) -> int:
        """Return the bytes to read for the owned experts of all layers."""

    def lie_as_packed(self) -> bool:
        """Return whether all experts lie in GGUF files in the blocks in which they are kept: to pack one then takes
        little longer than to read it packed."""

    def reader(self, total_bytes: int, progress: ReadProgress | None = None) -> TensorReader:
        """Return the reader for `layer`. total_bytes, progress: see `TensorReader`."""

    def layer(self, layer: int, owned: Sequence[int] | None, reader: TensorReader) -> LayerExperts:
        """Return the reader of a layer's owned experts. owned: None for all of them."""


class NativeExperts:
    """The experts of a model on our own code. See `StoredExperts`."""

    def __init__(
        self, index: Mapping[str, TensorInfo], spec: DecoderSpec, dtype: torch.dtype, rounding: Rounding = NO_ROUNDING
    ) -> None:
        """dtype: in which the experts compute."""
        self.index, self.layers = index, spec.moe_layers
        self._spec, self._dtype, self._rounding = spec, dtype, rounding

    def shapes(self) -> tuple[ExpertShape, ...]:
        plans = _expert_plans(plan_weights(self._spec, self.index))
        return tuple(expert_shape(self._spec, plan, self._dtype, self._rounding) for plan in plans)

    def num_bytes(self, owned: OwnedExperts | None) -> int:
        return _bytes_of_experts(plan_weights(self._spec, self.index, owned))

    def reader(self, total_bytes: int, progress: ReadProgress | None = None) -> TensorReader:
        return TensorReader(self.index, total_bytes, progress=progress)

    def lie_as_packed(self) -> bool:
        if not self._rounding.keeps_stored or self._rounding.experts is not None:
            return False
        tensors = (
            self.index[tensor.name]
            for plan in _expert_plans(plan_weights(self._spec, self.index))
            for of_plan in plan.tensors
            for key, tensor in of_plan.items()
            if "bias" not in key
        )
        return all(map(lies_in_blocks, tensors))

    def layer(self, layer: int, owned: Sequence[int] | None, reader: TensorReader) -> ExpertReader:
        plan = plan_experts(self._spec, self.index, layer, owned)
        return ExpertReader(self._spec, plan, reader, self._dtype, self._rounding)


def shapes_of_experts(
    directory: Path, spec: DecoderSpec, dtype: torch.dtype, rounding: Rounding
) -> tuple[ExpertShape, ...]:
    """Return the shape of the experts of each layer that has some. Raise CheckpointError."""
    return () if spec.moe is None else NativeExperts(read_index(directory), spec, dtype, rounding).shapes()


class ExpertReader:
    """Reads the experts of one layer of a model on our own code. See `LayerExperts`."""

    def __init__(
        self,
        spec: DecoderSpec,
        plan: ExpertsPlan,
        reader: TensorReader,
        dtype: torch.dtype,
        rounding: Rounding,
    ) -> None:
        """dtype: in which the experts compute."""
        assert spec.moe is not None
        self._moe, self._plan, self._reader = spec.moe, plan, reader
        self.owned = plan.owned
        self.shape = expert_shape(spec, plan, dtype, rounding)
        self._keeps_stored = rounding.keeps_stored and rounding.experts is None and self.shape.formats is not None

    @cached_property
    def layout(self) -> ExpertLayout:
        # Made when it is asked for: on a GPU nobody does.
        return expert_layout(self.shape)

    def read(self, place: int) -> Tensor:
        return self.layout.pack(self.read_matrices(place))

    def read_matrices(self, place: int) -> ExpertMatrices:
        if self._keeps_stored and self._plan.storage == "split":
            return *self._read_matrices(self._plan.tensors[place]), None, None
        if self._keeps_stored:
            return *self._read_stored(self.owned[place]), *self._read_biases(self._plan.tensors[0], self.owned[place])
        hidden, width, dtype = self.shape.hidden_size, self.shape.intermediate_size, self.shape.weight_dtype
        rows = self.shape.gate_up_rows
        gate_up, down = torch.empty((rows, hidden), dtype=dtype), torch.empty((hidden, width), dtype=dtype)
        tensors, expert = self._plan.tensors[place if self._plan.storage == "split" else 0], self.owned[place]
        if self._plan.storage == "split":
            for part, key in enumerate(self._first_keys(tensors)):
                self._reader.read_into(tensors[key], gate_up[part * width :][:width])
            self._reader.read_into(tensors["down"], down)
        elif self._plan.storage == "stacked":
            for part, key in enumerate(self._first_keys(tensors)):
                self._reader.read_expert_into(tensors[key], expert, gate_up[part * width :][:width])
            self._reader.read_expert_into(tensors["down"], expert, down)
        elif self._plan.storage == "mxfp4":
            # The file holds [I, (gate, up), H] and [H, I].
            for key, out in (("gate_up", _halves(gate_up).transpose(0, 1)), ("down", down)):
                self._reader.read_mxfp4_expert_into(tensors[f"{key}.blocks"], tensors[f"{key}.scales"], expert, out)
        elif self._moe.transposed_experts:
            # The file holds [H, I, (gate, up)] and [I, H].
            self._reader.read_expert_into(tensors["gate_up"], expert, _halves(gate_up).permute(2, 1, 0))
            self._reader.read_expert_into(tensors["down"], expert, down.T)
        else:
            self._reader.read_expert_into(tensors["gate_up"], expert, gate_up)
            self._reader.read_expert_into(tensors["down"], expert, down)
        return gate_up, down, *self._read_biases(tensors, expert)

    def _read_stored(self, expert: int) -> tuple[QuantizedRows, QuantizedRows]:
        """Return the matrices of an expert in the blocks of the checkpoint."""
        (tensors,), reader = self._plan.tensors, self._reader
        if self._plan.storage == "mxfp4":
            # The file has gate and up rows in turn.
            first = reader.read_mxfp4_rows(tensors["gate_up.blocks"], tensors["gate_up.scales"], expert)
            turns = torch.arange(first.shape[0]).view(-1, 2).T.flatten()
            down = reader.read_mxfp4_rows(tensors["down.blocks"], tensors["down.scales"], expert)
            return first.rows(turns), down
        return self._read_matrices(tensors, expert)

    @staticmethod
    def _first_keys(tensors: Mapping[str, StoredTensor]) -> list[str]:
        """Return the keys of the parts of an expert's first matrix."""
        return [key for key in ("gate", "up", "gate_up") if key in tensors]

    def _read_matrices(
        self, tensors: Mapping[str, StoredTensor], expert: int | None = None
    ) -> tuple[QuantizedRows, QuantizedRows]:
        """expert: of tensors that hold all experts, None if they hold one."""
        keys = self._first_keys(tensors)
        gate_up = joined_rows([self._reader.read_quantised(tensors[key], expert) for key in keys])
        if gate_up is None:
            raise CheckpointError(f"{tensors[keys[0]].name} orders its columns otherwise than {tensors[keys[1]].name}.")
        return gate_up, self._reader.read_quantised(tensors["down"], expert)

    def _read_biases(
        self, tensors: Mapping[str, StoredTensor], expert: int
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if not self.shape.has_bias:
            return None, None
        gate_up_bias = torch.empty(self.shape.gate_up_rows, dtype=self.shape.dtype)
        down_bias = torch.empty(self.shape.hidden_size, dtype=self.shape.dtype)
        if self._plan.storage == "stacked":
            for key, half in zip(("gate.bias", "up.bias"), _halves(gate_up_bias), strict=True):
                self._reader.read_expert_into(tensors[key], expert, half)
        else:
            seen = _halves(gate_up_bias).T if self._moe.transposed_experts else gate_up_bias
            self._reader.read_expert_into(tensors["gate_up.bias"], expert, seen)
        self._reader.read_expert_into(tensors["down.bias"], expert, down_bias)
        return gate_up_bias, down_bias


def packed_experts(
    stored: StoredExperts, packings: LayerPackings[ExpertPacking], report: Progress, owned: OwnedExperts | None = None
) -> Iterator[Tensor]:
    """Yield the experts of all layers, or only the `owned` ones, packed: uint8 [packings.num_bytes] each."""

    def progress(done: int, total: int) -> None:
        report("store experts", done, total)

    with stored.reader(stored.num_bytes(owned), progress) as reader:
        for layer, packing in zip(stored.layers, packings.layers, strict=True):
            experts = stored.layer(layer, None if owned is None else owned(layer), reader)
            for place in range(len(experts.owned)):
                yield padded(packing.pack(experts.read_matrices(place)), packings.num_bytes)


def padded(packed: Tensor, num_bytes: int) -> Tensor:
    """Return packed bytes with zeros behind them, uint8 [num_bytes]."""
    missing = num_bytes - len(packed)
    return torch.cat([packed, packed.new_zeros(missing)]) if missing else packed


def _expert_plans(plan: WeightPlan) -> list[ExpertsPlan]:
    return [layer.experts for layer in plan.layers if layer.experts is not None]


def _bytes_of_experts(plan: WeightPlan) -> int:
    outer = sum(tensor.num_bytes for tensor in plan.outer.values())
    return plan.num_bytes - outer - sum(tensor.num_bytes for layer in plan.layers for tensor in layer.tensors.values())


def expert_shape(spec: DecoderSpec, plan: ExpertsPlan, dtype: torch.dtype, rounding: Rounding) -> ExpertShape:
    """Return the shape of a layer's experts when they compute in `dtype`."""
    assert spec.moe is not None
    sizes = spec.expert_hidden_size, spec.moe.intermediate_size
    formats = rounding.expert_formats(*sizes)
    is_kept = rounding.keeps_stored and formats is None
    if is_kept and not (plan.storage == "fused" and spec.moe.transposed_experts):
        formats = _stored_formats(plan)
    return ExpertShape(
        *sizes,
        dtype,
        torch.bfloat16 if rounding.narrow else _kept_dtype(plan, dtype),
        spec.moe.expert_bias,
        formats=formats,
        arithmetic=rounding.arithmetic,
        has_order=is_kept and formats is not None and _has_order(plan),
        narrow_rows=rounding.narrow,
        is_gated=spec.moe.activation.is_gated,
        is_fine=has_fine_experts(plan.layer, spec.num_layers),
    )


def _has_order(plan: ExpertsPlan) -> bool:
    return any(stored.has_order for tensors in plan.tensors for stored in tensors.values())


def _stored_formats(plan: ExpertsPlan) -> tuple[WeightFormat, WeightFormat] | None:
    """Return the formats of gate_up and down in the checkpoint; None if they are not kept in their own bits."""
    if plan.storage == "mxfp4":
        return MXFP4, MXFP4
    keys = [key for key in ("gate", "up", "gate_up") if plan.tensors and key in plan.tensors[0]]
    gate_up = {format_in_file(tensors[key].dtype) for tensors in plan.tensors for key in keys}
    down = {format_in_file(tensors["down"].dtype) for tensors in plan.tensors}
    if len(gate_up) != 1 or len(down) != 1:
        return None
    first, second = gate_up.pop(), down.pop()
    return None if first is None or second is None else (first, second)


def _kept_dtype(plan: ExpertsPlan, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which weights stay: bfloat16 if `dtype` is float32 and the file has 16 bits or fewer."""
    # An MXFP4 number has one bit after the point, times a power of two.
    narrow = plan.storage == "mxfp4" or all(
        tensor.dtype in KEPT_IN_BFLOAT16
        for tensors in plan.tensors
        for key, tensor in tensors.items()
        if "bias" not in key
    )
    return torch.bfloat16 if narrow and dtype == torch.float32 else dtype


def _halves(rows: Tensor) -> Tensor:
    """Return [2I, ...] as [2, I, ...]: the gate half and the up half."""
    return rows.view(2, -1, *rows.shape[1:])


TakenT = TypeVar("TakenT")


class Rereader(Generic[TakenT]):
    """Reads single experts of a checkpoint that has been loaded before. Numbers count only layers with experts."""

    def __init__(
        self, stored: Callable[[], StoredExperts], owned: OwnedExperts, take: Callable[[LayerExperts], TakenT]
    ) -> None:
        """stored: looks the checkpoint up, once. owned: the experts that were loaded. take: takes the only expert of a
        reader into memory of its own, as at loading."""
        self._look_up = stored
        self._owned = owned
        self._take = take
        self._stored: StoredExperts | None = None

    def __call__(self, number: int, expert: int) -> TakenT:
        """Raise CheckpointError."""
        stored = self._stored = self._stored or self._look_up()
        layer = stored.layers[number]
        with stored.reader(0) as reader:
            loaded, one = (stored.layer(layer, experts, reader) for experts in (self._owned(layer), [expert]))
            if one.shape != loaded.shape:
                raise CheckpointError(f"Expert {expert} of layer {layer} is stored otherwise than the others.")
            return self._take(one)
