"""The tensors of a checkpoint that a decoder reads, planned from the headers before any memory is taken.

Torch-free: `read_index` lists the tensors of the files, `plan_weights` finds the tensors that a DecoderSpec needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal

from moeserve.model.dummy import dummy_index, is_dummy_folder
from moeserve.model.files import is_gguf_folder
from moeserve.model.packed.config import quantization_in
from moeserve.model.packed.parts import joined_matrices
from moeserve.model.shards import Cut, Cuts, Shard, layer_cuts, outer_cuts
from moeserve.model.spec import (
    CheckpointError,
    DecoderSpec,
    MtpSpec,
)
from moeserve.model.stages import Stage
from moeserve.model.stored import TensorInfo, is_in_blocks, read_headers
from moeserve.model.tensor_names import (
    MTP_LAYERS,
    TensorRef,
    Tensors,
    fused_expert_tensors,
    layer_tensors,
    linear,
    mxfp4_expert_tensors,
    norm,
    outer_tensors,
    split_expert_tensors,
    stacked_expert_tensors,
)


def read_index(directory: Path) -> dict[str, TensorInfo]:
    """Return every tensor of the checkpoint in ``directory`` by its name, from the headers alone.

    A quantised matrix is one tensor, whatever it consists of. Raise CheckpointError if files are missing, truncated or
    not safetensors, if the index names a tensor that its file does not hold, or if parts of a matrix do not fit.
    """
    if is_gguf_folder(directory):
        return _read_gguf(directory)
    if is_dummy_folder(directory):
        return dummy_index(directory)
    return joined_matrices(read_headers(directory), quantization_in(directory))


def _read_gguf(directory: Path) -> dict[str, TensorInfo]:
    # Imported late: other checkpoints do without its packages.
    from moeserve.model.gguf.folder import gguf_parts
    from moeserve.model.gguf.native import NeededNames

    def needed(spec: DecoderSpec) -> NeededNames:
        tensors = list(outer_tensors(spec).values())
        for layer in range(spec.num_layers):
            tensors += layer_tensors(spec, layer).values()
        experts = [fused_expert_tensors(spec, layer) for layer in spec.moe_layers]
        names = [(of_layer["gate_up"].names[0], of_layer["down"].names[0]) for of_layer in experts]
        return NeededNames([ref.names for ref in tensors], names)

    return {
        name: TensorInfo(part.sources[0].file, part.kind, part.shape, part.num_bytes, part)
        for name, part in gguf_parts(directory, needed)
    }


def has_weights(directory: Path) -> bool:
    return is_gguf_folder(directory) or is_dummy_folder(directory) or any(directory.glob("*.safetensors"))


# The bytes of a quantised matrix by its key, None for one that is not. The last argument is all tensors of its layer.
QuantisedBytes = Callable[[str, "StoredTensor", Mapping[str, "StoredTensor"]], int | None]
# The experts that this process loads, by layer.
OwnedExperts = Callable[[int], Sequence[int]]

_LAYER = re.compile(r"(?:model\.|backbone\.)?(?:language_model\.)?layers\.(\d+)\.")
# Rotation tables of old exports, extra modules that predict further tokens, and modules that read images or sound.
_IGNORED = re.compile(
    r"rotary_emb\.|^(?:model\.)?(?:mtp[._]|visual\.|(?:vision|audio)_tower\.|embed_(?:vision|audio)\.)"
)
# Prefixes of the decoder's tensors; the third one is of decoders in vision-language models, the last of Nemotron-H.
_PREFIXES = ("model.", "", "model.language_model.", "backbone.")
_KEYS_AND_VALUES = re.compile(r"self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\.")
_PLAIN_DTYPES = frozenset(("F64", "F32", "F16", "BF16"))
_GATED = ("gate", "up", "gate_up", "down")
# Matrices stored in these dtypes stay in bfloat16 where products in float32 read 16-bit weights as they are.
KEPT_IN_BFLOAT16 = frozenset(("BF16",))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor to read.

    shape: as the decoder uses it. num_bytes: to read from the file, block scales included. dtype: in the file, as
    `TensorInfo` names it. has_order: where its blocks are kept, columns are in an order of their own. cut: the part of
    the stored tensor that is read, None for all of it.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    dtype: str
    has_order: bool = False
    cut: Cut | None = None

    def part(self, cut: Cut) -> StoredTensor:
        """Return a part of a tensor that is whole."""
        return replace(self, shape=cut.shape(self.shape), num_bytes=self.num_bytes * cut.length // cut.size, cut=cut)


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """The owned experts of one layer.

    tensors: with ``split`` storage one mapping (gate, up, down) per owned expert, in their order; with ``fused``,
    ``stacked`` and ``mxfp4`` a single mapping of tensors that hold all experts of the layer.
    """

    layer: int
    storage: Literal["split", "fused", "stacked", "mxfp4"]
    owned: tuple[int, ...]
    tensors: tuple[Mapping[str, StoredTensor], ...]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    tensors: Mapping[str, StoredTensor]
    experts: ExpertsPlan | None


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Every tensor to read. num_bytes: to read from the files; progress counts up to it. mtp: None without an MTP layer
    that is used; it has all its experts."""

    outer: Mapping[str, StoredTensor]
    layers: tuple[LayerPlan, ...]
    num_bytes: int
    mtp: LayerPlan | None = None

    def of_stage(self, stage: Stage, spec: DecoderSpec) -> WeightPlan:
        """Return the tensors of a stage of the model `spec`, without an MTP layer.

        Behind the layers of a stage that is not the last comes the first norm of the next one.
        """
        layers = self.layers[stage.first : stage.end]
        outer = {"embedding": self.outer["embedding"]} if stage.is_first else {}
        if stage.is_last:
            outer |= {key: tensor for key, tensor in self.outer.items() if key != "embedding"}
        else:
            following = self.layers[stage.end].tensors
            keys = ("input_norm", "input_norm.bias")
            outer |= {key.removeprefix("input_"): following[key] for key in keys if key in following}
        return WeightPlan(outer, layers, _bytes_to_read(outer.values(), layers, spec))

    def of_shard(self, shard: Shard, spec: DecoderSpec) -> WeightPlan:
        """Return the tensors of a shard of the model `spec`, without an MTP layer. Experts stay as they are."""
        layers = tuple(
            LayerPlan(_cut(layer.tensors, layer_cuts(spec, number, shard)), layer.experts)
            for number, layer in enumerate(self.layers)
        )
        outer = _cut(self.outer, outer_cuts(spec, shard))
        return WeightPlan(outer, layers, _bytes_to_read(outer.values(), layers, spec))

    def loaded_num_bytes(self, item_size: int, *, narrow: bool, quantised: QuantisedBytes | None = None) -> int:
        """Return the bytes of the loaded weights at ``item_size`` bytes per number.

        quantised: tells the bytes of a matrix outside experts if it is. narrow: keep in 16 bits the matrices that the
        checkpoint holds in bfloat16 or MXFP4. Loading needs room for another layer. Tied embeddings count twice,
        because the output projection is packed.
        """
        total = 0
        layers = self.layers if self.mtp is None else (*self.layers, self.mtp)
        for tensors in (self.outer, *(layer.tensors for layer in layers)):
            for key, tensor in tensors.items():
                num_bytes = None if quantised is None else quantised(key, tensor, tensors)
                if num_bytes is None:
                    block = matrices_of_block(key, tensors).values()
                    stays = narrow and all(other.dtype in KEPT_IN_BFLOAT16 for other in block)
                    num_bytes = loaded_bytes(tensor, item_size, stays)
                total += num_bytes
        for layer in layers:
            if layer.experts is not None:
                total += _loaded_expert_bytes(layer.experts, item_size, narrow)
        return total


