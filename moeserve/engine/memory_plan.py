"""Plan every rank's part of the model and divide its memory, once, before any rank takes some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from experts.placement.placement import Placement, PlacementError, contiguous
from kernels.cpu.library import native_kernels, native_kernels_absence
from kernels.cpu.panels import LANES
from kernels.packed_experts import ExpertLayout, LayerPackings
from moeserve.config import ConfigError, ServeConfig, refuse_changed
from moeserve.device import (
    KvBudget,
    StateDemand,
    available_bytes,
    choose_device,
    cuda_absence,
    current_gpu,
    multiplies_fp8,
    plan_kv,
    step_budget,
)
from moeserve.engine.experts.memory import ResidencyPlan, plan_residency, residency_with
from moeserve.engine.experts.settings import plan_placement, read_statistics
from moeserve.engine.kv.disk.files import AUTO
from moeserve.engine.ranks.settings import check_first_node, layers_of_ranks
from moeserve.engine.weight_bytes import (
    keeps_narrow,
    no_experts,
    owned_experts,
    shard_bytes,
    stage_bytes,
    weights_bytes,
)
from moeserve.model.checkpoint import OwnedExperts, find_mtp, plan_weights, read_index
from moeserve.model.demo import demo_named
from moeserve.model.expert_store import layouts_of, native_layouts
from moeserve.model.families import build_spec, is_native, load_config, read_config
from moeserve.model.files import is_gguf_folder
from moeserve.model.kv_pool import kv_block_bytes, kv_pool_bytes, window_demand
from moeserve.model.rounding import FLOATS_OF_8_BITS, NO_ROUNDING, Rounding, format_in_file, shown_format
from moeserve.model.shards import Shard, check_shards, sharded
from moeserve.model.spec import DecoderSpec, ModelError, ModelSpec
from moeserve.model.stages import Stage, stages_of
from moeserve.model.state_pool import state_row_bytes
from moeserve.model.stored import TensorInfo
from moeserve.settings.drafts import parse_speculative
from moeserve.settings.quantities import show_size

# Bytes of KV without a setting for the demo, which people try beside their work.
_DEMO_KV_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model to be loaded, which computes in `dtype` on a device, `cpu` or `cuda`.

    kv: the KV memory of each rank. weights_bytes: of all ranks together. On a GPU both are 0 here and known when all
    ranks have loaded. placement: the ranks that hold each expert, None where ranks do not share the experts. layers:
    the number of layers on each rank, empty where every rank has all layers. residency: the slots
    of experts in memory, None where all experts are in memory; a GPU decides that when it loads. forgets_files: pages
    of the checkpoint leave memory behind the reader, because there is no room for them beside the weights.
    """

    spec: ModelSpec
    dtype: torch.dtype
    kv: KvBudget
    weights_bytes: int
    placement: Placement | None = None
    residency: ResidencyPlan | None = None
    device: str = "cpu"
    rounding: Rounding = NO_ROUNDING
    forgets_files: bool = False
    layers: tuple[int, ...] = ()


def read_spec(directory: Path, config: ServeConfig, device: str = "cpu") -> tuple[DecoderSpec, torch.dtype]:
    """Return the architecture of a model on our own code, and the dtype to compute in.

    Raise ConfigError or ModelError for an MTP layer that is asked for and cannot draft.
    """
    spec = build_spec(load_config(directory))
    if _drafts_by_mtp(config):
        if device != "cpu":
            raise ConfigError("--speculative-config: MTP layers draft tokens on a CPU alone so far.")
        spec = replace(spec, mtp=find_mtp(spec, read_index(directory)))
    if device != "cpu" and spec.gpu_obstacle is not None:
        raise ConfigError(spec.gpu_obstacle)
    return spec, native_dtype(config, device)


def _drafts_by_mtp(config: ServeConfig) -> bool:
    return parse_speculative(config.speculative_config).method == "mtp"


def native_dtype(config: ServeConfig, device: str) -> torch.dtype:
    """Return the dtype in which a model on our own code computes: float32 where bfloat16 is for products alone."""
    return torch.float32 if device == "cpu" and _narrows(config) else compute_dtype(config, device)


def _narrows(config: ServeConfig) -> bool:
    return config.dtype == "bfloat16" and native_kernels() is not None


def compute_dtype(config: ServeConfig, device: str) -> torch.dtype:
    default = torch.float32 if device == "cpu" else torch.bfloat16
    dtype: torch.dtype = default if config.dtype == "auto" else getattr(torch, config.dtype)
    return dtype


