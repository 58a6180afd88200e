"""Make a runner on a GPU from a decoder.

Compile all kernels, compute the largest step once, plan KV memory from the memory that is left, launch all kernels, and
capture the decode steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from experts.routing.tap import RoutingTap
from kernels.gpu.compile_ahead import caught_launches
from kernels.gpu.moe_config import MoeConfigs
from moeserve.config import ConfigError
from moeserve.device import KvBudget, StateDemand, kv_memory, share_kv
from moeserve.gpu_faults import gpu_memory_said
from moeserve.model.decoder import Decoder, KvPools
from moeserve.model.gpu.batches import AttentionLimits, DecodeTensors, StepBatches, native_limits
from moeserve.model.gpu.runner import DecodeSteps, GpuModelRunner, HeardDecoder, Peers
from moeserve.model.gpu.setup import (
    BeginStep,
    StepLimits,
    alone,
    blank_arrays,
    launch_all_variants,
    launch_blank_step,
    launch_variants,
    measure_steps,
    seconds_on_gpu,
)
from moeserve.model.kv_pool import KVPool, kv_block_bytes, window_demand
from moeserve.model.sampler import SCORED_AT_ONCE
from moeserve.model.spec import ModelSpec, Progress, silent
from moeserve.model.state_pool import StatePool, pools_by_layer
from moeserve.model.step_arrays import StepShape, capture_sizes
from moeserve.settings.quantities import show_size


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """The service's settings for a GPU.

    kv_cache_memory: bytes, None for all memory that is left. kv_dtype: of the KV blocks, None for the model's dtype.
    expert_form: see `expert_storage`. states: the demand of recurrent layers on this memory, None without such
    layers. keeps_stored: products unpack weights in the checkpoint's bits.
    """

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    kv_cache_memory: int | None
    gpu_memory_utilization: float
    enforce_eager: bool
    kv_dtype: torch.dtype | None = None
    expert_form: str = "none"
    states: StateDemand | None = None
    keeps_stored: bool = False


def kv_blocks(spec: ModelSpec, dtype: torch.dtype, settings: GpuSettings, memory: int) -> KvBudget:
    """Divide `memory` bytes between recurrent states, if there are any, and KV blocks.

    Raise ConfigError if too few blocks fit.
    """
    states, num_slots, num_snapshots = settings.states, 0, 0
    if states is not None:
        num_slots = states.num_slots(memory)
        memory -= num_slots * states.row_bytes
        num_snapshots = states.num_snapshots(memory, memory)
        memory -= num_snapshots * states.row_bytes
    size, kv_dtype = settings.block_size, settings.kv_dtype or dtype
    kv = share_kv(
        memory,
        block_bytes=kv_block_bytes(spec.kv_layers, size, kv_dtype),
        block_size=size,
        model_max_len=spec.longest_context(settings.max_model_len),
        max_model_len=settings.max_model_len,
        windows=window_demand(spec.kv_layers, size, kv_dtype, settings.max_num_seqs, settings.max_num_batched_tokens),
    )
    return replace(kv, num_state_slots=num_slots, num_snapshots=num_snapshots)


def make_runner(
    decoder: Decoder,
    kv: KvBudget,
    settings: GpuSettings,
    configs: MoeConfigs | None = None,
    peers: Peers | None = None,
    tap: RoutingTap | None = None,
    told: Progress = silent,
) -> GpuModelRunner:
    """Allocate the KV memory; on a GPU launch all kernels and, unless eager, capture the decode steps.

    configs: the kernel configurations of the decoder's experts. peers: the other ranks, which must do the same at the
    same time. tap: observes the decoder's gates. told: hears what is launched and captured.
    """
    spec, size, dtype, device = decoder.spec, settings.block_size, decoder.dtype, decoder.device
    kv_dtype = settings.kv_dtype or dtype
    pool = KVPool(spec.kv_layers, kv.num_blocks, size, kv_dtype, device, kv.num_window_blocks)
    state_pool = _state_pool(decoder, kv.num_state_rows)
    pools = pools_by_layer(spec, pool.layers, state_pool)
    apart = kv.num_window_blocks > 0
    limits = native_limits(spec, size, kv.max_model_len, dtype, device, kv_dtype, windows_apart=apart)
    batches = StepBatches(limits, settings.max_num_seqs)
    begin_step = alone if peers is None else peers.begin_alike
    if decoder.device.type == "cuda":
        steps = StepLimits(settings.max_num_batched_tokens, settings.max_num_seqs, kv.max_model_len)
        variants = launch_variants(limits, configs, steps, keeps_stored=settings.keeps_stored)
        launch_all_variants(decoder, pools, batches, variants, settings.block_size, begin_step, told)
    tapped = HeardDecoder(decoder, pools, tap)
    decode = None
    if not settings.enforce_eager:
        decode = DecodeSteps(tapped, limits, capture_sizes(settings.max_num_seqs), peers)
        if decoder.device.type == "cuda":
            decode.capture(told)
    measured: list[tuple[int, float]] = []
    if decoder.device.type == "cuda":
        launch = partial(launch_blank_step, decoder, pools, batches, block_size=size, begin_step=begin_step)
        measured = measure_steps(launch, min(settings.max_num_batched_tokens, kv.max_model_len), seconds_on_gpu)
    wait = torch.cuda.Event.synchronize if peers is None else peers.wait_for
    return GpuModelRunner(
        tapped,
        pool,
        batches,
        decode=decode,
        wait=wait,
        state_pool=state_pool,
        is_alone=peers is None,
        measured=measured,
        samples=decoder.gives_logits,
    )


@torch.inference_mode()
def kernels_to_launch(decoder: Decoder, settings: GpuSettings, configs: MoeConfigs | None) -> set[str]:
    """Return the kernels that a start launches for steps and sampling, as `compile_ahead` takes them; launch none.

    What the operations of torch compute between them has no meaning, so no rank may wait for it.
    """
    size = settings.block_size
    limits, pools = _without_kv(decoder, settings)
    batches = StepBatches(limits, settings.max_num_seqs)
    steps = StepLimits(settings.max_num_batched_tokens, settings.max_num_seqs, limits.max_model_len)
    variants = launch_variants(limits, configs, steps, keeps_stored=settings.keeps_stored)
    sizes = () if settings.enforce_eager else capture_sizes(settings.max_num_seqs)
    with caught_launches() as kernels:
        launch_all_variants(decoder, pools, batches, variants, size)
        decode = DecodeSteps(HeardDecoder(decoder, pools), limits, sizes) if sizes else None
        for count in sizes:
            assert decode is not None
            decode.run(blank_arrays(StepShape(count, (), count), size, decoder.spec.vocab_size), None, count)
    return kernels


@torch.inference_mode()
def compute_largest_step(decoder: Decoder, settings: GpuSettings, begin_step: BeginStep = alone) -> None:
    """Compute the largest step that the settings allow, so that the allocator's peak includes it. Store no KV.

    Unless eager, the peak includes the tensors of decode batches: scratch of attention, tables, work lists and logits.
    """
    size = settings.block_size
    length = min(settings.max_num_batched_tokens, decoder.max_model_len)
    count = max(1, settings.max_num_batched_tokens // length)
    limits, pools = _without_kv(decoder, settings)
    num_logits = min(max(settings.max_num_seqs, SCORED_AT_ONCE), length * count)
    shape = StepShape(0, (length,) * count, num_logits)
    batches = StepBatches(replace(limits, windows_apart=False), settings.max_num_seqs)
    # Held while the step is computed.
    decode = None if settings.enforce_eager else DecodeTensors(limits, settings.max_num_seqs)
    logits = launch_blank_step(decoder, pools, batches, shape, size, begin_step)
    # Penalties and log probabilities each make a copy of the logits in fp32.
    widened = logits.float()
    widened.clone().log_softmax(-1)
    del decode


def measure_graphs(decoder: Decoder, settings: GpuSettings) -> int:
    """Return the bytes that graphs of all sizes will take on a GPU: capture the largest, and release it.

    Graphs share one pool for what they compute, which the largest fills; the driver copies the nodes of each.
    """
    device = decoder.device
    if device.type != "cuda":
        return 0
    limits, pools = _without_kv(decoder, settings)
    sizes = capture_sizes(settings.max_num_seqs)
    decode = DecodeSteps(HeardDecoder(decoder, pools), limits, sizes[-1:])

    def taken() -> tuple[int, int]:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free, torch.cuda.memory_reserved(device)

    used, reserved = taken()
    decode.capture()
    used_then, reserved_then = taken()
    decode.release()
    return graphs_of_all_sizes(used_then - used, reserved_then - reserved, len(sizes))


def graphs_of_all_sizes(used_bytes: int, pool_bytes: int, num_sizes: int) -> int:
    """Return the bytes of all graphs from those of the largest: `used_bytes`, `pool_bytes` of them for its tensors."""
    pool_bytes = max(0, pool_bytes)
    return pool_bytes + num_sizes * max(0, used_bytes - pool_bytes)


def _without_kv(decoder: Decoder, settings: GpuSettings) -> tuple[AttentionLimits, KvPools]:
    """Return limits and pools for steps that store nothing."""
    spec, size = decoder.spec, settings.block_size
    dtype, device, kv_dtype = decoder.dtype, decoder.device, settings.kv_dtype or decoder.dtype
    apart = any(window is not None for window in spec.windows)
    limits = native_limits(spec, size, decoder.max_model_len, dtype, device, kv_dtype, windows_apart=apart)
    pool = KVPool(spec.kv_layers, 1, size, kv_dtype, device)
    return limits, pools_by_layer(spec, pool.layers, _state_pool(decoder, 1))


def _state_pool(decoder: Decoder, num_rows: int) -> StatePool | None:
    layers = decoder.spec.state_layers
    return StatePool(layers, num_rows, decoder.dtype, decoder.device) if layers else None


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that tensors take on a device; 0 on a CPU under the interpreter."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def forget_peak(device: torch.device) -> None:
    """Reset the allocator's peak: memory that loading used temporarily, as for quantising, is free for KV."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free_for_kv(device: torch.device, settings: GpuSettings, graph_bytes: int) -> int:
    """Return the bytes left for KV on this device. Call it after `compute_largest_step`. Raise ConfigError if none are
    left."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device)
    memory = kv_memory(
        total_bytes=total,
        free_bytes=free,
        reserved_bytes=torch.cuda.memory_reserved(device),
        peak_bytes=peak,
        utilization=settings.gpu_memory_utilization,
        graph_bytes=graph_bytes,
    )
    if not memory:
        raise ConfigError(
            f"--device cuda: no memory is left for keys and values: weights and the largest step take "
            f"{show_size(peak, up=True)}, and {gpu_memory_said()}."
        )
    return memory
