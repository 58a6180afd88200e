"""The traffic between processes: frames, and the messages between frontend and engine.

`msgpack` reads and writes the bytes under limits; `msgspec.convert` gives them types. Each frame is
`[incarnation, message]`, and a receiver drops frames of another incarnation of the engine. Token ids and block tables
travel as int32 bytes. `RunContext` (`run_context.py`) names the sockets.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum
from typing import Any, TypeVar

import msgpack
import msgspec

from moeserve.kv_transfer import KvTicket
from moeserve.plan import (
    DEFAULT_TERMS,
    CacheWish,
    FinishReason,
    PromptProgress,
    SamplingParams,
    Terms,
    TokenLogprobs,
)
from moeserve.scheduling.pacing import Load
from moeserve.thoughts import ThoughtBudget
from radix_cache import Miss

MAX_FRAME_BYTES = 64 * 1024 * 1024  # of any message but steps and results of ranks
MAX_STEP_BYTES = 2**31  # of a plan or a result, which travels between ranks in several frames if need be

_T = TypeVar("_T")


class Tick(IntFlag):
    """The byte that an HTTP process writes to the supervisor while its event loop turns: what holds now.

    READY: it would admit a generation. BUSY: it has a request, or had one since its last tick. SLEEP, WAKE: a client
    waits for the service to sleep, or to wake. A byte may be lost: what still holds is said again by the next one.
    """

    READY = 1
    BUSY = 2
    SLEEP = 4
    WAKE = 8


class Rest(StrEnum):
    """The service is awake, or sleeps: without an engine, and with no weights in memory, until a request wakes it."""

    AWAKE = "awake"
    FALLING = "falling"
    ASLEEP = "asleep"


class DecodeError(ValueError):
    """A frame that is not a message of this protocol. It harms only its sender."""


def encode(message: msgspec.Struct, incarnation: int) -> bytes:
    return pack([incarnation, message])


def decode(frame: bytes, expected: Any, max_bytes: int = MAX_FRAME_BYTES) -> tuple[int, Any]:
    """Return a frame's incarnation and its message of one of the `expected` types. Raise DecodeError for others."""

    def open_frame(body: Any) -> tuple[int, Any]:
        if not isinstance(body, list) or len(body) != 2 or type(body[0]) is not int:
            raise DecodeError("frame is not [incarnation, message]")
        return body[0], msgspec.convert(body[1], expected)

    return _unpack(frame, open_frame, max_bytes)


def pack(value: Any) -> bytes:
    """Return the MessagePack bytes of structs and builtins. Equal values have equal bytes."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(value, builtin_types=(bytes,)))
    return packed


def unpack(data: bytes, kind: type[_T], max_bytes: int = MAX_FRAME_BYTES) -> _T:
    """Return the value of type `kind` that `pack` made into `data`. Raise DecodeError for other bytes."""
    return _unpack(data, lambda body: msgspec.convert(body, kind), max_bytes)


def _unpack(data: bytes, convert: Callable[[Any], _T], max_bytes: int) -> _T:
    """Raise DecodeError for bytes too large or not MessagePack, extension types, deep nesting, wrong fields."""
    if len(data) > max_bytes:
        raise DecodeError(f"{len(data)} bytes exceed {max_bytes}")
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
    return array("i", token_ids).tobytes()


def unpack_token_ids(data: bytes) -> array[int]:
    """Return the token ids in int32 bytes. Raise DecodeError for a torn one."""
    token_ids = array("i")
    if len(data) % token_ids.itemsize:
        raise DecodeError("token ids are not whole int32 values")
    token_ids.frombytes(data)
    return token_ids


def _refuse_extension(code: int, _data: bytes) -> None:
    raise DecodeError(f"extension type {code}")


# The messages between frontend and engine.

PROTOCOL_VERSION = 5


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages: an array whose first element is the class name."""


class Hello(Message):
    """A frontend introduces itself. The engine answers another version or model with `Refused`."""

    protocol_version: int
    model_hash: str


class Generate(Message):
    """Run one sequence. `token_ids` is the prompt as int32 bytes; `namespace` separates cached prefixes of tenants.

    `arrived_at`: the arrival of the client's request, in seconds of the machine's monotonic clock; None for now.

    A request that `resumes` was with an earlier life of the engine, and goes before all that were not. If that life has
    begun it, it continues: `output_token_ids` (int32 bytes) are its output so far, and `num_prompt_logprobs` log
    probabilities of its prompt are known already. `thought`: the budget of its thoughts, None for no bound.
    `cache_hit_threshold`: the share of the prompt that must be cached for the request to be computed. `has_tools`:
    the answer may call tools (see `Turned`).
    `offers_kv`: hold the blocks of the prompt for another service. `ticket`: fetch them from another one.
    `predicted`: the answer's text as its client predicts it, as int32 bytes. `reports_progress`: tell how far the
    prompt is (`Prompts`). `led`: behind each token it waits for `Continue`. `forks`: the id of a led request with whose
    text it began, but for the last token; it waits until that one goes on.
    """

    request_id: str
    token_ids: bytes
    sampling: SamplingParams
    namespace: str = ""
    priority: int = 0
    cache: CacheWish | None = None
    terms: Terms = DEFAULT_TERMS
    arrived_at: float | None = None
    output_token_ids: bytes = b""
    num_prompt_logprobs: int = 0
    resumes: bool = False
    thought: ThoughtBudget | None = None
    cache_hit_threshold: float = 0.0
    has_tools: bool = False
    offers_kv: bool = False
    ticket: KvTicket | None = None
    predicted: bytes = b""
    reports_progress: bool = False
    led: bool = False
    forks: str = ""


