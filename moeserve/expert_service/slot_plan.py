"""How many slots of a fast tier `--expert-memory` pays for, on any device. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experts.memory.expert_file import round_to_page
from experts.memory.slot_budget import least_slots, share_slots
from moeserve.config import ConfigError
from moeserve.models.spec import DecoderSpec, MoeSpec


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Of each rank. num_slots: of each layer with experts. slot_bytes: one expert, whole pages."""

    num_slots: tuple[int, ...]
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(self.num_slots) * self.slot_bytes


def plan_slots(
    num_bytes: int, expert_bytes: int, num_held: Sequence[int], top_k: int, *, several_ranks: bool = False
) -> SlotPlan | None:
    """The slots that `num_bytes` pay for on a rank that holds `num_held` experts of each layer; None if these all fit.

    Raises ConfigError where a layer could not hold the experts that one token may choose on the rank.
    """
    slot_bytes = round_to_page(expert_bytes)
    count, least = num_bytes // slot_bytes, least_slots(num_held, top_k)
    if count < sum(least):
        where = " on every rank" if several_ranks else ""
        raise ConfigError(
            f"--expert-memory {in_mib(num_bytes)} holds {count} experts of {in_mib(slot_bytes)}, but "
            f"{len(num_held)} layers need {max(least)} each{where}: give at least {in_mib(sum(least) * slot_bytes)}."
        )
    num_slots = share_slots(count, num_held, top_k)
    return None if num_slots is None else SlotPlan(num_slots, slot_bytes)


def experts_of(spec: DecoderSpec) -> MoeSpec:
    """Raises ConfigError for a model without experts."""
    if spec.moe is None:
        raise ConfigError(f"--expert-memory: a {spec.model_type} model has no experts.")
    return spec.moe


def in_mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
