"""Every message between frontend and engine. `moeserve.frames` has their bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from moeserve.plan import TokenLogprobs
from moeserve.request import FinishReason, SamplingParams

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages: an array whose first element is the class name."""


class Hello(Message):
    """A frontend introduces itself. A version or model that differs is answered with `Refused`."""

    protocol_version: int
    model_hash: str


class Generate(Message):
    """Run one sequence. `token_ids` is the prompt as int32 bytes; `namespace` separates cached prefixes of tenants."""

    request_id: str
    token_ids: bytes
    sampling: SamplingParams
    namespace: str = ""
    priority: int = 0


class Finish(Message):
    """The frontend found a stop string: the request ends with its first `keep_tokens` output tokens."""

    request_id: str
    keep_tokens: int


class Abort(Message):
    """The client left."""

    request_id: str


class Control(Message):
    """An operator's command; answered with `ControlResult` of the same id.

    Commands: `reset_prefix_cache`, and those of `moeserve.expert_service.monitor`.
    """

    control_id: int
    command: str
    arguments: dict[str, Any] = {}


class EngineReady(Message):
    """The answer to `Hello`, once the model is loaded."""

    pid: int
    model_hash: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    default_sampling: dict[str, float]
    max_num_seqs: int
    max_num_queued_reqs: int
    num_blocks: int
    block_size: int
    device: str
    dtype: str
    weights_bytes: int
    kv_bytes: int
    num_experts: int = 0


class Refused(Message):
    """The answer to a `Hello` that does not fit."""

    reason: str


class Admitted(Message):
    """The request is queued or running; from here on it gets outputs and one terminal output."""

    request_id: str


class Rejected(Message):
    """Terminal: the request never entered. `code`: `queue_full`, `context_length_exceeded`, `draining` or `invalid`."""

    request_id: str
    code: str
    reason: str
    retry_after_s: float | None = None


class Output(Message):
    """New tokens of one request; terminal when `finish_reason` is set.

    `token_ids` are the tokens since the last output. In the terminal output `num_output_tokens` counts what the request
    produced in all, `num_cached_tokens` the prompt tokens that came from the prefix cache (None until the first chunk).
    """

    request_id: str
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


class Outputs(Message):
    """What one step gave to the requests of one frontend."""

    outputs: list[Output]


class RecallCounters(Message):
    """Of `experts.prediction.recall.SourceRecall`: a sample of the steps."""

    source: str
    distance: int
    num_chosen: int
    num_recalled: int


class PrefetchCounters(Message):
    """Prefetches, since the start. num_late: experts that were wanted while their prefetch was under way.

    num_foreseeable, num_foreseen: experts that layers needed for which some had been named 1, 2, 3 layers ahead, and
    how many of them were among these. recall: of each source by itself.
    """

    predictor_seconds: float
    num_late: int
    prefetch_bytes: int
    useful_bytes: int
    late_bytes: int
    wasted_bytes: int
    cancelled_bytes: int
    num_foreseeable: list[int] = []
    num_foreseen: list[int] = []
    recall: list[RecallCounters] = []


class ExpertMemoryCounters(Message):
    """Of a rank's `experts.memory.stats.ExpertMemoryStats`, since the start. prefetch: None if nothing is predicted."""

    stall_seconds: float
    misses_by_tier: dict[str, int]
    num_hits: int
    num_evictions: int
    num_resident: int
    demand_bytes: int
    prefetch: PrefetchCounters | None = None


class RebalanceCounters(Message):
    """Of `experts.placement.rebalance.RebalanceStats`."""

    placement_version: int
    num_migrations: int
    num_failures: int
    num_experts_loaded: int
    seconds_since_success: float | None


class ExpertStats(Message):
    """What of the experts is counted. None, or empty, is what is not there: nothing recorded, one rank, all resident.

    expert_balancedness, rank_balancedness: by layer with experts, mean over maximum of the recent load.
    remote_rows: rows (a token in a layer) times the other ranks that hold experts of theirs, and rows. links: from,
    to, rows, bytes. memory: of each rank, where experts are read while they are computed.
    """

    tokens_recorded: int | None = None
    expert_balancedness: list[float] = []
    rank_balancedness: list[float] | None = None
    remote_rows: list[int] | None = None
    links: list[list[int]] | None = None
    memory: list[ExpertMemoryCounters] | None = None
    rebalancing: RebalanceCounters | None = None


class Stats(Message):
    """The engine's counters (since its start) and gauges (now)."""

    step: int
    num_running: int
    num_waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_leased: int
    slots_empty: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    rejections: dict[str, int]
    step_seconds: float
    queue_seconds: list[float] = []
    experts: ExpertStats | None = None


class ControlResult(Message):
    """What a `Control` did; `error` is None on success."""

    control_id: int
    result: dict[str, Any]
    error: str | None = None


class Heartbeat(Message):
    """Published a few times a second by a thread of the engine: it is alive, and `step` moves while it is busy."""

    pid: int
    step: int
    busy: bool


ToEngine = Hello | Generate | Finish | Abort | Control
FromEngine = EngineReady | Refused | Admitted | Rejected | Outputs | Stats | ControlResult | Heartbeat
