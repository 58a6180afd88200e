"""Decoders with random weights, made on the GPU: the time of a step does not depend on what a model has learnt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from experts.moe_layer import MoeLayer
from experts.observer import AnyObserver
from kernels.gpu.moe_config import MoeConfigs
from kernels.gpu.moe_weights import GpuExperts, StoredMatrix
from kernels.gpu.ops import GpuOps
from kernels.linear import Linear
from kernels.ops import NormWeights
from moeserve.model.decoder import Decoder, DecoderLayer, GqaAttention
from moeserve.model.families import build_spec
from moeserve.model.gpu.kernels import expert_configs, expert_storage, triton_moe
from moeserve.model.spec import AttentionSpec, DecoderSpec


def qwen3_moe_spec(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    num_experts: int,
    expert_width: int,
    top_k: int,
    vocab: int,
    max_position: int,
) -> DecoderSpec:
    """Return a model of type qwen3_moe of these sizes, with experts in all layers."""
    from transformers import Qwen3MoeConfig

    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_experts": num_experts,
        "moe_intermediate_size": expert_width,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "vocab_size": vocab,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": False,
    }
    return build_spec(Qwen3MoeConfig.from_dict(sizes).to_dict())


def random_decoder(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_tokens: int,
    max_model_len: int,
    configs: MoeConfigs | None = None,
    observers: Sequence[AnyObserver] = (),
    seed: int = 0,
) -> Decoder:
    """Make a decoder with shared KV heads and experts in all layers. Raise ValueError for other specs.

    max_tokens: of the largest step. observers: of steps. Weights are normal and keep activations near 1.
    """
    attention, moe = spec.attention, spec.moe
    if not isinstance(attention, AttentionSpec) or moe is None or not all(spec.sparse_layers) or moe.shared is not None:
        raise ValueError("random weights are made for plain attention and experts in every layer")
    weights = _Weights(dtype, device, seed)
    storage = expert_storage(spec, dtype)
    configs = configs or expert_configs(spec, storage, device)
    assert configs is not None
    ops = GpuOps(device, storage, triton_moe(configs, device, dtype, max_tokens))
    return Decoder(
        spec,
        ops,
        weights.matrix(spec.vocab_size, spec.hidden_size) * spec.hidden_size**0.5,
        [_layer(spec, ops, attention, place, weights, observers) for place in range(spec.num_layers)],
        weights.norm(spec.hidden_size, spec.norm_eps),
        weights.linear(ops, spec.vocab_size, spec.hidden_size),
        max_model_len=max_model_len,
        dtype=dtype,
    )


class _Weights:
    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype, self._device = dtype, device
        self._random = torch.Generator(device).manual_seed(seed)

    def matrix(self, *shape: int) -> Tensor:
        """Draw normal numbers with variance 1 / last size in the model's dtype: fp32 ones would not fit beside them."""
        out = torch.empty(shape, dtype=self.dtype, device=self._device)
        return out.normal_(0.0, shape[-1] ** -0.5, generator=self._random)

    def linear(self, ops: GpuOps, *shape: int) -> Linear:
        return ops.pack_linear(self.matrix(*shape), None, self.dtype)

    def norm(self, size: int, eps: float) -> NormWeights:
        return NormWeights(self.ones(size), None, eps)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self.dtype, device=self._device)


def _layer(
    spec: DecoderSpec,
    ops: GpuOps,
    attention: AttentionSpec,
    place: int,
    weights: _Weights,
    observers: Sequence[AnyObserver],
) -> DecoderLayer:
    hidden, moe = spec.hidden_size, spec.moe
    assert moe is not None
    rows = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    has_norms = attention.qk_norm == "head"
    count, width = moe.num_experts, moe.intermediate_size
    return DecoderLayer(
        weights.norm(hidden, spec.norm_eps),
        GqaAttention(
            attention,
            ops,
            weights.linear(ops, rows, hidden),
            weights.linear(ops, hidden, attention.num_heads * attention.head_dim),
            window=spec.windows[place],
            interleaved=spec.rope.interleaved,
            eps=spec.norm_eps,
            q_norm=weights.ones(attention.head_dim) if has_norms else None,
            k_norm=weights.ones(attention.head_dim) if has_norms else None,
        ),
        weights.norm(hidden, spec.norm_eps),
        MoeLayer(
            ops,
            weights.linear(ops, count, hidden),
            moe.gate,
            GpuExperts(
                StoredMatrix(weights.matrix(count, 2 * width, hidden)),
                StoredMatrix(weights.matrix(count, hidden, width)),
            ),
            moe.activation,
            gate_dtype=weights.dtype,
            place=place,
            observers=observers,
        ),
    )
