"""The messages between the event loop and a text process: an `Ask` with a body, and one `Reply`.

A frame is the length of its head, the head and a payload. An ask's head is MessagePack, its payload the body as it is.
A reply's head is JSON, since integers of clients are of any size; its payload holds JSON of the dialect, token ids as
int32 and texts as UTF-8, of the sizes that the head tells.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.internal import ChatPrompt, GenerateRequest, ModelFacts, Tool
from moeserve.frontend.dialects.responses_items import Earlier, Named
from moeserve.frontend.http import ApiError
from moeserve.frontend.text import PromptText
from moeserve.plan import CacheWish

SIZE_BYTES = 4

# The reader of a body, and the use of its content.
Kind = Literal[
    "chat",
    "completions",
    "messages",
    "responses",
    "warm",
    "prefix",
    "unpin",
    "tokenize",
    "detokenize",
    "count_message",
    "conversation",
    "conversation_items",
    "conversation_metadata",
]


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A body's route and the facts that reading it needs.

    owner: digest of the caller's key; nobody else's text is compared with this one. retention_share, tells_salts: see
    `CacheWish`. reports: the answer tells about the prompt cache. coding: in which the body came, up to `max_bytes` of
    it. max_choices: of one request. earlier: what the body refers to, None before that is known.
    """

    kind: Kind
    model: ModelFacts
    owner: bytes = b""
    retention_share: float | None = None
    tells_salts: bool = False
    reports: bool = False
    coding: bytes | None = None
    max_bytes: int = 0
    max_choices: int = limits.MAX_PROMPTS * limits.MAX_N
    earlier: Earlier | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose text work is done: prompts are token ids, the grammar is checked and part of `sampling`.

    The request keeps of its prompts and tools what its answer needs (`for_answer`). wishes: of each prompt, None where
    nothing is asked of the cache. prompt_texts: of each prompt if the answer shows them. prediction: the tokens of the
    text that the client predicts.
    """

    request: GenerateRequest
    prompts: list[array[int]]
    wishes: list[CacheWish] | None = None
    prompt_texts: Sequence[PromptText] = ()
    prediction: array[int] = field(default_factory=lambda: array("i"))


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that a route of the cache names by its tokens, or by its id of the listing."""

    token_ids: array[int] | None
    prefix_id: str | None
    cache_salt: str
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """The whole body of an answer."""

    content: bytes


@dataclass(frozen=True, slots=True)
class NeedsEarlier:
    """The request names earlier items; send the body again with these."""

    named: Named


Reply = Prepared | Prefix | Body | NeedsEarlier | ApiError


_R = TypeVar("_R")


def expect(reply: Reply, kind: type[_R]) -> _R:
    """Return a reply of this kind. Raises the ApiError that came in its place."""
    if isinstance(reply, ApiError):
        raise reply
    assert isinstance(reply, kind)
    return reply


class _PreparedHead(msgspec.Struct, tag_field="reply", tag="prepared"):
    request: GenerateRequest
    num_tokens: list[int]
    num_text_bytes: list[int]
    num_repeated_bytes: int
    num_predicted: int
    wishes: list[CacheWish] | None = None


class _PrefixHead(msgspec.Struct, tag_field="reply", tag="prefix"):
    is_known: bool
    prefix_id: str | None
    cache_salt: str
    ignored: tuple[str, ...]


class _BodyHead(msgspec.Struct, tag_field="reply", tag="body"):
    pass


class _EarlierHead(msgspec.Struct, tag_field="reply", tag="earlier"):
    named: Named


