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
    AttentionSpec,
    CheckpointError,
    DecoderSpec,
    DeltaNetSpec,
    IndexerSpec,
    MambaSpec,
    MlaSpec,
    MoeSpec,
    MtpSpec,
    ShortConvSpec,
)
from moeserve.model.stages import Stage
from moeserve.model.stored import TensorInfo, is_in_blocks, read_headers


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


# The bytes of a quantised matrix by its key, None for one that is not.
QuantisedBytes = Callable[[str, "StoredTensor"], int | None]
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
                num_bytes = None if quantised is None else quantised(key, tensor)
                total += loaded_bytes(tensor, item_size, narrow) if num_bytes is None else num_bytes
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
    tensors = _norm(spec, "embedding_norm", mtp.embedding_norm) | _norm(spec, "hidden_norm", mtp.hidden_norm)
    tensors |= _linear("projection", (mtp.projection,), hidden, 2 * hidden, False)
    if mtp.norm is not None:
        tensors |= _norm(spec, "norm", mtp.norm)
    experts = matcher.match_experts(number, _owned(spec, number, None)) if mtp.is_sparse else None
    return LayerPlan(matcher.match(tensors | layer_tensors(longer, number)), experts)


def find_mtp(spec: DecoderSpec, index: Mapping[str, TensorInfo]) -> MtpSpec:
    """Return the MTP layer of a checkpoint, the first of several. Raise CheckpointError if it has none."""
    number = spec.num_layers
    for names in _MTP_LAYERS:
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
        experts = [self.match(_split_expert_tensors(spec, layer, e)) for e in range(spec.moe.num_experts)]
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


# Names and shapes of the tensors that a decoder needs. Names are relative to the decoder, ``layers.0.mlp.gate.weight``;
# a checkpoint usually puts ``model.`` in front. Where published checkpoints differ in a name, all forms are candidates.

