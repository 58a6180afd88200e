"""How a model's attention is computed on a GPU: its shape, and measured configurations where there are any."""

from __future__ import annotations

import torch

from kernels.gpu.attention_config import AttentionConfigs, AttentionShape
from kernels.gpu.moe_config import PACKAGED
from moeserve.cuda.expert_kernels import platform_of, tuned_folder
from moeserve.model.spec import DecoderSpec, MlaSpec


def attention_shape(
    spec: DecoderSpec, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> AttentionShape:
    """With keys and values stored as `kv_dtype`, default `dtype`.

    Latent attention has one KV head, whose values are part of its keys.
    """
    attention = spec.attention
    if isinstance(attention, MlaSpec):
        heads, kv_heads, value_dim = attention.num_heads, 1, attention.kv_lora_rank
        key_dim = value_dim + attention.rope_dim
    else:
        heads, kv_heads, key_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        value_dim = key_dim
    return AttentionShape(heads, kv_heads, key_dim, value_dim, block_size, dtype, kv_dtype or dtype)


def kv_dtype_of(name: str) -> torch.dtype | None:
    """What `--kv-cache-dtype` says of keys and values; None for the dtype of the activations."""
    return torch.float8_e4m3fn if name == "fp8_e4m3" else None


def tuned_attention(shape: AttentionShape, device: torch.device) -> AttentionConfigs:
    """The user's tuned files before those of the package."""
    return AttentionConfigs.find(shape, platform_of(device), (tuned_folder(), PACKAGED))
