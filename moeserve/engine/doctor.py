"""Say which ways to serve a model fit into a machine, from its configuration alone.

Nothing here is a second opinion: the memory comes from the functions that plan it at a start
(`moeserve.engine.memory_plan`, `moeserve.device`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from experts.memory.file import round_to_page
from moeserve.config import ConfigError, ServeConfig, default_of, flag_name
from moeserve.device import (
    GRAPH_BYTES,
    RESERVE_BYTES,
    KvBudget,
    available_bytes,
    choose_device,
    incapability,
    kv_memory,
    needs_fp8,
    refuse_gpu_settings,
    share_kv,
    step_budget,
)
from moeserve.engine.experts.settings import equal_placement
from moeserve.engine.known_model import BorrowedModel, KnownModel, NativeModel, examine
from moeserve.engine.kv.disk.files import disk_root, why_unusable
from moeserve.engine.memory_plan import (
    ModelPlan,
    check_expert_store,
    check_kv_tiers,
    check_native_ranks,
    compute_dtype,
    cpu_kv_dtype,
    layers_on_gpus,
    native_dtype,
    plan_on_cpu,
    read_any_spec,
    rounding_of,
    rounding_on_gpu,
    share_memory,
)
from moeserve.engine.ranks.settings import check_pipeline, check_tensor
from moeserve.engine.weight_bytes import keeps_narrow, no_experts, weights_bytes
from moeserve.machine import Gpu, Machine
from moeserve.model.checkpoint import WeightPlan, loaded_bytes, plan_weights
from moeserve.model.expert_store import layouts_of, native_layouts
from moeserve.model.expert_weights import NativeExperts
from moeserve.model.kv_pool import kv_block_bytes, kv_pool_bytes, window_demand, windowed
from moeserve.model.rounding import FLOATS_OF_8_BITS, NO_ROUNDING, Rounding
from moeserve.model.shards import Shard, check_shards, sharded
from moeserve.model.spec import DecoderSpec, ModelError
from moeserve.model.stages import stages_of
from moeserve.model.state_pool import state_row_bytes
from moeserve.settings.quantities import parse_size
from radix_cache import Kind

if TYPE_CHECKING:
    from kernels.gpu.moe import SlotLayout
    from kernels.packed_experts import ExpertShape, LayerPackings
    from moeserve.model.hf.sizes import SizedModel

# The share of the memory left beside other weights and reserve that is advised for `--expert-memory`.
_SHARE_FOR_EXPERTS = 0.75
_GIB, _MIB = 2**30, 2**20
# Bytes; the memory that a model needs at least is searched in steps of this size.
_STEP_BYTES = 256 * _MIB
_UNITS = ((_GIB, "GiB"), (_MIB, "MiB"), (1, ""))


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to serve a model on a machine.

    device: `cpu` or `cuda`. flags: of `moeserve serve`. obstacle: why it does not fit; then the numbers are 0.
    num_window_blocks: of only the layers with a sliding window, 0 if all layers share blocks. resident_experts: the
    number of each layer's experts in memory at a time, None if all are. tokens_per_second: the most for a single
    request, because each token reads the active weights; None if it is not known. expert_file_bytes: of the file that
    holds all experts on disk, 0 without one. kv_host_bytes: of the host, for KV that leaves a GPU. kv_disk_bytes: the
    most that files of KV take.
    """

    device: str
    flags: tuple[str, ...]
    obstacle: str | None = None
    weights_bytes: int = 0
    kv_bytes: int = 0
    kv_tokens: int = 0
    max_model_len: int = 0
    state_bytes: int = 0
    num_state_slots: int = 0
    num_snapshots: int = 0
    num_window_blocks: int = 0
    resident_experts: int | None = None
    tokens_per_second: float | None = None
    expert_file_bytes: int = 0
    kv_host_bytes: int = 0
    kv_disk_bytes: int = 0