def cpu_kv_dtype(
    config: ServeConfig, spec: ModelSpec, dtype: torch.dtype, rounding: Rounding = NO_ROUNDING
) -> torch.dtype:
    """Return the dtype of keys and values on a CPU that computes in `dtype`. Raise ConfigError."""
    name = config.kv_cache_dtype
    rounds = isinstance(spec, DecoderSpec) and (rounding.rounds_rows or rounding.narrow)
    if name == "auto" and dtype == torch.float32 and rounds:
        return torch.bfloat16
    kv_dtype: torch.dtype = dtype if name == "auto" else getattr(torch, name)
    if kv_dtype != dtype and dtype != torch.float32:
        raise ConfigError(f"--kv-cache-dtype {name} on a CPU needs --dtype float32.")
    if kv_dtype != dtype and not isinstance(spec, DecoderSpec):
        raise ConfigError(f"--kv-cache-dtype {name} is for models on our own code so far.")
    return kv_dtype


def read_any_spec(directory: Path, config: ServeConfig, device: str = "cpu") -> tuple[ModelSpec, torch.dtype]:
    """Do as `read_spec`, for a model on our own code or on transformers'."""
    described = read_config(directory)
    if is_native(described, config.model_impl):
        return read_spec(directory, config, device)
    if is_gguf_folder(directory) and is_native(described, "auto"):
        raise ConfigError("Our own code computes this GGUF file: leave --model-impl at auto.")
    if _drafts_by_mtp(config):
        raise ConfigError("--speculative-config: MTP layers draft tokens of models on our own code alone.")
    if device != "cpu":
        _check_transformers_on_gpu(config)
    from moeserve.model.hf.spec import read_transformers_spec  # Imported late: it loads transformers' modelling code.

    spec = read_transformers_spec(directory)
    if device != "cpu" and spec.gpu_obstacle is not None:
        raise ConfigError(spec.gpu_obstacle)
    return spec, compute_dtype(config, device)


def _check_transformers_on_gpu(config: ServeConfig) -> None:
    """Raise ConfigError for settings of a GPU that models on transformers' code do not honour."""
    ours = "a model on our own code so far"
    if config.num_ranks > 1:
        raise ConfigError(f"--device cuda: several GPUs are for {ours}, and transformers' code computes this one.")
    for name in ("expert_memory", "kv_cache_dtype"):
        if getattr(config, name) != getattr(ServeConfig, name):
            flag = f"--{name.replace('_', '-')} {getattr(config, name)}"
            raise ConfigError(f"{flag} on a GPU is for {ours}, and transformers' code computes this one.")


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Let torch compute on one thread: a pool that it starts would not survive a fork of this process."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@on_one_thread()
def plan_model(directory: Path, config: ServeConfig) -> ModelPlan:
    """Read the configuration and, on a CPU, divide the memory that is free now, before any rank takes some.

    Raise ConfigError or ModelError for a model or settings that cannot be served.
    """
    device = choose_device(config, cuda_absence)
    check_kv_tiers(config, device)
    _check_kv_transfer(config, device)
    spec, dtype = read_any_spec(directory, config, device)
    check_expert_store(config, spec, device)
    placement = plan_placement(directory, spec, config) if config.expert_parallel_size > 1 else None
    if device == "cuda":
        return _plan_on_gpu(spec, dtype, read_index(directory), config, placement)
    if placement is None and spec.moe is not None:
        # Refuse an unusable file, whether or not a setting uses it.
        read_statistics(directory, config)
    if isinstance(spec, DecoderSpec):
        return plan_on_cpu(spec, dtype, read_index(directory), config, available_bytes(), placement)
    check_native_ranks(config, spec)
    from moeserve.model.hf.expert_weights import TransformersExperts, map_model

    model, narrow = map_model(directory), keeps_narrow(dtype)
    rounding = rounding_of(config, spec, model.weights.index)

    def layouts() -> LayerPackings[ExpertLayout]:
        return layouts_of(TransformersExperts(model, dtype, rounding))

    residency = plan_residency(layouts, spec, dtype, config, placement, rounding)
    owned_by = _owned_by(spec, config.expert_parallel_size, placement, residency)
    num_bytes = sum(model.num_bytes(dtype, owned, rounding, narrow=narrow) for owned in owned_by)
    return share_memory(spec, dtype, num_bytes, config, available_bytes(), placement, residency, rounding)


