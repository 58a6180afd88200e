"""A model with only some of its experts in the fast tier, on any device.

`plan_slots` computes the number of slots of each layer that `--expert-memory` pays for; `resident_model` puts the
expert memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from experts.memory.eviction import EvictionPolicy, make_policies
from experts.memory.file import round_to_page
from experts.memory.memory import ExpertMemory
from experts.memory.residency import ResidencyControl, least_slots, share_slots
from experts.memory.slots import Slots
from experts.memory.tiers import ExpertTier
from kernels.packed_experts import ExpertLayout, SplitExperts
from moeserve.config import ConfigError
from moeserve.model.spec import ModelError, ModelSpec, MoeSpec
from moeserve.settings.quantities import show_size

# Computes one layer's experts through its slots.
Layer = TypeVar("Layer")


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The slots of each rank. num_slots: by layer with experts. slot_bytes: the bytes of one expert, in whole pages."""

    num_slots: tuple[int, ...]
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(self.num_slots) * self.slot_bytes


def plan_slots(
    num_bytes: int, expert_bytes: int, num_held: Sequence[int], top_k: int, *, several_ranks: bool
) -> SlotPlan | None:
    """Share `num_bytes` out among the layers of a rank that holds num_held[layer] experts; None if all of them fit.

    Raise ConfigError if a layer could not hold the experts that one token may choose on the rank.
    """
    slot_bytes = round_to_page(expert_bytes)
    count, least = num_bytes // slot_bytes, least_slots(num_held, top_k)
    if count < sum(least):
        where = " on every rank" if several_ranks else ""
        raise ConfigError(
            f"--expert-memory {show_size(num_bytes)} holds {count} experts of {show_size(slot_bytes, up=True)}, but "
            f"{len(num_held)} layers need {max(least)} each{where}: "
            f"give at least {show_size(sum(least) * slot_bytes, up=True)}."
        )
    num_slots = share_slots(count, num_held, top_k)
    return None if num_slots is None else SlotPlan(num_slots, slot_bytes)


def experts_of(spec: ModelSpec) -> MoeSpec:
    """Return the spec of the experts. Raise ConfigError for a model without experts."""
    if spec.moe is None:
        raise ConfigError(f"--expert-memory: a {spec.model_type} model has no experts that moeserve computes itself.")
    return spec.moe


def empty_experts(layout: ExpertLayout, num_experts: int) -> SplitExperts:
    """Return a layer without contents. Raise ModelError for a layout in which experts have no matrices of their own."""
    experts = layout.experts(num_experts)
    if not isinstance(experts, SplitExperts):
        raise ModelError(f"--expert-memory does not work with experts kept as {layout.name}.")
    return experts


def in_mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True)
class ResidentModel(Generic[Layer]):
    """The expert memory of a model and the layers that compute with it.

    layers: by their numbers in the model. tier, reads: for log lines, the place of the experts without a slot and the
    way in which they are read. share: called once all kernels are compiled; from then on the host computes some experts
    in place of a device, where it has them.
    """

    memory: ExpertMemory
    control: ResidencyControl
    policies: Sequence[EvictionPolicy]
    layers: Mapping[int, Layer]
    slots: SlotPlan
    tier: str
    reads: Mapping[str, str]
    share: Callable[[], None] = lambda: None

    def dispatch_of(self, layer: int) -> Layer:
        return self.layers[layer]


def resident_model(
    spec: ModelSpec,
    plan: SlotPlan,
    policy: str,
    load: Sequence[Sequence[float]] | None,
    slots: Slots,
    tier: ExpertTier,
    layer_of: Callable[[ExpertMemory, int], Layer],
    *,
    tier_name: str,
    reads: Mapping[str, str] | None = None,
    num_copiers: int = 1,
) -> ResidentModel[Layer]:
    """Open an expert memory that copies from `tier` into `slots` as the policy decides, and make its layers.

    load: [L, E], for a policy that uses it. layer_of(memory, number): makes a layer, by its number among the layers
    with experts. num_copiers: see `ExpertMemory`.
    """
    assert spec.moe is not None
    num_experts = spec.moe.num_experts
    policies = make_policies(policy, len(spec.moe_layers), num_experts, load)
    control = ResidencyControl(plan.num_slots, num_experts, plan.slot_bytes, policies.__getitem__)
    memory = ExpertMemory(control, slots, tier, num_copiers)
    layers = {layer: layer_of(memory, number) for number, layer in enumerate(spec.moe_layers)}
    return ResidentModel(memory, control, policies, layers, plan, tier_name, reads or {})
