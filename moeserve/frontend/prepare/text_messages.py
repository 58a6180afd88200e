"""The messages between the event loop and a text process: an `Ask` with a body, one `Reply`; and the page of a job's
stage.

A frame is the length of its head, the head and a payload. An ask's head is MessagePack, its payload the body as it is.
A reply's head is JSON, since integers of clients are of any size. Arrays of int32 follow the head in its order, which
holds their numbers of bytes in their place; the rest is JSON of the dialect, or the body of an answer.

Templates, grammars and the libraries that read them can take time and memory without bound outside of Python code. So
processor time and memory of each stage of a job are bounded: a stage that exceeds its time ends the process by a
signal, and a stage that exceeds its memory fails an allocation. The page names the stage.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import signal
from array import array
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.batch_lines import BatchPart
from moeserve.frontend.dialects.internal import ChatPrompt, GenerateRequest, ModelFacts, Tool
from moeserve.frontend.dialects.responses_items import Earlier, Named
from moeserve.frontend.errors import ApiError, chat_template_failed, internal_error, invalid
from moeserve.frontend.limits import GRAMMAR_CPU_SECONDS, RENDER_CPU_SECONDS
from moeserve.frontend.text import Int32s, PromptText
from moeserve.plan import CacheWish

SIZE_BYTES = 4

# Names the reader of a body and the use of its content.
Kind = Literal[
    "chat",
    "completions",
    "messages",
    "responses",
    "ollama_chat",
    "ollama_generate",
    "tgi",
    "tgi_stream",
    "triton",
    "triton_stream",
    "warm",
    "prefix",
    "pin",
    "tokenize",
    "detokenize",
    "count_message",
    "conversation",
    "conversation_items",
    "conversation_metadata",
    "batch_lines",
]


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A body's route and the facts that reading it needs.

    owner: digest of the caller's key; nobody else's text is compared with this one. tells_salts: see `CacheWish`.
    reports: the answer tells about the prompt cache. coding: in which the body came, up to `max_bytes` of it.
    max_choices: of one request. earlier: the items that the body refers to, None until they are known.
    part: of a batch's file, which the body is.
    """

    kind: Kind
    model: ModelFacts
    owner: bytes = b""
    tells_salts: bool = False
    reports: bool = False
    coding: bytes | None = None
    max_bytes: int = 0
    max_choices: int = limits.MAX_PROMPTS * limits.MAX_N
    earlier: Earlier | None = None
    part: BatchPart | None = None

    @property
    def num_earlier_bytes(self) -> int:
        return 0 if self.earlier is None else self.earlier.num_bytes


class Relaxed(msgspec.Struct, frozen=True):
    """A tool whose schema is enforced without some of its words. paths: of these words."""

    tool: str
    paths: tuple[str, ...]


class Prepared(msgspec.Struct, frozen=True, tag_field="reply"):
    """A request whose text work is done: prompts are token ids, the grammar is checked and part of `sampling`.

    The request keeps of its prompts and tools what its answer needs (`for_answer`). wishes: of each prompt, None where
    nothing is asked of the cache. prompt_texts: of each prompt if the answer shows them. prediction: the tokens of the
    text that the client predicts. relaxed: tools, for the log.
    """

    request: GenerateRequest
    prompts: list[Int32s]
    wishes: list[CacheWish] | None = None
    prompt_texts: list[PromptText] = []
    prediction: Int32s = msgspec.field(default_factory=lambda: array("i"))

    @property
    def num_bytes(self) -> int:
        """Bytes of memory of what can be long: prompts are held as they are, and as they are sent."""
        request = self.request
        return len(request.repeated) + len(request.own_items) + sum(8 * len(prompt) for prompt in self.prompts)

    relaxed: tuple[Relaxed, ...] = ()


class Prefix(msgspec.Struct, frozen=True, tag_field="reply"):
    """A prefix that a route of the cache names by its tokens, or by its id of the listing."""

    token_ids: Int32s | None
    prefix_id: str | None
    cache_salt: str
    ignored: tuple[str, ...]


