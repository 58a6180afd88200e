"""The fewest bytes that a decode step moves, and with them the most tokens per second. No torch here."""

from __future__ import annotations

from moeserve.models.spec import AttentionSpec, DecoderSpec


def distinct_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Expected number of experts that any of the tokens chooses, if all are as likely."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** num_tokens)


def decode_bytes(spec: DecoderSpec, batch: int, context: int, element_size: int, distinct: float | None = None) -> int:
    """Read in a step of `batch` sequences of `context` positions: attention's weights, gates, the chosen experts, the
    output projection, and all keys and values. Of a model with shared KV heads and experts in all layers.

    distinct: experts that a layer's tokens choose between them; by itself `distinct_experts`.
    """
    attention, moe, hidden = spec.attention, spec.moe, spec.hidden_size
    if not isinstance(attention, AttentionSpec) or moe is None:
        raise ValueError("the bound is of plain attention and experts in every layer")
    of_heads = (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim * hidden
    expert = 3 * moe.intermediate_size * hidden
    if distinct is None:
        distinct = distinct_experts(moe.num_experts, moe.gate.top_k, batch)
    experts = distinct * expert
    cached = 2 * attention.num_kv_heads * attention.head_dim * batch * context
    per_layer = of_heads + moe.num_experts * hidden + experts + cached
    return round((spec.num_layers * per_layer + spec.vocab_size * hidden) * element_size)


def bound_tokens_per_second(step_bytes: int, batch: int, bytes_per_second: float) -> float:
    """At the given bandwidth."""
    return batch * bytes_per_second / step_bytes
