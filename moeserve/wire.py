"""The bytes of messages, between frontend and engine and between ranks, and of what they carry.

`msgpack` reads and writes the bytes under limits; `msgspec.convert` gives them types. Each frame is
`[incarnation, message]`: whoever receives one of another engine's life drops it. Token ids travel as int32 bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgpack
import msgspec

from moeserve.config import ServeConfig
from moeserve.plan import (
    MAX_ANNOTATION_BYTES,
    Chunk,
    ChunkExtras,
    ChunkResult,
    FinishReason,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

MAX_FRAME_BYTES = 64 * 1024 * 1024

_T = TypeVar("_T")


class DecodeError(ValueError):
    """A frame that is no message of this protocol. It concerns its sender alone."""


def encode(message: msgspec.Struct, incarnation: int) -> bytes:
    """The frame of a message."""
    return pack([incarnation, message])


def decode(frame: bytes, expected: Any) -> tuple[int, Any]:
    """The incarnation and the message of a frame that must hold one of the `expected` types. Raises DecodeError."""

    def opened(body: Any) -> tuple[int, Any]:
        if not isinstance(body, list) or len(body) != 2 or type(body[0]) is not int:
            raise DecodeError("frame is not [incarnation, message]")
        return body[0], msgspec.convert(body[1], expected)

    return _unpack(frame, opened)


def pack(value: Any) -> bytes:
    """The bytes of structs and what they are made of. Equal ones have equal bytes."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(value, builtin_types=(bytes,)))
    return packed


def unpack(data: bytes, kind: type[_T]) -> _T:
    """The value of such bytes, which must be of that kind. Raises DecodeError."""
    return _unpack(data, lambda body: msgspec.convert(body, kind))


def _unpack(data: bytes, convert: Callable[[Any], _T]) -> _T:
    """Raises DecodeError for anything else: too large, not MessagePack, extension types, deep nesting, wrong fields."""
    if len(data) > MAX_FRAME_BYTES:
        raise DecodeError(f"{len(data)} bytes exceed {MAX_FRAME_BYTES}")
    try:
        return convert(
            msgpack.unpackb(
                data,
                use_list=True,
                strict_map_key=False,
                ext_hook=_refuse_extension,
                max_ext_len=0,
                max_array_len=1_000_000,
                max_map_len=65_536,
            )
        )
    except DecodeError:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError(f"{type(error).__name__}: {error}") from None


def pack_token_ids(token_ids: list[int] | array[int]) -> bytes:
    """int32 bytes of token ids."""
    return array("i", token_ids).tobytes()


def unpack_token_ids(data: bytes) -> array[int]:
    """Token ids from int32 bytes; raises DecodeError for a torn one."""
    token_ids = array("i")
    if len(data) % token_ids.itemsize:
        raise DecodeError("token ids are not whole int32 values")
    token_ids.frombytes(data)
    return token_ids


def _refuse_extension(code: int, _data: bytes) -> None:
    raise DecodeError(f"extension type {code}")


# Every message between frontend and engine. `moeserve.wire` has their bytes.


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

    Commands: `reset_prefix_cache`, and those of `moeserve.experts.monitor`.
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
    """Of `experts.predictors.SourceRecall`: a sample of the steps."""

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
    """Of a rank's `experts.residency.ExpertMemoryStats`, since the start. prefetch: None if nothing is predicted."""

    stall_seconds: float
    num_hits: int
    num_misses: int
    num_evictions: int
    num_resident: int
    demand_bytes: int
    prefetch: PrefetchCounters | None = None


class RebalanceCounters(Message):
    """Of `experts.rebalance.RebalanceStats`."""

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


# The bytes of a step plan, for the ranks that execute it. MessagePack arrays in the order of the fields below; token
# ids and block tables as int32 bytes. Equal plans have equal bytes.


class _WireExtras(msgspec.Struct, array_like=True, frozen=True):
    history: bytes | None
    num_prompt_tokens: int
    banned_token_ids: tuple[int, ...]
    prompt_targets: bytes | None
    num_top_logprobs: int


class _WireChunk(msgspec.Struct, array_like=True, frozen=True):
    request_id: str
    token_ids: bytes
    start: int
    block_table: bytes
    sampling: SamplingParams | None
    extras: _WireExtras | None
    drawn_by: int | None
    annotation: Annotated[bytes, msgspec.Meta(max_length=MAX_ANNOTATION_BYTES)] | None


class _WirePlan(msgspec.Struct, array_like=True, frozen=True):
    step: int
    chunks: list[_WireChunk]
    zeroed_blocks: bytes


def encode_plan(plan: StepPlan) -> bytes:
    """The bytes of a plan, a copy of it as it is now."""
    wire = _WirePlan(plan.step, [_pack_chunk(chunk) for chunk in plan.chunks], plan.zeroed_blocks.tobytes())
    return pack(wire)


def decode_plan(data: bytes) -> StepPlan:
    """The plan of such bytes. Raises DecodeError for anything else."""
    wire = unpack(data, _WirePlan)
    return StepPlan(wire.step, [_unpack_chunk(chunk) for chunk in wire.chunks], unpack_token_ids(wire.zeroed_blocks))


def _pack_chunk(chunk: Chunk) -> _WireChunk:
    extras = chunk.extras
    return _WireChunk(
        chunk.request_id,
        chunk.token_ids.tobytes(),
        chunk.start,
        chunk.block_table.tobytes(),
        chunk.sampling,
        None if extras is None else _pack_extras(extras),
        chunk.drawn_by,
        chunk.annotation,
    )


