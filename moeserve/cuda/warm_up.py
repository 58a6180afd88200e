"""Launches before serving whatever serving may launch, so that no request waits for the compiler."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import torch

from kernels.gpu.moe_config import MoeConfigs
from kernels.sampling import Draw
from moeserve.cuda.batches import AttentionLimits, StepBatches
from moeserve.cuda.launch_variants import LaunchVariants, StepLimits, StepShape
from moeserve.cuda.step_arrays import StepArrays
from moeserve.model.decoder import Decoder, KvPools

# Told of every step that is launched: several ranks have to know the sizes of each other's.
BeginStep = Callable[[StepShape], None]


def alone(_: StepShape) -> None:
    """For a rank that has no others."""


def launch_variants(limits: AttentionLimits, configs: MoeConfigs | None, step: StepLimits) -> LaunchVariants:
    """Of the steps of a model that are not captured."""
    experts = None if configs is None else configs.variant
    return LaunchVariants(step, limits.prefill, experts, limits.extends(step.max_seqs), limits.spec.sparse_layers)


@torch.inference_mode()
def launch_all_variants(
    decoder: Decoder,
    kv_pools: KvPools,
    batches: StepBatches,
    variants: LaunchVariants,
    block_size: int,
    begin_step: BeginStep = alone,
) -> None:
    """Every kernel of a step that is not captured, then those that draw. Writes no KV; reads what lies in block 0."""
    for shape in variants.steps():
        launch_blank_step(decoder, kv_pools, batches, shape, block_size, begin_step)
    launch_all_draws(decoder)


def launch_all_draws(decoder: Decoder) -> None:
    """Each way of drawing, from logits as they are and from adjusted ones, which are in fp32."""
    for dtype in {decoder.dtype, torch.float32}:
        logits = torch.zeros((1, decoder.spec.vocab_size), dtype=dtype, device=decoder.device)
        for draw in (Draw(0.0), Draw(1.0), Draw(1.0, top_k=1, top_p=0.5, min_p=0.5)):
            decoder.ops.sample(logits, [draw])


def launch_blank_step(
    decoder: Decoder,
    kv_pools: KvPools,
    batches: StepBatches,
    shape: StepShape,
    block_size: int,
    begin_step: BeginStep = alone,
) -> torch.Tensor:
    """Logits without meaning of a step of this shape, which stores nothing."""
    begin_step(shape)
    arrays = blank_arrays(shape, block_size, decoder.spec.vocab_size)
    rows = range(arrays.num_rows - shape.num_logits, arrays.num_rows)
    return decoder.forward(batches.make(arrays, rows, None), kv_pools)


def blank_arrays(shape: StepShape, block_size: int, vocab_size: int) -> StepArrays:
    """New sequences without slots, whose contexts lie in block 0."""
    lengths = (1,) * shape.num_decodes + shape.prompt_lens
    arrays = StepArrays(num_decodes=shape.num_decodes, max_query_len=max(lengths))
    for length in lengths:
        # Spread over the vocabulary, so that the gate spreads them over the experts.
        arrays.token_ids.extend(position * 31 % vocab_size for position in range(length))
        arrays.positions.extend(range(length))
        arrays.slots.extend([-1] * length)
        arrays.seq_lens.append(length)
        arrays.query_starts.append(arrays.num_rows)
        arrays.block_tables.append(array("i", [0] * -(-length // block_size)))
    return arrays