def _plan_on_gpu(
    spec: ModelSpec,
    dtype: torch.dtype,
    index: Mapping[str, TensorInfo],
    config: ServeConfig,
    placement: Placement | None,
) -> ModelPlan:
    """Plan the part of each rank, which finds out by itself how much memory is left for KV."""
    if not isinstance(spec, DecoderSpec):
        rounding = rounding_on_gpu(spec, index)
        return ModelPlan(spec, dtype, KvBudget(0, 0), 0, placement, device="cuda", rounding=rounding)
    layers = layers_on_gpus(spec, index, config) if config.pipeline_parallel_size > 1 else ()
    if config.tensor_parallel_size > 1:
        check_shards(spec, config.tensor_parallel_size)
        placement = placement or shards_placement(spec, config)
    rounding = rounding_on_gpu(spec, index, fp8_products=_fp8_products(spec, dtype, config))
    return ModelPlan(spec, dtype, KvBudget(0, 0), 0, placement, device="cuda", rounding=rounding, layers=layers)


def layers_on_gpus(spec: DecoderSpec, index: Mapping[str, TensorInfo], config: ServeConfig) -> tuple[int, ...]:
    """Split the layers over GPUs, by their bytes in the checkpoint or as the settings say. Raise ConfigError."""
    whole = plan_weights(spec, index)
    sizes = [whole.of_stage(stage, spec).num_bytes for stage in stages_of([1] * spec.num_layers)]
    layers = layers_of_ranks(config, sizes, spec.joined_layers)
    if not all(spec.of_layers(stage).kv_layers for stage in stages_of(layers)):
        raise ConfigError("--pipeline-parallel-size: on GPUs every rank needs a layer with attention.")
    return layers


def plan_on_cpu(
    spec: DecoderSpec,
    dtype: torch.dtype,
    index: Mapping[str, TensorInfo],
    config: ServeConfig,
    free_bytes: int,
    placement: Placement | None = None,
) -> ModelPlan:
    """Divide `free_bytes` of memory between weights and KV. index: of the checkpoint.

    Raise ConfigError or ModelError if something does not fit.
    """
    rounding = rounding_of(config, spec, index)

    def layouts() -> LayerPackings[ExpertLayout]:
        return native_layouts(index, spec, dtype, rounding)

    if config.tensor_parallel_size > 1:
        check_shards(spec, config.tensor_parallel_size)
        placement = placement or shards_placement(spec, config)
    if config.pipeline_parallel_size > 1:
        return _plan_pipeline(spec, dtype, index, config, free_bytes, placement, rounding)
    if config.tensor_parallel_size > 1:
        residency = plan_residency(layouts, spec, dtype, config, placement, rounding)
        return _plan_shards(spec, dtype, index, config, free_bytes, placement, residency, rounding)
    residency = plan_residency(layouts, spec, dtype, config, placement, rounding)
    owned_by = _owned_by(spec, config.expert_parallel_size, placement, residency)
    num_bytes = weights_bytes(spec, dtype, index, owned_by, rounding)
    plan = share_memory(spec, dtype, num_bytes, config, free_bytes, placement, residency, rounding)
    stored_bytes = sum(info.num_bytes for info in index.values())
    return replace(plan, forgets_files=plan.weights_bytes + stored_bytes > free_bytes)


def _plan_pipeline(
    spec: DecoderSpec,
    dtype: torch.dtype,
    index: Mapping[str, TensorInfo],
    config: ServeConfig,
    free_bytes: int,
    placement: Placement | None,
    rounding: Rounding,
) -> ModelPlan:
    """Split the layers over ranks, and divide the memory of this machine, the first node, between the stages on it."""
    sizes = stage_bytes(spec, dtype, index, stages_of([1] * spec.num_layers), rounding)
    # The first size has the embedding, the last one the output projection.
    layers = layers_of_ranks(config, sizes, spec.joined_layers)
    shards, width = config.tensor_parallel_size, config.num_ranks // config.pipeline_parallel_size
    num_here = config.num_ranks_here // width
    here, whole = (Stage(0, end, spec.num_layers) for end in (sum(layers[:num_here]), spec.num_layers))
    owned_by = _owned_by(spec, width, placement, None) * (1 if placement is not None else shards)
    of_places = [
        stage_bytes(spec, dtype, index, [here, whole], rounding, owned, Shard(place % shards, shards))
        for place, owned in enumerate(owned_by)
    ]
    num_bytes, of_all = (sum(sizes) for sizes in zip(*of_places, strict=True))
    # Of all ranks at one place of their stages.
    settings = {name: getattr(config, name) for name in ("kv_cache_memory", "state_cache_memory")}
    of_node = replace(config, **{name: size * num_here for name, size in settings.items() if size is not None})
    # All ranks have as many blocks: as many as those with the most heads have room for.
    part = sharded(spec.of_layers(here), Shard(shards - 1, shards))
    check_first_node(part, spec)
    plan = share_memory(part, dtype, num_bytes, of_node, free_bytes, placement, rounding=rounding, num_ranks=width)
    stored_bytes = sum(info.num_bytes for info in index.values())
    forgets_files = num_bytes + stored_bytes > free_bytes
    return replace(plan, spec=spec, weights_bytes=of_all, layers=layers, forgets_files=forgets_files)


