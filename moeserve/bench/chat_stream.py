"""Reads the timed pieces of a streamed chat completion. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec


class StreamError(Exception):
    """The stream is malformed, carries an error event or ends before its finish reason."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `event_times` has one entry per event with text in it, seconds on the clock of the pieces.

    An event may hold several tokens: the counts are what the server says in `usage`, None if it says nothing.
    """

    text: str
    event_times: tuple[float, ...]
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def timed_data(reads: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The `data` of each server-sent event, with the time at which its last byte was read."""
    rest, data = b"", []
    for read_at, piece in reads:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield read_at, b"\n".join(data)
                data = []


def read_answer(reads: Iterable[tuple[float, bytes]]) -> Answer:
    """Raises StreamError."""
    texts: list[str] = []
    event_times: list[float] = []
    usage = _Usage()
    finished = False
    for read_at, data in timed_data(reads):
        if data == b"[DONE]":
            break
        chunk = _decode(data)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content = choice.delta.content or ""
            if content or choice.delta.reasoning_content or choice.delta.reasoning:
                texts.append(content)
                event_times.append(read_at)
            finished = finished or choice.finish_reason is not None
    if not finished:
        raise StreamError("the stream ended without a finish reason")
    details = usage.prompt_tokens_details
    cached_tokens = details.cached_tokens if details else None
    return Answer("".join(texts), tuple(event_times), usage.prompt_tokens, usage.completion_tokens, cached_tokens)


def _decode(data: bytes) -> _Chunk:
    try:
        chunk = _decode_chunk(data)
    except msgspec.MsgspecError as error:
        raise StreamError(f"an event is not a chat completion chunk: {error}") from error
    if bytes(chunk.error) != b"null":
        raise StreamError(error_message(data))
    return chunk


def error_message(body: bytes) -> str:
    """What an error body says: OpenAI's `error.message`, FastAPI's `detail`, or the beginning of the body."""
    try:
        decoded = msgspec.json.decode(body)
        found = decoded.get("error", decoded.get("detail"))
        return str(found.get("message", found) if isinstance(found, dict) else found or decoded)
    except (msgspec.MsgspecError, AttributeError):
        return body[:200].decode("utf-8", "replace")