def setups_of(
    model: KnownModel, machine: Machine, config: ServeConfig, on_gpu: ServeConfig | None = None
) -> list[Setup]:
    """Return the ways to serve the model here with the given settings, with obstacles.

    While nothing fits, further flags that take less memory are tried; use the last setup of a device that fits. config:
    its device is ignored. on_gpu: the same settings for a GPU; None: settings at a CPU's default are at a GPU's.
    """
    on_cpu = replace(config, device="cpu")
    refusal = _refusal(on_cpu, model)
    if isinstance(model, BorrowedModel):
        found = [refusal] if refusal is not None else list(_borrowed_on_cpu(model.sized, machine, on_cpu))
        obstacle = model.sized.spec.gpu_obstacle
        if obstacle is not None and any(gpu.obstacle is None for gpu in machine.gpus):
            found.append(Setup("cuda", _flags_of(on_gpu or for_gpu(config)), obstacle))
        return found
    assert isinstance(model, NativeModel)
    setups = [refusal] if refusal is not None else list(_on_cpu(model, machine, on_cpu))
    gpus = [gpu for gpu in machine.gpus if gpu.obstacle is None]
    # The memory of states on a GPU is not planned before loading.
    if gpus and not model.spec.state_layers:
        on_gpu = on_gpu or for_gpu(config)
        refusal = _refusal(on_gpu, model)
        setups += [refusal] if refusal is not None else _on_gpus(model, gpus, on_gpu, machine.free_bytes)
    return setups


def deciding_gpu(gpus: Sequence[Gpu], num_ranks: int) -> Gpu:
    """Return the GPU that decides what fits: the one with the least free memory of several ranks', or the first, which
    one rank takes."""
    return gpus[0] if num_ranks == 1 else min(gpus, key=lambda gpu: gpu.free_bytes)


def gpu_obstacle(folder: Path, config: ServeConfig, gpu: Gpu) -> str | None:
    """Return why the model in a folder is not served on a GPU, which can be used; None if it is.

    config: of a service on a GPU. Raise ConfigError or ModelError for settings or a model that no GPU takes.
    """
    choose_device(config, lambda _: None)
    check_kv_tiers(config, "cuda")
    spec, _ = read_any_spec(folder, config, "cuda")
    if not isinstance(spec, DecoderSpec):
        return "its checks do not cover transformers' code, which computes this model; --device cuda tries it"
    if spec.state_layers:
        return "the memory of recurrent states there is not planned before loading; --device cuda tries it"
    model = examine(folder)
    assert isinstance(model, NativeModel)
    return _gpu_setup(model, [gpu], config, available_bytes()).obstacle


def for_gpu(config: ServeConfig) -> ServeConfig:
    """Return settings for a GPU whose defaults take the place of a CPU's."""
    changed = {
        setting.name: default_of(setting, "cuda")
        for setting in fields(ServeConfig)
        if getattr(config, setting.name) == setting.default
    }
    return replace(config, **(changed | {"device": "cuda"}))


def _refusal(config: ServeConfig, model: KnownModel) -> Setup | None:
    """Return a setup that says why the settings contradict each other, however much memory there is; None if not."""
    obstacle = None
    try:
        if config.device == "cpu":
            is_native = isinstance(model, NativeModel)
            refuse_gpu_settings(config, "--device cuda" if is_native else "a model on our own code, with --device cuda")
        choose_device(config, lambda _: None)
        check_kv_tiers(config, config.device)
        check_pipeline(config)
        check_tensor(config)
    except ConfigError as error:
        obstacle = str(error)
    else:
        path = config.kv_disk_path
        reason = None if path is None else why_unusable(disk_root(path))
        if reason is not None:
            obstacle = f"The folder of --kv-disk-path, {path}, cannot be used: {reason}."
    return None if obstacle is None else Setup(config.device, _flags_of(config), obstacle)


def rounded_setups(model: KnownModel, machine: Machine, config: ServeConfig) -> list[Setup]:
    """Return the ways to serve the model on a CPU with `--quantization` that fit, the most bits first.

    None where the settings or the checkpoint have few bits already.
    """
    if config.expert_memory is not None:
        return []
    on_cpu = replace(config, device="cpu")
    if _refusal(on_cpu, model) is not None:
        return []
    try:
        rounding = rounding_of(on_cpu, model.spec, model.index)
    except (ModelError, ConfigError):
        return []
    is_fp8 = rounding.keeps_stored and FLOATS_OF_8_BITS.issuperset(rounding.stored)
    widths = ("int4",) if is_fp8 else ("int8", "int4")
    if not is_fp8 and not (rounding.is_none and model.spec.quantization is None):
        return []
    configs = [replace(on_cpu, quantization=width) for width in widths]
    tried: list[Setup] = []
    if isinstance(model, NativeModel):
        tried = [_cpu_setup(model, machine, tried_config) for tried_config in configs]
    elif isinstance(model, BorrowedModel):
        tried = [_borrowed_setup(model.sized, machine, tried_config) for tried_config in configs]
    return [setup for setup in tried if setup.obstacle is None]