def _plan_shards(
    spec: DecoderSpec,
    dtype: torch.dtype,
    index: Mapping[str, TensorInfo],
    config: ServeConfig,
    free_bytes: int,
    placement: Placement | None,
    residency: ResidencyPlan | None,
    rounding: Rounding,
) -> ModelPlan:
    """Cut the layers, and divide the memory of this machine, the first node, between the shards on it."""
    sizes = shard_bytes(
        spec, dtype, index, placement, config.tensor_parallel_size, rounding, with_experts=residency is None
    )
    num_here, stored_bytes = config.num_ranks_here, sum(info.num_bytes for info in index.values())
    num_bytes = sum(sizes[:num_here])
    # All ranks have the same number of blocks, which the rank with the most heads has room for.
    part = sharded(spec, Shard(config.tensor_parallel_size - 1, config.tensor_parallel_size))
    plan = share_memory(part, dtype, num_bytes, config, free_bytes, placement, residency, rounding, num_here)
    of_all = sum(sizes) if residency is None else sum(sizes) + config.num_ranks * residency.slots.num_bytes
    return replace(plan, spec=spec, weights_bytes=of_all, forgets_files=num_bytes + stored_bytes > free_bytes)


def shards_placement(spec: DecoderSpec, config: ServeConfig) -> Placement | None:
    """Return where the experts of one group of ranks that share each layer are, in order; None without experts.

    Raise ConfigError if they cannot be shared equally.
    """
    if spec.moe is None:
        return None
    try:
        num_ranks = config.num_ranks // config.pipeline_parallel_size
        return contiguous(len(spec.moe_layers), spec.moe.num_experts, num_ranks)
    except PlacementError as error:
        raise ConfigError(f"--tensor-parallel-size {config.tensor_parallel_size}: {error}") from None


def share_memory(
    spec: ModelSpec,
    dtype: torch.dtype,
    num_bytes: int,
    config: ServeConfig,
    free_bytes: int,
    placement: Placement | None = None,
    residency: ResidencyPlan | None = None,
    rounding: Rounding = NO_ROUNDING,
    num_ranks: int | None = None,
) -> ModelPlan:
    """Give keys, values and states the part of `free_bytes` that weights and slots of experts leave.

    num_bytes: of the weights that are loaded with the model, on all ranks together. num_ranks: that share the rest,
    those that share the experts by default.
    """
    num_ranks = num_ranks or config.expert_parallel_size
    if residency is not None:
        num_bytes += num_ranks * residency.slots.num_bytes
    if num_bytes > free_bytes:
        what = "The weights take" if residency is None else "Weights and --expert-memory take"
        raise ModelError(
            f"{what} {show_size(num_bytes, up=True)} of memory, but only {show_size(free_bytes)} are free."
        )
    kv_dtype = cpu_kv_dtype(config, spec, dtype, rounding)
    free_for_rank = (free_bytes - num_bytes) // num_ranks
    kv = plan_kv(
        block_bytes=kv_block_bytes(spec.kv_layers, config.block_size, kv_dtype),
        block_size=config.block_size,
        available_bytes=free_for_rank,
        kv_cache_memory=config.kv_cache_memory,
        model_max_len=spec.longest_context(config.max_model_len),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        most_bytes=_most_kv_bytes(config, free_for_rank, residency),
        states=state_demand(spec, dtype, config),
        windows=window_demand(spec.kv_layers, config.block_size, kv_dtype, config.max_num_seqs, step_budget(config)),
    )
    if config.kv_disk_path not in (None, AUTO) and spec.state_layers and not kv.num_snapshots:
        raise ConfigError(
            "--kv-disk-path keeps cached prefixes, and this model caches none without room for snapshots of its states."
        )
    if spec.state_layers or kv.num_window_blocks:
        kind = "recurrent states" if spec.state_layers else "window blocks"
        if config.kv_transfer_config is not None:
            raise ConfigError(f"--kv-transfer-config moves KV blocks alone so far, and this model needs its {kind}.")
    return ModelPlan(spec, dtype, kv, num_bytes, placement, residency, rounding=rounding)


