"""The GPU kernels of a model: shapes of its attention and experts, their configurations, and scratch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kernels.gpu.attention_config import SHORT_QUERIES, AttentionShape
from kernels.gpu.device import Multiprocessor, multiprocessor_of
from kernels.gpu.moe import MoeWorkspace, TritonMoe
from kernels.gpu.moe_config import MoeConfigs, MoeShape, WeightFormat, WeightStorage, config_for
from kernels.gpu.moe_weights import FORMAT_OF, is_kept_packed
from kernels.gpu.packed_rows import packed_form
from kernels.packed_experts import ExpertShape
from moeserve.config import ConfigError
from moeserve.model.checkpoint import QuantisedBytes, StoredTensor
from moeserve.model.rounding import Rounding
from moeserve.model.spec import DecoderSpec, MlaSpec, ModelSpec

_QUANTISED: dict[str, WeightFormat] = {"int8": "int8", "fp8": "fp8", "int4": "int4"}
# The numbers of values that may share an int4 scale; the first that the model's sizes allow is used.
_GROUP_SIZES = (128, 64, 32)


def triton_moe(
    configs: MoeConfigs, device: torch.device, dtype: torch.dtype, max_tokens: int, num_slots: int | None = None
) -> TritonMoe:
    """Return the kernels for all layers of the configurations' shape on one stream, with scratch for `max_tokens` rows.

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
    return TritonMoe(configs, workspace)


def rows_at_once(num_rows: int, max_rows: int) -> int:
    """Return the number of arrived rows to compute at once, with scratch for `max_rows`.

    More rows than that can arrive, as all ranks may send theirs at once. All parts begin at multiples of 16 bytes, as
    the compiled kernels expect.
    """
    return num_rows if num_rows <= max_rows else max(1, max_rows - max_rows % 4)


def expert_storage(
    spec: ModelSpec, dtype: torch.dtype, form: str = "none", shapes: Sequence[ExpertShape] = ()
) -> WeightStorage:
    """Return the storage of a model's experts: in the bits of the checkpoint where `shapes`, of the experts of each
    layer, say so, else in `dtype`; or in the form that `--quantization` gives the experts.

    Raise ConfigError for a model that has no experts to quantise or whose sizes no group divides.
    """
    if form == "none":
        if any(map(is_kept_packed, shapes)):
            return WeightStorage("packed_float32" if dtype == torch.float32 else "packed")
        return WeightStorage(FORMAT_OF[dtype])
    flag = f"--quantization experts={form}"
    if spec.moe is None:
        raise ConfigError(f"{flag}: a {spec.model_type} model has no experts.")
    if form != "int4":
        return WeightStorage(_QUANTISED[form])
    sizes = (spec.expert_hidden_size, spec.moe.intermediate_size)
    group = next((group for group in _GROUP_SIZES if not any(size % group for size in sizes)), None)
    if group is None:
        raise ConfigError(f"{flag}: groups of {_GROUP_SIZES[-1]} values divide {sizes[0]} and {sizes[1]} not evenly.")
    return WeightStorage("int4", group)


def quantised_bytes(rounding: Rounding) -> QuantisedBytes:
    """Return the function that tells the bytes of a quantised matrix outside experts on a GPU, None for others."""

    def num_bytes(key: str, stored: StoredTensor, beside: Mapping[str, StoredTensor]) -> int | None:
        form = rounding.stored_format(key, stored, beside) if len(stored.shape) == 2 else None
        return None if form is None else stored.shape[0] * packed_form(form, stored.shape[1]).row_bytes

    return num_bytes


def expert_configs(spec: ModelSpec, storage: WeightStorage, device: torch.device) -> MoeConfigs | None:
    """Return the kernel configurations, by number of tokens, for experts kept in `storage`; None without experts."""
    shape = _moe_shape(spec, storage)
    if shape is None:
        return None
    multiprocessor = multiprocessor_of(device)
    return MoeConfigs(shape, multiprocessor.shared_bytes, reads_tiles=multiprocessor.reads_tiles)


def _moe_shape(spec: ModelSpec, storage: WeightStorage) -> MoeShape | None:
    moe = spec.moe
    if moe is None:
        return None
    sizes = (moe.num_experts, moe.intermediate_size, spec.expert_hidden_size, moe.gate.top_k)
    return MoeShape(*sizes, storage.format, storage.group_size)


def attention_shape(
    spec: DecoderSpec,
    block_size: int,
    dtype: torch.dtype,
    multiprocessor: Multiprocessor,
    kv_dtype: torch.dtype | None = None,
) -> AttentionShape:
    """Return the shape of attention, with keys and values stored as `kv_dtype`, default `dtype`.

    Latent attention has one KV head, whose values are part of its keys.
    """
    attention = spec.attention
    if isinstance(attention, MlaSpec):
        heads, kv_heads, value_dim = attention.num_heads, 1, attention.kv_lora_rank
        key_dim = value_dim + attention.rope_dim
    else:
        heads, kv_heads, key_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        value_dim = key_dim
    return AttentionShape(heads, kv_heads, key_dim, value_dim, block_size, dtype, kv_dtype or dtype, multiprocessor)


def check_shared_memory(spec: DecoderSpec, storage: WeightStorage, attention: AttentionShape) -> None:
    """Raise ConfigError, one sentence, if a kernel has no configuration that fits the multiprocessor."""
    experts = _moe_shape(spec, storage)
    try:
        attention.extend()
        attention.split()
        attention.prefill(SHORT_QUERIES + 1)
        if experts is not None:
            config_for(experts, 1, attention.multiprocessor.shared_bytes)  # Tiles for more tokens shrink to this one.
    except ValueError as error:
        raise ConfigError(f"--device cuda: {error}.") from None


def kv_dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype of keys and values that `--kv-cache-dtype` names; None for the dtype of the activations."""
    return torch.float8_e4m3fn if name == "fp8_e4m3" else None
