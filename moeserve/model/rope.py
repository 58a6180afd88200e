"""Rotary position embedding: from a configuration to inverse frequencies, torch-free.

Sources: rotary embedding https://arxiv.org/abs/2104.09864, YaRN https://arxiv.org/abs/2309.00071, LongRoPE
https://arxiv.org/abs/2402.13753, and the frequency bands of Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moeserve.model.spec import ModelError, RopeSpec, UnsupportedModel


@dataclass(frozen=True, slots=True)
class Frequencies:
    """inverse: rotary_dim / 2 angles per position, in radians. scale: factor on every cosine and sine."""

    inverse: tuple[float, ...]
    scale: float


def parse_rope(
    parameters: Mapping[str, Any], *, rotary_dim: int, max_position: int, interleaved: bool = False
) -> RopeSpec:
    """Read the ``rope_parameters`` of a configuration.

    Raise UnsupportedModel for a kind of scaling that is not served, ModelError if a value is missing.
    """
    kind = parameters.get("rope_type") or "default"
    if kind not in (*_KINDS, "longrope"):
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
    if kind == "proportional" and parameters.get("partial_rotary_factor") is not None:
        values["proportion"] = float(parameters["partial_rotary_factor"])
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
        factor=float(factor) if factor is not None else max_position / original,
        **values,
    )


def rope_frequencies(rope: RopeSpec, max_model_len: int) -> Frequencies:
    """Return the frequencies of all contexts of a service with up to `max_model_len` tokens.

    LongRoPE has two kinds. They do not change within a service, whose requests so share cached keys at any length.
    Dynamic scaling equals the default up to the context at which it starts.
    """
    return _longrope(rope, max_model_len) if rope.kind == "longrope" else _KINDS[rope.kind](rope)


def yarn_softmax_multiplier(rope: RopeSpec) -> float:
    """Return the factor by which DeepSeek models of extended context multiply the attention scale."""
    if rope.kind == "default" or not rope.mscale_all_dim:
        return 1.0
    return _yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2


def _plain(rope: RopeSpec) -> list[float]:
    return [rope.theta ** (-channel / rope.rotary_dim) for channel in range(0, rope.rotary_dim, 2)]


def _proportional(rope: RopeSpec) -> Frequencies:
    """Stop all pairs of channels but the first ones, a proportion of them; their frequencies are of the whole width."""
    num_turning = int(rope.proportion * rope.rotary_dim // 2)
    plain = _plain(rope)
    return Frequencies(tuple(i / rope.factor for i in plain[:num_turning]) + (0.0,) * (len(plain) - num_turning), 1.0)


def _default(rope: RopeSpec) -> Frequencies:
    return Frequencies(tuple(_plain(rope)), 1.0)


def _linear(rope: RopeSpec) -> Frequencies:
    return Frequencies(tuple(inverse / rope.factor for inverse in _plain(rope)), 1.0)


def _llama3(rope: RopeSpec) -> Frequencies:
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


def _yarn(rope: RopeSpec) -> Frequencies:
    def channel_of(rotations: float) -> float:
        """Return the index of the channel pair that turns ``rotations`` times over the original context."""
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
    is_long = rope.short_context is not None and max_model_len > rope.short_context
    factors = rope.long_factor if is_long else rope.short_factor
    scale = rope.long_mscale if is_long else rope.short_mscale
    if scale is None:
        scale = rope.attention_factor
    if scale is None:
        grown = rope.factor > 1
        scale = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position)) if grown else 1.0
    return Frequencies(tuple(i / f for i, f in zip(_plain(rope), factors, strict=True)), scale)


_KINDS: dict[str, Callable[[RopeSpec], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
}
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