class Body(msgspec.Struct, frozen=True, tag_field="reply"):
    """The whole body of an answer."""

    content: bytes


class NeedsEarlier(msgspec.Struct, frozen=True, tag_field="reply"):
    """The request names earlier items; send the body again with these."""

    named: Named


class Defect(msgspec.Struct, frozen=True, tag_field="reply"):
    """A defect of a text process. trace: Python's, for the log of the frontend."""

    trace: str


class _Error(msgspec.Struct, tag_field="reply"):
    error: ApiError


Reply = Prepared | Prefix | Body | NeedsEarlier | Defect | ApiError
_Packed = Prepared | Prefix | Body | NeedsEarlier | Defect | _Error

_R = TypeVar("_R")


def expect(reply: Reply, kind: type[_R]) -> _R:
    """Return a reply of this kind. Raise the ApiError that came in its place."""
    if isinstance(reply, ApiError):
        raise reply
    assert isinstance(reply, kind)
    return reply


def pack_ask(ask: Ask, body: bytes) -> list[bytes]:
    """Return the parts of a frame; the body is not copied."""
    head = msgspec.msgpack.encode(ask)
    return [(len(head) + SIZE_BYTES + len(body)).to_bytes(SIZE_BYTES), len(head).to_bytes(SIZE_BYTES), head, body]


def unpack_ask(frame: bytes) -> tuple[Ask, bytes]:
    """Return the ask of a frame without its length, and the body."""
    size = SIZE_BYTES + int.from_bytes(frame[:SIZE_BYTES])
    return msgspec.msgpack.decode(memoryview(frame)[SIZE_BYTES:size], type=Ask), frame[size:]


def pack_reply(reply: Reply) -> bytes:
    """Return a frame without its length."""
    payload, rest = list[bytes](), b""

    def set_aside(values: array[int]) -> int:
        payload.append(values.tobytes())
        return len(payload[-1])

    packed: _Packed
    match reply:
        case ApiError():
            packed = _Error(reply)
        case Prepared():
            request = reply.request
            packed = msgspec.structs.replace(reply, request=replace(request, repeated=b"", own_items=b""))
            rest = b"".join([len(request.repeated).to_bytes(SIZE_BYTES), request.repeated, request.own_items])
        case Body():
            packed, rest = Body(b""), reply.content
        case _:
            packed = reply
    head = msgspec.json.encode(packed, enc_hook=set_aside)
    return b"".join([len(head).to_bytes(SIZE_BYTES), head, *payload, rest])


def unpack_reply(frame: bytes) -> Reply:
    """Return the reply of a frame without its length. Raise msgspec.DecodeError for one that is none."""
    place = SIZE_BYTES + int.from_bytes(frame[:SIZE_BYTES])
    head, payload = memoryview(frame)[SIZE_BYTES:place], memoryview(frame)[place:]

    def take(_: type, num_bytes: int) -> array[int]:
        nonlocal payload
        values = array("i")
        values.frombytes(payload[:num_bytes])
        payload = payload[num_bytes:]
        return values

    packed: _Packed = msgspec.json.decode(head, type=_Packed, dec_hook=take)
    match packed:
        case _Error():
            return packed.error
        case Prepared():
            end = SIZE_BYTES + int.from_bytes(payload[:SIZE_BYTES])
            repeated, own_items = bytes(payload[SIZE_BYTES:end]), bytes(payload[end:])
            request = replace(packed.request, repeated=repeated, own_items=own_items)
            return msgspec.structs.replace(packed, request=request)
        case Body():
            return Body(bytes(payload))
    return packed


def for_answer(request: GenerateRequest) -> GenerateRequest:
    """Return the request with no more of its prompts, tools and format than its answer needs."""
    prompts: list[ChatPrompt | str | list[int]] = []
    for prompt in request.prompts:
        if isinstance(prompt, ChatPrompt):
            last = [{"content": prompt.messages[-1]["content"]}] if prompt.continue_final else []
            prompts.append(replace(prompt, messages=last, tools=(), variables={}, switches={}))
        else:
            prompts.append([])
    tools = tuple(Tool(tool.name, None, tool.parameters) for tool in request.tools)
    return replace(request, prompts=prompts, tools=tools, output_format=None, prediction="")


