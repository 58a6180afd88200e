"""What rank 0 and the other ranks of one service tell each other, in the frames of `moeserve.wire`.

A start: every rank says `Joined`, gets `Setup` (or `Dismissed`), loads, says `Loaded` and gets `Start`. Then each step
is a `Forward` to every rank and a `RankResult` from it, until `Shutdown`. From `Joined` on a rank sends `RankBeat`.
Meanwhile rank 0 may have a layer placed anew: `PlaceLayer`, a `LayerLoaded` of every rank, and then a `Forward` that
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experts.residency import ExpertMemoryStats
from moeserve.cuda.step_arrays import padded_size
from moeserve.plan import StepPlan
from moeserve.wire import Message


class RankError(Exception):
    """A rank is lost, or does not do its part. The message is one sentence that names it."""


class Joined(Message):
    """A rank's process is there, on a machine named `node`. `software` and `model_hash` must be those of rank 0.

    Only where `machine` (`moeserve.ranks.meeting.machine_id`) is that of the receiver does `pid` mean something to it.
    """

    rank: int
    pid: int
    node: str
    machine: str
    software: str
    model_hash: str


class Dismissed(Message):
    """The rank cannot take part; one sentence why."""

    reason: str


class Setup(Message):
    """What rank 0 decided for all: `pid` is its own process, the blocks are those of each rank.

    `settings` are those of rank 0 (JSON of a `ServeConfig` without keys), which hold for all ranks.
    placement[layer][expert]: the ranks that hold the expert (`experts.placement`). expert_slots: of each
    layer on each rank, None where all experts of a rank are in memory.
    """

    settings: bytes
    pid: int
    num_blocks: int
    max_model_len: int
    placement: tuple[tuple[tuple[int, ...], ...], ...]
    expert_slots: tuple[int, ...] | None = None


class Loaded(Message):
    """A rank has its weights."""

    rank: int


class Start(Message):
    """All ranks have theirs."""


class Forward(Message):
    """A step: this rank's plan (`plan_codec`), and what all ranks know of all plans (`moeserve.ranks.messages`).

    placement_version: the migration (`PlaceLayer`) that is in use from this step on, 0 before the first.
    """

    plan: bytes
    num_rows: list[int]
    num_logit_rows: list[int]
    only_decodes: bool
    placement_version: int


class RankResult(Message):
    """What a rank's plan gave (`result_codec`)."""

    rank: int
    result: bytes


class PlaceLayer(Message):
    """Load what this rank is to hold of a layer (of the placement), for the step whose `Forward` has this version."""

    version: int
    layer: int
    ranks: tuple[tuple[int, ...], ...]


class LayerLoaded(Message):
    """A rank has what a `PlaceLayer` gives it; or, with an error, it could not read it."""

    rank: int
    version: int
    error: str | None


class DropLayer(Message):
    """Nothing will come of a `PlaceLayer`."""

    version: int


class RankBeat(Message):
    """Sent a few times a second: the process runs, and has entered so many collectives.

    memory: what its expert memory tells, None without one.
    """

    rank: int
    num_entered: int
    memory: ExpertMemoryStats | None = None


class Shutdown(Message):
    """There will be no further step."""


ToRank = Setup | Dismissed | Start | Forward | PlaceLayer | DropLayer | Shutdown
FromRank = Joined | Loaded | RankResult | LayerLoaded | RankBeat


# How many rows every rank has in a step, known to all, and what follows from that alone. No torch here.


@dataclass(frozen=True, slots=True)
class StepRows:
    """num_rows[r], num_logit_rows[r]: of rank r, in all layers and in the last one.

    only_decodes: whether all chunks of all ranks are single tokens whose logits are wanted.
    """

    num_rows: Sequence[int]
    num_logit_rows: Sequence[int]
    only_decodes: bool

    @classmethod
    def of(cls, plans: Sequence[StepPlan]) -> StepRows:
        """plans[r] is what rank r computes."""
        return cls(
            [plan.num_tokens for plan in plans],
            [plan.num_logit_rows for plan in plans],
            all(len(chunk.token_ids) == chunk.num_logit_rows == 1 for plan in plans for chunk in plan.chunks),
        )

    @classmethod
    def alike(cls, num_ranks: int, num_rows: int, num_logit_rows: int) -> StepRows:
        """Every rank computes a step of the same shape, of its own."""
        return cls([num_rows] * num_ranks, [num_logit_rows] * num_ranks, only_decodes=False)

    def captured_size(self, sizes: Sequence[int]) -> int | None:
        """The one of the captured sizes (ascending) that all ranks replay, those with fewer rows or none padded to it.

        None for a step that each rank computes with its own rows.
        """
        return padded_size(max(self.num_rows), sizes) if self.only_decodes else None


def captures_decodes(shape: str, *, eager: bool, all_resident: bool) -> bool:
    """Whether ranks on GPUs replay decode steps; follows from settings alone, so that all ranks do the same.

    shape: of dispatch. Only the sizes of `allgather` need no word from the device; with `auto` decodes take it whatever
    suits the other steps. eager: `--enforce-eager`. all_resident: what the gate chose is not looked at on the host.
    """
    return shape != "alltoall" and all_resident and not eager
