"""Routing traces made from a seed, with the structure that published traces show."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.experts.lab_traces import LabTrace

Float = NDArray[np.float32]

# The sizes of synthetic traces.
_TOKENS_PER_CLASS = 16
_BIAS_TOKENS = 2048
_BIAS_ROUNDS = 15


@dataclass(frozen=True, slots=True)
class SyntheticSpec:
    """Sizes and knobs of routing traces made from a seed, with the structure that published traces show.

    A token's gate logits are a taste of the request's topic, a taste of the token's class, noise that persists from
    token to token, and what the experts of the layer before ask for; then a bias per expert, found by iteration, gives
    each layer the load that training gives it: Zipf's law with an exponent. Strengths are standard deviations of a
    logit, beside noise of 1.

    popularity: exponent of Zipf's law of a layer's load. topic_drift: probability per token that the
    topic changes. persistence: correlation of the noise between neighbouring tokens. edge: the share of coupling,
    topic and persistence that the first layer has; they rise to the full strength at a quarter of the depth.
    kinship: the share of an expert's tastes that its kin, kin_size experts of the layer, have too; it makes them be
    chosen together, on which the published figures say nothing.
    """

    num_layers: int
    num_experts: int
    top_k: int
    num_topics: int = 8
    num_classes: int = 64
    popularity: float = 0.2
    topic: float = 0.6
    token_class: float = 0.3
    coupling: float = 1.0
    persistence: float = 0.55
    topic_drift: float = 0.003
    edge: float = 0.1
    kinship: float = 0.0
    kin_size: int = 2


# Tuned to figures of Mixtral-8x7B.
MIXTRAL_LIKE = SyntheticSpec(32, 8, 2, coupling=2.2)


# Tuned to figures of Qwen3-30B-A3B.
QWEN3_LIKE = SyntheticSpec(
    48, 128, 8, popularity=0.75, topic=1.5, token_class=0.4, coupling=0.8, persistence=0.5, edge=0.5
)


# The same knobs for a model with few choices among many experts.
SPARSE = replace(QWEN3_LIKE, num_layers=24, num_experts=64, top_k=4)


def synthetic_trace(spec: SyntheticSpec, num_requests: int, tokens_per_request: int, seed: int) -> LabTrace:
    """Requests one after the other. Another seed is another model and other requests; only the knobs are the same."""
    random = np.random.default_rng(seed)
    topics = _topics(spec, num_requests, tokens_per_request, random)
    # Zipf's law over classes; a token id belongs to one class.
    weights = 1 / np.arange(1, spec.num_classes + 1)
    shape = (num_requests, tokens_per_request)
    classes = random.choice(spec.num_classes, shape, p=weights / weights.sum())
    token_ids = classes * _TOKENS_PER_CLASS + random.integers(_TOKENS_PER_CLASS, size=shape)
    ids = np.empty((spec.num_layers, num_requests * tokens_per_request, spec.top_k), np.uint16)
    previous: NDArray[np.int64] | None = None
    for layer in range(spec.num_layers):
        logits = _layer_logits(spec, layer, topics, classes, previous, random)
        load = random.permutation(1 / np.arange(1, spec.num_experts + 1) ** spec.popularity)
        logits += _bias_for(load / load.sum(), logits, spec.top_k)
        chosen = np.argsort(-logits, axis=-1)[..., : spec.top_k]
        ids[layer] = chosen.reshape(-1, spec.top_k)
        previous = chosen
    requests = np.repeat(np.arange(num_requests, dtype=np.int32), tokens_per_request)
    return LabTrace(spec.num_experts, ids, requests, token_ids.reshape(-1).astype(np.int32))


def _topics(spec: SyntheticSpec, num_requests: int, num_tokens: int, random: np.random.Generator) -> NDArray[np.int64]:
    """[N, T]: a topic that drifts."""
    found = np.empty((num_requests, num_tokens), np.int64)
    topic = random.integers(spec.num_topics, size=num_requests)
    for token in range(num_tokens):
        drifts = random.random(num_requests) < spec.topic_drift
        topic = np.where(drifts, random.integers(spec.num_topics, size=num_requests), topic)
        found[:, token] = topic
    return found


def _layer_logits(
    spec: SyntheticSpec,
    layer: int,
    topics: NDArray[np.int64],
    classes: NDArray[np.int64],
    previous: NDArray[np.int64] | None,
    random: np.random.Generator,
) -> Float:
    """[N, T, E]."""
    experts = spec.num_experts
    depth = min(1.0, layer / max(spec.num_layers / 4, 1))
    strength = spec.edge + (1 - spec.edge) * depth
    logits = _noise(spec.persistence * strength, topics.shape, experts, random)
    kin = random.permutation(experts) // spec.kin_size
    logits += _taste(spec, strength * spec.topic, spec.num_topics, kin, random)[topics]
    logits += _taste(spec, spec.token_class, spec.num_classes, kin, random)[classes]
    if previous is not None:
        asks = _taste(spec, strength * spec.coupling / spec.top_k**0.5, experts, kin, random)
        # By choice, so that [N, T, k, E] never exists.
        for choice in range(spec.top_k):
            logits += asks[previous[..., choice]]
    return logits


def _bias_for(shares: NDArray[np.float64], logits: Float, top_k: int) -> Float:
    """[E]: the bias that gives the experts about these shares of all choices."""
    flat = logits.reshape(-1, len(shares))
    sample = flat[:: max(len(flat) // _BIAS_TOKENS, 1)]
    wanted = np.log(shares)
    bias = np.zeros(len(shares), np.float32)
    for _ in range(_BIAS_ROUNDS):
        chosen = np.argpartition(sample + bias, -top_k, axis=1)[:, -top_k:]
        load = np.bincount(chosen.reshape(-1), minlength=len(shares)) + 1.0
        bias += (0.5 * (wanted - np.log(load / load.sum()))).astype(np.float32)
    return bias


def _noise(persistence: float, shape: tuple[int, ...], num_experts: int, random: np.random.Generator) -> Float:
    """[N, T, E]: unit variance, first-order autoregressive over tokens."""
    noise = random.standard_normal((*shape, num_experts), np.float32)
    fresh = np.float32((1 - persistence**2) ** 0.5)
    for token in range(1, shape[1]):
        noise[:, token] = np.float32(persistence) * noise[:, token - 1] + fresh * noise[:, token]
    return noise


def _taste(spec: SyntheticSpec, scale: float, size: int, kin: NDArray[np.int64], random: np.random.Generator) -> Float:
    """[size, E]: normal, of variance scale²; experts of a kin share part of it."""
    own = random.standard_normal((size, spec.num_experts), np.float32)
    shared = random.standard_normal((size, int(kin.max()) + 1), np.float32)[:, kin]
    return np.float32(scale) * (np.float32((1 - spec.kinship) ** 0.5) * own + np.float32(spec.kinship**0.5) * shared)
