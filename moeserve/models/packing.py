"""All experts of a checkpoint, packed for a kernel one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kernels.packed_experts import ExpertPacking
from moeserve.models.checkpoint import TensorInfo
from moeserve.models.expert_weights import ExpertReader
from moeserve.models.progress import Progress
from moeserve.models.spec import DecoderSpec
from moeserve.models.tensor_reader import TensorReader
from moeserve.models.weight_plan import ExpertsPlan, OwnedExperts, WeightPlan, plan_weights


def packed_experts(
    spec: DecoderSpec,
    packing: ExpertPacking,
    dtype: torch.dtype,
    index: Mapping[str, TensorInfo],
    report: Progress,
    owned: OwnedExperts | None = None,
) -> Iterator[Tensor]:
    """Every expert of every sparse layer, or those `owned`, uint8 [packing.num_bytes], one at a time."""
    plan = plan_weights(spec, index, owned)
    with TensorReader(
        index,
        _bytes_of_experts(plan),
        quantization=spec.quantization,
        progress=lambda done, total: report("store experts", done, total),
    ) as reader:
        for of_layer in expert_plans(plan):
            experts = ExpertReader(spec, of_layer, reader, dtype)
            for place in range(len(experts.owned)):
                yield packing.pack(*experts.read_matrices(place))


def expert_plans(plan: WeightPlan) -> list[ExpertsPlan]:
    """Of the layers that have experts, in their order."""
    return [layer.experts for layer in plan.layers if layer.experts is not None]


def _bytes_of_experts(plan: WeightPlan) -> int:
    outer = sum(tensor.num_bytes for tensor in plan.outer.values())
    return plan.num_bytes - outer - sum(tensor.num_bytes for layer in plan.layers for tensor in layer.tensors.values())
