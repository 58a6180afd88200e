"""What rank 0 and the other ranks of one service tell each other, in the frames of `moeserve.wire`.

A start: every rank says `Joined`, gets `Setup` (or `Dismissed`), loads, says `Loaded` and gets `Start`. Then each step
is a `Forward` to every rank and a `RankResult` from it, until `Shutdown`. From `Joined` on a rank sends `RankBeat`.
Meanwhile rank 0 may have a layer placed anew: `PlaceLayer`, a `LayerLoaded` of every rank, and then a `Forward` that
says so.
"""

from __future__ import annotations

from experts.residency import ExpertMemoryStats
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
    """A step: this rank's plan (`moeserve.wire`), and how many rows all have (`moeserve.ranks.together.StepRows`).

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