def _on_cpu(model: NativeModel, machine: Machine, config: ServeConfig) -> Iterator[Setup]:
    spec, index = model.spec, model.index
    setup = _cpu_setup(model, machine, config)
    yield setup
    wide = weights_bytes(spec, torch.float32, index)
    if setup.obstacle is not None and config.dtype == "auto" and 2 * weights_bytes(spec, torch.bfloat16, index) <= wide:
        setup = _cpu_setup(model, machine, replace(config, dtype="bfloat16"))
        yield setup
    shares_layers = config.num_ranks > config.expert_parallel_size
    if setup.obstacle is not None and spec.moe is not None and config.expert_memory is None and not shares_layers:
        dtype = native_dtype(config, "cpu")
        try:
            rounding = rounding_of(config, spec, index)
            others = weights_bytes(spec, dtype, index, [no_experts], rounding)
            free = machine.free_bytes - RESERVE_BYTES - others
            advised = _advised(free, spec, native_layouts(index, spec, dtype, rounding).num_bytes)
        except (ModelError, ConfigError) as error:
            yield Setup("cpu", (), str(error))
        else:
            yield _cpu_setup(model, machine, replace(config, expert_memory=advised))


def _cpu_setup(model: NativeModel, machine: Machine, config: ServeConfig) -> Setup:
    spec, dtype, flags = model.spec, native_dtype(config, "cpu"), _flags_of(config)
    try:
        check_expert_store(config, spec, "cpu")
        placement = equal_placement(spec, config)
        plan = plan_on_cpu(spec, dtype, model.index, config, machine.free_bytes, placement)
    except (ModelError, ConfigError) as error:
        return Setup("cpu", flags, str(error))
    resident = speed = None
    if plan.residency is not None:
        resident = min(plan.residency.slots.num_slots)
    elif machine.bandwidth is not None and config.num_ranks == 1:
        others = weights_bytes(spec, dtype, model.index, [no_experts], plan.rounding)
        narrow = keeps_narrow(dtype)
        speed = machine.bandwidth / _read_per_token(
            model, plan.weights_bytes - others, others, dtype, narrow=narrow, rounding=plan.rounding
        )
    fitting = _fitting(plan, config, flags, resident, speed)
    stored = NativeExperts(model.index, spec, dtype, plan.rounding)
    if config.expert_store_dir is None and (plan.residency is None or stored.lie_as_packed()):
        return fitting
    if plan.residency is None and config.expert_memory is not None:
        return fitting
    return replace(fitting, expert_file_bytes=_expert_file_bytes(spec, layouts_of(stored).num_bytes))


def _expert_file_bytes(spec: DecoderSpec, expert_bytes: int) -> int:
    assert spec.moe is not None
    return (len(spec.moe_layers) * spec.moe.num_experts + 1) * round_to_page(expert_bytes)


def least_memory(model: KnownModel, machine: Machine, config: ServeConfig) -> tuple[int, Setup] | None:
    """Return the free memory with which a CPU could serve the model, in steps of 256 MiB, and the setup that fits.

    None if no amount below 64 TiB helps: the obstacle is another one.
    """

    def found(free_bytes: int) -> Setup | None:
        setups = setups_of(model, replace(machine, free_bytes=free_bytes, gpus=()), config)
        return next((setup for setup in setups if setup.obstacle is None), None)

    too_little, enough = 0, 64 * 2**40 // _STEP_BYTES
    if found(enough * _STEP_BYTES) is None:
        return None
    while enough - too_little > 1:
        middle = (too_little + enough) // 2
        if found(middle * _STEP_BYTES) is None:
            too_little = middle
        else:
            enough = middle
    setup = found(enough * _STEP_BYTES)
    assert setup is not None
    return enough * _STEP_BYTES, setup


