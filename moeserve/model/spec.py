"""A decoder described by data: everything the generic decoder and the weight loader need to know about a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kernels.specs import Activation, GateSpec

# The exceptions that model resolution, configuration, weight loading and the manifest raise at the user.


class ModelError(Exception):
    """A model cannot be served. The message is one sentence fit for a terminal: what is wrong and what to do."""


class UnsupportedModel(ModelError):
    """The model is of a kind that moeserve does not serve."""


class CheckpointError(ModelError):
    """The weight files are missing, damaged or do not fit the configuration."""


# Rotary position embedding: from configuration to inverse frequencies. Plain arithmetic, no tensors. Sources: rotary
# embedding https://arxiv.org/abs/2104.09864, YaRN https://arxiv.org/abs/2309.00071, LongRoPE
# https://arxiv.org/abs/2402.13753, and the frequency bands of Llama 3.1.


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Everything that decides the rotation of a position.

    rotary_dim: channels rotated, from the first (even). interleaved: pairs are (0, 1), (2, 3), ... instead of
    (i, i + rotary_dim / 2). keep_fp32: the rotation is done in fp32 also in models of lower precision.
    original_max_position: the context length before any extension. The other fields belong to single kinds.
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
    short_mscale: float | None = None
    long_mscale: float | None = None


@dataclass(frozen=True, slots=True)
class Frequencies:
    """inverse: rotary_dim / 2 angles per position, in radians. scale: factor on every cosine and sine."""

    inverse: tuple[float, ...]
    scale: float


def parse_rope(
    parameters: Mapping[str, Any],
    *,
    rotary_dim: int,
    max_position: int,
    interleaved: bool = False,
    keep_fp32: bool = False,
) -> RopeSpec:
    """Read the ``rope_parameters`` of a configuration.

    Raises UnsupportedModel for a kind of scaling that is not served, ModelError for one that lacks a value.
    """
    kind = parameters.get("rope_type") or "default"
    if kind not in _KINDS:
        raise UnsupportedModel(f"Rotary embeddings of type {kind!r} are not supported.")
    required = _REQUIRED.get(kind, ())
    missing = [name for name in required if parameters.get(name) is None]
    if missing:
        raise ModelError(f"The configuration's {kind} rope_parameters lack {', '.join(missing)}.")
    original = parameters.get("original_max_position_embeddings") or max_position
    factor = parameters.get("factor")
    values: dict[str, Any] = {
        name: float(parameters[name])
        for name in ("attention_factor", "low_freq_factor", "high_freq_factor", "short_mscale", "long_mscale")
        if parameters.get(name) is not None
    }
    # A zero here means "not given" to the reference, as None does.
    values |= {
        name: float(parameters[name])
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        if parameters.get(name)
    }
    if parameters.get("truncate") is not None:
        values["truncate"] = bool(parameters["truncate"])
    for name in ("short_factor", "long_factor"):
        if kind == "longrope":
            values[name] = tuple(float(value) for value in parameters[name])
            if len(values[name]) != rotary_dim // 2:
                raise ModelError(f"The configuration's {name} has {len(values[name])} values, not {rotary_dim // 2}.")
    return RopeSpec(
        kind=kind,
        theta=float(parameters.get("rope_theta") or 10000.0),
        rotary_dim=rotary_dim,
        original_max_position=int(original),
        interleaved=interleaved,
        keep_fp32=keep_fp32,
        factor=float(factor) if factor is not None else max_position / original,
        **values,
    )


def rope_frequencies(rope: RopeSpec, max_model_len: int) -> Frequencies:
    """Inverse frequencies of a model served with contexts of up to ``max_model_len`` tokens.

    They must not depend on the length of a single request, because cached keys are shared between requests:
    longrope therefore uses its long factors for all requests as soon as ``max_model_len`` exceeds the original
    context, and dynamic scaling is the plain one up to the context it starts from.
    """
    return _KINDS[rope.kind](rope, max_model_len)


def yarn_softmax_multiplier(rope: RopeSpec) -> float:
    """The factor that DeepSeek models put on the attention scale when their context is extended."""
    if rope.kind == "default" or not rope.mscale_all_dim:
        return 1.0
    return _yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2


def _plain(rope: RopeSpec) -> list[float]:
    return [rope.theta ** (-channel / rope.rotary_dim) for channel in range(0, rope.rotary_dim, 2)]


def _default(rope: RopeSpec, max_model_len: int) -> Frequencies:
    return Frequencies(tuple(_plain(rope)), 1.0)


def _linear(rope: RopeSpec, max_model_len: int) -> Frequencies:
    return Frequencies(tuple(inverse / rope.factor for inverse in _plain(rope)), 1.0)


def _llama3(rope: RopeSpec, max_model_len: int) -> Frequencies:
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor

    def stretch(inverse: float) -> float:
        wavelength = 2 * math.pi / inverse
        if wavelength < shortest:
            return inverse
        if wavelength > longest:
            return inverse / rope.factor
        smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        return (1 - smooth) * inverse / rope.factor + smooth * inverse

    return Frequencies(tuple(stretch(inverse) for inverse in _plain(rope)), 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(rope: RopeSpec, max_model_len: int) -> Frequencies:
    def channel_of(rotations: float) -> float:
        """The channel pair that turns ``rotations`` times over the original context."""
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = channel_of(rope.beta_fast), channel_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    blended = []
    for index, inverse in enumerate(_plain(rope)):
        interpolated = min(max((index - low) / (high - low), 0.0), 1.0)
        blended.append(inverse / rope.factor * interpolated + inverse * (1 - interpolated))
    scale = rope.attention_factor
    if scale is None:
        if rope.mscale and rope.mscale_all_dim:
            scale = _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
        else:
            scale = _yarn_mscale(rope.factor, 1.0)
    return Frequencies(tuple(blended), scale)


def _longrope(rope: RopeSpec, max_model_len: int) -> Frequencies:
    extended = max_model_len > rope.original_max_position
    factors = rope.long_factor if extended else rope.short_factor
    scale = rope.long_mscale if extended else rope.short_mscale
    if scale is None:
        scale = rope.attention_factor
    if scale is None:
        grown = rope.factor > 1
        scale = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position)) if grown else 1.0
    return Frequencies(tuple(i / f for i, f in zip(_plain(rope), factors, strict=True)), scale)


_KINDS: dict[str, Callable[[RopeSpec, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Multi-head attention with shared key and value heads.

    qk_norm: RMS norm of queries and keys, per ``head`` or over the ``flat`` projection.
    clip_qkv: bound on the projections. sinks: one learned logit per head takes part in the softmax.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "flat"] = "none"
    clip_qkv: float | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434), served in its absorbed form.

    A token caches one latent of ``kv_lora_rank`` channels, normalised, and one rotated key of ``rope_dim`` channels.
    q_lora_rank is None when queries come straight from the hidden state. bias: on the two down projections and the
    output.
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


@dataclass(frozen=True, slots=True)
class SharedExpertSpec:
    """A dense block beside the experts; ``gated`` scales its output by a sigmoid of one more projection."""

    intermediate_size: int
    gated: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """The mixture-of-experts block of the sparse layers.

    gate_fp32: the gate's projection is done in fp32. transposed_experts: a checkpoint's fused expert matrices are
    stored [in, out] with alternating gate and up channels.
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
    shared: SharedExpertSpec | None = None


