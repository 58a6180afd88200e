"""Serving with less GPU memory than the experts take: slots in device memory, all experts in host memory or on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from experts.errors import ExpertStoreError
from experts.memory.device_slots import DeviceSlots
from experts.memory.eviction import EvictionPolicy, make_policies
from experts.memory.expert_file import round_to_page
from experts.memory.expert_memory import ExpertMemory
from experts.memory.host_tier import HostTier
from experts.memory.residency_control import ResidencyControl
from experts.memory.slot_budget import least_slots, share_slots
from experts.memory.store import DiskTier, ExpertTier, SlowedTier
from kernels.gpu.moe_slots import SlotExperts, SlotLayout
from kernels.gpu.tuning import MoeConfigs
from kernels.packed_experts import ExpertShape
from moeserve.config import ConfigError
from moeserve.cuda.expert_kernels import model_moe
from moeserve.cuda.parts import GpuDispatch
from moeserve.cuda.resident_experts import GpuResidentExperts
from moeserve.models.checkpoint import read_index
from moeserve.models.errors import ModelError
from moeserve.models.packing import packed_experts
from moeserve.models.progress import Progress
from moeserve.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class GpuExpertSettings:
    """What the service's settings say of experts on a GPU.

    num_bytes: of the slots. host_bytes: the host memory that all experts may take; beyond it they are read from disk.
    bandwidth: of an emulated link, in bytes per second. load: [L, E], for a policy that goes by it.
    """

    num_bytes: int
    host_bytes: int
    policy: str
    store_dir: Path | None
    bandwidth: int | None
    load: Sequence[Sequence[float]] | None = None


@dataclass(frozen=True, slots=True)
class GpuResidencyPlan:
    """num_slots: of each layer with experts. slot_bytes: one expert, whole pages."""

    layout: SlotLayout
    num_slots: tuple[int, ...]
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(self.num_slots) * self.slot_bytes


@dataclass(frozen=True, slots=True)
class GpuResidentModel:
    """The experts of a model of which only some are on the device.

    num_slots: of each layer with experts. tier: where the others are, for the log. `dispatch_of(layer)`: of the
    decoder's layers.
    """

    memory: ExpertMemory
    control: ResidencyControl
    policies: Sequence[EvictionPolicy]
    layers: Mapping[int, GpuResidentExperts]
    num_slots: Sequence[int]
    tier: str

    def dispatch_of(self, layer: int) -> GpuDispatch:
        return self.layers[layer]


def plan_gpu_residency(spec: DecoderSpec, dtype: torch.dtype, num_bytes: int) -> GpuResidencyPlan | None:
    """The slots that `num_bytes` pay for; None if all experts fit.

    Raises ConfigError for a model without experts, and where a layer could not hold the experts of one token.
    """
    moe = spec.moe
    if moe is None:
        raise ConfigError(f"--expert-memory: a {spec.model_type} model has no experts.")
    layout = slot_layout(spec, dtype)
    slot_bytes = round_to_page(layout.num_bytes)
    held, top_k = [moe.num_experts] * len(spec.moe_layers), moe.gate.top_k
    count, least = num_bytes // slot_bytes, sum(least_slots(held, top_k))
    if count < least:
        raise ConfigError(
            f"--expert-memory {_mib(num_bytes)} holds {count} experts of {_mib(slot_bytes)}, but {len(held)} layers "
            f"need {top_k} each: give at least {_mib(least * slot_bytes)}."
        )
    num_slots = share_slots(count, held, top_k)
    return None if num_slots is None else GpuResidencyPlan(layout, num_slots, slot_bytes)


def slot_layout(spec: DecoderSpec, dtype: torch.dtype) -> SlotLayout:
    """How the experts of a model that computes in `dtype` lie in slots."""
    assert spec.moe is not None
    return SlotLayout(ExpertShape(spec.hidden_size, spec.moe.intermediate_size, dtype, dtype, spec.moe.expert_bias))


def open_gpu_experts(
    directory: Path,
    spec: DecoderSpec,
    plan: GpuResidencyPlan,
    settings: GpuExpertSettings,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
    progress: Progress,
    configs: MoeConfigs | None = None,
) -> GpuResidentModel:
    """Puts all experts where they are copied from, and takes the memory of the slots. Raises ModelError.

    configs: of the experts' kernels, see `moeserve.cuda.expert_kernels.expert_configs`.
    """
    assert spec.moe is not None
    num_experts = spec.moe.num_experts
    try:
        name, tier = _open_tier(directory, spec, plan, settings, dtype, device, progress)
    except ExpertStoreError as error:
        raise ModelError(str(error)) from error
    if settings.bandwidth is not None:
        tier = SlowedTier(tier, settings.bandwidth)
    policies = make_policies(settings.policy, len(spec.moe_layers), num_experts, settings.load)
    control = ResidencyControl(plan.num_slots, num_experts, plan.slot_bytes, policies.__getitem__)
    slots = DeviceSlots(plan.num_slots, plan.layout.num_bytes, device)
    memory = ExpertMemory(control, slots, tier)
    moe = model_moe(spec, device, dtype, max_tokens, max(plan.num_slots), configs)
    layers = {
        layer: GpuResidentExperts(memory, number, SlotExperts(plan.layout, slots.of_layer(number), num_experts, moe))
        for number, layer in enumerate(spec.moe_layers)
    }
    return GpuResidentModel(memory, control, policies, layers, plan.num_slots, name)


def _open_tier(
    directory: Path,
    spec: DecoderSpec,
    plan: GpuResidencyPlan,
    settings: GpuExpertSettings,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> tuple[str, ExpertTier]:
    assert spec.moe is not None
    num_layers, num_experts = len(spec.moe_layers), spec.moe.num_experts
    if num_layers * num_experts * plan.slot_bytes > settings.host_bytes:
        # Building files takes packages that computing does not.
        from moeserve.models.expert_store import ensure_expert_store

        store = ensure_expert_store(directory, spec, plan.layout, dtype, settings.store_dir, progress)
        return f"disk, {store.path}", DiskTier(store.path, store.source)
    tier = HostTier(num_layers, num_experts, plan.layout.num_bytes, device)
    packed = packed_experts(spec, plan.layout, dtype, read_index(directory), progress)
    for number, expert in enumerate(packed):
        tier.put(*divmod(number, num_experts), expert)
    return "host memory", tier


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
