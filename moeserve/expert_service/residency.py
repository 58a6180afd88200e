"""Serving with less memory than the experts take: how many slots each layer gets, and what fills them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from experts.errors import ExpertStoreError
from experts.memory.deep_nvme import deep_nvme
from experts.memory.eviction import EvictionPolicy, make_policies
from experts.memory.expert_file import round_to_page
from experts.memory.expert_memory import ExpertMemory
from experts.memory.lending import LentExperts, lend_experts
from experts.memory.peer_memory import LentMemory, PeerTier, lend
from experts.memory.residency_control import ResidencyControl
from experts.memory.resident_experts import ResidentExperts
from experts.memory.slot_arena import SlotArena
from experts.memory.slot_budget import least_slots, share_slots
from experts.memory.store import DiskTier, ExpertTier, PositionedReads, SlowedTier
from experts.moe_layer import Dispatch, LocalExperts
from experts.placement.placement import Placement
from kernels.packed_experts import ExpertLayout, SplitExperts
from moeserve.config import ConfigError, ServeConfig
from moeserve.expert_service.placement import measured_load, read_statistics
from moeserve.models.errors import ModelError
from moeserve.models.expert_store import ensure_expert_store, layout_in_store
from moeserve.models.spec import DecoderSpec

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """Of each rank. num_slots: of each layer with experts. slot_bytes: one expert, whole pages. dtype: of computing.

    lent: what each rank keeps for the others (`--expert-peer-memory`); empty without that.
    """

    layout: ExpertLayout
    dtype: torch.dtype
    num_slots: tuple[int, ...]
    slot_bytes: int
    lent: tuple[LentExperts, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of the slots."""
        return sum(self.num_slots) * self.slot_bytes

    @property
    def num_lent_bytes(self) -> int:
        """What all ranks lend each other."""
        return sum(map(len, self.lent)) * self.slot_bytes


@dataclass(frozen=True, slots=True)
class ResidentModel:
    """The experts of a model of which only some are in memory. `dispatch_of(layer)`: of the decoder's layers.

    lent: what this rank lends. peers: reads what all lend, once it is told where that is.
    """

    memory: ExpertMemory
    control: ResidencyControl
    policies: Sequence[EvictionPolicy]
    layers: Mapping[int, ResidentExperts]
    lent: LentMemory | None = None
    peers: PeerTier | None = None

    def dispatch_of(self, layer: int) -> Dispatch:
        return self.layers[layer]

    def local_of(self, layer: int) -> LocalExperts:
        """The same for rows of several ranks, which have experts elsewhere too."""
        return self.layers[layer].partial


