"""Matching what a decoder needs against what a checkpoint holds, before any memory is taken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from moeserve.models.checkpoint import TensorInfo
from moeserve.models.errors import CheckpointError
from moeserve.models.layout import (
    TensorRef,
    Tensors,
    fused_expert_tensors,
    layer_tensors,
    mxfp4_expert_tensors,
    outer_tensors,
    split_expert_tensors,
)
from moeserve.models.spec import DecoderSpec

OwnedExperts = Callable[[int], Sequence[int]]

_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
# Rotation tables of old exports, and the extra modules that predict further tokens.
_IGNORED = re.compile(r"rotary_emb\.|^(?:model\.)?mtp[._]")
_PLAIN_DTYPES = frozenset(("F64", "F32", "F16", "BF16"))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor to read: its name in the checkpoint, the shape it is used in, the file's bytes it takes, the dtype they
    are in (as safetensors names it), and the name of its block scales if it is stored in FP8."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    dtype: str
    scale: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """The owned experts of one layer. ``split``: one mapping (gate, up, down) per owned expert, in their order.
    ``fused`` and ``mxfp4``: a single mapping of tensors over all experts."""

    storage: Literal["split", "fused", "mxfp4"]
    owned: tuple[int, ...]
    tensors: tuple[Mapping[str, StoredTensor], ...]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    tensors: Mapping[str, StoredTensor]
    experts: ExpertsPlan | None


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Every tensor to read. num_bytes: what will be read from the files (progress counts up to it)."""

    outer: Mapping[str, StoredTensor]
    layers: tuple[LayerPlan, ...]
    num_bytes: int

    def loaded_num_bytes(self, item_size: int, *, narrow: bool) -> int:
        """Bytes the loaded weights take at ``item_size`` bytes per number.

        narrow: matrices that the checkpoint holds in bfloat16 or MXFP4 stay in 16 bits. Beside them, loading needs
        room for one layer more. Tied embeddings count twice: the output projection is packed.
        """
        total = sum(_loaded_bytes(tensor, item_size, narrow) for tensor in self.outer.values())
        for layer in self.layers:
            total += sum(_loaded_bytes(tensor, item_size, narrow) for tensor in layer.tensors.values())
            if layer.experts is not None:
                total += _loaded_expert_bytes(layer.experts, item_size, narrow)
        return total


def plan_weights(
    spec: DecoderSpec, index: Mapping[str, TensorInfo], owned_experts: OwnedExperts | None = None
) -> WeightPlan:
    """Find every tensor of the model in the checkpoint.

    owned_experts(layer) lists the experts to load; without it all are. Raises CheckpointError for tensors that are
    missing, of another shape than the configuration says, of a dtype that cannot be read, or that nothing asks for.
    """
    matcher = _Matcher(spec, index)
    outer = matcher.match(outer_tensors(spec))
    layers = []
    for layer in range(spec.num_layers):
        tensors = matcher.match(layer_tensors(spec, layer))
        sparse = spec.moe is not None and spec.sparse_layers[layer]
        experts = matcher.match_experts(layer, _owned(spec, layer, owned_experts)) if sparse else None
        layers.append(LayerPlan(tensors, experts))
    matcher.check_unexpected()
    return WeightPlan(outer, tuple(layers), _bytes_to_read(outer.values(), layers, spec))


def plan_experts(spec: DecoderSpec, index: Mapping[str, TensorInfo], layer: int, experts: Sequence[int]) -> ExpertsPlan:
    """The tensors of some experts of a layer, for a checkpoint whose plan has been made before."""
    return _Matcher(spec, index).match_experts(layer, _owned(spec, layer, lambda _: experts))


def _bytes_to_read(outer: Iterable[StoredTensor], layers: Iterable[LayerPlan], spec: DecoderSpec) -> int:
    total = sum(tensor.num_bytes for tensor in outer)
    for layer in layers:
        total += sum(tensor.num_bytes for tensor in layer.tensors.values())
        experts = layer.experts
        if experts is None or spec.moe is None:
            continue
        stored = sum(tensor.num_bytes for mapping in experts.tensors for tensor in mapping.values())
        total += stored if experts.storage == "split" else stored * len(experts.owned) // spec.moe.num_experts
    return total


def _loaded_bytes(tensor: StoredTensor, item_size: int, narrow: bool) -> int:
    stays = narrow and len(tensor.shape) > 1 and tensor.dtype == "BF16"
    return prod(tensor.shape) * (2 if stays else item_size)


def _loaded_expert_bytes(experts: ExpertsPlan, item_size: int, narrow: bool) -> int:
    """Those of the owned experts; what is stored in one tensor for all experts has them in its first dimension."""
    total = 0
    for tensors in experts.tensors:
        for key, tensor in tensors.items():
            if key.endswith(".scales"):
                continue
            if key.endswith(".blocks"):  # Two numbers of four bits per byte.
                count = 2 * prod(tensor.shape) * (2 if narrow else item_size)
            else:
                count = _loaded_bytes(tensor, item_size, narrow)
            total += count if experts.storage == "split" else count * len(experts.owned) // tensor.shape[0]
    return total