def _unpack_chunk(wire: _WireChunk) -> Chunk:
    return Chunk(
        wire.request_id,
        unpack_token_ids(wire.token_ids),
        wire.start,
        unpack_token_ids(wire.block_table),
        wire.sampling,
        None if wire.extras is None else _unpack_extras(wire.extras),
        wire.drawn_by,
        wire.annotation,
    )


def _pack_extras(extras: ChunkExtras) -> _WireExtras:
    return _WireExtras(
        _bytes_or_none(extras.history),
        extras.num_prompt_tokens,
        extras.banned_token_ids,
        _bytes_or_none(extras.prompt_targets),
        extras.num_top_logprobs,
    )


def _unpack_extras(wire: _WireExtras) -> ChunkExtras:
    return ChunkExtras(
        _array_or_none(wire.history),
        wire.num_prompt_tokens,
        wire.banned_token_ids,
        _array_or_none(wire.prompt_targets),
        wire.num_top_logprobs,
    )


def _bytes_or_none(token_ids: array[int] | None) -> bytes | None:
    return None if token_ids is None else token_ids.tobytes()


def _array_or_none(data: bytes | None) -> array[int] | None:
    return None if data is None else unpack_token_ids(data)


# The bytes of a step result, from the rank that computed it to the engine: MessagePack arrays, as in `plan_codec`.


_Entry = tuple[float, list[tuple[int, float]]]


class _WireChunkResult(msgspec.Struct, array_like=True, frozen=True):
    token_id: int | None
    logprobs: _Entry | None
    prompt_logprobs: list[_Entry] | None
    error: str | None
    annotation: bytes | None


class _WireResult(msgspec.Struct, array_like=True, frozen=True):
    step: int
    chunks: list[_WireChunkResult]
    routing: bytes | None
    sent: list[int] | None


def encode_result(result: StepResult) -> bytes:
    """The bytes of a result."""
    routing = None if result.routing is None else bytes(result.routing)
    wire = _WireResult(result.step, [_result_codec_pack_chunk(chunk) for chunk in result.chunks], routing, result.sent)
    return pack(wire)


def decode_result(data: bytes) -> StepResult:
    """The result of such bytes. Raises DecodeError for anything else."""
    wire = unpack(data, _WireResult)
    return StepResult(wire.step, [_result_codec_unpack_chunk(chunk) for chunk in wire.chunks], wire.routing, wire.sent)


def _result_codec_pack_chunk(chunk: ChunkResult) -> _WireChunkResult:
    prompt = chunk.prompt_logprobs
    return _WireChunkResult(
        chunk.token_id,
        None if chunk.logprobs is None else _pack_entry(chunk.logprobs),
        None if prompt is None else [_pack_entry(entry) for entry in prompt],
        chunk.error,
        chunk.annotation,
    )


def _result_codec_unpack_chunk(wire: _WireChunkResult) -> ChunkResult:
    prompt = wire.prompt_logprobs
    return ChunkResult(
        wire.token_id,
        None if wire.logprobs is None else _unpack_entry(wire.logprobs),
        None if prompt is None else [_unpack_entry(entry) for entry in prompt],
        wire.error,
        wire.annotation,
    )


def _pack_entry(entry: TokenLogprobs) -> _Entry:
    return entry.logprob, list(entry.top)


def _unpack_entry(entry: _Entry) -> TokenLogprobs:
    return TokenLogprobs(entry[0], tuple(entry[1]))


# What the supervisor hands to the processes of one running service, as a file in its private run directory.


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One life of one service. The file holds secrets; its directory is 0700.

    `incarnation` numbers the engine's life: it is in every frame and in the socket paths. `secret` (hex) keys the cache
    namespaces of API keys. `model_hash` is compared in `Hello`. `meets_in_store`: not all ranks were started with this
    context, so they find each other in torchrun's store.
    """

    config: ServeConfig
    model_dir: str
    model_hash: str
    run_dir: str
    incarnation: int
    secret: str
    served_model_names: tuple[str, ...]
    meets_in_store: bool = False

    @property
    def engine_address(self) -> str:
        """Frontends' DEALER sockets connect here; the engine's ROUTER binds."""
        return f"ipc://{self.run_dir}/engine.{self.incarnation}"

    @property
    def heartbeat_address(self) -> str:
        """The engine's PUB binds here; frontends and the supervisor subscribe."""
        return f"ipc://{self.run_dir}/heartbeat.{self.incarnation}"

    @property
    def results_address(self) -> str:
        """Rank 0's PULL binds here; the PUSH sockets of the other ranks connect."""
        return f"ipc://{self.run_dir}/results.{self.incarnation}"

    def steps_address(self, rank: int) -> str:
        """Rank 0's PUSH for the steps of a rank binds here; that rank's PULL connects."""
        return f"ipc://{self.run_dir}/steps.{rank}.{self.incarnation}"

    @property
    def rendezvous(self) -> Path:
        """The file in which ranks find each other for their collectives."""
        return Path(self.run_dir) / f"collectives.{self.incarnation}"

    def save(self) -> Path:
        """Writes the file with mode 0600 and returns its path."""
        path = Path(self.run_dir) / f"run.{self.incarnation}.json"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(self))
        return path


def load_run_context(path: str | Path) -> RunContext:
    """The context that `save` wrote."""
    return msgspec.json.decode(Path(path).read_bytes(), type=RunContext)
