"""The bytes of the weights that ranks keep in memory on a CPU, as the checkpoint's index says before any is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from experts.placement.placement import Placement
from kernels.cpu.library import native_kernels
from kernels.moe import expert_layout
from moeserve.model.checkpoint import OwnedExperts, WeightPlan, plan_weights
from moeserve.model.expert_store import native_layouts
from moeserve.model.expert_weights import expert_shape
from moeserve.model.rounding import NO_ROUNDING, Rounding
from moeserve.model.shards import WHOLE, Shard
from moeserve.model.spec import DecoderSpec, ModelSpec
from moeserve.model.stages import Stage
from moeserve.model.stored import TensorInfo


def owned_experts(spec: ModelSpec, placement: Placement, rank: int) -> OwnedExperts:
    """Return the experts that a rank loads, by layer of the decoder."""
    placed_layer = {layer: number for number, layer in enumerate(spec.moe_layers)}
    return lambda layer: placement.experts_on(placed_layer[layer], rank)


def no_experts(_: int) -> Sequence[int]:
    """Return no experts: none are loaded with the model, as they are read when they are needed."""
    return ()


def keeps_narrow(dtype: torch.dtype) -> bool:
    """Return whether a CPU that computes in `dtype` multiplies by matrices of 16 bits without widening them first."""
    return dtype == torch.float32 and native_kernels() is not None


def weights_bytes(
    spec: DecoderSpec,
    dtype: torch.dtype,
    index: Mapping[str, TensorInfo],
    owned_by: Sequence[OwnedExperts | None] = (None,),
    rounding: Rounding = NO_ROUNDING,
) -> int:
    """Return the bytes of ranks with all layers, together. Raise ModelError.

    owned_by: for each rank the experts that it loads, None for all.
    """
    whole = _whole(spec)
    return sum(size for owned in owned_by for size in stage_bytes(spec, dtype, index, [whole], rounding, owned))


def shard_bytes(
    spec: DecoderSpec,
    dtype: torch.dtype,
    index: Mapping[str, TensorInfo],
    placement: Placement | None,
    num_shards: int,
    rounding: Rounding = NO_ROUNDING,
    *,
    with_experts: bool = True,
) -> list[int]:
    """Return, by rank, the bytes of ranks with a shard of each layer.

    placement: of experts over groups of `num_shards` ranks, None without experts. with_experts: False where they lie in
    slots. Raise CheckpointError for matrices whose blocks are not to be cut.
    """
    sizes, whole = list[int](), _whole(spec)
    for rank in range(num_shards if placement is None else placement.num_ranks):
        owned = None if placement is None else owned_experts(spec, placement, rank)
        owned = owned if with_experts else no_experts
        sizes += stage_bytes(spec, dtype, index, [whole], rounding, owned, Shard(rank % num_shards, num_shards))
    return sizes


def stage_bytes(
    spec: DecoderSpec,
    dtype: torch.dtype,
    index: Mapping[str, TensorInfo],
    stages: Sequence[Stage],
    rounding: Rounding = NO_ROUNDING,
    owned: OwnedExperts | None = None,
    shard: Shard = WHOLE,
) -> list[int]:
    """Return, by stage, the bytes of a rank with this stage. owned: the experts that it loads, None for all. shard: of
    each layer. Raise CheckpointError as `shard_bytes` does."""
    moe, packed = spec.moe, _packs_experts(spec, rounding)
    layouts = native_layouts(index, spec, dtype, rounding).layers if packed else ()
    of_all = plan_weights(spec, index, no_experts if packed else owned)
    sizes = []
    for stage in stages:
        is_whole, num_bytes = stage == _whole(spec), 0
        plan = of_all if is_whole else of_all.of_stage(stage, spec)
        if shard.count > 1:
            plan = plan.of_shard(shard, spec if is_whole else spec.of_layers(stage))
            _check_cuts(plan, rounding)
        if packed and moe is not None and plan.mtp is not None and plan.mtp.experts is not None:
            shape = expert_shape(spec, plan.mtp.experts, dtype, rounding)
            num_bytes += expert_layout(shape).num_bytes * moe.num_experts
            plan = replace(plan, mtp=replace(plan.mtp, experts=None))
        num_bytes += plan.loaded_num_bytes(dtype.itemsize, narrow=keeps_narrow(dtype), quantised=rounding.num_bytes)
        for layer, layout in zip(spec.moe_layers, layouts, strict=False):
            if moe is not None and stage.first <= layer < stage.end:
                num_bytes += layout.num_bytes * (moe.num_experts if owned is None else len(owned(layer)))
        sizes.append(num_bytes)
    return sizes


def _whole(spec: DecoderSpec) -> Stage:
    return Stage(0, spec.num_layers, spec.num_layers)


def _check_cuts(plan: WeightPlan, rounding: Rounding) -> None:
    """Raise CheckpointError for matrices of a shard that are cut within blocks."""
    for tensors in (plan.outer, *(layer.tensors for layer in plan.layers)):
        rounding.check_cuts(tensors)


def _packs_experts(spec: DecoderSpec, rounding: Rounding) -> bool:
    """Return whether the experts in memory have other bytes than in the checkpoint or at the width of the dtype."""
    return spec.moe is not None and (rounding.experts is not None or rounding.keeps_stored or rounding.narrow)