def _owned(spec: DecoderSpec, layer: int, owned_experts: OwnedExperts | None) -> tuple[int, ...]:
    assert spec.moe is not None
    if owned_experts is None:
        return tuple(range(spec.moe.num_experts))
    owned = tuple(owned_experts(layer))
    if len(set(owned)) != len(owned) or not all(0 <= expert < spec.moe.num_experts for expert in owned):
        raise ValueError(f"owned experts {owned} of layer {layer} are not distinct ids below {spec.moe.num_experts}")
    return owned


class _Matcher:
    def __init__(self, spec: DecoderSpec, index: Mapping[str, TensorInfo]) -> None:
        self._spec = spec
        self._index = index
        self._used: set[str] = set()

    def match(self, tensors: Tensors) -> dict[str, StoredTensor]:
        return {key: self._match_one(ref) for key, ref in tensors.items()}

    def match_experts(self, layer: int, owned: tuple[int, ...]) -> ExpertsPlan:
        spec = self._spec
        assert spec.moe is not None
        mxfp4 = mxfp4_expert_tensors(spec, layer)
        if self._find(mxfp4["gate_up.blocks"]) is not None:
            return ExpertsPlan("mxfp4", owned, ({key: self._match_bytes(key, ref) for key, ref in mxfp4.items()},))
        fused = fused_expert_tensors(spec, layer)
        if self._find(fused["gate_up"]) is not None:
            return ExpertsPlan("fused", owned, (self.match(fused),))
        experts = [self.match(split_expert_tensors(spec, layer, e)) for e in range(spec.moe.num_experts)]
        return ExpertsPlan("split", owned, tuple(experts[expert] for expert in owned))

    def check_unexpected(self) -> None:
        left = sorted(name for name in self._index if name not in self._used and not self._ignorable(name))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise CheckpointError(
                f"The checkpoint holds {left[0]}{more}, which a {self._spec.model_type} model of this configuration "
                "does not have."
            )

    def _ignorable(self, name: str) -> bool:
        layer = _LAYER.match(name)
        if layer and int(layer[1]) >= self._spec.num_layers:  # Layers that predict further tokens.
            return True
        return bool(_IGNORED.search(name)) or (self._spec.tie_embeddings and name == "lm_head.weight")

    def _find(self, ref: TensorRef) -> str | None:
        for name in ref.names:
            for candidate in (f"model.{name}", name):
                if candidate in self._index:
                    return candidate
        return None

    def _match_one(self, ref: TensorRef) -> StoredTensor:
        name, info = self._take(ref)
        if info.dtype in _PLAIN_DTYPES:
            return StoredTensor(name, ref.shape, info.num_bytes, info.dtype)
        if info.dtype != "F8_E4M3":
            raise CheckpointError(f"{name} is stored as {info.dtype}, which cannot be read.")
        return self._match_fp8(name, info, ref)

    def _match_fp8(self, name: str, info: TensorInfo, ref: TensorRef) -> StoredTensor:
        quantization, scale = self._spec.quantization, f"{name}_scale_inv"
        if quantization is None or quantization.kind != "fp8":
            raise CheckpointError(f"{name} is stored in FP8, but the configuration gives no block size for its scales.")
        if scale not in self._index:
            raise CheckpointError(f"{name} is stored in FP8, but its scales {scale} are missing.")
        *leading, rows, columns = ref.shape
        row_block, column_block = quantization.block
        expected = (*leading, -(-rows // row_block), -(-columns // column_block))
        _check_shape(scale, self._index[scale].shape, expected)
        self._used.add(scale)
        return StoredTensor(name, ref.shape, info.num_bytes + self._index[scale].num_bytes, info.dtype, scale)

    def _match_bytes(self, key: str, ref: TensorRef) -> StoredTensor:
        if key.endswith(".bias"):
            return self._match_one(ref)
        name, info = self._take(ref)
        if info.dtype != "U8":
            raise CheckpointError(f"{name} is stored as {info.dtype}, not as bytes.")
        return StoredTensor(name, ref.shape, info.num_bytes, info.dtype)

    def _take(self, ref: TensorRef) -> tuple[str, TensorInfo]:
        name = self._find(ref)
        if name is None:
            raise CheckpointError(f"The checkpoint lacks the tensor model.{ref.names[0]}.")
        info = self._index[name]
        _check_shape(name, info.shape, ref.shape)
        self._used.add(name)
        return name, info


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(size for size in found if size != 1) != tuple(size for size in expected if size != 1):
        raise CheckpointError(f"{name} has shape {list(found)}, but the configuration says {list(expected)}.")