class Continue(Message):
    """Led requests may go on, each with the token that it has sampled."""

    request_ids: list[str]


class Turned(Message):
    """The answer of a request that has ended calls tools: its conversation continues once they have run."""

    request_id: str


class Finish(Message):
    """The frontend found a stop string: the request is to end with its first `keep_tokens` output tokens."""

    request_id: str
    keep_tokens: int


class Abort(Message):
    """The client left."""

    request_id: str


class Left(Message):
    """The client of a request left while, or before, the engine that had it died. If the request is a suspect, whoever
    sends the same work again is one. For the fields see `Generate`."""

    request_id: str
    token_ids: bytes
    sampling: SamplingParams


class Control(Message):
    """A command; answered with `ControlResult` of the same id. tenant: the account of the key that asks for it.

    `moeserve.engine.cache_commands` and `moeserve.engine.experts.monitor` carry commands out.
    """

    control_id: int
    command: str
    arguments: dict[str, Any] = {}
    tenant: str = ""


class EngineReady(Message):
    """The answer to `Hello`, once the model is loaded. keeps_states: prefixes need snapshots of recurrent states.
    drafts: draft tokens are made. arithmetic: how the model multiplies, for people. kv_event_sources: where each rank
    publishes events about its cached blocks; empty if it does not. fingerprint: see `moeserve.engine.fingerprint`;
    weights count in it by samples. default_max_tokens: the longest answer to a request
    that sets no bound, longest_answer: to any request; None for all that the context leaves."""

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
    keeps_states: bool = False
    drafts: bool = False
    arithmetic: str = ""
    kv_event_sources: list[dict[str, Any]] = []
    default_max_tokens: int | None = None
    longest_answer: int | None = None
    fingerprint: str = ""


class Refused(Message):
    """The answer to a `Hello` that does not fit."""

    reason: str


class Admitted(Message):
    """The request is queued or running; outputs and one terminal output follow."""

    request_id: str


class Rejected(Message):
    """Terminal: the request never entered this engine. `code`: `queue_full`, `overloaded`, `context_length_exceeded`,
    `draining`, `engine_crash` (engines have ended when they had it) or `invalid`."""

    request_id: str
    code: str
    reason: str
    retry_after_s: float | None = None


class Output(Message):
    """New tokens of one request; terminal if `finish_reason` is set.

    `token_ids` are the tokens since the last output. `num_cached_tokens` counts the prompt tokens that came from the
    prefix cache (None until the first chunk); `num_output_tokens`, in the terminal output, all output tokens. `miss`,
    in the first output, answers `CacheWish.report`. `tier_tokens` of the cached tokens were in the host's memory below
    a GPU's, and on disk; None where blocks are in memory alone. `ticket`, in the terminal output: for the blocks that
    are held. `judged`: how many tokens of the client's prediction the step found right, and how many wrong.
    """

    request_id: str
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    miss: Miss | None = None
    tier_tokens: tuple[int, int] | None = None
    ticket: KvTicket | None = None
    judged: tuple[int, int] = (0, 0)

    @property
    def has_failed(self) -> bool:
        return self.finish_reason in (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LATE)


class Outputs(Message):
    """The outputs of one step for the requests of one frontend."""

    outputs: list[Output]


class Prompts(Message):
    """The prompts of one frontend that asked for their progress, before a step is computed."""

    prompts: list[PromptProgress]


# Statistics of features, opaque to the wire: by name of metric, rows `[*labels, value]`.
FeatureSamples = dict[str, list[list[str | int | float]]]


class Stats(Message):
    """The engine's counters (since its start) and gauges (now). A feature that is not in use has no entry."""

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
    features: FeatureSamples = {}
    load: Load | None = None


class ControlResult(Message):
    """The answer to `Control`; `error` is None on success. is_refused: too many commands wait."""

    control_id: int
    result: dict[str, Any]
    error: str | None = None
    is_refused: bool = False


class Heartbeat(Message):
    """A thread of the engine publishes it a few times a second.

    `progress` moves with every turn of the engine's loop, so in an idle engine too, and within a step as layers, parts
    of kernels and copies of experts are done. busy: requests are open.
    """

    pid: int
    progress: int
    busy: bool


ToEngine = Hello | Left | Generate | Continue | Turned | Finish | Abort | Control
FromEngine = EngineReady | Refused | Admitted | Rejected | Outputs | Prompts | Stats | ControlResult | Heartbeat


class EngineNews(msgspec.Struct):
    """News from the supervisor to a frontend, a line of JSON on a pipe: the incarnation of the engine's newest life.

    None: no further life will follow, for this `reason`. `seconds`: the likely duration of a restart. `num_restarts`:
    the number of engines that have replaced, or are replacing, an engine that had served. `rest`: FALLING where this
    engine is being ended so that the service sleeps, ASLEEP once it has ended.
    """

    incarnation: int | None
    reason: str = ""
    seconds: float = 0.0
    num_restarts: int = 0
    rest: Rest = Rest.AWAKE


def encode_news(news: EngineNews) -> bytes:
    return msgspec.json.encode(news) + b"\n"


def decode_news(line: bytes) -> EngineNews:
    """Return the news in a line of `encode_news`. Raise msgspec.MsgspecError for any other line."""
    return msgspec.json.decode(line, type=EngineNews)


@dataclass(frozen=True)
class Suspicion:
    """Suspicions that follow from the ends of earlier engines.

    `places`: one of these requests may have ended the engine before; each has the number of its tokens that were about
    to be computed. `culprits`: digests of the work that ended engines (`Suspects`), each with the time until which it
    is refused, in seconds of the machine's monotonic clock.
    """

    places: dict[str, int] = field(default_factory=dict)
    culprits: tuple[tuple[str, float], ...] = ()
