"""The GPU kernels of a model: shapes of its attention and experts, measured configurations where there are any, and
scratch."""

from __future__ import annotations

from pathlib import Path

import torch
import triton

from kernels.gpu.attention_config import AttentionConfigs, AttentionShape
from kernels.gpu.moe import MoeWorkspace, TritonMoe, device_of
from kernels.gpu.moe_config import PACKAGED, MoeConfigs, MoeShape, Platform, WeightFormat, WeightStorage
from kernels.gpu.moe_weights import FORMAT_OF
from moeserve.config import ConfigError, cache_root
from moeserve.model.spec import DecoderSpec, MlaSpec

_QUANTISED: dict[str, WeightFormat] = {"int8": "int8", "fp8": "fp8", "int4": "int4"}
# Of values that share an int4 scale, the first that the model's sizes allow.
_GROUP_SIZES = (128, 64, 32)


def tuned_folder() -> Path:
    """Where `moeserve tune` writes for this user."""
    return cache_root() / "tuned"


def platform_of(device: torch.device) -> Platform:
    """Return the key of tuned files; a name that no GPU has where there is none."""
    return Platform(torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter", triton.__version__)


def moe_configs(shape: MoeShape, device: torch.device) -> MoeConfigs:
    """The user's tuned files before those of the package."""
    return MoeConfigs(shape, device_of(device), platform_of(device), (tuned_folder(), PACKAGED))


def triton_moe(
    configs: MoeConfigs, device: torch.device, dtype: torch.dtype, max_tokens: int, num_slots: int | None = None
) -> TritonMoe:
    """The kernels of all layers of the configurations' shape on one stream, with scratch for steps of max_tokens rows.

    dtype: of the activations. num_slots: the most experts that a layer holds here, default all.
    """
    shape = configs.shape
    workspace = MoeWorkspace.allocate(
        max_tokens,
        shape.top_k,
        num_slots or shape.num_experts,
        shape.hidden_size,
        shape.intermediate_size,
        dtype,
        device,
    )
    return TritonMoe(configs, workspace, device_of(device).num_multiprocessors)


def rows_at_once(num_rows: int, max_rows: int) -> int:
    """How many of arrived rows are computed together, with scratch for `max_rows`: all ranks may send theirs at once.

    All parts begin at multiples of 16 bytes, as kernels are compiled for.
    """
    return num_rows if num_rows <= max_rows else max(1, max_rows - max_rows % 4)


def expert_storage(spec: DecoderSpec, dtype: torch.dtype, quantization: str = "none") -> WeightStorage:
    """How a model's experts are kept: in `dtype`, or as `--expert-quantization` says.

    Raises ConfigError for a model that has no experts to quantise or whose sizes no group divides.
    """
    if quantization == "none":
        return WeightStorage(FORMAT_OF[dtype])
    flag = f"--expert-quantization {quantization}"
    if spec.moe is None:
        raise ConfigError(f"{flag}: a {spec.model_type} model has no experts.")
    if quantization != "int4":
        return WeightStorage(_QUANTISED[quantization])
    sizes = (spec.hidden_size, spec.moe.intermediate_size)
    group = next((group for group in _GROUP_SIZES if not any(size % group for size in sizes)), None)
    if group is None:
        raise ConfigError(f"{flag}: groups of {_GROUP_SIZES[-1]} values divide {sizes[0]} and {sizes[1]} not evenly.")
    return WeightStorage("int4", group)


def expert_configs(spec: DecoderSpec, storage: WeightStorage, device: torch.device) -> MoeConfigs | None:
    """How the model's experts, kept in `storage`, are computed by number of tokens; None for a model without any."""
    moe = spec.moe
    if moe is None:
        return None
    sizes = (moe.num_experts, moe.intermediate_size, spec.hidden_size, moe.gate.top_k)
    return moe_configs(MoeShape(*sizes, storage.format, storage.group_size), device)


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
    """Return the dtype of keys and values that `--kv-cache-dtype` names; None for the dtype of the activations."""
    return torch.float8_e4m3fn if name == "fp8_e4m3" else None


def tuned_attention(shape: AttentionShape, device: torch.device) -> AttentionConfigs:
    """The user's tuned files before those of the package."""
    return AttentionConfigs.find(shape, platform_of(device), (tuned_folder(), PACKAGED))
