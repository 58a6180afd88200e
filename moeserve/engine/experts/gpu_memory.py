"""Serve with less GPU memory than the experts take: slots in device memory, all experts in host memory or on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from experts.errors import ExpertStoreError
from experts.memory.memory import ExpertMemory
from experts.memory.slots import DeviceSlots
from experts.memory.tiers import DiskTier, ExpertTier, HostTier
from experts.moe_layer import LoadingDispatch
from experts.observer import AnyObserver
from kernels.gpu.moe import SlotExperts, SlotLayout
from kernels.gpu.moe_config import MoeConfigs, WeightStorage
from kernels.packed_experts import ExpertShape, LayerPackings
from kernels.specs import Activation
from moeserve.engine.experts.resident_model import ResidentModel, SlotPlan, experts_of, plan_slots, resident_model
from moeserve.model.checkpoint import OwnedExperts, read_index
from moeserve.model.expert_weights import NativeExperts, packed_experts
from moeserve.model.gpu.kernels import expert_configs, expert_storage, rows_at_once, triton_moe
from moeserve.model.spec import DecoderSpec, ModelError, Progress


class GpuResidentExperts(LoadingDispatch):
    """One layer's dispatch through its slots.

    The host finds the missing experts, so it waits for the gate's choice in every layer, and no graph can record the
    step. The same kernels are launched whether experts are missing or not, so none is compiled while serving.
    observers: receive `arrived` for the rows that this rank computes, with expert ids on the host.
    """

    def __init__(
        self,
        memory: ExpertMemory,
        layer: int,
        experts: SlotExperts,
        max_rows: int,
        observers: Sequence[AnyObserver],
    ) -> None:
        """experts: computes with the slots that the memory fills for this layer. max_rows: the size of its scratch."""
        self._memory = memory
        self._layer = layer
        self._experts = experts
        self._max_rows = max_rows
        self._observers = observers

    def partial(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        _: object,
        activation: Activation,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Tensor:
        memory, layer, experts = self._memory, self._layer, self._experts
        chosen = ids.cpu()
        wanted = set(chosen.flatten().tolist())
        some_elsewhere = -1 in wanted
        wanted.discard(-1)
        with memory.event(layer, wanted):
            if self._observers:
                # Meanwhile the missing experts load.
                here = (chosen >= 0).any(1)
                rows = here.nonzero().flatten().to(x.device) if some_elsewhere else slice(None)
                arrived = x[rows], chosen[here], weights[rows]
                for observer in self._observers:
                    observer.arrived(layer, *arrived)
            meanwhile()
            if not wanted:
                return x.new_zeros(x.shape, dtype=torch.float32)
            make = x.new_zeros if some_elsewhere else x.new_empty
            products = make((*ids.shape, x.shape[1]), dtype=torch.float32)
            size = rows_at_once(len(x), self._max_rows)
            for ready in memory.turns(layer, wanted):
                contents = memory.contents(layer)
                # Experts of an earlier turn may be overwritten now.
                few = len(ready) < len(wanted)
                experts.show([expert if expert in ready else -1 for expert in contents] if few else contents)
                for rows, chosen_here, out in zip(*(part.split(size) for part in (x, ids, products)), strict=True):
                    experts.multiply(rows, chosen_here, activation, out)
            return experts.combine(products, weights)


@dataclass(frozen=True, slots=True)
class GpuExpertSettings:
    """The service's settings for experts on a GPU.

    num_bytes: the memory for slots. host_bytes: the host memory that the experts of this GPU may take; if they need
    more, they are read from disk. load: [L, E],
    for a policy that uses it.
    """

    num_bytes: int
    host_bytes: int
    policy: str
    store_dir: Path | None
    load: Sequence[Sequence[float]] | None = None


@dataclass(frozen=True, slots=True)
class GpuResidencyPlan:
    """The layout of experts in slots for a model that computes in `dtype`, and the number of slots.

    held: the experts of each sparse layer that this rank computes.
    """

    spec: DecoderSpec
    dtype: torch.dtype
    layout: SlotLayout
    slots: SlotPlan
    held: Sequence[Sequence[int]]


GpuResidentModel = ResidentModel[GpuResidentExperts]


def plan_gpu_residency(
    spec: DecoderSpec,
    dtype: torch.dtype,
    num_bytes: int,
    storage: WeightStorage | None = None,
    owned: OwnedExperts | None = None,
) -> GpuResidencyPlan | None:
    """Plan the slots that `num_bytes` pay for, with weights kept in `storage` (default `dtype`); None if all fit.

    owned: returns the experts of a decoder layer that this rank holds; None on a single rank. Raise ConfigError for a
    model without experts, and if a layer could not hold the experts of one token.
    """
    moe = experts_of(spec)
    layout = slot_layout(spec, dtype, storage)
    held = [range(moe.num_experts) if owned is None else owned(layer) for layer in spec.moe_layers]
    counts = [len(experts) for experts in held]
    slots = plan_slots(num_bytes, layout.num_bytes, counts, moe.gate.top_k, several_ranks=owned is not None)
    return None if slots is None else GpuResidencyPlan(spec, dtype, layout, slots, held)


def slot_layout(spec: DecoderSpec, dtype: torch.dtype, storage: WeightStorage | None = None) -> SlotLayout:
    """Return the layout of a slot for a model that computes in `dtype`, with weights in `storage` (default `dtype`)."""
    assert spec.moe is not None
    shape = ExpertShape(spec.hidden_size, spec.moe.intermediate_size, dtype, dtype, spec.moe.expert_bias)
    return SlotLayout(shape, storage or expert_storage(spec, dtype))


def open_gpu_experts(
    directory: Path,
    plan: GpuResidencyPlan,
    settings: GpuExpertSettings,
    device: torch.device,
    max_tokens: int,
    progress: Progress,
    configs: MoeConfigs | None = None,
    observers: Sequence[AnyObserver] = (),
) -> GpuResidentModel:
    """Put the planned experts into host memory or onto disk, and allocate the slots. Raise ModelError.

    configs: the configurations of the experts' kernels, see `moeserve.model.gpu.kernels.expert_configs`. observers:
    receive `arrived` for the rows that this rank computes.
    """
    spec, layout, num_slots = plan.spec, plan.layout, plan.slots.num_slots
    configs = configs or expert_configs(spec, layout.storage, device)
    assert configs is not None
    try:
        name, tier = _open_tier(directory, plan, settings, device, progress)
    except ExpertStoreError as error:
        raise ModelError(str(error)) from error
    slots = DeviceSlots(num_slots, layout.num_bytes, device)
    moe = triton_moe(configs, device, plan.dtype, max_tokens, max(num_slots))

    def layer_of(memory: ExpertMemory, number: int) -> GpuResidentExperts:
        experts = SlotExperts(layout, slots.of_layer(number), configs.shape.num_experts, moe)
        return GpuResidentExperts(memory, number, experts, max_tokens, observers)

    return resident_model(spec, plan.slots, settings.policy, settings.load, slots, tier, layer_of, tier_name=name)


def _open_tier(
    directory: Path, plan: GpuResidencyPlan, settings: GpuExpertSettings, device: torch.device, progress: Progress
) -> tuple[str, ExpertTier]:
    spec, layout = plan.spec, plan.layout
    packings = LayerPackings((layout,) * len(spec.moe_layers))
    stored = NativeExperts(read_index(directory), spec, plan.dtype)
    if sum(map(len, plan.held)) * plan.slots.slot_bytes > settings.host_bytes:
        # Imported late: only building the file needs these packages.
        from moeserve.model.expert_store import ExpertFile

        moe = experts_of(spec)
        file = ExpertFile(directory, stored, moe.num_experts, packings, settings.store_dir)
        file.ensure(progress)
        return f"disk, {file.path}", DiskTier(file.path, file.source)
    tier = HostTier(plan.held, layout.num_bytes, device)
    of_layer = dict(zip(spec.moe_layers, plan.held, strict=True))
    packed = packed_experts(stored, packings, progress, of_layer.__getitem__)
    for place, expert in zip(tier.experts, packed, strict=True):
        tier.put(*place, expert)
    return "host memory", tier
