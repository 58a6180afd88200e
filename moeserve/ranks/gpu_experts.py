"""What a rank of several computes on its GPU of the rows that reach it, with all of its experts there or with slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from experts.collectives import DeviceWaits
from experts.dispatch import Compute
from experts.observer import AnyObserver
from experts.rebalance import ExpertMigrator, PlacedExperts
from kernels.activation import Activation
from kernels.gpu.moe import TritonMoe
from kernels.gpu.moe_config import MoeConfigs, WeightStorage
from kernels.gpu.moe_weights import GpuExperts
from kernels.gpu.ops import store_expert
from moeserve.experts.migrator import Rereader
from moeserve.model.checkpoint import OwnedExperts
from moeserve.model.gpu_expert_memory import GpuResidentModel, open_gpu_experts, plan_gpu_residency
from moeserve.model.gpu_kernels import rows_at_once, triton_moe
from moeserve.model.gpu_model import GpuSettings
from moeserve.model.tensor_reader import Progress
from moeserve.model_loading import ModelPlan


@dataclass(frozen=True, slots=True)
class GpuRankExperts:
    """compute_of(layer): of a layer of the decoder, what sums up the experts that are here for arrived rows.

    resident: None where all experts of the rank are in the device's memory, each in a slot of its own; else they go by
    their numbers in the model.
    """

    compute_of: Callable[[int], Compute[GpuExperts]]
    resident: GpuResidentModel | None = None


def open_rank_experts(
    directory: Path,
    plan: ModelPlan,
    settings: GpuSettings,
    owned: OwnedExperts,
    storage: WeightStorage,
    configs: MoeConfigs,
    waits: DeviceWaits,
    device: torch.device,
    progress: Progress,
    observers: Sequence[AnyObserver],
) -> GpuRankExperts:
    """Takes scratch and, where `--expert-memory` does not hold all experts that the rank owns, slots for them, and puts
    them where they are copied from. waits: of the collectives. Raises ConfigError or ModelError."""
    bounded, max_rows = settings.experts, settings.max_num_batched_tokens
    residency = (
        None if bounded is None else plan_gpu_residency(plan.spec, plan.dtype, bounded.num_bytes, storage, owned)
    )
    if bounded is None or residency is None:
        num_slots = max(len(owned(layer)) for layer in plan.spec.moe_layers)
        compute = in_pieces(triton_moe(configs, device, plan.dtype, max_rows, num_slots), max_rows)
        return GpuRankExperts(lambda _: compute)
    resident = open_gpu_experts(
        directory,
        residency,
        bounded,
        device,
        max_rows,
        lambda _, done, total: progress(done, total),
        configs,
        observers,
    )
    return GpuRankExperts(lambda layer: _waiting(resident.layers[layer].partial, waits), resident)


def in_pieces(moe: TritonMoe, max_rows: int) -> Compute[GpuExperts]:
    """The kernels with scratch for `max_rows` rows, over as many as arrive.

    A row's bits depend on its piece only through the configuration that a number of rows is computed with.
    """

    def compute(
        x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, experts: GpuExperts, activation: Activation
    ) -> torch.Tensor:
        if len(x) <= max_rows:
            return moe.partial(x, slots, weights, experts, activation)
        size = rows_at_once(len(x), max_rows)
        pieces = zip(x.split(size), slots.split(size), weights.split(size), strict=True)
        return torch.cat([moe.partial(*piece, experts, activation) for piece in pieces])

    return compute


def make_gpu_migrator(
    directory: Path,
    plan: ModelPlan,
    placed: PlacedExperts,
    owned: OwnedExperts,
    storage: WeightStorage,
    experts: Sequence[GpuExperts],
) -> ExpertMigrator[GpuExperts]:
    """For the rank that has loaded `experts`, those that it `owned` then. They arrive in host memory, quantised."""
    host = torch.device("cpu")
    reread = Rereader(
        directory,
        plan.spec,
        plan.dtype,
        owned,
        lambda reader: store_expert(reader.read_matrices(0), storage, plan.dtype, host),
    )
    return ExpertMigrator(placed, reread, lambda layer, slot, arrived: experts[layer].copy_slot(slot, arrived))


def _waiting(compute: Compute[GpuExperts], waits: DeviceWaits) -> Compute[GpuExperts]:
    """The host looks at what arrived: what it waits for may never come, so it waits no longer than ranks may be
    apart."""

    def waited(
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: GpuExperts, activation: Activation
    ) -> torch.Tensor:
        waits.wait_for_device()
        return compute(x, ids, weights, experts, activation)

    return waited
