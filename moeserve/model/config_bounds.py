"""Bounds on the numbers of a configuration, checked before they size anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moeserve.model.spec import ModelError

_MAX_DEPTH = 16
_MAX_ENTRIES = 100_000
_MAX_MAGNITUDE = 2**63

_WIDTH = (1, 2**20)
_EXPERTS = (0, 8192)
_LAYER = (0, 1024)
# Whole numbers of the top level, (least, most). None counts as not given.
_INTEGERS: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "moe_intermediate_size": _WIDTH,
    "moe_latent_size": _WIDTH,
    "shared_expert_intermediate_size": (0, 2**20),
    "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (1, 8192),
    "max_position_embeddings": (1, 2**28),
    "sliding_window": (0, 2**31),
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "moe_num_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "moe_k": _EXPERTS,
    "n_shared_experts": (0, 1024),
    "moe_num_shared_experts": (0, 1024),
    "n_group": _EXPERTS,
    "topk_group": _EXPERTS,
    "q_lora_rank": _WIDTH,
    "kv_lora_rank": _WIDTH,
    "qk_nope_head_dim": (1, 8192),
    "qk_rope_head_dim": (1, 8192),
    "v_head_dim": (1, 8192),
    "index_n_heads": (1, 4096),
    "index_head_dim": (1, 8192),
    "index_topk": (1, 2**31 - 1),
    "first_k_dense_replace": _LAYER,
    "num_dense_layers": _LAYER,
    "num_kv_shared_layers": _LAYER,
    "hidden_size_per_layer_input": (0, 2**20),
    "vocab_size_per_layer_input": (1, 2**24),
    "shared_intermediate_size": (0, 2**20),
    "conv_L_cache": (2, 64),
    "mamba_n_heads": (1, 4096),
    "mamba_n_groups": (1, 4096),
    "mamba_d_state": (1, 8192),
    "mamba_d_conv": (2, 64),
    "decoder_sparse_step": _LAYER,
    "moe_layer_interval": _LAYER,
    "moe_layer_start_index": (-1, 1024),
    "moe_layer_end_index": (-1, 1024),
    "linear_num_key_heads": (1, 4096),
    "linear_num_value_heads": (1, 4096),
    "linear_key_head_dim": (1, 8192),
    "linear_value_head_dim": (1, 8192),
    "linear_conv_kernel_dim": (2, 64),
    "full_attention_interval": (1, 1024),
    "bos_token_id": (-1, 2**31 - 1),
}
# Numbers, of the top level and of the tables of rotary embeddings: (above, most).
_NUMBERS: dict[str, tuple[float, float]] = {
    "rope_theta": (1.0, 1e12),
    "partial_rotary_factor": (0.0, 1.0),
    "rms_norm_eps": (0.0, 1.0),
    "attention_multiplier": (0.0, 1e6),
    "logits_scaling": (0.0, 1e6),
    "clip_qkv": (0.0, 1e6),
}
_ROPE_NUMBERS: dict[str, tuple[float, float]] = {
    "rope_theta": _NUMBERS["rope_theta"],
    "partial_rotary_factor": _NUMBERS["partial_rotary_factor"],
    "factor": (0.0, 1e6),
    "original_max_position_embeddings": (1.0, 2.0**28),
    "attention_factor": (0.0, 1e6),
    "low_freq_factor": (0.0, 1e6),
    "high_freq_factor": (0.0, 1e6),
    "beta_fast": (-1e-9, 1e6),  # A zero means "not given".
    "beta_slow": (-1e-9, 1e6),
}
# Bounds of Mamba's time steps.
_MAY_BE_INFINITE = frozenset(("time_step_limit",))
_ROPE_TABLES = ("rope_parameters", "rope_scaling")


def check_numbers(config: Mapping[str, Any]) -> None:
    """Raise ModelError for a number of a configuration that no model has; the sentence names it.

    Numbers without a bound of their own must be finite and below 2^63; lists and tables, at any depth, must be short.
    """
    check_tree(config)
    _check_known(config)
    text = config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise ModelError(f"The configuration's text_config is {_shown(text)}: it must be an object.")
    _check_known(text or {})


def _check_known(config: Mapping[str, Any]) -> None:
    """Check the numbers that have bounds of their own. config: of a text model."""
    for name, (least, most) in _INTEGERS.items():
        value = config.get(name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            needed = f"it must be from {least} to {most}" if type(value) is int else "it must be a whole number"
            raise ModelError(f"The configuration's {name} is {_shown(value)}: {needed}.")
    _check_above(config, _NUMBERS)
    for table in _ROPE_TABLES:
        parameters = config.get(table)
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ModelError(f"The configuration's {table} is {_shown(parameters)}: it must be an object.")
        _check_above(parameters or {}, _ROPE_NUMBERS)


def _check_above(config: Mapping[str, Any], bounds: Mapping[str, tuple[float, float]]) -> None:
    for name, (least, most) in bounds.items():
        value = config.get(name)
        if value is not None and (type(value) not in (int, float) or not least < value <= most):
            least_shown = f"above {least:g}" if least >= 0 else "at least 0"
            needed = f"{least_shown} and at most {most:g}" if type(value) in (int, float) else "a number"
            raise ModelError(f"The configuration's {name} is {_shown(value)}: it must be {needed}.")


def check_tree(config: Mapping[str, Any]) -> None:
    """Raise ModelError for a configuration that is nested too deeply, too long, or has a number beyond 2^63."""
    _check_tree(config, "config.json", 0)


def check_counts(config: Mapping[str, Any]) -> None:
    """Raise ModelError for a whole number, at any depth, that is above its bound or counts too many layers or experts.

    For configurations of any type: their own classes check the other limits of a number.
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            check_counts(value)
        if type(value) is not int:
            continue
        counted = _LAYER if "layers" in str(name) else _EXPERTS if "experts" in str(name) else None
        bounds = _INTEGERS.get(str(name), counted)
        if bounds is not None and value > bounds[1]:
            raise ModelError(f"The configuration's {str(name)[:60]} is {value}: it must be at most {bounds[1]}.")


def _check_tree(value: Any, name: str, depth: int) -> None:
    """Check sizes and finiteness. name: of the innermost table's entry."""
    if depth > _MAX_DEPTH:
        raise ModelError(f"The configuration is nested more than {_MAX_DEPTH} deep at {name[:60]}.")
    if isinstance(value, (int, float)) and not abs(value) < _MAX_MAGNITUDE:
        raise ModelError(f"The configuration's {name[:60]} is {_shown(value)}, which is no number of a model.")
    if isinstance(value, (Mapping, list)) and len(value) > _MAX_ENTRIES:
        raise ModelError(f"The configuration's {name[:60]} has {len(value)} entries; at most {_MAX_ENTRIES} are read.")
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key not in _MAY_BE_INFINITE:
                _check_tree(part, str(key), depth + 1)
    elif isinstance(value, list):
        for part in value:
            _check_tree(part, name, depth + 1)


def with_special_floats(value: Any) -> Any:
    """Replace the objects by which transformers writes infinite numbers into JSON."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return {"Infinity": float("inf"), "-Infinity": float("-inf")}.get(value["__float__"], value)
        return {name: with_special_floats(part) for name, part in value.items()}
    return [with_special_floats(part) for part in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "not a finite number"
    if isinstance(value, (list, Mapping)):
        return "a list" if isinstance(value, list) else "an object"
    return str(value)[:40] if isinstance(value, (int, float)) else repr(value[:40] if isinstance(value, str) else value)