def plan_residency(
    directory: Path, spec: DecoderSpec, dtype: torch.dtype, config: ServeConfig, placement: Placement | None = None
) -> ResidencyPlan | None:
    """The slots that `--expert-memory` pays for on each rank; None where it is not given or a rank's experts all fit.

    dtype: what the experts compute in. placement: None of one rank. Raises ConfigError where a layer could not hold the
    experts that one token may choose on a rank, and ModelError for a checkpoint that cannot be served so.
    """
    if config.expert_memory is None:
        return None
    if spec.moe is None:
        raise ConfigError(f"--expert-memory: a {spec.model_type} model has no experts.")
    moe = spec.moe
    layout = layout_in_store(directory, spec, dtype)
    slot_bytes = round_to_page(layout.num_bytes)
    num_layers, top_k = len(spec.moe_layers), moe.gate.top_k
    held = [moe.num_experts if placement is None else placement.slots_per_rank(layer) for layer in range(num_layers)]
    count = config.expert_memory // slot_bytes
    least = least_slots(held, top_k)
    if count < sum(least):
        where = "" if placement is None else " on every rank"
        raise ConfigError(
            f"--expert-memory {_mib(config.expert_memory)} holds {count} experts of {_mib(slot_bytes)}, but "
            f"{num_layers} layers need {max(least)} each{where}: give at least {_mib(sum(least) * slot_bytes)}."
        )
    num_slots = share_slots(count, held, top_k)
    if num_slots is None:
        return None
    lent: tuple[LentExperts, ...] = ()
    if config.expert_peer_memory is not None and placement is not None:
        if config.expert_peer_memory < slot_bytes:
            raise ConfigError(
                f"--expert-peer-memory {_mib(config.expert_peer_memory)} holds no expert of {_mib(slot_bytes)}."
            )
        statistics = read_statistics(directory, config)
        load = np.ones((num_layers, moe.num_experts)) if statistics is None else statistics.load()
        lent = lend_experts(placement, num_slots, load, config.expert_peer_memory // slot_bytes)
    return ResidencyPlan(layout, dtype, num_slots, slot_bytes, lent)


def residency_with(
    num_slots: tuple[int, ...], lent: tuple[LentExperts, ...], directory: Path, spec: DecoderSpec, dtype: torch.dtype
) -> ResidencyPlan:
    """A rank's plan when another one has decided on the slots and on what is lent. Raises ModelError."""
    layout = layout_in_store(directory, spec, dtype)
    return ResidencyPlan(layout, dtype, num_slots, round_to_page(layout.num_bytes), lent)


def open_experts(
    directory: Path,
    spec: DecoderSpec,
    plan: ResidencyPlan,
    config: ServeConfig,
    report: Callable[[dict[str, Any]], None],
    rank: int = 0,
) -> ResidentModel:
    """Builds the expert file if need be, takes the memory of the slots and fills what `rank` lends. Raises ModelError.

    Where ranks lend each other memory, `ResidentModel.peers` is to be told where, before the first step.
    """
    assert spec.moe is not None

    def progress(stage: str, done: int, total: int) -> None:
        report({"event": "loading", "done": done, "total": total, "stage": stage})

    root = None if config.expert_store_dir is None else Path(config.expert_store_dir).expanduser()
    store = ensure_expert_store(directory, spec, plan.layout, plan.dtype, root, progress)
    nvme = deep_nvme()
    locked = None if nvme is None else nvme.locked_memory(plan.num_bytes)
    # Into memory that is not locked, DeepNVMe copies everything once more and is slower than plain reads.
    open_reads = PositionedReads if nvme is None or locked is None else nvme.open
    try:
        disk = DiskTier(store.path, store.source, open_reads)
        lent = lend(plan.lent[rank], disk, plan.slot_bytes) if plan.lent else None
    except ExpertStoreError as error:
        raise ModelError(str(error)) from error
    tier: ExpertTier = disk
    if config.expert_store_bandwidth is not None:
        tier = SlowedTier(disk, config.expert_store_bandwidth)
    peers = PeerTier(plan.lent, disk.header, tier) if plan.lent else None
    num_experts = spec.moe.num_experts
    load = measured_load(directory, config, (len(spec.moe_layers), num_experts))
    policies = make_policies(config.expert_policy, len(spec.moe_layers), num_experts, load)
    control = ResidencyControl(plan.num_slots, num_experts, plan.slot_bytes, policies.__getitem__)
    arena = SlotArena(plan.num_slots, plan.layout.num_bytes, locked)
    if peers is None:
        memory = ExpertMemory(control, arena, tier)
    else:
        memory = ExpertMemory(control, arena, peers, peers.tier_of, ("peer", "disk"))
    log.info(
        "expert_memory",
        slots=f"{min(plan.num_slots)} of {num_experts} per layer",
        size=_mib(plan.num_bytes),
        policy=config.expert_policy,
        **({"lent": f"{len(plan.lent[rank])} experts"} if plan.lent else {}),
        store=str(store.path),
        read=disk.reads.description,
        **({"emulated_bytes_per_second": config.expert_store_bandwidth} if config.expert_store_bandwidth else {}),
    )
    layers = _resident_layers(spec, plan, memory, arena)
    return ResidentModel(memory, control, policies, layers, lent, peers)


def _resident_layers(
    spec: DecoderSpec, plan: ResidencyPlan, memory: ExpertMemory, arena: SlotArena
) -> dict[int, ResidentExperts]:
    """By the layer's number in the model. Raises ModelError for experts that have no whole matrices of their own."""
    assert spec.moe is not None
    layers = {}
    for number, layer in enumerate(spec.moe_layers):
        experts = plan.layout.experts(spec.moe.num_experts)
        if not isinstance(experts, SplitExperts):
            raise ModelError(f"--expert-memory does not work with experts kept as {plan.layout.name}.")
        layers[layer] = ResidentExperts(memory, arena, number, experts)
    return layers


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
