"""Fields of a GGUF file that change numbers, and that the configuration of its architecture has no place for."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from moeserve.model.gguf.fields import plain
from moeserve.model.spec import UnsupportedModel

# The values of a field that change nothing, as llama.cpp computes with it, or with the models that write it.
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "attention.causal": (1,),
    "attention.clamp_kqv": (0,),
    "attention.indexer.top_k": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_scale": (0,),
    "attention.value_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "moe_latent_size": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "ssm.dt_b_c_rms": (0,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
    "swin_norm": (0,),
    "use_parallel_residual": (0,),
}
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3
_SIGMOIDS = frozenset(("bailingmoe2", "dots1", "glm4moe", "minimax-m2"))
# Architectures that use the probabilities among all experts as they are. The others divide the chosen ones by their
# sum, which is the softmax of the chosen experts' logits; of Phi it is neither.
_NOT_NORMALISED = frozenset(("olmoe", "qwen2moe"))
# Architectures whose heads' keys and values differ in width, and whose file may count the latent's width instead.
_LATENT = frozenset(("deepseek2", "glm-dsa", "kimi-linear", "mistral4"))
# Architectures without rotary embeddings, whose files count rotated channels all the same.
_UNROTATED = frozenset(("jamba", "nemotron_h_moe"))


def check_unread(architecture: str, unread: Mapping[str, Any], head_dim: int, context_length: int) -> None:
    """Raise UnsupportedModel if a field that no builder of a configuration has read would change numbers.

    unread: by name without the architecture.
    """
    neutral: dict[str, tuple[float, ...]] = {
        **_NEUTRAL,
        **_routing(architecture),
        "attention.scale": (0, head_dim**-0.5),
    }
    if architecture not in _UNROTATED:
        neutral["rope.dimension_count"] = (head_dim,)
    if architecture not in _LATENT:
        neutral["attention.value_length"] = (head_dim,)
    for name, values in neutral.items():
        if name in unread and not _is_among(unread[name], values):
            _refuse(architecture, name, unread[name])
    window = unread.get("attention.sliding_window", 0)
    if not isinstance(window, int | float) or 0 < window < context_length:
        _refuse(architecture, "attention.sliding_window", window)


def _routing(architecture: str) -> dict[str, tuple[float, ...]]:
    """Return how the architecture weighs experts, as fields may repeat it; 0 is no function of its own."""
    if architecture in _SIGMOIDS:
        functions: tuple[float, ...] = (0, _SIGMOID)
    elif architecture in _NOT_NORMALISED:
        functions = (0, _SOFTMAX)
    else:
        functions = (0, _SOFTMAX, _SOFTMAX_OF_CHOSEN)
    norm = {} if architecture == "phimoe" else {"expert_weights_norm": (float(architecture not in _NOT_NORMALISED),)}
    return {"expert_gating_func": functions, **norm}


def _is_among(value: object, neutral: tuple[float, ...]) -> bool:
    if isinstance(value, list | array):  # One per layer.
        return all(_is_among(own, neutral) for own in value)
    return isinstance(value, int | float) and any(abs(value - own) <= 1e-6 * max(1.0, abs(own)) for own in neutral)


def _refuse(architecture: str, name: str, value: object) -> None:
    shown = str(plain(value))[:40]
    raise UnsupportedModel(
        f"The GGUF file sets {architecture}.{name} to {shown}, and models of this architecture are computed "
        "without it here."
    )