def plan_weights(
    spec: DecoderSpec, index: Mapping[str, TensorInfo], owned_experts: OwnedExperts | None = None
) -> WeightPlan:
    """Find every tensor of the model in the checkpoint. owned_experts: default is all.

    Raise CheckpointError for a tensor that is missing, that has another shape than the configuration says or a dtype
    that cannot be read, or that the model does not have.
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
    mtp = None if spec.mtp is None else _plan_mtp(spec, spec.mtp, index)
    all_layers = layers if mtp is None else [*layers, mtp]
    return WeightPlan(outer, tuple(layers), _bytes_to_read(outer.values(), all_layers, spec), mtp)


def _plan_mtp(spec: DecoderSpec, mtp: MtpSpec, index: Mapping[str, TensorInfo]) -> LayerPlan:
    longer, number = spec.with_mtp_layer, spec.num_layers
    matcher = _Matcher(longer, index, (f"layers.{number}.", f"{mtp.block}."))
    hidden = spec.hidden_size
    tensors = norm(spec, "embedding_norm", mtp.embedding_norm) | norm(spec, "hidden_norm", mtp.hidden_norm)
    tensors |= linear("projection", (mtp.projection,), hidden, 2 * hidden, False)
    if mtp.norm is not None:
        tensors |= norm(spec, "norm", mtp.norm)
    experts = matcher.match_experts(number, _owned(spec, number, None)) if mtp.is_sparse else None
    return LayerPlan(matcher.match(tensors | layer_tensors(longer, number)), experts)


def find_mtp(spec: DecoderSpec, index: Mapping[str, TensorInfo]) -> MtpSpec:
    """Return the MTP layer of a checkpoint, the first of several. Raise CheckpointError if it has none."""
    number = spec.num_layers
    for names in MTP_LAYERS:
        named = replace(
            names,
            **{
                part: name.format(number)
                for part in ("block", "embedding_norm", "hidden_norm", "projection", "norm")
                if (name := getattr(names, part)) is not None
            },
        )
        for prefix in _PREFIXES:
            if f"{prefix}{named.projection}.weight" in index:
                block = f"{prefix}{named.block}."
                is_sparse = any(name.startswith(block) and ".experts." in name for name in index)
                return replace(named, is_sparse=is_sparse)
    raise CheckpointError(
        "The checkpoint has no layer that predicts further tokens, which the drafts of method mtp need: choose another "
        "--speculative-config."
    )


def plan_experts(
    spec: DecoderSpec, index: Mapping[str, TensorInfo], layer: int, experts: Sequence[int] | None
) -> ExpertsPlan:
    """Find the tensors of some experts of one layer, None for all, in a checkpoint that `plan_weights` has accepted."""
    owned = None if experts is None else lambda _: experts
    return _Matcher(spec, index).match_experts(layer, _owned(spec, layer, owned))


def _cut(tensors: Mapping[str, StoredTensor], cuts: Cuts) -> dict[str, StoredTensor]:
    """Return the parts of tensors, without those that the shard does not have."""
    parts = {}
    for key, tensor in tensors.items():
        if key not in cuts:
            parts[key] = tensor
        elif (cut := cuts[key]) is not None:
            parts[key] = tensor.part(cut)
    return parts


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


def matrices_of_block(key: str, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the matrices of the dense block or shared expert that has the tensor of this key: gate and up, then down.

    They are packed together: all in the checkpoint's blocks, or all in 16 bits, or none. Empty for any other tensor.
    """
    stem, dot, own = key.rpartition(".")
    names = [f"{stem}{dot}{part}" for part in _GATED] if own in _GATED else []
    return {name: tensors[name] for name in names if name in tensors}


