"""From a decoder to a runner on a GPU: the largest step once, KV memory from what is left, kernels, graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from experts.routing_tap import RoutingTap
from kernels.gpu.moe_config import MoeConfigs
from moeserve.device import KvBudget, kv_memory, share_kv
from moeserve.model.decoder import Decoder
from moeserve.model.gpu_batches import AttentionLimits, StepBatches
from moeserve.model.gpu_kernels import attention_shape, tuned_attention
from moeserve.model.gpu_runner import DecodeSteps, GpuModelRunner, HeardDecoder, Peers
from moeserve.model.gpu_setup import (
    BeginStep,
    StepLimits,
    alone,
    launch_all_variants,
    launch_blank_step,
    launch_variants,
)
from moeserve.model.kv_pool import KVPool, kv_block_bytes
from moeserve.model.sampler import SCORED_AT_ONCE
from moeserve.model.spec import DecoderSpec
from moeserve.model.step_arrays import StepShape, capture_sizes
from moeserve.model.token_masks import MaskSource


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """What the service's settings say of a GPU.

    kv_dtype: of the KV blocks, None for the model's. expert_quantization: see `expert_storage`.
    """

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    kv_cache_memory: int | None
    gpu_memory_utilization: float
    enforce_eager: bool
    kv_dtype: torch.dtype | None = None
    expert_quantization: str = "none"


def kv_blocks(spec: DecoderSpec, dtype: torch.dtype, settings: GpuSettings, memory: int) -> tuple[KvBudget, int]:
    """The blocks that so many bytes are shared out into, and the bytes that these take. Raises ConfigError."""
    block_bytes = kv_block_bytes(spec.kv_layers, settings.block_size, settings.kv_dtype or dtype)
    kv = share_kv(
        memory,
        block_bytes=block_bytes,
        block_size=settings.block_size,
        model_max_len=spec.max_position,
        max_model_len=settings.max_model_len,
    )
    return kv, kv.num_blocks * block_bytes


def make_runner(
    decoder: Decoder,
    kv: KvBudget,
    settings: GpuSettings,
    configs: MoeConfigs | None = None,
    peers: Peers | None = None,
    tap: RoutingTap | None = None,
    grammars: MaskSource | None = None,
) -> GpuModelRunner:
    """Takes the KV memory. On a GPU it compiles all kernels and, unless eager, captures the decode steps.

    configs: of the decoder's experts. peers: the other ranks, who do the same meanwhile. tap: what hears the decoder's
    gates. grammars: what enforces those of requests.
    """
    spec, size, dtype, device = decoder.spec, settings.block_size, decoder.dtype, decoder.device
    kv_dtype = settings.kv_dtype or dtype
    pool = KVPool(spec.kv_layers, kv.num_blocks, size, kv_dtype, device)
    tuned = tuned_attention(attention_shape(spec, size, dtype, kv_dtype), device)
    limits = AttentionLimits(spec, size, kv.max_model_len, dtype, device, tuned, kv_dtype)
    batches = StepBatches(limits, settings.max_num_seqs)
    if decoder.device.type == "cuda":
        steps = StepLimits(settings.max_num_batched_tokens, settings.max_num_seqs, kv.max_model_len)
        variants = launch_variants(limits, configs, steps)
        begin_step = alone if peers is None else peers.begin_alike
        launch_all_variants(decoder, pool.layers, batches, variants, settings.block_size, begin_step)
    heard = HeardDecoder(decoder, pool.layers, tap)
    decode = None
    if not settings.enforce_eager:
        decode = DecodeSteps(heard, limits, capture_sizes(settings.max_num_seqs), peers)
        if decoder.device.type == "cuda":
            decode.capture()
    wait = torch.cuda.Event.synchronize if peers is None else peers.wait_for
    return GpuModelRunner(heard, pool, batches, decode=decode, wait=wait, grammars=grammars)


@torch.inference_mode()
def compute_largest_step(decoder: Decoder, settings: GpuSettings, begin_step: BeginStep = alone) -> None:
    """Leaves the allocator's peak behind. Stores no KV."""
    spec, size = decoder.spec, settings.block_size
    length = min(settings.max_num_batched_tokens, decoder.max_model_len)
    count = max(1, settings.max_num_batched_tokens // length)
    dtype, device, kv_dtype = decoder.dtype, decoder.device, settings.kv_dtype or decoder.dtype
    limits = AttentionLimits(spec, size, decoder.max_model_len, dtype, device, kv_dtype=kv_dtype)
    pool = KVPool(spec.kv_layers, 1, size, kv_dtype, device)
    num_logits = min(max(settings.max_num_seqs, SCORED_AT_ONCE), length * count)
    shape = StepShape(0, (length,) * count, num_logits)
    batches = StepBatches(limits, settings.max_num_seqs)
    logits = launch_blank_step(decoder, pool.layers, batches, shape, size, begin_step)
    # Penalties and log probabilities widen the logits once each.
    widened = logits.float()
    widened.clone().log_softmax(-1)


def allocated_bytes(device: torch.device) -> int:
    """What tensors take of a device's memory; 0 of a CPU under the interpreter."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def forget_peak(device: torch.device) -> None:
    """What loading took for a moment, as for quantising, is free again and does not count as used in a step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free_for_kv(device: torch.device, settings: GpuSettings) -> int:
    """Bytes for KV on this device, once the largest step was computed."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return kv_memory(
        total_bytes=total,
        free_bytes=free,
        reserved_bytes=torch.cuda.memory_reserved(device),
        peak_bytes=torch.cuda.max_memory_allocated(device),
        utilization=settings.gpu_memory_utilization,
        with_graphs=not settings.enforce_eager,
    )