def _fitting(
    plan: ModelPlan, config: ServeConfig, flags: tuple[str, ...], resident: int | None, speed: float | None
) -> Setup:
    """Return a setup on a CPU that takes the memory of `plan`."""
    return Setup(
        "cpu",
        flags,
        None,
        plan.weights_bytes,
        kv_pool_bytes(
            plan.spec.kv_layers,
            plan.kv.num_blocks,
            plan.kv.num_window_blocks,
            config.block_size,
            cpu_kv_dtype(config, plan.spec, plan.dtype, plan.rounding),
        ),
        plan.kv.num_blocks * config.block_size,
        plan.kv.max_model_len,
        plan.kv.num_state_rows * state_row_bytes(plan.spec.state_layers, plan.dtype),
        plan.kv.num_state_slots,
        plan.kv.num_snapshots,
        plan.kv.num_window_blocks,
        resident,
        speed,
        kv_disk_bytes=0 if config.kv_disk_path is None else config.kv_disk_size,
    )


def _borrowed_on_cpu(sized: SizedModel, machine: Machine, config: ServeConfig) -> Iterator[Setup]:
    """Do as `_on_cpu`, with all experts in memory."""
    setup = _borrowed_setup(sized, machine, config)
    yield setup
    wide, half = (sized.loaded_bytes(d, NO_ROUNDING, narrow=keeps_narrow(d)) for d in (torch.float32, torch.bfloat16))
    if setup.obstacle is not None and config.dtype == "auto" and config.expert_memory is None and 2 * half <= wide:
        yield _borrowed_setup(sized, machine, replace(config, dtype="bfloat16"))


def _borrowed_setup(sized: SizedModel, machine: Machine, config: ServeConfig) -> Setup:
    spec, dtype, flags = sized.spec, compute_dtype(config, "cpu"), _flags_of(config)
    narrow = keeps_narrow(dtype)
    try:
        check_expert_store(config, spec, "cpu")
        check_native_ranks(config, spec)
        if config.expert_memory is not None:
            raise ConfigError("What --expert-memory takes of a model on transformers' code is known when it is loaded.")
        rounding = rounding_of(config, spec, sized.index)
        num_bytes = sized.loaded_bytes(dtype, rounding, narrow=narrow)
        plan = share_memory(spec, dtype, num_bytes, config, machine.free_bytes, rounding=rounding)
    except (ModelError, ConfigError) as error:
        return Setup("cpu", flags, str(error))
    read = sized.read_per_token(dtype, rounding, narrow=narrow)
    speed = None if read is None or machine.bandwidth is None else machine.bandwidth / read
    return _fitting(plan, config, flags, None, speed)


def _read_per_token(
    model: NativeModel, experts: int, others: int, dtype: torch.dtype, *, narrow: bool, rounding: Rounding = NO_ROUNDING
) -> int:
    """Return the bytes of the weights read for one token: chosen experts, and all others but the embedding.

    The embedding is left out because a token reads only one row of it. experts, others: bytes of all experts and of the
    other weights, loaded to compute in `dtype`.
    """
    moe = model.spec.moe
    chosen = 0 if moe is None else experts * moe.gate.top_k // moe.num_experts
    embedding = plan_weights(model.spec, model.index, no_experts).outer["embedding"]
    quantised = rounding.num_bytes("embedding", embedding)
    return chosen + others - (loaded_bytes(embedding, dtype.itemsize, narrow) if quantised is None else quantised)


