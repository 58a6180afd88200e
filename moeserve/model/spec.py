"""Models described by data, and the progress and errors that the preparation of a model reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from kernels.specs import Activation, GateSpec
from moeserve.model.stages import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(ABC):
    """The facts about a language model that the service needs, whichever code computes it.

    sparse_layers: one entry per layer; a sparse layer has experts. max_position: the longest context, in tokens, for
    which the position embedding is meant.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    max_position: int
    sparse_layers: tuple[bool, ...]
    moe: MoeSpec | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    quantization: QuantizationSpec | None = None

    def longest_context(self, asked: int | None) -> int:
        """Return the longest context that can be served. asked: the one that a service is to have, None for any."""
        return self.max_position

    @property
    def num_layers(self) -> int:
        return len(self.sparse_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer, sparse in enumerate(self.sparse_layers) if sparse)

    @property
    def expert_hidden_size(self) -> int:
        """The width of the rows that experts take."""
        own = None if self.moe is None else self.moe.hidden_size
        return self.hidden_size if own is None else own

    @property
    def last_layer_is_partial(self) -> bool:
        """True if the last layer has experts, and they see only the rows that need logits."""
        return False

    @property
    def keeps_snapshots(self) -> bool:
        """True if a request's states can be copied."""
        return True

    @property
    @abstractmethod
    def kv_layers(self) -> tuple[KvLayerSpec, ...]:
        """The KV caches of the layers that have one."""

    @property
    @abstractmethod
    def state_layers(self) -> tuple[tuple[StateShape, ...], ...]:
        """The states of a request in each layer that has some."""


