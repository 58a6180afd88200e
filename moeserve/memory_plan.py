"""What is loaded, and what fits into memory: decided once, before any rank takes some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from experts.placement import Placement
from kernels.cpu.library import native_kernels
from moeserve.config import ConfigError, ServeConfig
from moeserve.device import KvBudget, available_bytes, choose_device, cuda_absence, plan_kv
from moeserve.experts.memory import ResidencyPlan, plan_residency, residency_with
from moeserve.experts.settings import plan_placement, read_statistics
from moeserve.model.checkpoint import OwnedExperts, plan_weights, read_index
from moeserve.model.families import build_spec, is_native, load_config, read_model_type
from moeserve.model.kv_pool import kv_block_bytes
from moeserve.model.spec import DecoderSpec, ModelError, ModelSpec


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What will be loaded, to compute in `dtype` on a device, `cpu` or `cuda`.

    `kv` is the memory of each rank, `weights_bytes` are those of all ranks together; on a GPU both are known when all
    have loaded and are 0 here. placement: which ranks hold which experts, None where one rank holds all. residency:
    which part of the experts is in memory at a time, None where all are; a GPU decides that when it loads.
    """

    spec: ModelSpec
    dtype: torch.dtype
    kv: KvBudget
    weights_bytes: int
    placement: Placement | None = None
    residency: ResidencyPlan | None = None
    device: str = "cpu"


def read_spec(directory: Path, config: ServeConfig, device: str = "cpu") -> tuple[DecoderSpec, torch.dtype]:
    """What the configuration of a model on our own code says, and the dtype to compute in."""
    return build_spec(load_config(directory)), _compute_dtype(config, device)


def _compute_dtype(config: ServeConfig, device: str) -> torch.dtype:
    default = torch.float32 if device == "cpu" else torch.bfloat16
    dtype: torch.dtype = default if config.dtype == "auto" else getattr(torch, config.dtype)
    return dtype


def _read_any_spec(directory: Path, config: ServeConfig, device: str) -> tuple[ModelSpec, torch.dtype]:
    """As `read_spec`, of a model on our own code or on transformers'."""
    if is_native(read_model_type(directory), config.model_impl):
        return read_spec(directory, config, device)
    if device != "cpu":
        raise ConfigError("A model on transformers' code is served on a CPU only so far: give --device cpu.")
    if config.expert_parallel_size > 1 or config.expert_memory is not None:
        given = "--expert-parallel-size" if config.expert_parallel_size > 1 else "--expert-memory"
        raise ConfigError(f"{given} needs a model on our own code; this one is computed by transformers' code.")
    from moeserve.model.hf.spec import read_transformers_spec  # Imported late: it loads transformers' modelling code.

    spec = read_transformers_spec(directory)
    if spec.geometry.has_states:
        raise ModelError(
            f"Models of type {spec.model_type!r} are not served on transformers' code yet: their layers keep a state "
            "per request."
        )
    return spec, _compute_dtype(config, device)


def plan_model(directory: Path, config: ServeConfig) -> ModelPlan:
    """Reads the configuration and, on a CPU, shares out the memory that is free now, before any rank takes some.

    Raises ConfigError or ModelError for what cannot be served.
    """
    device = choose_device(config, cuda_absence)
    spec, dtype = _read_any_spec(directory, config, device)
    num_ranks = config.expert_parallel_size
    placement = plan_placement(directory, spec, config) if num_ranks > 1 else None
    if device == "cuda":
        return ModelPlan(spec, dtype, KvBudget(0, 0), 0, placement, device=device)
    if placement is None and spec.moe is not None:
        # A file that cannot serve is refused, whether or not anything goes by it.
        read_statistics(directory, config)
    residency = None
    if isinstance(spec, DecoderSpec):
        residency = plan_residency(directory, spec, dtype, config, placement)
    weights_bytes = _weights_bytes(directory, spec, dtype, num_ranks, placement, residency)
    free = available_bytes()
    if weights_bytes > free:
        name = str(dtype).removeprefix("torch.")
        raise ModelError(
            f"The weights take {weights_bytes / 2**30:.1f} GiB as {name}, but only {free / 2**30:.1f} GiB of "
            "memory are free."
        )
    kv = plan_kv(
        block_bytes=kv_block_bytes(spec.kv_layers, config.block_size, dtype),
        block_size=config.block_size,
        available_bytes=(free - weights_bytes) // num_ranks,
        kv_cache_memory=config.kv_cache_memory,
        model_max_len=spec.max_position,
        max_model_len=config.max_model_len,
    )
    return ModelPlan(spec, dtype, kv, weights_bytes, placement, residency, device)


def plan_as_told(
    directory: Path, config: ServeConfig, placement: Placement, kv: KvBudget, num_slots: tuple[int, ...] | None
) -> ModelPlan:
    """What rank 0 has planned, for another rank's own copy of the model. num_slots: see `residency_with`."""
    device = choose_device(config, cuda_absence)
    spec, dtype = read_spec(directory, config, device)
    residency = None if num_slots is None else residency_with(num_slots, directory, spec, dtype)
    return ModelPlan(spec, dtype, kv, 0, placement, residency, device)


def owned_experts(spec: ModelSpec, placement: Placement, rank: int) -> OwnedExperts:
    """The experts that a rank loads, by layer of the decoder."""
    placed_layer = {layer: number for number, layer in enumerate(spec.moe_layers)}
    return lambda layer: placement.experts_on(placed_layer[layer], rank)


def no_experts(_: int) -> Sequence[int]:
    """Nothing is loaded with the model: experts are read when they are needed."""
    return ()


def _weights_bytes(
    directory: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    num_ranks: int,
    placement: Placement | None,
    residency: ResidencyPlan | None,
) -> int:
    """Of all ranks."""
    narrow = dtype == torch.float32 and native_kernels() is not None
    if not isinstance(spec, DecoderSpec):
        from moeserve.model.hf.loading import weights_bytes

        return weights_bytes(directory, spec, dtype, None, narrow=narrow)
    owned: list[OwnedExperts | None] = [None]
    if residency is not None:
        owned = [no_experts] * num_ranks
    elif placement is not None:
        owned = [owned_experts(spec, placement, rank) for rank in range(num_ranks)]
    index = read_index(directory)
    loaded = sum(
        plan_weights(spec, index, of_rank).loaded_num_bytes(dtype.itemsize, narrow=narrow) for of_rank in owned
    )
    return loaded if residency is None else loaded + num_ranks * residency.slots.num_bytes
