"""Serve on a CPU with less memory than the experts take: plan the slots of each layer and open the tier below them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from experts.errors import ExpertStoreError
from experts.memory.file import round_to_page
from experts.memory.memory import ExpertMemory
from experts.memory.resident_experts import ResidentExperts
from experts.memory.slots import SlotArena
from experts.memory.tiers import DiskTier, ExpertTier, PackingTier
from experts.observer import AnyObserver
from experts.placement.placement import Placement
from kernels.packed_experts import ExpertLayout, LayerPackings
from moeserve.config import ServeConfig
from moeserve.engine.experts.kept import ExpertFileWriter, store_dir
from moeserve.engine.experts.resident_model import (
    ResidentModel,
    SlotPlan,
    empty_experts,
    experts_of,
    plan_slots,
    resident_model,
)
from moeserve.engine.experts.settings import measured_load
from moeserve.model.expert_store import ExpertFile, ExpertPacker, layouts_in_store, stored_experts
from moeserve.model.rounding import NO_ROUNDING, Rounding
from moeserve.model.spec import ModelError, ModelSpec
from moeserve.statuses import Report, progress_to


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """The layouts of each layer's experts in slots, and the number of slots. dtype: in which the model computes."""

    layouts: LayerPackings[ExpertLayout]
    dtype: torch.dtype
    slots: SlotPlan
    rounding: Rounding = NO_ROUNDING


CpuResidentModel = ResidentModel[ResidentExperts]


def plan_residency(
    find_layouts: Callable[[], LayerPackings[ExpertLayout]],
    spec: ModelSpec,
    dtype: torch.dtype,
    config: ServeConfig,
    placement: Placement | None,
    rounding: Rounding = NO_ROUNDING,
) -> ResidencyPlan | None:
    """Plan the slots that `--expert-memory` pays for on each rank; None without it or where a rank's experts all fit.

    find_layouts: looks the layouts up in the checkpoint. dtype: in which the experts compute. placement: None on a
    single rank. Raise ConfigError if a layer could not hold the experts that one token may choose on a rank, and
    ModelError for a checkpoint whose experts cannot lie in slots.
    """
    if config.expert_memory is None:
        return None
    moe, num_layers = experts_of(spec), len(spec.moe_layers)
    layouts = find_layouts()
    held = [moe.num_experts if placement is None else placement.slots_per_rank(layer) for layer in range(num_layers)]
    slots = plan_slots(
        config.expert_memory, layouts.num_bytes, held, moe.gate.top_k, several_ranks=placement is not None
    )
    return None if slots is None else ResidencyPlan(layouts, dtype, slots, rounding)


def residency_with(
    num_slots: tuple[int, ...], directory: Path, spec: ModelSpec, dtype: torch.dtype, rounding: Rounding
) -> ResidencyPlan:
    """Return the plan of a rank for the numbers of slots that rank 0 has decided on. Raise ModelError."""
    layouts = layouts_in_store(directory, spec, dtype, rounding)
    return ResidencyPlan(layouts, dtype, SlotPlan(num_slots, round_to_page(layouts.num_bytes)), rounding)


def open_experts(
    directory: Path,
    spec: ModelSpec,
    plan: ResidencyPlan,
    config: ServeConfig,
    report: Report,
    observers: Sequence[AnyObserver] = (),
) -> CpuResidentModel:
    """Open the tier below the slots, and allocate them. Raise ModelError.

    The tier is the GGUF file of the model, or an expert file. Where that is missing it is written while requests run,
    and experts are packed out of the checkpoint. observers: receive `arrived` for the rows that this rank computes.
    """
    moe, slots = experts_of(spec), plan.slots
    tier, reads = _open_tier(directory, spec, plan, config, report)
    load = measured_load(directory, config, (len(spec.moe_layers), moe.num_experts))
    arena = SlotArena(slots.num_slots, plan.layouts.num_bytes, in_pieces=isinstance(tier, DiskTier))

    def layer_of(memory: ExpertMemory, number: int) -> ResidentExperts:
        return ResidentExperts(
            memory, arena, number, empty_experts(plan.layouts.layers[number], moe.num_experts), observers
        )

    policy = config.expert_policy
    return resident_model(
        spec,
        slots,
        policy,
        load,
        arena,
        tier,
        layer_of,
        tier_name="disk",
        reads=reads,
        num_copiers=torch.get_num_threads(),
    )


def _open_tier(
    directory: Path, spec: ModelSpec, plan: ResidencyPlan, config: ServeConfig, report: Report
) -> tuple[ExpertTier, dict[str, str]]:
    """Return the tier below the slots, and how it is read."""
    stored, layouts = stored_experts(directory, spec, plan.dtype, plan.rounding), plan.layouts
    packer, num_experts = ExpertPacker(stored, layouts), experts_of(spec).num_experts
    packing = PackingTier(packer, layouts.num_bytes)
    if stored.lie_as_packed() and config.expert_store_dir is None:
        return packing, {"read": "packed out of the GGUF file"}
    file = ExpertFile(directory, stored, num_experts, layouts, store_dir(config))
    if not file.is_built(progress_to(report)):
        # Of several ranks one writes the file, and the others wait for it on their threads.
        tier = PackedMeanwhile(packing, file, packer.all(num_experts))
        return tier, {"read": "packed out of the checkpoint", "until_written": str(file.path)}
    try:
        stored_tier = DiskTier(file.path, file.source)
    except ExpertStoreError as error:
        raise ModelError(str(error)) from error
    return stored_tier, {"store": str(file.path), "read": stored_tier.reads.description}


class PackedMeanwhile:
    """A tier whose expert file is still being written: until it is there, experts are packed out of the checkpoint."""

    def __init__(self, packing: ExpertTier, file: ExpertFile, experts: Iterable[Tensor]) -> None:
        """experts: see `ExpertFile.ensure`."""
        self._tier, self._file = packing, file
        otherwise = "experts are packed out of the checkpoint whenever they are loaded"
        self._writer = ExpertFileWriter(file, experts, self._use_file, otherwise)

    def read(self, layer: int, expert: int, offset: int, out: memoryview) -> None:
        """Fill `out`, which holds a whole expert: `offset` is 0."""
        self._tier.read(layer, expert, offset, out)

    def close(self) -> None:
        self._writer.close()
        self._tier.close()

    def _use_file(self) -> None:
        self._tier = DiskTier(self._file.path, self._file.source)