def loaded_bytes(tensor: StoredTensor, item_size: int, narrow: bool) -> int:
    """Return the bytes of a loaded tensor; see `WeightPlan.loaded_num_bytes`."""
    stays = narrow and len(tensor.shape) > 1 and tensor.dtype in KEPT_IN_BFLOAT16
    return prod(tensor.shape) * (2 if stays else item_size)


def _loaded_expert_bytes(experts: ExpertsPlan, item_size: int, narrow: bool) -> int:
    total = 0
    for tensors in experts.tensors:
        for key, tensor in tensors.items():
            if key.endswith(".scales"):
                continue
            if key.endswith(".blocks"):  # Two numbers of four bits per byte.
                count = 2 * prod(tensor.shape) * (2 if narrow else item_size)
            else:
                count = loaded_bytes(tensor, item_size, narrow)
            # The first dimension of a tensor of all experts counts experts.
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
    """Finds needed tensors in an index, and records the tensors found."""

    def __init__(self, spec: DecoderSpec, index: Mapping[str, TensorInfo], renamed: tuple[str, str] = ("", "")) -> None:
        """renamed: a beginning of names, without the decoder's prefix, and the one that stands for it in the index."""
        self._spec = spec
        self._index = index
        self._renamed = renamed
        self._used: set[str] = set()

    def match(self, tensors: Tensors) -> dict[str, StoredTensor]:
        return {key: self._match_one(ref) for key, ref in tensors.items()}

    def match_experts(self, layer: int, owned: tuple[int, ...]) -> ExpertsPlan:
        spec = self._spec
        assert spec.moe is not None
        mxfp4 = mxfp4_expert_tensors(spec, layer)
        if self._find(mxfp4["gate_up.blocks"]) is not None:
            return ExpertsPlan(
                layer, "mxfp4", owned, ({key: self._match_bytes(key, ref) for key, ref in mxfp4.items()},)
            )
        fused = fused_expert_tensors(spec, layer)
        if self._find(fused["gate_up"]) is not None:
            return ExpertsPlan(layer, "fused", owned, (self.match(fused),))
        stacked = stacked_expert_tensors(spec, layer)
        if self._find(stacked["up"]) is not None:
            return ExpertsPlan(layer, "stacked", owned, (self.match(stacked),))
        experts = [self.match(split_expert_tensors(spec, layer, e)) for e in range(spec.moe.num_experts)]
        return ExpertsPlan(layer, "split", owned, tuple(experts[expert] for expert in owned))

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
        if layer and int(layer[1]) >= self._spec.num_layers:  # A layer that predicts further tokens.
            return True
        if layer and self._spec.kv_source(int(layer[1])) != int(layer[1]) and _KEYS_AND_VALUES.search(name):
            return True  # The layer has no use for its own.
        weight = self._index.get(f"{name.removesuffix('.bias')}.weight")
        if weight is not None and weight.packed is not None:  # Some programs write zeros for biases that a model lacks.
            return True
        return bool(_IGNORED.search(name)) or (self._spec.tie_embeddings and name == "lm_head.weight")

    def _find(self, ref: TensorRef) -> str | None:
        for name in ref.names:
            for prefix in _PREFIXES:
                candidate = prefix + self._stored_name(name)
                if candidate in self._index:
                    return candidate
        return None

    def _stored_name(self, name: str) -> str:
        own, stored = self._renamed
        return stored + name.removeprefix(own) if own and name.startswith(own) else name

    def _match_one(self, ref: TensorRef) -> StoredTensor:
        name, info = self._take(ref)
        check_scaled(name, info)
        if info.packed is None and info.dtype not in _PLAIN_DTYPES and not is_in_blocks(info.dtype):
            raise CheckpointError(f"{name} is stored as {info.dtype}, which cannot be read.")
        has_order = info.packed is not None and info.packed.has_order
        return StoredTensor(name, ref.shape, info.num_bytes, info.dtype, has_order=has_order)

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
            raise CheckpointError(f"The checkpoint lacks the tensor model.{self._stored_name(ref.names[0])}.")
        info = self._index[name]
        _check_shape(name, info.shape, ref.shape)
        self._used.add(name)
        return name, info


def check_scaled(name: str, info: TensorInfo) -> None:
    """Raise CheckpointError for a tensor in FP8 that no scales belong to."""
    if info.dtype == "F8_E4M3" and info.packed is None:
        raise CheckpointError(f"{name} is stored in FP8, but the checkpoint has no scales of its blocks.")


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(size for size in found if size != 1) != tuple(size for size in expected if size != 1):
        raise CheckpointError(f"{name} has shape {list(found)}, but the configuration says {list(expected)}.")