@dataclass(frozen=True, slots=True)
class KvLayerSpec:
    """What one layer caches per token: ``num_heads * key_dim`` and, unless values are a prefix of the keys
    (``value_dim`` 0), ``num_heads * value_dim`` numbers."""

    num_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """Compressed weights that are expanded on load. block: rows and columns that share one scale."""

    kind: Literal["mxfp4", "fp8"]
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder-only language model.

    sparse_layers and windows have one entry per layer: whether it has experts, and its sliding window in tokens (a
    query sees the last ``window`` positions, its own included; None sees all). max_position: longest context in
    tokens that the position embedding is meant for. intermediate_size: of the dense layers.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position: int
    attention: AttentionSpec | MlaSpec
    rope: RopeSpec
    sparse_layers: tuple[bool, ...]
    windows: tuple[int | None, ...]
    moe: MoeSpec | None = None
    activation: Activation = field(default_factory=Activation)
    mlp_bias: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    tie_embeddings: bool = False
    lm_head_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    quantization: QuantizationSpec | None = None

    @property
    def num_layers(self) -> int:
        return len(self.sparse_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(layer for layer, sparse in enumerate(self.sparse_layers) if sparse)

    @property
    def kv_layers(self) -> tuple[KvLayerSpec, ...]:
        attention = self.attention
        if isinstance(attention, MlaSpec):
            layer = KvLayerSpec(1, attention.kv_lora_rank + attention.rope_dim, 0)
        else:
            layer = KvLayerSpec(attention.num_kv_heads, attention.head_dim, attention.head_dim)
        return (layer,) * self.num_layers


# How long-running model preparation tells its caller how far it is.


# (stage, done, total); total is 0 while the amount of work is not known. Calls never overlap, but downloads make them
# from threads of their own.
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Progress for callers that want none."""