LayerPart = Literal["mixer", "block"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """A model on our own code: a decoder described by data.

    windows: one entry per layer. With a window of n a query sees the last n positions, its own included; with None it
    sees all. window_attention, window_rope: of the layers with a window, None if they are as in the others.
    recurrent_layers: one entry per layer, or empty for none; a recurrent layer has `recurrent` in place of attention.
    shared_choices: one entry per layer, or empty for none; such a layer attends to the positions that the indexer of an
    earlier layer has chosen, and has no indexer of its own. num_shared_kv: the last layers that attend over keys and
    values of the last layer of their kind before them; wide_shared_kv: with dense blocks of twice the width.
    layer_inputs: of layers that get an input of their own, None without. single_parts: one entry per layer, the only
    part that it has, or empty if all have a mixer and a block. intermediate_size: of the dense layers.
    zero_centred_norms: norms multiply by one plus the stored weight. added_norms: what a mixer or a block adds passes a
    norm first. layer_scales: a factor on the stream behind each layer. fused_mlps: a checkpoint has gate and up of
    dense blocks and of shared experts in one tensor, as Granite does. logit_softcap: c, of logits that become c
    tanh(logit / c). mtp: the layer that drafts tokens, which is none of the `num_layers`; None unless it is used.
    """

    intermediate_size: int
    attention: AttentionSpec | MlaSpec
    rope: RopeSpec
    windows: tuple[int | None, ...]
    window_attention: AttentionSpec | None = None
    window_rope: RopeSpec | None = None
    recurrent_layers: tuple[bool, ...] = ()
    recurrent: DeltaNetSpec | MambaSpec | ShortConvSpec | None = None
    shared_choices: tuple[bool, ...] = ()
    num_shared_kv: int = 0
    wide_shared_kv: bool = False
    layer_inputs: LayerInputsSpec | None = None
    single_parts: tuple[LayerPart, ...] = ()
    activation: Activation = field(default_factory=Activation)
    mlp_bias: bool = False
    fused_mlps: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    zero_centred_norms: bool = False
    added_norms: bool = False
    layer_scales: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    tie_embeddings: bool = False
    lm_head_bias: bool = False
    mtp: MtpSpec | None = None

    def longest_context(self, asked: int | None) -> int:
        # Stretched positions cost quality in short contexts, so they are for a service that asks for longer ones.
        short = self.rope.short_context
        return self.max_position if asked is not None or short is None else min(short, self.max_position)

    def is_recurrent(self, layer: int) -> bool:
        return bool(self.recurrent_layers) and self.recurrent_layers[layer]

    def has(self, part: LayerPart, layer: int) -> bool:
        return not self.single_parts or self.single_parts[layer] == part

    def attention_of(self, layer: int) -> AttentionSpec | MlaSpec:
        attention = self.attention if self.windows[layer] is None else self.window_attention or self.attention
        if isinstance(attention, MlaSpec) and attention.indexer is not None and self.shares_choice(layer):
            return replace(attention, indexer=replace(attention.indexer, is_shared=True))
        return attention

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends over: itself, or an earlier one."""
        first_shared = self.num_layers - self.num_shared_kv
        if layer < first_shared:
            return layer
        has_window = self.windows[layer] is not None
        alike = (n for n in reversed(range(first_shared)) if (self.windows[n] is not None) is has_window)
        return next(alike, layer)

    def dense_width(self, layer: int) -> int:
        return self.intermediate_size * (2 if self.wide_shared_kv and self.kv_source(layer) != layer else 1)

    def shares_choice(self, layer: int) -> bool:
        return bool(self.shared_choices) and self.shared_choices[layer]

    @property
    def joined_layers(self) -> list[int]:
        """The layers that need the one before on the same rank."""
        return [layer for layer in range(self.num_layers) if self.shares_choice(layer)]

    @property
    def gpu_obstacle(self) -> str | None:
        """Why no GPU serves the model, in a sentence; None if one does."""
        is_indexed = isinstance(self.attention, MlaSpec) and self.attention.indexer is not None
        has_other_states = isinstance(self.recurrent, MambaSpec | ShortConvSpec)
        if is_indexed:
            kind = f"models of type {self.model_type!r}"
            return f"--device cuda: {kind} are computed on a CPU only so far, as their attention is indexed."
        if not (self.added_norms or self.single_parts or has_other_states):
            return None
        code = "our own code computes models of type"
        return f"--device cuda: {code} {self.model_type!r} on a CPU only so far; --model-impl transformers takes a GPU."

    @property
    def last_layer_is_partial(self) -> bool:
        # A layer behind the last one reads the states of all rows.
        return self.sparse_layers[-1] and self.mtp is None

    def of_layers(self, stage: Stage) -> DecoderSpec:
        """Return the decoder that has the layers of a stage alone, numbered from 0. Raise UnsupportedModel for a stage
        that begins with a layer that needs another one beside it."""
        if stage.first < self.num_layers and self.shares_choice(stage.first):
            raise UnsupportedModel(
                f"--pipeline-parallel-size: layer {stage.first} attends to the positions that layer {stage.first - 1} "
                "does, so one rank has both: choose other --layers-per-rank."
            )
        if self.layer_inputs is not None or self.num_shared_kv:
            raise UnsupportedModel(
                f"--pipeline-parallel-size: layers of this {self.model_type} model are not shared among ranks so far."
            )
        of_stage = slice(stage.first, stage.end)
        return replace(
            self,
            sparse_layers=self.sparse_layers[of_stage],
            windows=self.windows[of_stage],
            recurrent_layers=self.recurrent_layers[of_stage],
            shared_choices=self.shared_choices[of_stage],
            single_parts=self.single_parts[of_stage],
        )

    @property
    def with_mtp_layer(self) -> DecoderSpec:
        """The decoder whose last layer is the MTP layer, which has attention without a window."""
        assert self.mtp is not None
        return replace(
            self,
            mtp=None,
            sparse_layers=(*self.sparse_layers, self.mtp.is_sparse),
            windows=(*self.windows, None),
            recurrent_layers=(*self.recurrent_layers, False) if self.recurrent_layers else (),
            shared_choices=(*self.shared_choices, False) if self.shared_choices else (),
        )

    @property
    def kv_layers(self) -> tuple[KvLayerSpec, ...]:
        """The KV caches of the layers with attention, that of the MTP layer last."""
        with_attention = (
            number
            for number in range(self.num_layers)
            if self.has("mixer", number) and not self.is_recurrent(number) and self.kv_source(number) == number
        )
        layers = tuple(_kv_layer(self.attention_of(number), self.windows[number]) for number in with_attention)
        return layers if self.mtp is None else (*layers, _kv_layer(self.attention, None))

    @property
    def state_layers(self) -> tuple[tuple[StateShape, ...], ...]:
        """The states of a request in each recurrent layer: inputs of the convolution, and where it has heads a matrix
        for each."""
        return () if self.recurrent is None else (self.recurrent.states,) * sum(self.recurrent_layers)


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """A layer that predicts one token more (multi-token prediction, https://arxiv.org/abs/2412.19437, section 2.2).

    From a position's state and the embedding of the token that follows, it predicts the token after that. is_sparse:
    it has experts. Names of tensors, without `.weight`: block, of its decoder layer; embedding_norm and hidden_norm, of
    the norms of embedding and state; projection, of the two side by side to one state; norm, before the output
    projection, None without one. returns_normed: for one token more the layer gets its state behind this norm.
    """

    block: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str | None
    returns_normed: bool = False
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class LayerInputsSpec:
    """Inputs of `width` channels for each layer, from a table of `vocab_size` tokens and from the embedding."""

    width: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Multi-head attention with shared key and value heads.

    qk_norm: RMS norm of queries and keys, per ``head`` or over the ``flat`` projection. clip_qkv: bound on the
    projections. value_norm: RMS norm of each value head, without weights. keys_are_values: one projection gives keys
    and values, before norms and rotation. sinks: one learned logit per head takes part in the softmax. gated: the
    output is multiplied by the sigmoid of one more projection, stored head by head behind the queries.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "flat"] = "none"
    clip_qkv: float | None = None
    value_norm: bool = False
    keys_are_values: bool = False
    sinks: bool = False
    gated: bool = False


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """A gated delta net (https://arxiv.org/abs/2412.06464) in place of attention.

    Queries, keys and values pass through a short convolution of `conv_width` tokens; each key head serves equally many
    value heads. by_key_head: the checkpoint stores the projections of a key head and its value heads side by side, in
    two tensors instead of four.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    by_key_head: bool

    @property
    def key_channels(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_channels(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_channels + self.value_channels

    @property
    def states(self) -> tuple[StateShape, ...]:
        heads = (self.num_value_heads, self.key_dim, self.value_dim)
        return _conv_state(self.conv_width, self.conv_channels), StateShape(heads, keep_fp32=True)


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """A Mamba-2 layer (https://arxiv.org/abs/2405.21060) in place of attention.

    x of all heads, B and C of all groups pass through a short convolution of `conv_width` tokens. least_step: bound on
    the size of a token's step. bias: on both projections.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    conv_width: int
    least_step: float = 0.0
    conv_bias: bool = False
    bias: bool = False

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.channels + 2 * self.num_groups * self.state_dim

    @property
    def states(self) -> tuple[StateShape, ...]:
        heads = (self.num_heads, self.state_dim, self.head_dim)
        return _conv_state(self.conv_width, self.conv_channels), StateShape(heads, keep_fp32=True)


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A convolution of `width` tokens between two gates in place of attention (LFM2). bias: on it and on both
    projections."""

    channels: int
    width: int
    bias: bool = False

    @property
    def states(self) -> tuple[StateShape, ...]:
        return (_conv_state(self.width, self.channels),)


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434), served in its absorbed form.

    A token caches one latent of ``kv_lora_rank`` channels, normalised, and one rotated key of ``rope_dim`` channels.
    q_lora_rank is None when queries come straight from the hidden state. bias: on the two down projections and the
    output. indexer: None where a token attends to all positions.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    bias: bool = False
    latent_norm_eps: float = 1e-6
    indexer: IndexerSpec | None = None


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """Narrow heads that score all positions; a token attends to the `top_k` best (https://arxiv.org/abs/2512.02556,
    section 2.1).

    A token caches one key of ``head_dim`` channels for them. interleaved: how their heads are rotated, see `RopeSpec`.
    is_shared: the layer has no such heads, and attends to the positions that an earlier layer has chosen.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    norm_eps: float = 1e-6
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """The mixture-of-experts block of the sparse layers.

    gate_fp32: project the gate in fp32. transposed_experts: the checkpoint stores fused expert matrices [in, out] with
    alternating gate and up channels. own_norms: gate, experts and shared expert have norms of their own, as in Gemma 4
    (`kernels.ops.MoeNorms`). expert_scales: a factor on the weight of each expert. hidden_size: of the rows that
    experts take, None for the model's; two projections lead to these rows and back.
    """

    num_experts: int
    intermediate_size: int
    gate: GateSpec
    activation: Activation
    gate_fp32: bool = False
    gate_bias: bool = False
    correction_bias: bool = False
    expert_bias: bool = False
    transposed_experts: bool = False
    own_norms: bool = False
    expert_scales: bool = False
    shared: SharedExpertSpec | None = None
    hidden_size: int | None = None


@dataclass(frozen=True, slots=True)
class SharedExpertSpec:
    """A dense block beside the experts; ``gated`` scales its output by a sigmoid of one more projection."""

    intermediate_size: int
    gated: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class KvLayerSpec:
    """The KV cache of one layer.

    Per token it holds ``num_heads * key_dim`` numbers and ``num_heads * value_dim`` more. value_dim is 0 if the values
    are a prefix of the keys; where there is an indexer, its keys lie in the place of values. window: the number of
    tokens that a token sees, itself included; None if it sees all, or if the tokens that it does not see cannot be left
    out.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


def _kv_layer(attention: AttentionSpec | MlaSpec, window: int | None) -> KvLayerSpec:
    if isinstance(attention, MlaSpec):
        indexer = attention.indexer
        index_dim = 0 if indexer is None or indexer.is_shared else indexer.head_dim
        return KvLayerSpec(1, attention.kv_lora_rank + attention.rope_dim, index_dim, window)
    return KvLayerSpec(attention.num_kv_heads, attention.head_dim, attention.head_dim, window)


@dataclass(frozen=True, slots=True)
class StateShape:
    """One recurrent state of a request. keep_fp32: in float32 whatever the model's dtype, as it sums up all tokens."""

    shape: tuple[int, ...]
    keep_fp32: bool


def _conv_state(width: int, channels: int) -> StateShape:
    return StateShape((width - 1, channels), keep_fp32=False)


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """Compressed weights of a checkpoint.

    block: rows and columns that share one scale, of mxfp4 and fp8, and of matrices in blocks of other kinds. form: the
    dtype of most matrices that consist of several tensors. rounds_rows: the makers round activations to fp8 as they
    come, by row and as many columns as share a scale of the weights. widths: usual bits of codes in words of 32 bits,
    each with the columns that share a scale, 0 if they are not told. zeros_less_one, has_order: of GPTQ; see
    `moeserve.model.packed.parts`.
    """

    kind: Literal["mxfp4", "fp8", "gptq", "awq", "compressed-tensors", "modelopt"]
    block: tuple[int, int] = (1, 1)
    form: str = ""
    widths: tuple[tuple[int, int], ...] = ()
    rounds_rows: bool = False
    zeros_less_one: bool = False
    has_order: bool = False


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The facts that decide the rotation of a position.

    rotary_dim: the number of rotated channels, from the first on; even. interleaved: pairs are (0, 1), (2, 3), ...
    instead of (i, i + rotary_dim / 2). keep_fp32: rotate in fp32 also in models of lower precision.
    original_max_position: the context length before any extension. Each other field belongs to some kinds only.
    """

    kind: str
    theta: float
    rotary_dim: int
    original_max_position: int
    interleaved: bool = False
    keep_fp32: bool = False
    factor: float = 1.0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    proportion: float = 1.0
    short_mscale: float | None = None
    long_mscale: float | None = None

    @property
    def short_context(self) -> int | None:
        """The longest context for the short factors of LongRoPE; None if all contexts have the same angles."""
        same = (self.short_factor, self.short_mscale) == (self.long_factor, self.long_mscale)
        return None if same else self.original_max_position


class ModelError(Exception):
    """A model cannot be served. The message is one sentence for a terminal: the fault and the remedy."""


class UnsupportedModel(ModelError):
    """moeserve does not serve models of this kind."""


class CheckpointError(ModelError):
    """The weight files are missing, damaged or do not fit the configuration."""


class MissingWeights(CheckpointError):
    """Weight files are not there, in part or in a form that is read."""


# The message for weights that load but compute no finite numbers.
NO_NUMBERS = "The model's answer to a first prompt is not finite numbers: its weights are damaged."


# (stage, done, total); total is 0 while the amount of work is unknown. Calls never overlap, but a download calls from
# threads of its own.
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Ignore all progress."""