def _most_kv_bytes(config: ServeConfig, free_bytes: int, residency: ResidencyPlan | None) -> int:
    """Return the bytes that KV takes at most without a setting. free_bytes: beside the weights, for a rank."""
    if demo_named(config.model) is not None:
        return _DEMO_KV_BYTES
    # Experts without a slot stay in the page cache as far as memory is left for it.
    return free_bytes if residency is None else free_bytes // 2


def check_kv_tiers(config: ServeConfig, device: str) -> None:
    """Raise ConfigError if the settings for KV in lower tiers contradict others, or cannot be met."""
    if config.kv_host_memory is not None:
        if device == "cpu":
            raise ConfigError(
                "--kv-host-memory is for KV that a GPU evicts to its host's memory; on a CPU all KV is there already: "
                "--kv-cache-memory says how much."
            )
        if config.num_ranks > 1:
            raise ConfigError(
                "--kv-host-memory is for a single rank: each of several would find only what itself has put there. "
                "They share a --kv-disk-path, which may be a folder in the host's memory (tmpfs)."
            )
        if not config.enable_prefix_caching:
            raise ConfigError("--kv-host-memory keeps cached prefixes, and --no-enable-prefix-caching makes none.")
    if config.kv_disk_path is None:
        refuse_changed(config, ("kv_disk_size", "kv_disk_age"), "--kv-disk-path")
        if config.kv_overflow == "swap" and config.kv_host_memory is None:
            raise ConfigError("--kv-overflow swap needs --kv-disk-path, or on a GPU --kv-host-memory, to swap KV to.")
    elif config.nnodes > 1:
        raise ConfigError("--kv-disk-path is for the ranks of one machine so far.")
    elif config.expert_parallel_size > 1 and config.rebalance_interval:
        raise ConfigError("--kv-disk-path keeps KV that depends on the placement, which --rebalance-interval changes.")
    elif not config.enable_prefix_caching:
        raise ConfigError("--kv-disk-path keeps cached prefixes, and --no-enable-prefix-caching makes none.")


def check_native_ranks(config: ServeConfig, spec: ModelSpec) -> None:
    """Raise ConfigError if ranks would share layers of a model that transformers' code computes."""
    for way in ("pipeline", "tensor"):
        if (size := getattr(config, f"{way}_parallel_size")) > 1:
            raise ConfigError(
                f"--{way}-parallel-size {size}: layers of a {spec.model_type} model, which transformers' code "
                "computes, are not shared by ranks so far."
            )


def check_expert_store(config: ServeConfig, spec: ModelSpec, device: str) -> None:
    """Raise ConfigError if `--expert-store-dir` would have no effect."""
    if config.expert_store_dir is None or config.expert_memory is not None:
        return
    if device != "cpu" or config.num_ranks > 1 or not isinstance(spec, DecoderSpec):
        raise ConfigError(
            "--expert-store-dir without --expert-memory is for models on our own code, on a CPU and on a single rank."
        )
    if spec.moe is None:
        raise ConfigError(f"--expert-store-dir: a {spec.model_type} model has no experts.")


def _check_kv_transfer(config: ServeConfig, device: str) -> None:
    """Raise ConfigError if the transfer of KV between services contradicts other settings."""
    if config.kv_transfer_config is None:
        return
    if device != "cpu":
        raise ConfigError("--kv-transfer-config is for a CPU so far.")
    if config.expert_parallel_size > 1:
        raise ConfigError("--kv-transfer-config is for a single rank so far: each of several ranks has KV of its own.")
    if not config.enable_prefix_caching:
        raise ConfigError("--kv-transfer-config moves cached prefixes, and --no-enable-prefix-caching makes none.")