PAGE_BYTES = 4096
_STATM = Path("/proc/self/statm")
_MOST_FIELD_BYTES = 256

# Options of glibc's `mallopt`: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD (bytes) and M_ARENA_MAX.
_SETTINGS = ((-3, 256 * 1024), (-1, 2 * 2**20), (-8, 2))


class Stage(IntEnum):
    """The stages of a job. LOCATE searches for the place of an error in a schema."""

    READ = 0
    RENDER = 1
    ENCODE = 2
    GRAMMAR = 3
    LOCATE = 4
    IDLE = 5


# Seconds of processor time: for each stage, and for each character of its input.
_CPU_SECONDS = {
    Stage.READ: (1.0, 2e-6),
    Stage.RENDER: (RENDER_CPU_SECONDS, 0.0),
    Stage.ENCODE: (1.0, 5e-6),
    Stage.GRAMMAR: (GRAMMAR_CPU_SECONDS, 0.0),
    Stage.LOCATE: (1.0, 0.0),
}
_RENDER_BYTES = 512 * 2**20  # bytes that rendering may map beyond the process's own
_OTHER_BYTES = 4 * 2**30  # bytes that any other stage may map beyond the process's own at its start


class Watch:
    """The bounds of this process. The event loop has none: it runs the same code for few characters."""

    def __init__(self, page: mmap.mmap | None = None) -> None:
        """page: records the stage; None sets no bounds."""
        self._page = page
        self._most_bytes = 0 if page is None else address_space() + _OTHER_BYTES

    def enter(self, stage: Stage, num_chars: int = 0, field: str = "") -> None:
        """Begin a stage that goes through a number of characters. field: of the request, for the refusal."""
        if self._page is None:
            return
        name = field.encode("utf-8", "replace")[:_MOST_FIELD_BYTES]
        self._page[: 3 + len(name)] = bytes((stage, len(name) > 0)) + name + b"\0"
        limit_memory(address_space() + _RENDER_BYTES if stage is Stage.RENDER else self._most_bytes)
        base, each = _CPU_SECONDS[stage]
        limit_cpu(base + each * num_chars)

    def leave(self) -> None:
        """End the stages of a job."""
        if self._page is not None:
            limit_cpu(0)
            self._page[0] = Stage.IDLE

    def refusal(self) -> ApiError:
        """Return the error of a job whose latest stage took too much memory."""
        return internal_error() if self._page is None else refusal(self._page[:])


def refusal(page: bytes) -> ApiError:
    """Return the error of a job that exceeded its bounds, by the page of its process."""
    field = page[2:].partition(b"\0")[0].decode("utf-8", "replace") if page[1] else None
    match page[0]:
        case Stage.RENDER:
            return chat_template_failed("The chat template takes too long for these messages, or too much memory")
        case Stage.GRAMMAR | Stage.LOCATE:
            return invalid(f"Invalid value for `{field}`: it takes too long to compile", field)
        case _:
            return invalid("The request takes too long to read, or too much memory", code="too_many_values")


def least_seconds(page: bytes) -> float:
    """Return the least processor time, in seconds, that the latest stage may take, by the page of its process."""
    return _CPU_SECONDS[Stage(page[0])][0]


def limit_cpu(seconds: float) -> None:
    """End this process by SIGPROF after this number of further seconds of processor time; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def address_space() -> int:
    """Return the bytes that this process has mapped."""
    return int(_STATM.read_text().split()[0]) * resource.getpagesize()


def limit_memory(num_bytes: int) -> None:
    """Let this process map at most this number of bytes, until the next call."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, resource.RLIM_INFINITY))


def bound_pools() -> None:
    """Have malloc map each big block by itself, and use two pools for all threads. Call this before threads
    allocate."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in _SETTINGS:
            mallopt(option, value)


def give_back() -> None:
    """Return free memory to the system, which takes some milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