class _ErrorHead(msgspec.Struct, tag_field="reply", tag="error"):
    """The fields of an `ApiError`."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None
    retry_after_s: float | None
    may_retry: bool
    close: bool


_Head = _PreparedHead | _PrefixHead | _BodyHead | _EarlierHead | _ErrorHead


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
    payload: list[bytes] = []
    head: _Head
    match reply:
        case Prepared():
            texts = [shown.text.encode() for shown in reply.prompt_texts]
            repeated, request = reply.request.repeated, replace(reply.request, repeated=b"")
            counts = [*map(len, reply.prompts)], [*map(len, texts)], len(repeated), len(reply.prediction)
            head = _PreparedHead(request, *counts, reply.wishes)
            payload = [repeated, *(token_ids.tobytes() for token_ids in (reply.prediction, *reply.prompts))]
            for shown, text in zip(reply.prompt_texts, texts, strict=True):
                payload += [shown.offsets.tobytes(), text]
        case Prefix():
            payload = [] if reply.token_ids is None else [reply.token_ids.tobytes()]
            head = _PrefixHead(reply.token_ids is not None, reply.prefix_id, reply.cache_salt, reply.ignored)
        case Body():
            head, payload = _BodyHead(), [reply.content]
        case NeedsEarlier():
            head = _EarlierHead(reply.named)
        case ApiError() as error:
            head = _ErrorHead(
                error.status,
                error.message,
                error.type,
                error.param,
                error.code,
                error.retry_after_s,
                error.may_retry,
                error.close,
            )
    encoded = msgspec.json.encode(head)
    return b"".join([len(encoded).to_bytes(SIZE_BYTES), encoded, *payload])


def unpack_reply(frame: bytes) -> Reply:
    """Return the reply of a frame without its length. Raises msgspec.DecodeError for one that is none."""
    size = SIZE_BYTES + int.from_bytes(frame[:SIZE_BYTES])
    payload = memoryview(frame)[size:]
    head: _Head = msgspec.json.decode(memoryview(frame)[SIZE_BYTES:size], type=_Head)
    match head:
        case _PreparedHead():
            return _prepared(head, payload)
        case _PrefixHead():
            token_ids = _int32(payload) if head.is_known else None
            return Prefix(token_ids, head.prefix_id, head.cache_salt, head.ignored)
        case _BodyHead():
            return Body(bytes(payload))
        case _EarlierHead():
            return NeedsEarlier(head.named)
        case _ErrorHead():
            return ApiError(
                head.status,
                head.message,
                type=head.type,
                param=head.param,
                code=head.code,
                retry_after_s=head.retry_after_s,
                may_retry=head.may_retry,
                close=head.close,
            )


def _prepared(head: _PreparedHead, payload: memoryview) -> Prepared:
    place = 0

    def take(num_bytes: int) -> memoryview:
        nonlocal place
        place += num_bytes
        return payload[place - num_bytes : place]

    repeated = bytes(take(head.num_repeated_bytes))
    prediction = _int32(take(4 * head.num_predicted))
    prompts = [_int32(take(4 * count)) for count in head.num_tokens]
    texts = []
    for prompt, num_bytes in zip(prompts, head.num_text_bytes, strict=False):
        offsets = _int32(take(4 * len(prompt)))
        texts.append(PromptText(str(take(num_bytes), "utf-8"), offsets))
    return Prepared(replace(head.request, repeated=repeated), prompts, head.wishes, texts, prediction)


def _int32(data: memoryview) -> array[int]:
    numbers = array("i")
    numbers.frombytes(data)
    return numbers


def for_answer(request: GenerateRequest) -> GenerateRequest:
    """Return the request with what its answer needs of its prompts, its tools and its format."""
    prompts: list[ChatPrompt | str | list[int]] = []
    for prompt in request.prompts:
        if isinstance(prompt, ChatPrompt):
            last = [{"content": prompt.messages[-1]["content"]}] if prompt.continue_final else []
            prompts.append(replace(prompt, messages=last, tools=(), variables={}, switches={}))
        elif isinstance(prompt, str):
            prompts.append(prompt if request.echo else "")
        else:
            prompts.append([])
    tools = tuple(Tool(tool.name, None, tool.parameters) for tool in request.tools)
    return replace(request, prompts=prompts, tools=tools, output_format=None, prediction="")