def state_demand(spec: ModelSpec, dtype: torch.dtype, config: ServeConfig) -> StateDemand | None:
    """Return the memory that the recurrent layers of a model need, None without such layers.

    Raise ConfigError for a setting that then has no effect.
    """
    if not spec.state_layers:
        refuse_changed(config, ("state_cache_memory",), "a model with recurrent layers")
        return None
    row_bytes = state_row_bytes(spec.state_layers, dtype)
    if not (config.enable_prefix_caching and spec.keeps_snapshots):
        needed = "--enable-prefix-caching" if spec.keeps_snapshots else "a model whose states can be copied"
        refuse_changed(config, ("state_cache_memory",), needed)
        return StateDemand(row_bytes, config.max_num_seqs, 0)
    return StateDemand(row_bytes, config.max_num_seqs, config.state_cache_memory)


@on_one_thread()
def plan_from_rank_0(
    directory: Path,
    config: ServeConfig,
    placement: Placement | None,
    kv: KvBudget,
    num_slots: tuple[int, ...] | None,
    layers: tuple[int, ...] = (),
) -> ModelPlan:
    """Return rank 0's plan for another rank's own copy of the model. num_slots: see `residency_with`."""
    device = choose_device(config, cuda_absence)
    spec, dtype = read_any_spec(directory, config, device)
    index = read_index(directory)
    if device == "cpu":
        rounding = rounding_of(config, spec, index)
    else:
        rounding = rounding_on_gpu(spec, index, fp8_products=_fp8_products(spec, dtype, config))
    residency = None if num_slots is None else residency_with(num_slots, directory, spec, dtype, rounding)
    return ModelPlan(spec, dtype, kv, 0, placement, residency, device, rounding, layers=layers)


