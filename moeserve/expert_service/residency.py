"""Serving with less memory than the experts take: how many slots each layer gets, and what fills them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from experts.errors import DeepNvmeError, ExpertStoreError
from experts.memory.deep_nvme import DeepNvme, deep_nvme
from experts.memory.expert_file import round_to_page
from experts.memory.expert_memory import ExpertMemory
from experts.memory.lending import LentExperts, lend_experts
from experts.memory.peer_memory import PeerTier, lend
from experts.memory.resident_experts import ResidentExperts
from experts.memory.slot_arena import SlotArena
from experts.memory.store import DiskTier, ExpertTier, PositionedReads, SlowedTier
from experts.moe_layer import LocalExperts
from experts.placement.placement import Placement
from kernels.packed_experts import ExpertLayout, SplitExperts
from moeserve.config import ConfigError, ServeConfig
from moeserve.expert_service.placement import measured_load, read_statistics
from moeserve.expert_service.resident_model import ResidentModel, resident_model
from moeserve.expert_service.slot_plan import SlotPlan, experts_of, in_mib, plan_slots
from moeserve.models.errors import ModelError
from moeserve.models.expert_store import ensure_expert_store, layout_in_store
from moeserve.models.spec import DecoderSpec

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """dtype: of computing. lent: what each rank keeps for the others (`--expert-peer-memory`); empty without that."""

    layout: ExpertLayout
    dtype: torch.dtype
    slots: SlotPlan
    lent: tuple[LentExperts, ...] = ()

    @property
    def num_lent_bytes(self) -> int:
        """What all ranks lend each other."""
        return sum(map(len, self.lent)) * self.slots.slot_bytes


CpuResidentModel = ResidentModel[ResidentExperts]


def plan_residency(
    directory: Path, spec: DecoderSpec, dtype: torch.dtype, config: ServeConfig, placement: Placement | None = None
) -> ResidencyPlan | None:
    """The slots that `--expert-memory` pays for on each rank; None where it is not given or a rank's experts all fit.

    dtype: what the experts compute in. placement: None of one rank. Raises ConfigError where a layer could not hold the
    experts that one token may choose on a rank, and ModelError for a checkpoint that cannot be served so.
    """
    if config.expert_memory is None:
        return None
    moe, num_layers = experts_of(spec), len(spec.moe_layers)
    layout = layout_in_store(directory, spec, dtype)
    held = [moe.num_experts if placement is None else placement.slots_per_rank(layer) for layer in range(num_layers)]
    slots = plan_slots(
        config.expert_memory, layout.num_bytes, held, moe.gate.top_k, several_ranks=placement is not None
    )
    if slots is None:
        return None
    lent: tuple[LentExperts, ...] = ()
    if config.expert_peer_memory is not None and placement is not None:
        if config.expert_peer_memory < slots.slot_bytes:
            raise ConfigError(
                f"--expert-peer-memory {in_mib(config.expert_peer_memory)} holds no expert of "
                f"{in_mib(slots.slot_bytes)}."
            )
        statistics = read_statistics(directory, config)
        load = np.ones((num_layers, moe.num_experts)) if statistics is None else statistics.load()
        lent = lend_experts(placement, slots.num_slots, load, config.expert_peer_memory // slots.slot_bytes)
    return ResidencyPlan(layout, dtype, slots, lent)


def residency_with(
    num_slots: tuple[int, ...], lent: tuple[LentExperts, ...], directory: Path, spec: DecoderSpec, dtype: torch.dtype
) -> ResidencyPlan:
    """A rank's plan when another one has decided on the slots and on what is lent. Raises ModelError."""
    layout = layout_in_store(directory, spec, dtype)
    return ResidencyPlan(layout, dtype, SlotPlan(num_slots, round_to_page(layout.num_bytes)), lent)


def open_experts(
    directory: Path,
    spec: DecoderSpec,
    plan: ResidencyPlan,
    config: ServeConfig,
    report: Callable[[dict[str, Any]], None],
    rank: int = 0,
) -> CpuResidentModel:
    """Builds the expert file if need be, takes the memory of the slots and fills what `rank` lends. Raises ModelError.

    Where ranks lend each other memory, `ResidentModel.peers` is to be told where, before the first step.
    """
    moe, slots = experts_of(spec), plan.slots

    def progress(stage: str, done: int, total: int) -> None:
        report({"event": "loading", "done": done, "total": total, "stage": stage})

    root = None if config.expert_store_dir is None else Path(config.expert_store_dir).expanduser()
    store = ensure_expert_store(directory, spec, plan.layout, plan.dtype, root, progress)
    nvme = _deep_nvme(slots.num_bytes)
    locked = None if nvme is None else nvme.locked_memory(slots.num_bytes)
    open_reads = PositionedReads if nvme is None else nvme.open
    try:
        disk = DiskTier(store.path, store.source, open_reads)
        lent = lend(plan.lent[rank], disk, slots.slot_bytes) if plan.lent else None
    except ExpertStoreError as error:
        raise ModelError(str(error)) from error
    tier: ExpertTier = disk
    if config.expert_store_bandwidth is not None:
        tier = SlowedTier(disk, config.expert_store_bandwidth)
    peers = PeerTier(plan.lent, disk.header, tier) if plan.lent else None
    load = measured_load(directory, config, (len(spec.moe_layers), moe.num_experts))
    arena = SlotArena(slots.num_slots, plan.layout.num_bytes, locked)

    def layer_of(memory: ExpertMemory, number: int) -> ResidentExperts:
        return ResidentExperts(memory, arena, number, _places(plan.layout, moe.num_experts))

    _log_opened(config, plan, moe.num_experts, rank, store.path, disk.reads.description)
    return resident_model(
        spec, slots, config.expert_policy, load, arena, tier, layer_of, tier_name="disk", lent=lent, peers=peers
    )


def _deep_nvme(num_locked: int) -> DeepNvme | None:
    try:
        return deep_nvme(num_locked)
    except DeepNvmeError as error:
        log.info("deep_nvme_not_used", why=str(error))
        return None


def _log_opened(config: ServeConfig, plan: ResidencyPlan, num_experts: int, rank: int, path: Path, reads: str) -> None:
    """reads: how the file at `path` is read."""
    slots = plan.slots
    log.info(
        "expert_memory",
        slots=f"{min(slots.num_slots)} of {num_experts} per layer",
        size=in_mib(slots.num_bytes),
        policy=config.expert_policy,
        **({"lent": f"{len(plan.lent[rank])} experts"} if plan.lent else {}),
        store=str(path),
        read=reads,
        **({"emulated_bytes_per_second": config.expert_store_bandwidth} if config.expert_store_bandwidth else {}),
    )


def local_of(experts: CpuResidentModel, layer: int) -> LocalExperts:
    """Computes a layer's rows of several ranks, which have experts elsewhere too."""
    return experts.layers[layer].partial


def _places(layout: ExpertLayout, num_experts: int) -> SplitExperts:
    """For all experts of a layer, none there yet. Raises ModelError where these have no whole matrices of their own."""
    experts = layout.experts(num_experts)
    if not isinstance(experts, SplitExperts):
        raise ModelError(f"--expert-memory does not work with experts kept as {layout.name}.")
    return experts