_MOE_PREFIXES = ("mlp", "block_sparse_moe", "mixer", "feed_forward")
_PROJECTIONS = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
# The names of MTP layers in published checkpoints, of DeepSeek-V3 and GLM-4.5, Qwen3-Next and Qwen3.5, and Ernie 4.5.
# {} stands for the number of layers.
_MTP_LAYERS = (
    MtpSpec("layers.{}", "layers.{}.enorm", "layers.{}.hnorm", "layers.{}.eh_proj", "layers.{}.shared_head.norm"),
    MtpSpec("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", True),
    MtpSpec("mtp_block.0", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0", None),
)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A needed tensor: the names it may have, and its shape. The stored shape may differ by dimensions of 1."""

    names: tuple[str, ...]
    shape: tuple[int, ...]


Tensors = dict[str, TensorRef]


def outer_tensors(spec: DecoderSpec) -> Tensors:
    """Return the tensors outside the layers. A tied output projection is the embedding again."""
    vocab, hidden = spec.vocab_size, spec.hidden_size
    embedding = ("embed_tokens.weight", "embeddings.weight")
    tensors = {
        "embedding": TensorRef(embedding, (vocab, hidden)),
        "lm_head": TensorRef(embedding if spec.tie_embeddings else ("lm_head.weight",), (vocab, hidden)),
    }
    if spec.lm_head_bias:
        tensors["lm_head.bias"] = TensorRef(("lm_head.bias",), (vocab,))
    if (inputs := spec.layer_inputs) is not None:
        rows = spec.num_layers * inputs.width
        tensors["layer_embedding"] = TensorRef(("embed_tokens_per_layer.weight",), (inputs.vocab_size, rows))
        tensors |= _linear("layer_projection", ("per_layer_model_projection",), rows, hidden, False)
        tensors["layer_norm"] = TensorRef(("per_layer_projection_norm.weight",), (inputs.width,))
    return tensors | _norm(spec, "norm", "norm", "norm_f", "embedding_norm")


def layer_tensors(spec: DecoderSpec, layer: int) -> Tensors:
    """Return the tensors of one layer except its experts."""
    prefix = f"layers.{layer}"
    tensors = _norm(spec, "input_norm", f"{prefix}.input_layernorm", f"{prefix}.norm", f"{prefix}.operator_norm")
    if spec.has("mixer", layer):
        tensors |= _mixer(spec, layer, prefix)
    if not spec.has("block", layer):
        return tensors
    if spec.added_norms:
        tensors |= _norm(spec, "after_mixer", f"{prefix}.post_attention_layernorm")
        tensors |= _norm(spec, "post_norm", f"{prefix}.pre_feedforward_layernorm")
        tensors |= _norm(spec, "after_block", f"{prefix}.post_feedforward_layernorm")
    elif not spec.single_parts:
        tensors |= _norm(spec, "post_norm", f"{prefix}.post_attention_layernorm", f"{prefix}.ffn_norm")
    if (inputs := spec.layer_inputs) is not None:
        tensors |= _linear("input_gate", (f"{prefix}.per_layer_input_gate",), inputs.width, spec.hidden_size, False)
        tensors |= _linear("input_out", (f"{prefix}.per_layer_projection",), spec.hidden_size, inputs.width, False)
        tensors |= _norm(spec, "after_input", f"{prefix}.post_per_layer_input_norm")
    if spec.layer_scales:
        tensors["scale"] = TensorRef((f"{prefix}.layer_scalar",), (1,))
    if spec.moe is not None and spec.sparse_layers[layer]:
        return tensors | _moe(spec, spec.moe, prefix) | _moe_norms(spec, spec.moe, prefix)
    if spec.fused_mlps:
        return tensors | _fused_mlp("", prefix, spec.hidden_size, spec.dense_width(layer))
    names = tuple(f"{prefix}.{block}" for block in ("mlp", "mixer", "feed_forward"))
    return tensors | _mlp("", names, spec.hidden_size, spec.dense_width(layer), spec.mlp_bias, spec.activation.is_gated)


def _mixer(spec: DecoderSpec, layer: int, prefix: str) -> Tensors:
    attention, recurrent, hidden = spec.attention_of(layer), spec.recurrent, spec.hidden_size
    if recurrent is not None and spec.is_recurrent(layer):
        if isinstance(recurrent, MambaSpec):
            return _mamba(recurrent, hidden, (f"{prefix}.mixer", f"{prefix}.mamba"))
        if isinstance(recurrent, ShortConvSpec):
            return _short_conv(recurrent, hidden, f"{prefix}.conv")
        return _delta_net(recurrent, hidden, f"{prefix}.linear_attn")
    if isinstance(attention, MlaSpec):
        return _mla(attention, hidden, f"{prefix}.self_attn")
    tensors = _gqa(attention, hidden, (f"{prefix}.self_attn", f"{prefix}.mixer"))
    if spec.kv_source(layer) == layer:
        return tensors
    return {key: ref for key, ref in tensors.items() if key.partition(".")[0] in ("q", "o", "q_norm")}


def _linear(key: str, names: tuple[str, ...], rows: int, columns: int, bias: bool) -> Tensors:
    tensors = {key: TensorRef(tuple(f"{name}.weight" for name in names), (rows, columns))}
    if bias:
        tensors[f"{key}.bias"] = TensorRef(tuple(f"{name}.bias" for name in names), (rows,))
    return tensors


def _norm(spec: DecoderSpec, key: str, *names: str) -> Tensors:
    tensors = {key: TensorRef(tuple(f"{name}.weight" for name in names), (spec.hidden_size,))}
    if spec.norm == "layer":
        tensors[f"{key}.bias"] = TensorRef(tuple(f"{name}.bias" for name in names), (spec.hidden_size,))
    return tensors


def _gqa(attention: AttentionSpec, hidden: int, prefixes: tuple[str, ...]) -> Tensors:
    def named(name: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{name}" for prefix in prefixes)

    q_size = attention.num_heads * attention.head_dim
    kv_size = attention.num_kv_heads * attention.head_dim
    tensors: Tensors = {}
    of_values = "k_proj" if attention.keys_are_values else "v_proj"
    parts = (("q", "q_proj", q_size * (1 + attention.gated)), ("k", "k_proj", kv_size), ("v", of_values, kv_size))
    for key, name, rows in parts:
        tensors |= _linear(key, named(name), rows, hidden, attention.qkv_bias)
    tensors |= _linear("o", named("o_proj") + named("out_proj"), hidden, q_size, attention.out_bias)
    if attention.qk_norm != "none":
        flat = attention.qk_norm == "flat"
        for key, rows in (("q", q_size), ("k", kv_size)):
            shape = (rows if flat else attention.head_dim,)
            names = named(f"{key}_norm.weight") + named(f"{key}_layernorm.weight")
            tensors[f"{key}_norm"] = TensorRef(names, shape)
    if attention.sinks:
        tensors["sinks"] = TensorRef(named("sinks"), (attention.num_heads,))
    return tensors


def _mla(mla: MlaSpec, hidden: int, prefix: str) -> Tensors:
    q_size = mla.num_heads * (mla.nope_dim + mla.rope_dim)
    latent, rank = mla.kv_lora_rank, mla.q_lora_rank
    if rank is None:
        tensors = _linear("q", (f"{prefix}.q_proj",), q_size, hidden, False)
    else:
        tensors = _linear("q_a", (f"{prefix}.q_a_proj",), rank, hidden, mla.bias)
        tensors["q_norm"] = TensorRef((f"{prefix}.q_a_layernorm.weight",), (rank,))
        tensors |= _linear("q_b", (f"{prefix}.q_b_proj",), q_size, rank, False)
    tensors |= _linear("kv_a", (f"{prefix}.kv_a_proj_with_mqa",), latent + mla.rope_dim, hidden, mla.bias)
    tensors["kv_norm"] = TensorRef((f"{prefix}.kv_a_layernorm.weight",), (latent,))
    up_size = mla.num_heads * (mla.nope_dim + mla.value_dim)
    tensors |= _linear("kv_b", (f"{prefix}.kv_b_proj",), up_size, latent, False)
    if mla.indexer is not None and rank is not None and not mla.indexer.is_shared:
        tensors |= _indexer(mla.indexer, hidden, rank, f"{prefix}.indexer")
    return tensors | _linear("o", (f"{prefix}.o_proj",), hidden, mla.num_heads * mla.value_dim, mla.bias)


def _indexer(indexer: IndexerSpec, hidden: int, rank: int, prefix: str) -> Tensors:
    heads, dim = indexer.num_heads, indexer.head_dim
    tensors = _linear("index_q", (f"{prefix}.wq_b",), heads * dim, rank, False)
    tensors |= _linear("index_k", (f"{prefix}.wk",), dim, hidden, False)
    tensors |= _linear("index_weights", (f"{prefix}.weights_proj",), heads, hidden, False)
    for end in ("weight", "bias"):
        key = "index_norm" if end == "weight" else "index_norm.bias"
        tensors[key] = TensorRef((f"{prefix}.k_norm.{end}",), (dim,))
    return tensors


def _delta_net(net: DeltaNetSpec, hidden: int, prefix: str) -> Tensors:
    parts = {"qkvz": net.conv_channels + net.value_channels, "ba": 2 * net.num_value_heads}
    if not net.by_key_head:
        heads = net.num_value_heads
        parts = {"qkv": net.conv_channels, "z": net.value_channels, "b": heads, "a": heads}
    tensors: Tensors = {}
    for name, rows in parts.items():
        tensors |= _linear(name, (f"{prefix}.in_proj_{name}",), rows, hidden, False)
    tensors |= _linear("out", (f"{prefix}.out_proj",), hidden, net.value_channels, False)
    tensors["conv"] = TensorRef((f"{prefix}.conv1d.weight",), (net.conv_channels, net.conv_width))
    for key, name in (("decay", "A_log"), ("step_bias", "dt_bias")):
        tensors[key] = TensorRef((f"{prefix}.{name}",), (net.num_value_heads,))
    tensors["delta_norm"] = TensorRef((f"{prefix}.norm.weight",), (net.value_dim,))
    return tensors


def _mamba(mamba: MambaSpec, hidden: int, prefixes: tuple[str, ...]) -> Tensors:
    def named(name: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{name}" for prefix in prefixes)

    rows, heads = mamba.channels + mamba.conv_channels + mamba.num_heads, mamba.num_heads
    tensors = _linear("projections", named("in_proj"), rows, hidden, mamba.bias)
    tensors |= _linear("out", named("out_proj"), hidden, mamba.channels, mamba.bias)
    tensors["conv"] = TensorRef(named("conv1d.weight"), (mamba.conv_channels, mamba.conv_width))
    if mamba.conv_bias:
        tensors["conv.bias"] = TensorRef(named("conv1d.bias"), (mamba.conv_channels,))
    for key, name in (("decay", "A_log"), ("step_bias", "dt_bias"), ("skip", "D")):
        tensors[key] = TensorRef(named(name), (heads,))
    tensors["gated_norm"] = TensorRef(named("norm.weight"), (mamba.channels,))
    return tensors


def _short_conv(conv: ShortConvSpec, hidden: int, prefix: str) -> Tensors:
    tensors = _linear("projections", (f"{prefix}.in_proj",), 3 * conv.channels, hidden, conv.bias)
    tensors |= _linear("out", (f"{prefix}.out_proj",), hidden, conv.channels, conv.bias)
    tensors["conv"] = TensorRef((f"{prefix}.conv.weight",), (conv.channels, conv.width))
    if conv.bias:
        tensors["conv.bias"] = TensorRef((f"{prefix}.conv.bias",), (conv.channels,))
    return tensors


def _mlp(key: str, prefixes: tuple[str, ...], hidden: int, width: int, bias: bool, is_gated: bool = True) -> Tensors:
    tensors: Tensors = {}
    parts = (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width))
    for part, rows, columns in parts if is_gated else parts[1:]:
        names = tuple(f"{prefix}.{form}" for prefix in prefixes for form in _PROJECTIONS[part])
        tensors |= _linear(f"{key}{part}", names, rows, columns, bias)
    return tensors


def _fused_mlp(key: str, prefix: str, hidden: int, width: int) -> Tensors:
    tensors = _linear(f"{key}gate_up", (f"{prefix}.shared_mlp.input_linear",), 2 * width, hidden, False)
    return tensors | _linear(f"{key}down", (f"{prefix}.shared_mlp.output_linear",), hidden, width, False)


def _moe(spec: DecoderSpec, moe: MoeSpec, prefix: str) -> Tensors:
    blocks, hidden = _moe_blocks(prefix), spec.hidden_size

    def under(*suffixes: str) -> tuple[str, ...]:
        return tuple(f"{block}.{suffix}" for block in blocks for suffix in suffixes)

    tensors = _linear(
        "moe_gate", under("gate", "router", "router.layer", "router.proj"), moe.num_experts, hidden, moe.gate_bias
    )
    if moe.correction_bias:
        places = ("gate.", "", "moe_statics.", "gate.moe_statics.")
        names = under(*(f"{place}e_score_correction_bias" for place in places), "expert_bias")
        tensors["correction_bias"] = TensorRef(names, (moe.num_experts,))
    if moe.hidden_size is not None:
        sizes = moe.hidden_size, hidden
        tensors |= _linear("latent_down", under("fc1_latent_proj"), *sizes, spec.mlp_bias)
        tensors |= _linear("latent_up", under("fc2_latent_proj"), *sizes[::-1], spec.mlp_bias)
    if moe.expert_scales:
        tensors["expert_scales"] = TensorRef((f"{prefix}.router.per_expert_scale",), (moe.num_experts,))
    if moe.shared is not None and spec.fused_mlps:
        tensors |= _fused_mlp("shared.", prefix, hidden, moe.shared.intermediate_size)
    elif moe.shared is not None:
        names = (f"{prefix}.mlp",) if moe.own_norms else under("shared_experts", "shared_expert")
        sizes = hidden, moe.shared.intermediate_size
        tensors |= _mlp("shared.", names, *sizes, moe.shared.bias, moe.activation.is_gated)
        if moe.shared.gated:
            tensors |= _linear("shared_gate", under("shared_expert_gate"), 1, hidden, False)
    return tensors


def _moe_norms(spec: DecoderSpec, moe: MoeSpec, prefix: str) -> Tensors:
    """Return the norms inside a block of experts."""
    if not moe.own_norms:
        return {}
    return {
        "gate_scales": TensorRef((f"{prefix}.router.scale",), (spec.hidden_size,)),
        **_norm(spec, "experts_norm", f"{prefix}.pre_feedforward_layernorm_2"),
        **_norm(spec, "after_experts", f"{prefix}.post_feedforward_layernorm_2"),
        **_norm(spec, "after_shared", f"{prefix}.post_feedforward_layernorm_1"),
    }


def _moe_blocks(prefix: str) -> tuple[str, ...]:
    """Return the names that a block of experts may have in a layer; its parts may also lie in the layer itself."""
    return (*(f"{prefix}.{block}" for block in _MOE_PREFIXES), prefix)


def _split_expert_tensors(spec: DecoderSpec, layer: int, expert: int) -> Tensors:
    """Return one expert that is stored by itself: ``gate`` and ``up`` [I, H], ``down`` [H, I]."""
    assert spec.moe is not None
    blocks = tuple(f"{block}.experts.{expert}" for block in _moe_blocks(f"layers.{layer}"))
    shapes = _projection_shapes(spec.moe, spec.expert_hidden_size)
    return {
        key: TensorRef(tuple(f"{block}.{form}.weight" for block in blocks for form in _PROJECTIONS[key]), shape)
        for key, shape in shapes.items()
    }


def _projection_shapes(moe: MoeSpec, hidden: int) -> dict[str, tuple[int, int]]:
    """Return the shape of each projection of an expert."""
    width = moe.intermediate_size
    first = ("gate", "up") if moe.activation.is_gated else ("up",)
    return {**dict.fromkeys(first, (width, hidden)), "down": (hidden, width)}


def fused_expert_tensors(spec: DecoderSpec, layer: int) -> Tensors:
    """Return the tensors that hold all experts of a layer: ``gate_up`` [E, 2I, H], without a gate [E, I, H], and
    ``down`` [E, H, I].

    If the spec says so, they are transposed with alternating gate and up channels: [E, H, 2I] and [E, I, H].
    """
    moe = spec.moe
    assert moe is not None
    count, hidden, width = moe.num_experts, spec.expert_hidden_size, moe.intermediate_size
    blocks = _moe_blocks(f"layers.{layer}")

    def names(*suffixes: str) -> tuple[str, ...]:
        return tuple(f"{block}.{suffix}" for block in blocks for suffix in suffixes)

    flip = -1 if moe.transposed_experts else 1
    tensors = {
        "gate_up": TensorRef(
            names("experts.gate_up_proj", "experts.gate_up_proj.weight", "input_linear.weight")
            if moe.activation.is_gated
            else names("experts.up_proj", "experts.up_proj.weight"),
            (count, *((1 + moe.activation.is_gated) * width, hidden)[::flip]),
        ),
        "down": TensorRef(
            names("experts.down_proj", "experts.down_proj.weight", "output_linear.weight"),
            (count, *(hidden, width)[::flip]),
        ),
    }
    if moe.expert_bias:
        tensors["gate_up.bias"] = TensorRef(names("experts.gate_up_proj_bias"), (count, 2 * width))
        tensors["down.bias"] = TensorRef(names("experts.down_proj_bias"), (count, hidden))
    return tensors


def stacked_expert_tensors(spec: DecoderSpec, layer: int) -> Tensors:
    """Return the tensors that hold one projection of all experts: ``gate``, ``up`` [E, I, H] and ``down`` [E, H, I]."""
    moe = spec.moe
    assert moe is not None
    tensors, count = {}, moe.num_experts
    for key, shape in _projection_shapes(moe, spec.expert_hidden_size).items():
        names = tuple(f"{block}.experts.{key}_proj" for block in _moe_blocks(f"layers.{layer}"))
        tensors[key] = TensorRef(tuple(f"{name}.weight" for name in names), (count, *shape))
        if moe.expert_bias:
            tensors[f"{key}.bias"] = TensorRef(tuple(f"{name}.bias" for name in names), (count, shape[0]))
    return tensors


def mxfp4_expert_tensors(spec: DecoderSpec, layer: int) -> Tensors:
    """Return the fused layout in MXFP4: blocks of 32 four-bit values (16 bytes), with one exponent byte per block.

    ``gate_up.blocks`` [E, 2I, H/32, 16], ``gate_up.scales`` [E, 2I, H/32], and the same for ``down``.
    """
    moe = spec.moe
    assert moe is not None
    fused = fused_expert_tensors(spec, layer)
    tensors = {key: ref for key, ref in fused.items() if key.endswith(".bias")}
    shapes = {
        "gate_up": (2 * moe.intermediate_size, spec.expert_hidden_size),
        "down": (spec.expert_hidden_size, moe.intermediate_size),
    }
    for key, (rows, columns) in shapes.items():
        scales = (moe.num_experts, rows, columns // 32)
        tensors[f"{key}.blocks"] = TensorRef(tuple(f"{name}_blocks" for name in fused[key].names), (*scales, 16))
        tensors[f"{key}.scales"] = TensorRef(tuple(f"{name}_scales" for name in fused[key].names), scales)
    return tensors