@on_one_thread()
def check_stage(directory: Path, plan: ModelPlan, config: ServeConfig, rank: int, free_bytes: int) -> None:
    """Raise ModelError if the stage of a rank, with its part of the KV memory, does not fit into `free_bytes`.

    Rank 0 has divided the memory of its own machine, and knows no other.
    """
    shards, width = config.tensor_parallel_size, config.num_ranks // config.pipeline_parallel_size
    spec, stage, kv, shard = plan.spec, stages_of(plan.layers)[rank // width], plan.kv, Shard(rank % shards, shards)
    assert isinstance(spec, DecoderSpec)
    part, kv_dtype = sharded(spec.of_layers(stage), shard), cpu_kv_dtype(config, spec, plan.dtype, plan.rounding)
    owned = None if plan.placement is None else owned_experts(spec, plan.placement, rank % width)
    (num_bytes,) = stage_bytes(spec, plan.dtype, read_index(directory), [stage], plan.rounding, owned, shard)
    num_bytes += kv_pool_bytes(part.kv_layers, kv.num_blocks, kv.num_window_blocks, config.block_size, kv_dtype)
    num_bytes += kv.num_state_rows * state_row_bytes(part.state_layers, plan.dtype)
    if num_bytes > free_bytes:
        raise ModelError(
            f"Layers {stage.first} to {stage.end - 1}, with their part of the KV memory, take "
            f"{show_size(num_bytes, up=True)}, but only {show_size(free_bytes)} are free here: set --kv-cache-memory "
            "or --layers-per-rank."
        )


@on_one_thread()
def check_shard(directory: Path, plan: ModelPlan, config: ServeConfig, rank: int, free_bytes: int) -> None:
    """Raise ModelError if the shard of a rank, with its part of the KV memory, does not fit into `free_bytes`."""
    spec, kv, count = plan.spec, plan.kv, config.tensor_parallel_size
    assert isinstance(spec, DecoderSpec)
    part, kv_dtype = sharded(spec, Shard(rank % count, count)), cpu_kv_dtype(config, spec, plan.dtype, plan.rounding)
    slots, index = plan.residency, read_index(directory)
    num_bytes = shard_bytes(spec, plan.dtype, index, plan.placement, count, plan.rounding, with_experts=slots is None)[
        rank
    ]
    num_bytes += 0 if slots is None else slots.slots.num_bytes
    num_bytes += kv_pool_bytes(part.kv_layers, kv.num_blocks, kv.num_window_blocks, config.block_size, kv_dtype)
    num_bytes += kv.num_state_rows * state_row_bytes(part.state_layers, plan.dtype)
    if num_bytes > free_bytes:
        raise ModelError(
            f"The part of rank {rank}, with its KV memory, takes {show_size(num_bytes, up=True)}, but only "
            f"{show_size(free_bytes)} are free here: set --kv-cache-memory."
        )


def rounding_of(config: ServeConfig, spec: ModelSpec, index: Mapping[str, TensorInfo]) -> Rounding:
    """Return how a CPU keeps the weights: rounded as the settings ask, or in the checkpoint's own bits.

    Raise ConfigError for settings that contradict each other or the checkpoint.
    """
    if config.device == "cuda":
        return rounding_on_gpu(spec, index)
    if config.reproducible:
        _refuse_other_bits(config, spec)
    rounding = Rounding.named(config.quantization, config.arithmetic)
    if not isinstance(spec, DecoderSpec):
        # The check at load compares numbers, and rounded rows differ by more than faults do.
        rounding = replace(rounding, arithmetic="exact")
        if config.arithmetic == "int8":
            raise ConfigError("--arithmetic int8 is for models on our own code so far: leave it at auto.")
    stored = _stored_formats(spec, index)
    absence, narrow = native_kernels_absence(), isinstance(spec, DecoderSpec) and _narrows(config)
    computes = config.dtype in ("auto", "float32") or narrow
    if stored - FLOATS_OF_8_BITS and not rounding.is_none:
        raise ConfigError(f"--quantization is for floats of 8, 16 or 32 bits; these are {', '.join(sorted(stored))}.")
    if stored and computes and absence is None and rounding.matrices is None:
        return replace(rounding, keeps_stored=True, stored=tuple(sorted(stored)), narrow=narrow)
    if rounding.is_none:
        if config.arithmetic == "int8":
            raise ConfigError("--arithmetic int8 needs quantised weights, and compiled kernels, which lack float16.")
        return replace(rounding, narrow=narrow)
    if absence is not None:
        raise ConfigError(f"Quantised weights need the compiled kernels. {absence}")
    if not computes:
        raise ConfigError(f"Quantised weights on a CPU do not multiply rows of {config.dtype}: leave --dtype at auto.")
    return replace(rounding, narrow=narrow)


def _refuse_other_bits(config: ServeConfig, spec: ModelSpec) -> None:
    """Raise ConfigError where torch would compute: its bits differ between processors."""
    if (absence := native_kernels_absence()) is not None:
        raise ConfigError(f"--reproducible needs the compiled kernels. {absence}")
    if not isinstance(spec, DecoderSpec):
        raise ConfigError("--reproducible is for models on our own code: torch computes a part of others.")
    if config.dtype == "float16":
        raise ConfigError("--reproducible: torch computes float16 on a CPU, with other bits on other processors.")
    if any(dim % LANES for layer in spec.kv_layers for dim in (layer.key_dim, layer.value_dim)):
        raise ConfigError(f"--reproducible: torch computes attention whose heads are no multiple of {LANES} wide.")


def rounding_on_gpu(spec: ModelSpec, index: Mapping[str, TensorInfo], *, fp8_products: bool = False) -> Rounding:
    """Return how a GPU keeps the weights: in the checkpoint's own bits. `--quantization` is not part of it."""
    stored = tuple(sorted(_stored_formats(spec, index)))
    return Rounding(arithmetic="exact", keeps_stored=bool(stored), stored=stored, fp8_products=fp8_products)


def _fp8_products(spec: ModelSpec, dtype: torch.dtype, config: ServeConfig) -> bool:
    """Return whether this GPU multiplies weights in FP8 by activations in FP8, as the makers of a model round them."""
    rounds = spec.quantization is not None and spec.quantization.rounds_rows and config.arithmetic == "auto"
    return rounds and dtype != torch.float32 and multiplies_fp8(current_gpu())


def _stored_formats(spec: ModelSpec, index: Mapping[str, TensorInfo]) -> set[str]:
    """Return the names of the quantised formats of a checkpoint, for people."""
    stored = {
        shown_format(info.dtype, form) for info in index.values() if (form := format_in_file(info.dtype)) is not None
    }
    if spec.quantization is not None and spec.quantization.kind == "mxfp4":
        stored.add(spec.quantization.kind)
    return stored


def _owned_by(
    spec: ModelSpec, num_ranks: int, placement: Placement | None, residency: ResidencyPlan | None
) -> list[OwnedExperts | None]:
    """Return for each rank the experts that it loads with the model, None for all."""
    if residency is not None:
        return [no_experts] * num_ranks
    if placement is None:
        return [None]
    return [owned_experts(spec, placement, rank) for rank in range(num_ranks)]
