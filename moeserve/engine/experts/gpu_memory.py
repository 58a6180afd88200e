"""Serve with less GPU memory than the experts take: slots in device memory, all experts in host memory or on disk.

Experts without a slot are copied into one, or computed by the host where they lie: see `experts.memory.host_share`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from experts.errors import ExpertStoreError
from experts.memory.host_share import HostShare
from experts.memory.memory import ExpertMemory
from experts.memory.slots import DeviceSlots
from experts.memory.tiers import DiskTier, ExpertTier, HostTier
from experts.moe_layer import LoadingDispatch
from experts.observer import AnyObserver
from kernels.gpu.moe import SlotExperts, SlotLayout
from kernels.gpu.moe_config import MoeConfigs, WeightStorage
from kernels.moe import expert_layout
from kernels.packed_experts import ExpertShape, LayerPackings
from kernels.specs import Activation
from moeserve.config import ConfigError
from moeserve.engine.experts.host_experts import TIMED_ROWS, HostExperts, host_thread, measure_costs
from moeserve.engine.experts.resident_model import (
    ResidentModel,
    SlotPlan,
    empty_experts,
    experts_of,
    plan_slots,
    resident_model,
)
from moeserve.model.checkpoint import OwnedExperts, read_index
from moeserve.model.expert_weights import NativeExperts, packed_experts
from moeserve.model.gpu.kernels import expert_configs, rows_at_once, triton_moe
from moeserve.model.rounding import NO_ROUNDING, Rounding
from moeserve.model.spec import DecoderSpec, ModelError, Progress
from moeserve.settings.quantities import show_size


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
        host: HostExperts | None = None,
    ) -> None:
        """experts: computes with the slots that the memory fills for this layer. max_rows: the size of its scratch.
        host: the layer's experts in the host's memory, for it to compute; None if all are copied."""
        self.experts = experts
        self._memory, self._host = memory, host
        self._layer = layer
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
        memory, layer = self._memory, self._layer
        chosen = ids.cpu()
        num_rows = Counter(chosen.flatten().tolist())
        some_remote = num_rows.pop(-1, 0) > 0
        with memory.event(layer, num_rows.keys(), None if self._host is None else num_rows) as access:
            on_host = None
            if self._host is not None and access is not None and access.elsewhere:
                of_host = {expert: num_rows[expert] for expert in access.elsewhere}
                on_host = self._host.begin(x, chosen, of_host, activation)
            if self._observers:
                self._tell(x, chosen, weights, some_remote=some_remote)
            meanwhile()
            if access is None:
                return x.new_zeros(x.shape, dtype=torch.float32)
            make = x.new_zeros if some_remote else x.new_empty
            products = make((*ids.shape, x.shape[1]), dtype=torch.float32)
            self._multiply(x, ids, activation, products, num_rows.keys() - access.elsewhere, len(num_rows))
            if on_host is not None:
                memory.computed_on_host(on_host.num_rows.values(), on_host.put_into(products))
            return self.experts.combine(products, weights)

    def _tell(self, x: Tensor, chosen: Tensor, weights: Tensor, *, some_remote: bool) -> None:
        """Have observers look at the rows that have come, while the missing experts load. chosen: on the host."""
        here = (chosen >= 0).any(1)
        rows = here.nonzero().flatten().to(x.device) if some_remote else slice(None)
        arrived = x[rows], chosen[here], weights[rows]
        for observer in self._observers:
            observer.arrived(self._layer, *arrived)

    def _multiply(
        self,
        x: Tensor,
        ids: Tensor,
        activation: Activation,
        products: Tensor,
        wanted: Collection[int],
        num_chosen: int,
    ) -> None:
        """Write the products of `wanted` experts as they arrive in slots. num_chosen: the experts of all rows."""
        memory, experts = self._memory, self.experts
        size = rows_at_once(len(x), self._max_rows)
        for ready in memory.turns(self._layer, wanted):
            contents = memory.contents(self._layer)
            # Experts of an earlier turn may be overwritten now.
            few = len(ready) < num_chosen
            experts.show([expert if expert in ready else -1 for expert in contents] if few else contents)
            for rows, chosen, out in zip(*(part.split(size) for part in (x, ids, products)), strict=True):
                experts.multiply(rows, chosen, activation, out)


@dataclass(frozen=True, slots=True)
class GpuExpertSettings:
    """The service's settings for experts on a GPU.

    num_bytes: the memory for slots. host_bytes: the host memory that the experts of this GPU may take; if they need
    more, they are read from disk. load: [L, E], for a policy that uses it. compute: `--expert-compute`. host: returns
    how the host keeps the experts that it computes, or why it computes none.
    """

    num_bytes: int
    host_bytes: int
    policy: str
    store_dir: Path | None
    load: Sequence[Sequence[float]] | None = None
    compute: str = "copy"
    host: Callable[[], Rounding | str] = lambda: "all are copied"


@dataclass(frozen=True, slots=True)
class GpuResidencyPlan:
    """The layouts of experts in slots for a model that computes in `dtype`, and the number of slots.

    rounding: of the checkpoint's weights. held: the experts of each sparse layer that this rank computes.
    """

    spec: DecoderSpec
    dtype: torch.dtype
    rounding: Rounding
    layouts: LayerPackings[SlotLayout]
    slots: SlotPlan
    held: Sequence[Sequence[int]]


GpuResidentModel = ResidentModel[GpuResidentExperts]


def plan_gpu_residency(
    spec: DecoderSpec,
    dtype: torch.dtype,
    num_bytes: int,
    storage: WeightStorage | None = None,
    owned: OwnedExperts | None = None,
    rounding: Rounding = NO_ROUNDING,
    shapes: Sequence[ExpertShape] = (),
) -> GpuResidencyPlan | None:
    """Plan the slots that `num_bytes` pay for, with weights kept in `storage` (default `dtype`); None if all fit.

    owned: returns the experts of a decoder layer that this rank holds; None on a single rank. rounding: of the
    checkpoint's weights. shapes: see `slot_layouts`. Raise ConfigError for a model without experts, and if a layer
    could not hold the experts of one token.
    """
    moe = experts_of(spec)
    layouts = slot_layouts(spec, dtype, storage, shapes)
    held = [range(moe.num_experts) if owned is None else owned(layer) for layer in spec.moe_layers]
    counts = [len(experts) for experts in held]
    slots = plan_slots(num_bytes, layouts.num_bytes, counts, moe.gate.top_k, several_ranks=owned is not None)
    return None if slots is None else GpuResidencyPlan(spec, dtype, rounding, layouts, slots, held)


def slot_layouts(
    spec: DecoderSpec, dtype: torch.dtype, storage: WeightStorage | None = None, shapes: Sequence[ExpertShape] = ()
) -> LayerPackings[SlotLayout]:
    """Return the layout of a slot of each layer for a model that computes in `dtype`, see `plan_gpu_residency`.

    shapes: of the experts of each layer, where a checkpoint may have quantised ones.
    """
    assert spec.moe is not None
    plain = ExpertShape(spec.hidden_size, spec.moe.intermediate_size, dtype, dtype, spec.moe.expert_bias)
    shapes = shapes or (plain,) * len(spec.moe_layers)
    made = {shape: SlotLayout(shape, storage) for shape in set(shapes)}
    return LayerPackings(tuple(made[shape] for shape in shapes))


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
    spec, layouts, num_slots = plan.spec, plan.layouts, plan.slots.num_slots
    configs = configs or expert_configs(spec, layouts.layers[0].storage, device)
    assert configs is not None
    host = _open_host(directory, plan, settings, progress)
    if isinstance(host, str):
        by_layer, host_bytes, reads = [], settings.host_bytes, {"compute": "copy", "reason": host}
    else:
        by_layer, host_bytes, reads = host.layers, settings.host_bytes - host.num_bytes, {"compute": settings.compute}
    try:
        name, tier = _open_tier(directory, plan, settings, host_bytes, device, progress)
    except ExpertStoreError as error:
        raise ModelError(str(error)) from error
    slots = DeviceSlots(num_slots, layouts.num_bytes, device)
    moe = triton_moe(configs, device, plan.dtype, max_tokens, max(num_slots))

    def layer_of(memory: ExpertMemory, number: int) -> GpuResidentExperts:
        experts = SlotExperts(layouts.layers[number], slots.of_layer(number), configs.shape.num_experts, moe)
        own = by_layer[number] if by_layer else None
        return GpuResidentExperts(memory, number, experts, max_tokens, observers, own)

    policy, load = settings.policy, settings.load
    model = resident_model(spec, plan.slots, policy, load, slots, tier, layer_of, tier_name=name, reads=reads)

    def share() -> None:
        rows = torch.ones((min(max_tokens, TIMED_ROWS[-1]), spec.hidden_size), dtype=plan.dtype, device=device)
        costs = measure_costs(list(zip(by_layer, plan.held, strict=True)), rows, experts_of(spec).activation)
        model.memory.share_with_host(
            HostShare(
                model.control,
                configs.shape.num_experts,
                costs,
                waits_for_copies=settings.compute == "auto",
                piece_share=min(slots.piece_bytes / slots.slot_bytes, 1.0),
            )
        )

    return replace(model, share=share) if by_layer else model


@dataclass(frozen=True, slots=True)
class _Host:
    """The experts that the host computes, by layer, and the bytes that they take."""

    layers: list[HostExperts]
    num_bytes: int


def _open_host(directory: Path, plan: GpuResidencyPlan, settings: GpuExpertSettings, progress: Progress) -> _Host | str:
    """Put the experts into host memory as its kernels compute them, or return why the host computes none.

    `auto` leaves the memory to the experts that the device copies where it does not hold both. Raise ConfigError where
    `host` lacks the memory.
    """
    rounding = settings.host()
    if isinstance(rounding, str):
        return rounding
    spec, moe, num_held = plan.spec, experts_of(plan.spec), sum(map(len, plan.held))
    stored = NativeExperts(read_index(directory), spec, torch.float32, rounding)
    layouts = LayerPackings(tuple(map(expert_layout, stored.shapes())))
    num_bytes, to_copy = num_held * layouts.num_bytes, num_held * plan.slots.slot_bytes
    needed = num_bytes + (to_copy if settings.compute == "auto" and to_copy <= settings.host_bytes else 0)
    if needed > settings.host_bytes:
        reason = (
            f"the host needs {show_size(needed, up=True)} of memory for the experts, and may take "
            f"{show_size(settings.host_bytes)}"
        )
        if settings.compute == "host":
            raise ConfigError(f"--expert-compute host: {reason}.")
        return reason
    layers = [empty_experts(layout, moe.num_experts) for layout in layouts.layers]
    of_layer = dict(zip(spec.moe_layers, plan.held, strict=True))
    places = ((number, expert) for number, held in enumerate(plan.held) for expert in held)
    packed = packed_experts(stored, layouts, progress, of_layer.__getitem__)
    for (number, expert), of_expert in zip(places, packed, strict=True):
        layers[number].put(expert, of_expert[: layouts.layers[number].num_bytes])
    thread = host_thread()
    return _Host([HostExperts(experts, thread) for experts in layers], num_bytes)


def _open_tier(
    directory: Path,
    plan: GpuResidencyPlan,
    settings: GpuExpertSettings,
    host_bytes: int,
    device: torch.device,
    progress: Progress,
) -> tuple[str, ExpertTier]:
    """host_bytes: the most host memory to copy from."""
    spec, packings = plan.spec, plan.layouts
    stored = NativeExperts(read_index(directory), spec, plan.dtype, plan.rounding)
    if sum(map(len, plan.held)) * plan.slots.slot_bytes > host_bytes:
        # Imported late: only building the file needs these packages.
        from moeserve.model.expert_store import ExpertFile

        moe = experts_of(spec)
        file = ExpertFile(directory, stored, moe.num_experts, packings, settings.store_dir)
        file.ensure(progress)
        return f"disk, {file.path}", DiskTier(file.path, file.source)
    tier = HostTier(plan.held, packings.num_bytes, device)
    of_layer = dict(zip(spec.moe_layers, plan.held, strict=True))
    packed = packed_experts(stored, packings, progress, of_layer.__getitem__)
    for place, expert in zip(tier.experts, packed, strict=True):
        tier.put(*place, expert)
    return "host memory", tier