def _on_gpus(model: NativeModel, gpus: Sequence[Gpu], config: ServeConfig, host_bytes: int) -> Iterator[Setup]:
    """gpus: that can serve. host_bytes: of the host's memory, that are free."""
    if model.spec.gpu_obstacle is not None:
        yield Setup("cuda", _flags_of(config), model.spec.gpu_obstacle)
        return
    setup = _gpu_setup(model, gpus, config, host_bytes)
    yield setup
    moe = model.spec.moe
    if setup.obstacle is None or config.expert_memory is not None:
        return
    tried: list[ServeConfig] = []
    if config.num_ranks == 1 and config.kv_host_memory is None:
        tried += _shared_by(model.spec, len(gpus), config)
    dtype = compute_dtype(config, "cuda")
    kept = any(shape.formats for shape in _expert_shapes(model, dtype))
    if moe is not None and config.quantization == "none" and config.dtype != "float32" and not kept:
        tried += [replace(config, quantization=f"experts={form}") for form in ("int8", "int4")]
    for smaller in tried:
        setup = _gpu_setup(model, gpus, smaller, host_bytes)
        yield setup
        if setup.obstacle is None:
            return
    if moe is None or config.pipeline_parallel_size > 1:
        return
    free = _free_on_gpu(deciding_gpu(gpus, config.num_ranks), _gpu_others(model, dtype), config)
    advised = _advised(free, model.spec, _slot_layouts(model, dtype, config).num_bytes)
    yield _gpu_setup(model, gpus, replace(config, expert_memory=advised), host_bytes)


def _shared_by(spec: DecoderSpec, num_gpus: int, config: ServeConfig) -> Iterator[ServeConfig]:
    """Yield the settings by which all of several GPUs share a model, each way alone."""
    if num_gpus == 1:
        return
    if spec.moe is not None and not spec.moe.num_experts % num_gpus:
        yield replace(config, expert_parallel_size=num_gpus)
    if num_gpus <= spec.num_layers:
        yield replace(config, pipeline_parallel_size=num_gpus)
    yield replace(config, tensor_parallel_size=num_gpus)


def _gpu_setup(model: NativeModel, gpus: Sequence[Gpu], config: ServeConfig, host_bytes: int) -> Setup:
    """Plan the memory of one GPU: of several that share a model, that with the most weights."""
    gpu = deciding_gpu(gpus, config.num_ranks)
    dtype, flags = compute_dtype(config, "cuda"), _flags_of(config)
    kv_dtype = _gpu_kv_dtype(config)
    obstacle = incapability(gpu.capability, needs_fp8(config))
    if obstacle is not None:
        return Setup("cuda", flags, f"--device cuda: {obstacle}.")
    try:
        check_expert_store(config, model.spec, "cuda")
        equal_placement(model.spec, config)
        spec, others, experts, resident = max(_gpu_parts(model, dtype, config), key=lambda part: part[1] + part[2])
        _check_kernels(model, dtype, kv_dtype, gpu, config)
    except (ConfigError, ModelError) as error:
        return Setup("cuda", flags, str(error))
    try:
        kv = kv_on_gpu(spec, gpu, others + experts, config)
        if kv is None:
            usable = _free_on_gpu(gpu, 0, config)
            reason = (
                f"The weights take {(others + experts) / _GIB:.1f} GiB of a GPU; {usable / _GIB:.1f} GiB can be used."
            )
            return Setup("cuda", flags, reason)
        kv_bytes = kv_pool_bytes(spec.kv_layers, kv.num_blocks, kv.num_window_blocks, config.block_size, kv_dtype)
        kv_host_bytes = _kv_on_host(spec, config, kv, kv_bytes, kv_dtype, host_bytes)
    except ConfigError as error:
        return Setup("cuda", flags, str(error))
    speed = None
    if resident is None and gpu.bandwidth is not None and config.num_ranks == 1:
        rounding = rounding_on_gpu(spec, model.index)
        speed = gpu.bandwidth / _read_per_token(model, experts, others, dtype, narrow=False, rounding=rounding)
    num_tokens = kv.num_blocks * config.block_size
    return Setup(
        "cuda",
        flags,
        None,
        others + experts,
        kv_bytes,
        num_tokens,
        kv.max_model_len,
        num_window_blocks=kv.num_window_blocks,
        resident_experts=resident,
        tokens_per_second=speed,
        kv_host_bytes=kv_host_bytes,
    )


