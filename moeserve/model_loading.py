"""From a folder and settings to a model ready to execute plans: what fits into memory, weights, KV memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch

from experts.observer import AnyObserver
from experts.placement import Placement
from experts.routing_tap import RoutingTap
from kernels.cpu.library import native_kernels, native_kernels_absence
from kernels.packed_experts import PackedExperts
from moeserve.config import ServeConfig
from moeserve.device import KvBudget, available_bytes, plan_kv, step_budget
from moeserve.experts.memory import CpuResidentModel, ResidencyPlan, open_experts, plan_residency
from moeserve.experts.settings import plan_placement, read_statistics
from moeserve.model.checkpoint import OwnedExperts, plan_weights, read_index
from moeserve.model.decoder import Decoder
from moeserve.model.families import GenerationDefaults, build_spec, load_config, load_generation_defaults
from moeserve.model.kv_pool import KVPool, kv_block_bytes
from moeserve.model.runner import ModelRunner
from moeserve.model.spec import DecoderSpec, ModelError
from moeserve.model.tensor_reader import Progress
from moeserve.model.weights import DispatchOf, load_decoder

Report = Callable[[dict[str, Any]], None]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What will be loaded. `kv` is the memory of each rank, `weights_bytes` are those of all ranks together.

    placement: which ranks hold which experts, None where one rank holds all. residency: which part of the experts is in
    memory at a time, None where all are.
    """

    spec: DecoderSpec
    dtype: torch.dtype
    kv: KvBudget
    weights_bytes: int
    placement: Placement | None = None
    residency: ResidencyPlan | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the engine has to know of a model. `weights_bytes` are those of all ranks, `kv_bytes` those of this one."""

    spec: DecoderSpec
    defaults: GenerationDefaults
    kv: KvBudget
    dtype: torch.dtype
    weights_bytes: int
    kv_bytes: int
    device: str

    @property
    def eos_token_ids(self) -> list[int]:
        """Those of the generation config, else the model's. Some checkpoints name one that no logit stands for."""
        named = self.defaults.eos_token_ids or self.spec.eos_token_ids
        return [token for token in named if 0 <= token < self.spec.vocab_size]


@dataclass(frozen=True, slots=True)
class LoadedModel(ServedModel):
    """A model ready to execute plans on a CPU.

    packed_experts: those that are here, of each layer that has some. experts: None where all experts are in memory.
    observers: told what is computed; whoever assembles a rank completes the list before the first step.
    """

    runner: ModelRunner
    packed_experts: Sequence[PackedExperts]
    experts: CpuResidentModel | None = None
    observers: list[AnyObserver] = field(default_factory=list)
    decoder: Decoder | None = None


def read_spec(directory: Path, config: ServeConfig) -> tuple[DecoderSpec, torch.dtype]:
    """What the model's configuration says, and the dtype to compute in."""
    return build_spec(load_config(directory)), torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)


def plan_model(directory: Path, config: ServeConfig) -> ModelPlan:
    """Reads the configuration and shares out the memory that is free now, before any rank takes some."""
    spec, dtype = read_spec(directory, config)
    num_ranks = config.expert_parallel_size
    placement: Placement | None = None
    owned: list[OwnedExperts | None] = [None]
    if num_ranks > 1:
        placement = plan_placement(directory, spec, config)
        owned = [owned_experts(spec, placement, rank) for rank in range(num_ranks)]
    elif spec.moe is not None:
        # A file that cannot serve is refused, whether or not anything goes by it.
        read_statistics(directory, config)
    residency = plan_residency(directory, spec, dtype, config, placement)
    if residency is not None:
        owned = [no_experts] * num_ranks
    index = read_index(directory)
    narrow = dtype == torch.float32 and native_kernels() is not None
    weights_bytes = sum(
        plan_weights(spec, index, of_rank).loaded_num_bytes(dtype.itemsize, narrow=narrow) for of_rank in owned
    )
    if residency is not None:
        weights_bytes += num_ranks * residency.slots.num_bytes
    name = str(dtype).removeprefix("torch.")
    free = available_bytes()
    if weights_bytes > free:
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
    return ModelPlan(spec, dtype, kv, weights_bytes, placement, residency)


def owned_experts(spec: DecoderSpec, placement: Placement, rank: int) -> OwnedExperts:
    """The experts that a rank loads, by layer of the decoder."""
    placed_layer = {layer: number for number, layer in enumerate(spec.moe_layers)}
    return lambda layer: placement.experts_on(placed_layer[layer], rank)


def no_experts(_: int) -> Sequence[int]:
    """Nothing is loaded with the model: experts are read when they are needed."""
    return ()


def load_model(
    directory: Path,
    config: ServeConfig,
    report: Report,
    *,
    plan: ModelPlan | None = None,
    owned: OwnedExperts | None = None,
    dispatch_of: DispatchOf | None = None,
    tap: RoutingTap | None = None,
    experts: CpuResidentModel | None = None,
    observers: list[AnyObserver] | None = None,
) -> LoadedModel:
    """Reads weights and takes KV memory, as planned or for a rank that is alone, which then warms up.

    owned, dispatch_of: see `load_decoder`. A rank of several warms up when all are loaded: they meet in each layer.
    tap: hears what the gates choose. experts: what a rank of several has opened where not all are in memory, with the
    `observers`, which may be added to before the first step.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    plan = plan or plan_model(directory, config)
    spec, dtype, kv = plan.spec, plan.dtype, plan.kv
    _warn_of_uncompiled_kernels()
    observers = [] if observers is None else observers
    if tap is not None:
        observers.append(tap)
    if experts is None and plan.residency is not None:
        experts = open_experts(directory, spec, plan.residency, config, report, observers=observers)
    decoder = load_decoder(
        directory,
        spec,
        dtype=dtype,
        max_model_len=kv.max_model_len,
        owned_experts=owned if experts is None else no_experts,
        dispatch_of=dispatch_of or (None if experts is None else experts.dispatch_of),
        observers=observers,
        progress=_progress(plan, report),
    )
    runner = ModelRunner(decoder, KVPool(spec.kv_layers, kv.num_blocks, config.block_size, dtype), tap)
    if dispatch_of is None:
        runner.warm_up(step_budget(config))
    return LoadedModel(
        spec,
        load_generation_defaults(directory),
        kv,
        dtype,
        plan.weights_bytes,
        kv.num_blocks * kv_block_bytes(spec.kv_layers, config.block_size, dtype),
        "cpu",
        runner,
        decoder.experts,
        experts,
        observers,
        decoder,
    )


def _warn_of_uncompiled_kernels() -> None:
    absence = native_kernels_absence()
    if absence is not None:
        log.warning("cpu_kernels_not_compiled", reason=absence, consequence="torch computes, several times slower")


def _progress(plan: ModelPlan, report: Report) -> Progress:
    stage = f"loading {plan.weights_bytes / 2**30:.1f} GiB of weights for {str(plan.dtype).removeprefix('torch.')}"
    if plan.spec.quantization is not None:
        stage += f", expanded from {plan.spec.quantization.kind}"
    return lambda done, total: report({"event": "loading", "done": done, "total": total, "stage": stage})
