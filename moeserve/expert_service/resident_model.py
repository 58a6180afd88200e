"""The experts of a model of which only some are in the fast tier, whatever device computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from experts.memory.eviction import EvictionPolicy, make_policies
from experts.memory.expert_memory import ExpertMemory
from experts.memory.peer_memory import LentMemory, PeerTier
from experts.memory.residency_control import ResidencyControl
from experts.memory.slot_arena import Slots
from experts.memory.store import ExpertTier
from moeserve.expert_service.slot_plan import SlotPlan
from moeserve.models.spec import DecoderSpec

# What computes one layer's experts through its slots.
Layer = TypeVar("Layer")


@dataclass(frozen=True, slots=True)
class ResidentModel(Generic[Layer]):
    """layers: by their numbers in the model. tier: where the experts that have no slot are, for people.

    lent: what this rank lends. peers: reads what all lend, once it is told where that is.
    """

    memory: ExpertMemory
    control: ResidencyControl
    policies: Sequence[EvictionPolicy]
    layers: Mapping[int, Layer]
    slots: SlotPlan
    tier: str
    lent: LentMemory | None = None
    peers: PeerTier | None = None

    def dispatch_of(self, layer: int) -> Layer:
        return self.layers[layer]


def resident_model(
    spec: DecoderSpec,
    plan: SlotPlan,
    policy: str,
    load: Sequence[Sequence[float]] | None,
    slots: Slots,
    tier: ExpertTier,
    layer_of: Callable[[ExpertMemory, int], Layer],
    *,
    tier_name: str,
    lent: LentMemory | None = None,
    peers: PeerTier | None = None,
) -> ResidentModel[Layer]:
    """Starts to copy from `tier`, or through `peers` where there are some, into `slots`, as a policy decides.

    load: [L, E], for a policy that goes by it. layer_of(memory, number): of a layer by its number among those with
    experts.
    """
    assert spec.moe is not None
    num_experts = spec.moe.num_experts
    policies = make_policies(policy, len(spec.moe_layers), num_experts, load)
    control = ResidencyControl(plan.num_slots, num_experts, plan.slot_bytes, policies.__getitem__)
    if peers is None:
        memory = ExpertMemory(control, slots, tier)
    else:
        memory = ExpertMemory(control, slots, peers, peers.tier_of, ("peer", "disk"))
    layers = {layer: layer_of(memory, number) for number, layer in enumerate(spec.moe_layers)}
    return ResidentModel(memory, control, policies, layers, plan, tier_name, lent, peers)