def kv_on_gpu(spec: DecoderSpec, gpu: Gpu, weights: int, config: ServeConfig) -> KvBudget | None:
    """Return the KV beside `weights` bytes on a GPU, None where they do not fit. Raise ConfigError for too little."""
    memory, kv_dtype = _free_on_gpu(gpu, weights, config), _gpu_kv_dtype(config)
    if not memory:
        return None
    num_tokens = step_budget(config, "cuda", gpu)
    return share_kv(
        min(memory, config.kv_cache_memory or memory),
        block_bytes=kv_block_bytes(spec.kv_layers, config.block_size, kv_dtype),
        block_size=config.block_size,
        model_max_len=spec.longest_context(config.max_model_len),
        max_model_len=config.max_model_len,
        windows=window_demand(spec.kv_layers, config.block_size, kv_dtype, config.max_num_seqs, num_tokens),
    )


def _gpu_kv_dtype(config: ServeConfig) -> torch.dtype:
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8_e4m3" else compute_dtype(config, "cuda")


def _kv_on_host(
    spec: DecoderSpec, config: ServeConfig, kv: KvBudget, kv_bytes: int, kv_dtype: torch.dtype, host_bytes: int
) -> int:
    """Return the bytes of the host's memory for KV that leaves a GPU. For errors see `plan_kv_host`."""
    if config.kv_host_memory is None:
        return 0
    from moeserve.engine.kv.host import plan_kv_host  # Imported late: it loads the copiers of blocks.

    with_window = windowed(spec.kv_layers) if kv.num_window_blocks else ()
    of_windows = kv_block_bytes(with_window, config.block_size, kv_dtype)
    sizes = {Kind.KV: kv_block_bytes(spec.kv_layers, config.block_size, kv_dtype) - of_windows}
    if of_windows:
        sizes[Kind.WINDOW] = of_windows
    return plan_kv_host(config, kv, kv_bytes, sizes, host_bytes).num_bytes


def _gpu_parts(
    model: NativeModel, dtype: torch.dtype, config: ServeConfig
) -> Iterator[tuple[DecoderSpec, int, int, int | None]]:
    """Yield the part of the model on each GPU that differs from others': its layers and heads, the bytes of its weights
    but experts and of its experts, and the number of experts per layer, None if all of them.

    Raise ConfigError or ModelError for settings that the model does not allow.
    """
    spec, shards = model.spec, config.tensor_parallel_size
    if config.pipeline_parallel_size > 1:
        for stage in stages_of(layers_on_gpus(spec, model.index, config)):
            of_stage = [stage.first <= layer < stage.end for layer in spec.moe_layers]
            experts, resident = _experts_on_gpu(model, dtype, config, of_stage)
            others = _gpu_others(model, dtype, partial(WeightPlan.of_stage, stage=stage, spec=spec))
            yield spec.of_layers(stage), others, experts, resident
        return
    experts, resident = _experts_on_gpu(model, dtype, config, [True] * len(spec.moe_layers))
    if shards == 1:
        yield spec, _gpu_others(model, dtype), experts, resident
        return
    check_shards(spec, shards)
    for shard in (Shard(number, shards) for number in range(shards)):
        others = _gpu_others(model, dtype, partial(WeightPlan.of_shard, shard=shard, spec=spec))
        yield sharded(spec, shard), others, experts, resident


