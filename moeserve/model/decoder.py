"""The generic decoder: assembled as a DecoderSpec says, it is every supported model on every device.

It computes through `kernels.ops.Ops`, whose bodies were chosen for the device when its weights were packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from experts.moe_layer import MoeLayer
from experts.observer import AnyObserver, observes_states
from experts.routing.gates import GatedBlock as AskedGate
from kernels.cpu.attention_block import AttentionWeights, attention_block
from kernels.cpu.layers import LayerParts, NativeLayers, native_layers
from kernels.indexed_attention import indexed_attention
from kernels.linear import Linear
from kernels.ops import AttentionContext, GatedBlock, HeadLinear, NormWeights, Ops, PagedRows, StepInputs, Table
from kernels.packed_experts import Experts
from kernels.state_rows import StateRows
from kernels.weight_formats import Matrix
from moeserve.model.delta_net import GatedDeltaNet
from moeserve.model.indexer import Indexer
from moeserve.model.layer_inputs import LayerInput, LayerInputs
from moeserve.model.mamba import Mamba2
from moeserve.model.norms_over_ranks import NormsOverRanks, Partners
from moeserve.model.rope import rope_frequencies
from moeserve.model.shards import Shard
from moeserve.model.shared_keys import SharedKeysAttention
from moeserve.model.short_conv import ShortConv
from moeserve.model.spec import AttentionSpec, DecoderSpec, MlaSpec, ModelSpec, RopeSpec
from moeserve.model.stages import Stage
from moeserve.model.state_pool import StatePool, pools_by_layer

# Rows of a step that is computed in one call. In longer steps others read which layers are done, for example to send
# their keys and values, and Python between the layers takes no time to speak of.
_ROWS_OF_ONE_CALL = 128


class GqaAttention:
    """Multi-head attention with shared key-value heads; queries, keys and values come from one packed projection.

    qkv: rows of all query heads, then key heads, then value heads, then the gates of all query heads if there are any.
    q_norm, k_norm: weights of ``head`` ([D]) or ``flat`` norms. v_norm: [D], beside ``head`` norms. sinks: [H].
    partners: the ranks that have the other heads, None if all are here. block: all of it as one call of the compiled
    kernels, None where they do not compute it.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        ops: Ops,
        qkv: Linear,
        o: Linear,
        *,
        window: int | None,
        interleaved: bool,
        eps: float,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        v_norm: Tensor | None = None,
        sinks: Tensor | None = None,
        partners: Partners | None = None,
    ) -> None:
        self._spec, self._ops, self._qkv, self._o = spec, ops, qkv, o
        self._num_heads = spec.num_heads + 2 * spec.num_kv_heads
        self._width = self._num_heads * spec.head_dim
        self._window, self._interleaved, self._eps, self._sinks = window, interleaved, eps, sinks
        self._flat_norms: tuple[NormWeights, ...] = ()
        self._head_norms: tuple[Tensor, ...] | None = None
        if q_norm is not None and k_norm is not None:
            if spec.qk_norm == "flat":
                self._flat_norms = (NormWeights(q_norm, None, eps), NormWeights(k_norm, None, eps))
            else:
                self._head_norms = (q_norm, k_norm) if v_norm is None else (q_norm, k_norm, v_norm)
        self._norms_over_ranks: NormsOverRanks | None = None
        if partners is not None and self._flat_norms:
            self._norms_over_ranks = NormsOverRanks(spec, ops, partners, *self._flat_norms)
        is_plain = not spec.gated and spec.clip_qkv is None and self._norms_over_ranks is None
        self.block = attention_block(self._weights()) if is_plain else None

    def _weights(self) -> AttentionWeights:
        spec, norms = self._spec, [norm.weight for norm in self._flat_norms]
        return AttentionWeights(
            self._qkv,
            self._o,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            (norms[0], norms[1]) if norms else None,
            self._head_norms,
            self._eps,
            spec.scale,
            self._interleaved,
            self._window,
            self._sinks,
        )

    def __call__(self, x: Tensor, step: StepInputs, keys: Tensor, values: Tensor | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Writes the new keys and values into the pools [KV, num_slots, D]."""
        assert values is not None
        if self.block is not None:
            context = step.context
            assert isinstance(context, PagedRows)
            return self.block(x, step.cos, step.sin, context.slots, context.plan, keys, values)
        spec, ops, num_tokens = self._spec, self._ops, x.shape[0]
        projected = self._qkv(x)
        qkv = projected[:, : self._width] if spec.gated else projected
        if self._norms_over_ranks is not None:
            self._norms_over_ranks(qkv[:, : (spec.num_heads + spec.num_kv_heads) * spec.head_dim])
        else:
            self._norm_flat(qkv)
        q = ops.rotate_and_store(
            qkv.view(num_tokens, self._num_heads, -1),
            step,
            keys,
            values,
            interleaved=self._interleaved,
            head_norms=self._head_norms,
            eps=self._eps,
            clip=spec.clip_qkv,
        )
        out = ops.attend(q, keys, values, step.context, scale=spec.scale, window=self._window, sinks=self._sinks)
        out = out.view(num_tokens, -1)
        return self._o(out.mul_(ops.sigmoid(projected[:, self._width :])) if spec.gated else out)

    def _norm_flat(self, qkv: Tensor) -> None:
        """Norm queries and keys in place over the channels of all heads, if the model does."""
        first = 0
        for norm in self._flat_norms:
            part = qkv[:, first : first + norm.weight.shape[0]]
            self._ops.norm(part, norm, out=part)
            first += norm.weight.shape[0]


class MlaAttention:
    """Multi-head latent attention, absorbed: queries are taken into the latent's space, where all heads share one
    key of ``kv_lora_rank + rope_dim`` channels whose first ``kv_lora_rank`` are the value as well.
    With an indexer a token attends to some positions alone.

    down: packed projection of the hidden state to [queries or their low-rank form; latent; rotated key]. q_b: from the
    low-rank form to the queries. to_latent: per head, nope_dim -> kv_lora_rank. from_latent: kv_lora_rank -> value_dim.
    """

    def __init__(
        self,
        spec: MlaSpec,
        ops: Ops,
        down: Linear,
        o: Linear,
        *,
        kv_norm: Tensor,
        to_latent: HeadLinear,
        from_latent: HeadLinear,
        interleaved: bool,
        q_b: Linear | None = None,
        q_norm: Tensor | None = None,
        indexer: Indexer | None = None,
    ) -> None:
        """indexer: None without one, and where the spec says that an earlier layer's is shared."""
        self._spec, self._ops = spec, ops
        self._down, self._o, self._q_b, self._indexer = down, o, q_b, indexer
        self._kv_norm = NormWeights(kv_norm, None, spec.latent_norm_eps)
        self._q_norm = None if q_norm is None else NormWeights(q_norm, None, spec.latent_norm_eps)
        self._to_latent, self._from_latent = to_latent, from_latent
        self._interleaved = interleaved
        latent_and_key = (spec.kv_lora_rank, spec.rope_dim)
        self._widths = [down.out_features - sum(latent_and_key), *latent_and_key]

    def __call__(self, x: Tensor, step: StepInputs, keys: Tensor, values: Tensor | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Writes the new latents into ``keys`` [1, num_slots, D]; values are the keys of
        the indexer [1, num_slots, D], which it writes, or None."""
        spec, ops = self._spec, self._ops
        low, latent, key = torch.split(self._down(x), self._widths, -1)
        if self._q_b is not None and self._q_norm is not None:
            low = ops.norm(low, self._q_norm)
            if self._indexer is not None:
                assert values is not None
                step.chosen = self._indexer(x, low, step, values)
            low = self._q_b(low)
        q = low.unflatten(1, (spec.num_heads, -1))
        heads = ops.rotate_and_store_latent(
            self._to_latent(q[..., : spec.nope_dim]),
            q[..., spec.nope_dim :],
            ops.norm(latent, self._kv_norm),
            key,
            step,
            keys,
            interleaved=self._interleaved,
        )
        if spec.indexer is not None and step.chosen is not None:
            assert isinstance(step.context, PagedRows)
            out = indexed_attention(heads, keys, step.context.plan, step.chosen, scale=spec.scale)
            out = out[..., : spec.kv_lora_rank]
        else:
            out = ops.attend(heads, keys, None, step.context, scale=spec.scale, value_dim=spec.kv_lora_rank)
        return self._o(self._from_latent(out).flatten(1))


@dataclass(slots=True)
class ForwardBatch:
    """The rows of one step, one request's chunk after another.

    token_ids, positions: [T] int64; positions are rows of `RopeTable`. attention: for the operations of the decoder's
    device. window_attention: the same for layers with window blocks, None if no layer has window blocks. logit_rows:
    [S] int64, the rows that need logits; None for all. num_valid: int32 scalar on the device, the first row of padding;
    None without padding. states: of the recurrent layers, None for a model without recurrent layers.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionContext
    logit_rows: Tensor | None = None
    num_valid: Tensor | None = None
    states: StateRows | None = None
    window_attention: AttentionContext | None = None


class StepDecoder(Protocol):
    """A loaded model that computes steps: `Decoder`, or a decoder on transformers' modelling code."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def ops(self) -> Ops: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def gives_logits(self) -> bool:
        """See `Decoder.gives_logits`."""

    @property
    def max_model_len(self) -> int: ...

    def settle(self, begin_step: Callable[[int], None]) -> None:
        """Choose how steps are computed by computing a few, before the first real step. All ranks do so together.

        begin_step: receives each step's number of rows. Raise ModelError for a model that cannot be served after all.
        """

    @property
    def experts(self) -> list[Experts]:
        """See `Decoder.experts`."""

    def gated_blocks(self) -> Sequence[tuple[AskedGate, Tensor]]:
        """See `Decoder.gated_blocks`; empty where the gates cannot be asked ahead."""

    def arrange_pools(self, kv_layers: KvPools, state_pool: StatePool | None) -> KvPools:
        """Return the pools of `spec.kv_layers` and the states of `spec.state_layers`, as `states` takes them."""

    def forward(self, batch: ForwardBatch, kv_pools: KvPools) -> Tensor:
        """See `Decoder.forward`."""

    def logits(self, states: Tensor) -> Tensor:
        """See `Decoder.logits`."""

    def states(self, batch: ForwardBatch, kv_pools: KvPools) -> Tensor:
        """See `Decoder.states`."""

    def serve_others(self) -> Tensor:
        """See `Decoder.serve_others`."""


# Per layer: keys [KV, num_slots, Dk] and values [KV, num_slots, Dv], or None where values are a prefix of the keys. The
# keys of an indexer take the place of values. A recurrent layer has the states of its convolution and of its heads
# instead, see `GatedDeltaNet`.
KvPools = Sequence[tuple[Tensor, Tensor | None]]


class RopeTable:
    """Cosines and sines of all positions up to ``max_model_len``, made once: looking an angle up gives the same bits in
    every batch, which computing it might not."""

    def __init__(
        self, rope: RopeSpec, max_model_len: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        """device: of the tables, default the CPU, where they are computed."""
        frequencies = rope_frequencies(rope, max_model_len)
        inverse = torch.tensor(frequencies.inverse, dtype=torch.float32)
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inverse
        dtype = torch.float32 if rope.keep_fp32 else dtype
        self._cos = (angles.cos() * frequencies.scale).to(device, dtype)
        self._sin = (angles.sin() * frequencies.scale).to(device, dtype)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64, rows of the table -> cos, sin [T, rotary_dim / 2]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


Mixer = GqaAttention | MlaAttention | SharedKeysAttention | GatedDeltaNet | Mamba2 | ShortConv


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A mixer of tokens and a feed-forward block, each behind a norm and added to the residual stream.

    A layer may lack one of the two; then `input_norm` is the norm before the other, and `post_norm` is None.
    after_mixer, after_block: norms of what is added, None without them. scale: of the stream behind the layer.
    own_input: adds the layer's own input behind the block, None without one.
    """

    input_norm: NormWeights
    mixer: Mixer | None
    post_norm: NormWeights | None
    block: MoeLayer | GatedBlock | None
    after_mixer: NormWeights | None = None
    after_block: NormWeights | None = None
    scale: float = 1.0
    own_input: LayerInput | None = None

    @property
    def gate_norm(self) -> NormWeights:
        """The norm before the gate of the layer's experts."""
        own = self.block.gate_norm if isinstance(self.block, MoeLayer) else None
        return own or self.post_norm or self.input_norm

    def feed_forward(self, x: Tensor, num_valid: Tensor | None, residual: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]. Rows from `num_valid` on are padding. residual: the stream before the norm."""
        block = self.block
        assert block is not None
        return block(x, num_valid, residual) if isinstance(block, MoeLayer) else block(x)

    def native(self, next_norm: NormWeights, *, is_windowed: bool) -> LayerParts | None:
        """Return the layer's parts if the compiled kernels compute all of them."""
        attention = self.mixer.block if isinstance(self.mixer, GqaAttention) else None
        block = self.block.native() if isinstance(self.block, MoeLayer) else None
        if attention is None or block is None or self.post_norm is None or self.own_input is not None:
            return None
        inner = self.after_mixer, self.after_block
        return LayerParts(attention, block, self.post_norm, next_norm, *inner, self.scale, is_windowed)


class MtpLayer:
    """Takes in a state and the embedding of the token that follows it, and predicts the token after that (multi-token
    prediction, https://arxiv.org/abs/2412.19437, section 2.2). The states are the model's after its last norm.

    projection: from both, each behind its norm, side by side, to one state. norm: before the output projection, None
    without one. returns_normed: the state for one token more is the one after that norm.
    """

    def __init__(
        self,
        ops: Ops,
        layer: DecoderLayer,
        projection: Linear,
        *,
        embedding_norm: NormWeights,
        hidden_norm: NormWeights,
        norm: NormWeights | None,
        returns_normed: bool,
    ) -> None:
        self._ops, self._layer, self._projection = ops, layer, projection
        self._embedding_norm, self._hidden_norm, self._norm = embedding_norm, hidden_norm, norm
        self._returns_normed = returns_normed

    def __call__(
        self, embedded: Tensor, states: Tensor, step: StepInputs, pools: tuple[Tensor, Tensor | None], rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """embedded, states [T, H] -> for `rows` [S] int64 the input [S, H] of the output projection, and the states
        [S, H] from which the layer predicts one token more. Write keys and values of all T rows into `pools`."""
        ops, layer = self._ops, self._layer
        both = [ops.norm(embedded, self._embedding_norm), ops.norm(states, self._hidden_norm)]
        residual = self._projection(torch.cat(both, -1))
        assert layer.mixer is not None
        assert layer.post_norm is not None
        out = layer.mixer(ops.norm(residual, layer.input_norm), step, *pools)
        out, residual = out.index_select(0, rows), residual.index_select(0, rows)
        if not rows.shape[0]:
            return residual, residual
        normed = ops.norm_of_sum(out, residual, layer.post_norm, 1.0)
        out = layer.feed_forward(normed, None, residual)
        if self._norm is None:
            residual.add_(out)
            return residual, residual
        normed = ops.norm_of_sum(out, residual, self._norm, 1.0)
        return normed, normed if self._returns_normed else residual


class Border(Protocol):
    """The way of the residual stream into the layers of a stage, and out of them."""

    @property
    def stage(self) -> Stage: ...

    def take(self, num_rows: int) -> Tensor:
        """Wait for the rows [num_rows, hidden] that the stage before has computed, and return them."""

    def give(self, rows: Tensor) -> None:
        """Send rows to the next stage. They are not written to any more."""


class Decoder:
    """A loaded model, a stage of one, or a shard of one. It holds weights and tables; the data of requests comes with
    each call.

    embedding: [vocab, hidden], possibly of a lower precision than ``dtype``, the dtype of all computation. observers:
    called for each layer; a replayed graph calls none. mtp: the layer that drafts tokens, None where it is not used.
    layer_inputs: None unless layers have inputs of their own. border: None for a whole model. embedding and lm_head are
    None where other stages have them. partners: None unless the weights are a shard.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        embedding: Matrix | None,
        layers: Sequence[DecoderLayer],
        norm: NormWeights,
        lm_head: Linear | None,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        observers: Sequence[AnyObserver] = (),
        mtp: MtpLayer | None = None,
        border: Border | None = None,
        partners: Partners | None = None,
        layer_inputs: LayerInputs | None = None,
    ) -> None:
        self.spec = spec
        self._layer_inputs = layer_inputs
        self._border = border
        self._partners = partners
        self.mtp = mtp
        self.dtype = dtype
        self.device = ops.device
        self.max_model_len = max_model_len
        self.ops = ops
        self._embedding = None if embedding is None else ops.pack_table(embedding, dtype)
        self._layers = tuple(layers)
        # The norm after each layer's second sum.
        self._next_norms = (*(layer.input_norm for layer in self._layers[1:]), norm)
        self._lm_head = lm_head
        angles = torch.float32 if ops.wide_angles else dtype
        self._rope = RopeTable(spec.rope, max_model_len, angles, ops.device)
        window_rope = spec.window_rope
        self._window_rope = None if window_rope is None else RopeTable(window_rope, max_model_len, angles, ops.device)
        self._observers = observers
        one_call = dtype is torch.float32 and partners is None
        self._native = _native_layers(spec, self._layers, self._next_norms) if one_call else None

    def settle(self, begin_step: Callable[[int], None]) -> None:
        """Do nothing: there is nothing to choose. See `StepDecoder.settle`."""

    @property
    def experts(self) -> list[Experts]:
        """The local experts of each layer that has some."""
        return [layer.block.experts for layer in self._layers if isinstance(layer.block, MoeLayer)]

    def gated_blocks(self) -> list[tuple[MoeLayer, Tensor]]:
        """Return the blocks with experts, each with the weight [hidden] of the norm before it."""
        return [(layer.block, layer.gate_norm.weight) for layer in self._layers if isinstance(layer.block, MoeLayer)]

    def arrange_pools(self, kv_layers: KvPools, state_pool: StatePool | None) -> KvPools:
        return pools_by_layer(self.spec, kv_layers, state_pool)

    def forward(self, batch: ForwardBatch, kv_pools: KvPools) -> Tensor:
        """Return the logits [S, vocab] of the rows that need them, in the model's dtype. See `states`.

        A stage without the output projection returns its states.
        """
        states = self.states(batch, kv_pools)
        return self.logits(states) if self.gives_logits else states

    @property
    def gives_logits(self) -> bool:
        """False for a stage without the output projection."""
        return self._lm_head is not None

    def logits(self, states: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab]."""
        assert self._lm_head is not None, "another stage has the output projection"
        logits, spec = self._lm_head(states), self.spec
        if self._partners is not None:
            logits = self._join_logits(self._partners, logits)
        if spec.logit_divisor != 1.0:
            logits.div_(spec.logit_divisor)
        return logits if spec.logit_softcap is None else self.ops.softcap(logits, spec.logit_softcap)

    def _join_logits(self, partners: Partners, logits: Tensor) -> Tensor:
        """Return the logits [S, vocab] of all ranks, of which this one has some columns."""
        size, count = self.spec.vocab_size, partners.shard.count
        joined = logits.new_empty((len(logits), size))
        for number, part in enumerate(partners.gather(logits)):
            places = Shard(number, count).of_equal(size)
            joined[:, places.start : places.stop] = part
        return joined

    def states(self, batch: ForwardBatch, kv_pools: KvPools) -> Tensor:
        """Return the states [S, hidden] after the last norm, of the rows that need logits.

        Call it under ``torch.inference_mode``. Mutates ``kv_pools``: the rows' keys and values are stored at their
        slots, and the states of recurrent layers advance. Positions must lie below ``max_model_len``. The last layer's
        feed-forward block runs only on the rows that need logits. On a GPU the call waits for nothing and allocates
        only memory that the caching allocator holds, so that a graph can record it; rows with slot -1 come out as
        noise.

        A stage takes the residual stream from the one before it, and gives it to the next one; only the last stage
        returns states that mean something.
        """
        border = self._border
        if border is None or border.stage.is_first:
            residual = self._embed(batch.token_ids)
        else:
            residual = border.take(len(batch.token_ids))
        states = self._pass_layers(residual, batch, kv_pools)
        if border is not None and not border.stage.is_last:
            border.give(residual)
        return states

    def _pass_layers(self, residual: Tensor, batch: ForwardBatch, kv_pools: KvPools) -> Tensor:
        """Compute all layers over the residual stream [T, hidden] and return the states after the norm behind them.

        The stream is overwritten: where all rows need logits, it is the one behind the last layer.
        """
        spec, ops, rows, num_valid = self.spec, self.ops, batch.logit_rows, batch.num_valid
        step, windowed = self._step_inputs(batch)
        inputs = None if self._layer_inputs is None else self._layer_inputs(batch.token_ids, residual)
        normed = ops.norm(residual, self._layers[0].input_norm)
        if (
            self._native is not None
            and len(normed) <= _ROWS_OF_ONE_CALL
            and not any(map(observes_states, self._observers))
        ):
            normed, chosen = self._native(normed, residual, step, windowed, kv_pools, rows)
            for observer in self._observers:
                observer.chose_all(chosen)
            return normed
        last, multiplier, partners = len(self._layers) - 1, spec.residual_multiplier, self._partners
        for number, (layer, (keys, values), next_norm) in enumerate(
            zip(self._layers, kv_pools[: len(self._layers)], self._next_norms, strict=True)
        ):
            added = None
            if layer.mixer is not None:
                added = layer.mixer(normed, step if spec.windows[number] is None else windowed, keys, values)
                if layer.after_mixer is not None:
                    added = ops.norm(added, layer.after_mixer)
            if number == last and rows is not None:
                # From here on a row meets no other row.
                residual, num_valid = residual.index_select(0, rows), None
                inputs = None if inputs is None else inputs.index_select(0, rows)
                if not rows.shape[0]:
                    _serve_others(layer, residual)
                    return residual
                normed = normed.index_select(0, rows)
                added = None if added is None else added.index_select(0, rows)
            if added is not None:
                if partners is not None:
                    added = partners.add_up(added)
                normed = ops.norm_of_sum(added, residual, layer.post_norm or next_norm, multiplier)
            if layer.block is not None:
                added = layer.feed_forward(normed, num_valid, residual)
                if partners is not None:
                    added = partners.add_up(added)
                if layer.after_block is not None:
                    added = ops.norm(added, layer.after_block)
                if layer.own_input is not None and inputs is not None:
                    added = layer.own_input(residual.add_(added), inputs[:, number])
                normed = ops.norm_of_sum(added, residual, next_norm, multiplier, layer.scale)
            for observer in self._observers:
                observer.passed()
        return normed

    def _step_inputs(self, batch: ForwardBatch) -> tuple[StepInputs, StepInputs]:
        """Return the inputs of layers without a window, and of those with one."""
        step = StepInputs(*self._rope(batch.positions), batch.attention, batch.states)
        if self._window_rope is None and batch.window_attention is None:
            return step, step
        cos, sin = (step.cos, step.sin) if self._window_rope is None else self._window_rope(batch.positions)
        return step, StepInputs(cos, sin, batch.window_attention or batch.attention, batch.states)

    def _embed(self, token_ids: Tensor) -> Tensor:
        assert self._embedding is not None, "another stage has the embedding"
        if self._partners is None:
            embedded = self._embedding(token_ids)
        else:
            embedded = self._partners.add_up(self._own_rows(self._embedding, self._partners.shard, token_ids))
        return embedded if self.spec.embedding_multiplier == 1.0 else embedded.mul_(self.spec.embedding_multiplier)

    def _own_rows(self, embedding: Table, shard: Shard, token_ids: Tensor) -> Tensor:
        """Return the rows of the tokens that this shard has, and zeros for others."""
        own = shard.of(self.spec.vocab_size)
        places = token_ids - own.start
        is_other = (places < 0) | (places >= len(own))
        return embedding(places.masked_fill_(is_other, 0)).masked_fill_(is_other[:, None], 0.0)

    def predict_next(
        self, batch: ForwardBatch, states: Tensor, rows: Tensor, kv_pools: KvPools
    ) -> tuple[Tensor, Tensor]:
        """Have the MTP layer predict the tokens that follow `batch.token_ids`, greedily.

        states [T, hidden]: after the last norm, of the positions before these tokens, which `batch.positions` are. Or
        what this function returned for them. rows: [S] int64, the rows to predict for. Return tokens [S] int64, and
        their states [S, hidden]. Mutate the layer's pool.
        """
        assert self.mtp is not None
        embedded = self._embed(batch.token_ids)
        step = StepInputs(*self._rope(batch.positions), batch.attention, None)
        predicted, states = self.mtp(embedded, states, step, kv_pools[-1], rows)
        return self.logits(predicted).argmax(-1), states

    def serve_others(self) -> Tensor:
        """Compute rows of other ranks with local experts, in a step without rows of this rank. Return [0, hidden]."""
        no_rows = torch.empty((0, self.spec.hidden_size), dtype=self.dtype, device=self.device)
        for layer in self._layers:
            _serve_others(layer, no_rows)
        return no_rows


def _native_layers(
    spec: DecoderSpec, layers: Sequence[DecoderLayer], next_norms: Sequence[NormWeights]
) -> NativeLayers | None:
    """Return all layers as one call of the compiled kernels, None where they do not compute all parts of each."""
    parts = [
        layer.native(norm, is_windowed=window is not None)
        for layer, norm, window in zip(layers, next_norms, spec.windows, strict=True)
    ]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    return native_layers(known, known[0].attention.kernels, spec.hidden_size, spec.residual_multiplier)


def _serve_others(layer: DecoderLayer, no_rows: Tensor) -> None:
    if isinstance(layer.block, MoeLayer):
        layer.block.serve_others(no_rows)
