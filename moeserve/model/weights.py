"""Loading a checkpoint into a Decoder, layer by layer, so that no second copy of the model is ever in memory.

Tensors go to the device of the decoder's operations, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from experts.moe_layer import Dispatch, MoeLayer
from experts.observer import AnyObserver
from kernels.gated_delta_rule import DeltaHeads
from kernels.linear import Linear, side_by_side
from kernels.mamba import MambaHeads
from kernels.ops import CpuOps, GatedBlock, MoeNorms, NormWeights, Ops
from kernels.packed_experts import Experts
from kernels.weight_formats import Matrix, QuantizedRows, joined_rows
from moeserve.model.checkpoint import (
    KEPT_IN_BFLOAT16,
    ExpertsPlan,
    LayerPlan,
    OwnedExperts,
    StoredTensor,
    plan_weights,
    read_index,
)
from moeserve.model.decoder import Border, Decoder, DecoderLayer, GqaAttention, Mixer, MlaAttention, MtpLayer
from moeserve.model.delta_net import GatedDeltaNet, by_part
from moeserve.model.dummy import is_dummy_folder
from moeserve.model.expert_weights import ExpertReader
from moeserve.model.indexer import Indexer
from moeserve.model.layer_inputs import LayerInput, LayerInputs
from moeserve.model.mamba import Mamba2
from moeserve.model.norms_over_ranks import Partners
from moeserve.model.rounding import NO_ROUNDING, Rounding, fine
from moeserve.model.shards import sharded
from moeserve.model.shared_keys import SharedKeysAttention
from moeserve.model.short_conv import ShortConv
from moeserve.model.spec import (
    AttentionSpec,
    CheckpointError,
    DecoderSpec,
    DeltaNetSpec,
    IndexerSpec,
    MambaSpec,
    MlaSpec,
    ShortConvSpec,
)
from moeserve.model.tensor_reader import Progress, TensorReader

DispatchOf = Callable[[int], Dispatch]
# Returns the experts of a layer that are packed already, by its number among the layers with experts.
PackedLayer = Callable[[int], Experts]
Tensors = Mapping[str, StoredTensor]

_NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}


def load_decoder(
    directory: Path,
    spec: DecoderSpec,
    *,
    dtype: torch.dtype = torch.float32,
    ops: Ops | None = None,
    max_model_len: int | None = None,
    owned_experts: OwnedExperts | None = None,
    dispatch_of: DispatchOf | None = None,
    observers: Sequence[AnyObserver] = (),
    progress: Progress | None = None,
    rounding: Rounding = NO_ROUNDING,
    packed_experts: PackedLayer | None = None,
    forgets_files: bool = False,
    border: Border | None = None,
    partners: Partners | None = None,
) -> Decoder:
    """Load the safetensors checkpoint in ``directory`` as ``dtype`` (float32, bfloat16 or float16).

    ops: of the device, the CPU's by default. max_model_len: longest context to serve, None for any.
    owned_experts(layer): the experts to read, all if None; owning fewer takes a ``dispatch_of(layer)`` that reaches the
    others. observers: of all steps. progress(done_bytes, total_bytes). rounding: of float32 weights on a CPU.
    packed_experts: see ``PackedLayer``; ``owned_experts`` returns none then. forgets_files: see `TensorReader`.
    border: of the stage that is to be loaded, None for all layers. partners: the ranks that have the other shards, None
    for whole matrices.
    Check every tensor's name and shape before memory is taken; raise CheckpointError.
    ``WeightPlan.loaded_num_bytes`` tells the needed memory beforehand.
    """
    ops = ops or CpuOps()
    rounding.check(dtype)
    index = read_index(directory)
    plan, first = plan_weights(spec, index, owned_experts), 0
    if border is not None:
        plan, first = plan.of_stage(border.stage, spec), border.stage.first
    if partners is not None:
        plan = plan.of_shard(partners.shard, spec if border is None else spec.of_layers(border.stage))
        spec = sharded(spec, partners.shard)
    drawn = torch.device(ops.device) if is_dummy_folder(directory) else nullcontext()  # there, rather than copied
    with TensorReader(index, plan.num_bytes, progress=progress, forgets=forgets_files) as reader, drawn:
        first_place = sum(spec.sparse_layers[:first])
        loader = _Loader(
            spec, ops, reader, dtype, dispatch_of, observers, rounding, packed_experts, first_place, partners
        )
        embedding = loader.embedding(plan.outer["embedding"]) if "embedding" in plan.outer else None
        layers = [loader.layer(layer, number) for number, layer in enumerate(plan.layers, first)]
        return Decoder(
            spec if border is None else spec.of_layers(border.stage),
            ops,
            embedding,
            layers,
            loader.norm(plan.outer, "norm"),
            loader.linear(plan.outer, "lm_head") if "lm_head" in plan.outer else None,
            max_model_len=max_model_len or spec.longest_context(None),
            dtype=dtype,
            observers=observers,
            mtp=None if plan.mtp is None else _load_mtp(spec, plan.mtp, ops, reader, dtype, rounding),
            border=border,
            partners=partners,
            layer_inputs=loader.layer_inputs(plan.outer) if "layer_embedding" in plan.outer else None,
        )


def _load_mtp(
    spec: DecoderSpec, plan: LayerPlan, ops: Ops, reader: TensorReader, dtype: torch.dtype, rounding: Rounding
) -> MtpLayer:
    """Load the MTP layer with all its experts, which no other rank computes."""
    assert spec.mtp is not None
    loader, tensors = _Loader(spec.with_mtp_layer, ops, reader, dtype, None, (), rounding), plan.tensors
    return MtpLayer(
        ops,
        loader.layer(plan, spec.num_layers),
        loader.linear(tensors, "projection"),
        embedding_norm=loader.norm(tensors, "embedding_norm"),
        hidden_norm=loader.norm(tensors, "hidden_norm"),
        norm=loader.norm(tensors, "norm") if "norm" in tensors else None,
        returns_normed=spec.mtp.returns_normed,
    )


class _Loader:
    """Knows the tensors of each part of a decoder, reads them and has `ops` pack them."""

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        reader: TensorReader,
        dtype: torch.dtype,
        dispatch_of: DispatchOf | None,
        observers: Sequence[AnyObserver],
        rounding: Rounding,
        packed_experts: PackedLayer | None = None,
        first_place: int = 0,
        partners: Partners | None = None,
    ) -> None:
        """first_place: the number of layers with experts before those that are loaded. spec: of the shard, if partners
        have others."""
        self._spec, self._ops, self._reader, self._dtype, self._rounding = spec, ops, reader, dtype, rounding
        self._dispatch_of, self._observers, self._packed_experts = dispatch_of, observers, packed_experts
        self._first_place, self._partners = first_place, partners

    def embedding(self, stored: StoredTensor, key: str = "embedding") -> Matrix:
        """Load a table into memory of its own. Rows are widened when looked up, so it may have fewer bits."""
        if self._rounding.stored_format(key, stored) is not None:
            rows = self._reader.read_quantised(stored)
            return QuantizedRows(rows.format, rows.data.clone(), rows.depth, rows.order)
        narrow = self._ops.keeps_narrow and self._dtype == torch.float32
        wide = torch.bfloat16 if self._rounding.narrow else self._dtype
        table = self._tensor(stored, _NARROW.get(stored.dtype, wide) if narrow else self._dtype)
        return self._rounding.apply(table, key)

    def layer_inputs(self, tensors: Tensors) -> LayerInputs:
        table = self._ops.pack_table(self.embedding(tensors["layer_embedding"], "layer_embedding"), self._dtype)
        norm = NormWeights(self._norm_weight(tensors["layer_norm"]), None, self._spec.norm_eps)
        projection = self.linear(tensors, "layer_projection")
        return LayerInputs(self._ops, table, projection, norm, hidden_size=self._spec.hidden_size)

    def _layer_input(self, tensors: Tensors) -> LayerInput:
        gate, out = self.linear(tensors, "input_gate"), self.linear(tensors, "input_out")
        return LayerInput(self._ops, gate, out, self.norm(tensors, "after_input"), self._spec.activation)

    def layer(self, plan: LayerPlan, number: int) -> DecoderLayer:
        tensors, has = plan.tensors, self._spec.has
        return DecoderLayer(
            self.norm(tensors, "input_norm"),
            self._mixer(tensors, number) if has("mixer", number) else None,
            self._optional_norm(tensors, "post_norm"),
            self._block(plan, number) if has("block", number) else None,
            self._optional_norm(tensors, "after_mixer"),
            self._optional_norm(tensors, "after_block"),
            float(self._reader.read(tensors["scale"], torch.float32)) if "scale" in tensors else 1.0,
            self._layer_input(tensors) if "input_gate" in tensors else None,
        )

    def _block(self, plan: LayerPlan, number: int) -> MoeLayer | GatedBlock:
        tensors = plan.tensors
        return self._gated(tensors, "") if plan.experts is None else self._moe(tensors, plan.experts, number)

    def norm(self, tensors: Tensors, key: str) -> NormWeights:
        return NormWeights(self._norm_weight(tensors[key]), self._optional(tensors, f"{key}.bias"), self._spec.norm_eps)

    def _optional_norm(self, tensors: Tensors, key: str) -> NormWeights | None:
        return self.norm(tensors, key) if key in tensors else None

    def linear(
        self, tensors: Tensors, *keys: str, dtype: torch.dtype | None = None, order: Tensor | None = None
    ) -> Linear:
        """Load one projection from the projections ``keys``, their rows one below the other.

        dtype: of its input, default the model's. order: a new order of these rows, None to keep it.
        """
        dtype = dtype or self._dtype
        biases = self._biases(tensors, keys, dtype)
        if any(self._rounding.stored_format(key, tensors[key]) for key in keys):
            return self._stored_linear(tensors, keys, biases, dtype, order)
        rows = self._rows([tensors[key] for key in keys], dtype, keys[0])
        if order is not None:
            order = order.to(rows.device)
            rows, biases = rows[order], None if biases is None else biases[order]
        return self._ops.pack_linear(fine(self._rounding.apply(rows, keys[0]), keys[0]), biases, dtype)

    def _stored_linear(
        self, tensors: Tensors, keys: Sequence[str], biases: Tensor | None, dtype: torch.dtype, order: Tensor | None
    ) -> Linear:
        """Do as `linear`, where some of the matrices are kept in the checkpoint's own bits."""
        parts = [self._stored_matrix(key, tensors[key], dtype) for key in keys]
        rows = joined_rows([part for part in parts if isinstance(part, QuantizedRows)])
        if rows is None or rows.shape[0] < sum(part.shape[0] for part in parts):
            own = [None] * len(parts) if biases is None else biases.split([part.shape[0] for part in parts])
            own_parts = zip(parts, own, strict=True)
            packed = [self._ops.pack_linear(fine(part, keys[0]), bias, dtype) for part, bias in own_parts]
            return side_by_side(packed, None if order is None else order.to(self._ops.device))
        if order is not None:
            rows, biases = rows.rows(order), None if biases is None else biases[order]
        return self._ops.pack_linear(fine(rows, keys[0]), biases, dtype)

    def _stored_matrix(self, key: str, stored: StoredTensor, dtype: torch.dtype) -> Matrix:
        if self._rounding.stored_format(key, stored) is None:
            return self._rows([stored], dtype, key)
        return self._reader.read_quantised(stored)

    def _mixer(self, tensors: Tensors, number: int) -> Mixer:
        """Load the part that mixes the tokens in layer ``number``."""
        spec = self._spec
        if spec.recurrent is not None and spec.is_recurrent(number):
            if isinstance(spec.recurrent, MambaSpec):
                return self._mamba(tensors, spec.recurrent)
            if isinstance(spec.recurrent, ShortConvSpec):
                return self._short_conv(tensors)
            return self._delta_net(tensors, spec.recurrent)
        attention = spec.attention_of(number)
        if isinstance(attention, MlaSpec):
            return self._mla(tensors, attention)
        if spec.kv_source(number) != number:
            return self._shared_keys(tensors, attention, spec.windows[number])
        return self._gqa(tensors, attention, spec.windows[number])

    def _shared_keys(self, tensors: Tensors, spec: AttentionSpec, window: int | None) -> SharedKeysAttention:
        return SharedKeysAttention(
            spec,
            self._ops,
            self.linear(tensors, "q"),
            self.linear(tensors, "o"),
            window=window,
            interleaved=self._spec.rope.interleaved,
            norm=NormWeights(self._norm_weight(tensors["q_norm"]), None, self._spec.norm_eps),
        )

    def _delta_net(self, tensors: Tensors, spec: DeltaNetSpec) -> GatedDeltaNet:
        heads = DeltaHeads(
            spec.num_key_heads,
            spec.num_value_heads,
            spec.key_dim,
            spec.value_dim,
            -self._tensor(tensors["decay"], torch.float32).exp(),
            self._tensor(tensors["step_bias"], torch.float32),
        )
        if spec.by_key_head:
            projections = self.linear(tensors, "qkvz", "ba", order=by_part(spec))
        else:
            projections = self.linear(tensors, "qkv", "z", "b", "a")
        return GatedDeltaNet(
            spec,
            self._ops,
            projections,
            self.linear(tensors, "out"),
            conv=self._tensor(tensors["conv"]).T.contiguous(),
            heads=heads,
            norm=NormWeights(self._tensor(tensors["delta_norm"]), None, self._spec.norm_eps),
        )

    def _short_conv(self, tensors: Tensors) -> ShortConv:
        return ShortConv(
            self._ops,
            self.linear(tensors, "projections"),
            self.linear(tensors, "out"),
            conv=self._tensor(tensors["conv"]).T.contiguous(),
            conv_bias=self._optional(tensors, "conv.bias"),
        )

    def _mamba(self, tensors: Tensors, spec: MambaSpec) -> Mamba2:
        heads = MambaHeads(
            spec.num_heads,
            spec.num_groups,
            spec.head_dim,
            spec.state_dim,
            -self._tensor(tensors["decay"], torch.float32).exp(),
            self._tensor(tensors["step_bias"], torch.float32),
            self._tensor(tensors["skip"], torch.float32),
            (spec.least_step, float("inf")),
        )
        return Mamba2(
            self._ops,
            self.linear(tensors, "projections"),
            self.linear(tensors, "out"),
            conv=self._tensor(tensors["conv"]).T.contiguous(),
            conv_bias=self._optional(tensors, "conv.bias"),
            heads=heads,
            norm=NormWeights(self._tensor(tensors["gated_norm"]), None, self._spec.norm_eps),
        )

    def _gqa(self, tensors: Tensors, spec: AttentionSpec, window: int | None) -> GqaAttention:
        return GqaAttention(
            spec,
            self._ops,
            self.linear(tensors, "q", "k", "v", order=_gates_last(spec) if spec.gated else None),
            self.linear(tensors, "o"),
            window=window,
            interleaved=self._spec.rope.interleaved,
            eps=self._spec.norm_eps,
            q_norm=self._norm_weight(tensors["q_norm"]) if "q_norm" in tensors else None,
            k_norm=self._norm_weight(tensors["k_norm"]) if "k_norm" in tensors else None,
            v_norm=self._ones(spec.head_dim) if spec.value_norm else None,
            sinks=self._optional(tensors, "sinks"),
            partners=self._partners,
        )

    def _mla(self, tensors: Tensors, spec: MlaSpec) -> MlaAttention:
        low_rank = spec.q_lora_rank is not None
        up = self._rows([tensors["kv_b"]], self._dtype, "kv_b").view(spec.num_heads, -1, spec.kv_lora_rank)
        keys, values = torch.split(up, [spec.nope_dim, spec.value_dim], 1)
        return MlaAttention(
            spec,
            self._ops,
            self.linear(tensors, "q_a" if low_rank else "q", "kv_a"),
            self.linear(tensors, "o"),
            kv_norm=self._tensor(tensors["kv_norm"]),
            to_latent=self._ops.pack_heads(keys.transpose(1, 2), self._dtype),
            from_latent=self._ops.pack_heads(values, self._dtype),
            interleaved=self._spec.rope.interleaved,
            q_b=self.linear(tensors, "q_b") if low_rank else None,
            q_norm=self._optional(tensors, "q_norm"),
            indexer=None if spec.indexer is None or spec.indexer.is_shared else self._indexer(tensors, spec.indexer),
        )

    def _indexer(self, tensors: Tensors, spec: IndexerSpec) -> Indexer:
        return Indexer(
            spec,
            self._ops,
            self.linear(tensors, "index_q"),
            self.linear(tensors, "index_k"),
            self.linear(tensors, "index_weights", dtype=torch.float32),
            NormWeights(self._tensor(tensors["index_norm"]), self._tensor(tensors["index_norm.bias"]), spec.norm_eps),
        )

    def _gated(self, tensors: Tensors, prefix: str) -> GatedBlock:
        """Load a dense block from the tensors whose names begin with ``prefix``."""
        first_names: tuple[str, ...] = ("gate", "up") if self._spec.activation.is_gated else ("up",)
        if f"{prefix}gate_up" in tensors:
            first_names = ("gate_up",)
        *firsts, down = keys = [f"{prefix}{name}" for name in (*first_names, "down")]
        is_quantised = self._rounding.quantises_block({key: tensors[key] for key in keys})
        if self._rounding.keeps_stored and is_quantised:
            parts = [self._reader.read_quantised(tensors[key]) for key in keys]
            joined = joined_rows(parts[:-1])
            if joined is None:
                of_gate, of_up = (tensors[key].name for key in firsts)
                raise CheckpointError(f"{of_gate} orders its columns otherwise than {of_up}.")
            return self._pack_gated(tensors, firsts, down, joined, parts[-1])
        dtype = self._kept_dtype([tensors[key] for key in keys], self._dtype, firsts[0])
        gate_up = self._ops.on_device(self._reader.read_rows([tensors[key] for key in firsts], dtype))
        second = self._tensor(tensors[down], dtype)
        rounding = self._rounding if is_quantised else NO_ROUNDING
        first = rounding.apply(gate_up, "gate")
        return self._pack_gated(tensors, firsts, down, first, rounding.apply(second, "down"))

    def _pack_gated(
        self, tensors: Tensors, firsts: Sequence[str], down_key: str, gate_up: Matrix, down: Matrix
    ) -> GatedBlock:
        """firsts: the keys of gate and up, of both as one, or of up alone."""
        up_bias, down_bias = (self._biases(tensors, keys, self._dtype) for keys in (firsts, [down_key]))
        return self._ops.pack_gated((gate_up, down, up_bias, down_bias), self._spec.activation, self._dtype)

    def _moe(self, tensors: Tensors, plan: ExpertsPlan, number: int) -> MoeLayer:
        """Load the block of experts of layer ``number``."""
        moe = self._spec.moe
        assert moe is not None
        gate_dtype = torch.float32 if moe.gate_fp32 else self._dtype
        place = self._spec.moe_layers.index(number) - self._first_place
        return MoeLayer(
            self._ops,
            self.linear(tensors, "moe_gate", dtype=gate_dtype),
            moe.gate,
            self._pack_experts(plan) if self._packed_experts is None else self._packed_experts(place),
            moe.activation,
            gate_dtype=gate_dtype,
            correction_bias=self._optional(tensors, "correction_bias", torch.float32),
            expert_scales=self._optional(tensors, "expert_scales", torch.float32),
            norms=self._moe_norms(tensors) if moe.own_norms else None,
            latent=None if moe.hidden_size is None else self._latent(tensors),
            shared=None if moe.shared is None else self._gated(tensors, "shared."),
            shared_gate=self.linear(tensors, "shared_gate") if "shared_gate" in tensors else None,
            dispatch=None if self._dispatch_of is None else self._dispatch_of(number),
            place=place,
            observers=self._observers,
        )

    def _latent(self, tensors: Tensors) -> tuple[Linear, Linear]:
        return self.linear(tensors, "latent_down"), self.linear(tensors, "latent_up")

    def _moe_norms(self, tensors: Tensors) -> MoeNorms:
        # The gate's norm has no weights; each channel has a scale, and all of them share one.
        scales = self._tensor(tensors["gate_scales"], torch.float32) * self._spec.hidden_size**-0.5
        gate = NormWeights(scales.to(self._dtype), None, self._spec.norm_eps)
        others = (self.norm(tensors, key) for key in ("experts_norm", "after_experts", "after_shared"))
        return MoeNorms(gate, *others)

    def _ones(self, width: int) -> Tensor:
        return torch.ones(width, dtype=self._dtype, device=self._ops.device)

    def _pack_experts(self, plan: ExpertsPlan) -> Experts:
        experts = ExpertReader(self._spec, plan, self._reader, self._dtype, self._rounding)
        return self._ops.pack_experts(experts.shape, len(experts.owned), experts.read_matrices)

    def _norm_weight(self, stored: StoredTensor) -> Tensor:
        if self._spec.zero_centred_norms:
            # Added to one in 16 bits, a weight would lose most of its bits.
            return self._tensor(stored, torch.float32) + 1.0
        return self._tensor(stored)

    def _tensor(self, stored: StoredTensor, dtype: torch.dtype | None = None) -> Tensor:
        return self._ops.on_device(self._reader.read(stored, dtype or self._dtype))

    def _optional(self, tensors: Tensors, key: str, dtype: torch.dtype | None = None) -> Tensor | None:
        return self._tensor(tensors[key], dtype) if key in tensors else None

    def _rows(self, parts: Sequence[StoredTensor], dtype: torch.dtype, key: str) -> Tensor:
        """Return the weights of the projection ``key``, which computes in ``dtype``, one below the other."""
        return self._ops.on_device(self._reader.read_rows(parts, self._kept_dtype(parts, dtype, key)))

    def _biases(self, tensors: Tensors, keys: Sequence[str], dtype: torch.dtype) -> Tensor | None:
        found = self._reader.read_biases(tensors, keys, dtype)
        return None if found is None else self._ops.on_device(found)

    def _kept_dtype(self, parts: Sequence[StoredTensor], dtype: torch.dtype, key: str) -> torch.dtype:
        """Return bfloat16 if products in float32 read such weights as they are, else ``dtype``."""
        narrow = self._ops.keeps_narrow and dtype == torch.float32
        if narrow and self._rounding.narrow:
            return torch.bfloat16 if self._rounding.narrows(key) else dtype
        return torch.bfloat16 if narrow and all(part.dtype in KEPT_IN_BFLOAT16 for part in parts) else dtype


def _gates_last(spec: AttentionSpec) -> Tensor:
    """Return the order of rows that turns queries and gates head by head, keys and values into queries, keys, values
    and gates."""
    queries, gates = torch.arange(2 * spec.num_heads * spec.head_dim).view(spec.num_heads, 2, -1).unbind(1)
    others = torch.arange(2 * spec.num_kv_heads * spec.head_dim) + 2 * spec.num_heads * spec.head_dim
    return torch.cat([queries.flatten(), others, gates.flatten()])