def _experts_on_gpu(
    model: NativeModel, dtype: torch.dtype, config: ServeConfig, is_here: Sequence[bool]
) -> tuple[int, int | None]:
    """Return the bytes of experts on a GPU, and the number of experts per layer, None if all of them.

    is_here: by layer with experts. Raise ConfigError for experts that cannot be kept like this.
    """
    from moeserve.engine.experts.gpu_memory import plan_gpu_residency  # Imported late: it loads Triton.
    from moeserve.model.gpu.kernels import expert_storage

    spec, shapes = model.spec, _expert_shapes(model, dtype)
    if config.expert_memory is not None:
        storage = expert_storage(spec, dtype, config.weight_forms.experts, shapes)
        with torch.device("meta"):
            residency = plan_gpu_residency(spec, dtype, config.expert_memory, storage, shapes=shapes)
        if residency is not None:
            return residency.slots.num_bytes, min(residency.slots.num_slots)
    if spec.moe is None:
        return 0, None
    layouts = _slot_layouts(model, dtype, config)
    num_held = -(-spec.moe.num_experts // (config.expert_parallel_size * config.tensor_parallel_size))
    return sum(layout.num_bytes for layout, here in zip(layouts.layers, is_here, strict=True) if here) * num_held, None


def _check_kernels(
    model: NativeModel, dtype: torch.dtype, kv_dtype: torch.dtype, gpu: Gpu, config: ServeConfig
) -> None:
    """Raise ConfigError if a kernel does not fit the GPU's multiprocessors."""
    from kernels.gpu.device import Multiprocessor
    from moeserve.model.gpu.kernels import attention_shape, check_shared_memory, expert_storage

    storage = expert_storage(model.spec, dtype, config.weight_forms.experts, _expert_shapes(model, dtype))
    multiprocessor = Multiprocessor.of(gpu.capability, gpu.shared_bytes)
    shape = attention_shape(model.spec, config.block_size, dtype, multiprocessor, kv_dtype)
    check_shared_memory(model.spec, storage, shape)


def _slot_layouts(model: NativeModel, dtype: torch.dtype, config: ServeConfig) -> LayerPackings[SlotLayout]:
    """Return the layout of an expert of each layer on a GPU. Raise ConfigError."""
    from moeserve.engine.experts.gpu_memory import slot_layouts
    from moeserve.model.gpu.kernels import expert_storage

    shapes = _expert_shapes(model, dtype)
    # A layout is made from empty experts, which must take no memory.
    with torch.device("meta"):
        storage = expert_storage(model.spec, dtype, config.weight_forms.experts, shapes)
        return slot_layouts(model.spec, dtype, storage, shapes)


def _expert_shapes(model: NativeModel, dtype: torch.dtype) -> Sequence[ExpertShape]:
    """Return the shape of the experts of each layer that has some, as a GPU keeps them."""
    if model.spec.moe is None:
        return ()
    return NativeExperts(model.index, model.spec, dtype, rounding_on_gpu(model.spec, model.index)).shapes()


def _gpu_others(
    model: NativeModel, dtype: torch.dtype, part_of: Callable[[WeightPlan], WeightPlan] = lambda plan: plan
) -> int:
    """Return the bytes on a GPU of the weights but the experts. part_of: returns the part of them that it holds."""
    from moeserve.model.gpu.kernels import quantised_bytes

    quantised = quantised_bytes(rounding_on_gpu(model.spec, model.index))
    plan = part_of(plan_weights(model.spec, model.index, no_experts))
    return plan.loaded_num_bytes(dtype.itemsize, narrow=False, quantised=quantised)


def _free_on_gpu(gpu: Gpu, weights: int, config: ServeConfig) -> int:
    """Return the bytes left beside weights. The largest step also takes a part of them, which only loading tells."""
    return kv_memory(
        total_bytes=gpu.total_bytes,
        free_bytes=gpu.free_bytes,
        reserved_bytes=0,
        peak_bytes=weights,
        utilization=config.gpu_memory_utilization,
        graph_bytes=0 if config.enforce_eager else GRAPH_BYTES,
    )


def _advised(num_bytes: int, spec: DecoderSpec, expert_bytes: int) -> int:
    """Return a round number of bytes for `--expert-memory` out of `num_bytes` that are free for experts and KV.

    They hold at least the experts of one token in each layer. expert_bytes: of one expert.
    """
    assert spec.moe is not None
    least = spec.moe.gate.top_k * len(spec.moe_layers) * round_to_page(expert_bytes)
    share = max(least, int(num_bytes * _SHARE_FOR_EXPERTS))
    unit = _GIB if share >= 8 * _GIB else _MIB
    return max(share // unit * unit, -(-least // _MIB) * _MIB)


def _flags_of(config: ServeConfig) -> tuple[str, ...]:
    """Return the flags that differ from the defaults. MODEL is no flag, and the CPU is the default device."""
    shown: list[str] = []
    for setting in fields(ServeConfig):
        value = getattr(config, setting.name)
        is_default = value == default_of(setting, config.device)
        if is_default or setting.name == "model" or (setting.name, value) == ("device", "cpu"):
            continue
        if setting.metadata.get("parse") is parse_size:
            value = next(f"{value // unit}{name}" for unit, name in _UNITS if value % unit == 0)
        shown += [flag_name(setting), str(value)]
    return tuple(shown)
