"""The messages between rank 0 and the other ranks of one service, in the frames of `moeserve.wire`.

To load, every rank sends `Joined`, receives `Setup` (or `Dismissed`), loads and sends `Loaded`. For each life of the
engine it then sends `Joined`, receives `Start` and, once it is ready for a step, sends `Started`. In each step rank 0
sends a `Forward` to every rank and receives a `RankResult` from it, until it sends `Shutdown`. From `Joined` on a rank
sends `RankBeat`. To give a layer a new placement, rank 0 sends `PlaceLayer`, waits for `LayerLoaded` from every rank
and names the new version in the next `Forward`. With KV on disk it sends `OpenDisk` before the first step, then a
`CopyBlocks` at any time, and receives a `CopiesEnded` for each.
"""

from __future__ import annotations

from experts.memory.residency import ExpertMemoryStats
from moeserve.device import KvBudget
from moeserve.plan import StepResult
from moeserve.wire import Message
from radix_cache import BlockCopy


class RankError(Exception):
    """A rank has died, hangs or cannot take part. The message is one sentence that names the rank."""


class Joined(Message):
    """A rank's process runs on a machine named `node`. `software` and `model_hash` must equal rank 0's.

    `pid` has a meaning only for a receiver with the same `machine` (`moeserve.engine.ranks.meeting.machine_id`).
    """

    rank: int
    pid: int
    node: str
    machine: str
    software: str
    model_hash: str


class Dismissed(Message):
    """The rank cannot take part. `reason` is one sentence."""

    reason: str


class Setup(Message):
    """The decisions of rank 0 that hold for all ranks.

    settings: the settings of rank 0, JSON of a `ServeConfig` without API keys. pid: the process of rank 0. kv: of each
    rank. placement[layer][expert]: the ranks that hold the expert; None where ranks share layers. expert_slots: by
    layer, the number of slots on each rank; None if every rank keeps all its experts in memory. layers: the number of
    layers on each rank, empty where every rank has all layers.
    """

    settings: bytes
    pid: int
    kv: KvBudget
    placement: tuple[tuple[tuple[int, ...], ...], ...] | None
    expert_slots: tuple[int, ...] | None = None
    layers: tuple[int, ...] = ()


class Loaded(Message):
    """A rank has loaded its weights."""

    rank: int


class Start(Message):
    """All ranks have joined this life of the engine. `pid`: of rank 0."""

    pid: int


class Started(Message):
    """A rank is ready for its first step."""

    rank: int


class Forward(Message):
    """A step: the receiver's plan (`PlanReceiver`), and where ranks share experts the rows of all of them
    (`together.py`).

    placement_version: the version of the last `PlaceLayer` that takes effect with this step or before; 0 without one.
    """

    plan: bytes
    num_rows: tuple[int, ...] = ()
    num_logit_rows: tuple[int, ...] = ()
    only_decodes: bool = False
    placement_version: int = 0


class RankResult(Message):
    """The result of a rank's plan; its routing is bytes. Of ranks that share layers only the last stage's have
    chunks."""

    rank: int
    result: StepResult


class PlaceLayer(Message):
    """Load the experts that `ranks` gives the receiver in a layer. A `Forward` with this version will use them."""

    version: int
    layer: int
    ranks: tuple[tuple[int, ...], ...]


class LayerLoaded(Message):
    """A rank has loaded the experts of a `PlaceLayer`, or with `error` could not read them."""

    rank: int
    version: int
    error: str | None


class DropLayer(Message):
    """Rank 0 has cancelled a `PlaceLayer`."""

    version: int


class OpenDisk(Message):
    """Copies are of files in the folder `root`, whose blocks have a `fingerprint`."""

    root: str
    fingerprint: str


class CopyBlocks(Message):
    """Write blocks of the receiver's memory to disk, or read them from there, in their order."""

    number: int
    copies: list[BlockCopy]
    is_write: bool
    is_gentle: bool


class CancelCopies(Message):
    """Nobody wants the blocks of a `CopyBlocks` any more. Its `CopiesEnded` still follows."""

    number: int


class CopiesEnded(Message):
    """The end of a `CopyBlocks`; see `moeserve.scheduling.arrivals.Result`."""

    rank: int
    number: int
    num_bytes: list[int]
    seconds: float
    error: str | None


class RankBeat(Message):
    """Sent a few times a second: the process runs and has entered `num_entered` collectives.

    Of ranks that share layers the number counts their work, within a layer too. memory: the counters of its expert
    memory, None without one.
    """

    rank: int
    num_entered: int
    memory: ExpertMemoryStats | None = None


class Shutdown(Message):
    """No further step follows."""


ToRank = Setup | Dismissed | Start | Forward | PlaceLayer | DropLayer | OpenDisk | CopyBlocks | CancelCopies | Shutdown
FromRank = Joined | Loaded | Started | RankResult | LayerLoaded | CopiesEnded | RankBeat
