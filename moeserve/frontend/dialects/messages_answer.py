"""Writes answers as `/v1/messages` has them: messages of content blocks, named events, errors of another shape."""

from __future__ import annotations

from typing import Any

import msgspec

from moeserve.frontend.dialects.internal import (
    Delta,
    Formatter,
    GenerateRequest,
    ToolCallPart,
    Usage,
    Writing,
)
from moeserve.frontend.errors import ApiError
from moeserve.frontend.text import TextTokenizer

_CALL_PREFIX, _TOOL_USE_PREFIX = "call_", "toolu_"

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_NO_BLOCK, _TEXT, _THINKING, _CALL = "", "text", "thinking", "tool_use"
_TEXT_BLOCK = {"type": _TEXT, "text": "", "citations": None}
_THINKING_BLOCK = {"type": _THINKING, "thinking": "", "signature": ""}
# The kind of a block's deltas, and the field of their text.
_DELTAS = {
    _TEXT: (b"text_delta", b"text"),
    _THINKING: (b"thinking_delta", b"thinking"),
    _CALL: (b"input_json_delta", b"partial_json"),
}

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class Repeated(msgspec.Struct):
    """The fields of a request that its answer needs beside the common ones."""

    shows_thinking: bool = True


def call_id_of(tool_use_id: str) -> str:
    """Return the id that a call has in the other dialects. An id that is a model's own is the same in all."""
    if tool_use_id.startswith(_TOOL_USE_PREFIX):
        return _CALL_PREFIX + tool_use_id.removeprefix(_TOOL_USE_PREFIX)
    return tool_use_id


def tool_use_id_of(call_id: str) -> str:
    """Return this dialect's id of a call, from which `call_id_of` leads back."""
    return _TOOL_USE_PREFIX + call_id.removeprefix(_CALL_PREFIX) if call_id.startswith(_CALL_PREFIX) else call_id


def error_body(error: ApiError, request_id: str | None) -> bytes:
    """Return an error in the shape of Anthropic's API: the body of a response, or the data of an event."""
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # the words by which agents know that they must compact
    inner = {"type": _ERROR_TYPES.get(error.status, "invalid_request_error"), "message": message}
    return msgspec.json.encode({"type": "error", "error": inner, "request_id": request_id})


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a stream in an error."""
    return b"event: error\ndata: " + error_body(error, None) + b"\n\n"


class MessageFormatter(Formatter):
    """Writes answers in this dialect. In a stream one content block is open at a time."""

    def __init__(
        self, answer_id: str, created: int, request: GenerateRequest, tokenizer: TextTokenizer, fingerprint: str
    ) -> None:
        self._head = {"id": answer_id, "type": "message", "role": "assistant", "model": request.model}
        self._bound = None if request.max_tokens is None else request.longest_output(request.max_tokens)
        self._writes_cache = request.cache.seconds is not None or bool(request.cache.breakpoints)
        self._shows_thinking = msgspec.json.decode(request.repeated, type=Repeated).shows_thinking
        self._open = _NO_BLOCK
        self._num_blocks = 0
        self._delta_head = b""  # of the open block's events
        self._blank = ""  # white space that no text has followed yet
        self._last = Delta(0)  # the delta with the end

    def start(self, index: int, usage: Usage) -> bytes:
        message = {**self._head, "content": [], **_end_fields(None, None), "usage": self._usage(usage)}
        return _event("message_start", message=message)

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        events, calls = b"", delta.calls
        if calls and not calls[0].name:  # the rest of the open call, from before the text
            events, calls = self._piece(calls[0].arguments), calls[1:]
        if delta.reasoning:
            events += self._thinking(delta.reasoning)
        if delta.text:
            events += self._text(delta.text)
        for part in calls:
            events += self._call(part)
        if delta.finish_reason is not None:
            self._last = delta
        return events

    def end(self, usage: Usage) -> bytes:
        events, blank = b"", self._blank
        if not self._num_blocks:
            events = self._begin(_TEXT, _TEXT_BLOCK) + (self._piece(blank) if blank else b"")
        end = _event("message_delta", delta=self._end(self._last, usage), usage=self._delta_usage(usage))
        return events + self._close() + end + _MESSAGE_STOP

    def error(self, error: ApiError) -> bytes:
        return error_event(error)

    def ping(self) -> bytes:
        return _PING

    def complete(self, choices: list[Delta], usage: Usage) -> Writing:
        yield from ()
        (choice,) = choices
        message = {**self._head, "content": self._blocks(choice), **self._end(choice, usage)}
        return msgspec.json.encode({**message, "usage": self._usage(usage)})

    def _blocks(self, choice: Delta) -> list[dict[str, Any]]:
        """Return a whole answer's content. White space alone is no text beside other blocks."""
        blocks: list[dict[str, Any]] = []
        if choice.reasoning:
            thinking = choice.reasoning if self._shows_thinking else ""
            blocks.append({**_THINKING_BLOCK, "thinking": thinking})
        calls = [{**_call_block(call), "input": _input_of(call.arguments)} for call in choice.calls]
        if choice.text.strip() or not (blocks or calls):
            blocks.append({**_TEXT_BLOCK, "text": choice.text})
        return blocks + calls

    def _thinking(self, piece: str) -> bytes:
        events = b""
        if self._open != _THINKING:
            events = self._begin(_THINKING, _THINKING_BLOCK)
        return events + self._piece(piece) if self._shows_thinking else events

    def _text(self, piece: str) -> bytes:
        if self._open == _TEXT:
            return self._piece(piece)
        piece = self._blank + piece
        if not piece.strip():
            self._blank = piece
            return b""
        return self._begin(_TEXT, _TEXT_BLOCK) + self._piece(piece)

    def _call(self, part: ToolCallPart) -> bytes:
        events = self._begin(_CALL, _call_block(part))
        return events + self._piece(part.arguments) if part.arguments else events

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        """Close the open block and open another one."""
        events = self._close() + _event("content_block_start", index=self._num_blocks, content_block=block)
        self._delta_head = _delta_head(self._num_blocks, *_DELTAS[kind])
        self._open = kind
        self._num_blocks += 1
        self._blank = ""
        return events

    def _piece(self, text: str) -> bytes:
        """Return the event of a piece of the open block."""
        return self._delta_head + msgspec.json.encode(text) + b"}}\n\n"

    def _close(self) -> bytes:
        if self._open == _NO_BLOCK:
            return b""
        index = self._num_blocks - 1
        signature = _delta_head(index, b"signature_delta", b"signature") + b'""}}\n\n'
        stop = _event("content_block_stop", index=index)
        closed, self._open = self._open, _NO_BLOCK
        return signature + stop if closed == _THINKING else stop

    def _end(self, choice: Delta, usage: Usage) -> dict[str, Any]:
        """Return the fields that say why the answer ended."""
        reason = "end_turn"
        if choice.finish_reason == "length":
            short = self._bound is not None and usage.completion_tokens < self._bound
            reason = "model_context_window_exceeded" if short else "max_tokens"
        elif choice.matched_stop is not None:
            reason = "stop_sequence"
        elif choice.finish_reason == "tool_calls":
            reason = "tool_use"
        return _end_fields(reason, choice.matched_stop if reason == "stop_sequence" else None)

    def _delta_usage(self, usage: Usage) -> dict[str, Any]:
        """Return the counts; the three kinds of input tokens add up to the prompt.

        Tokens that are not read from the cache are written to it. They count as written where the request has
        `cache_control`, as in Anthropic's API, else as plain input.
        """
        new = usage.prompt_tokens - usage.cached_tokens
        return {
            "input_tokens": 0 if self._writes_cache else new,
            "cache_creation_input_tokens": new if self._writes_cache else 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
            "server_tool_use": None,
            **usage.extensions,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        rest = {"cache_creation": None, "inference_geo": None, "service_tier": "standard"}
        return {**self._delta_usage(usage), **rest}


def _end_fields(reason: str | None, stop_sequence: str | None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": stop_sequence, "stop_details": None, "container": None}


def _call_block(call: ToolCallPart) -> dict[str, Any]:
    """Return a `tool_use` block without its input."""
    return {
        "type": _CALL,
        "id": tool_use_id_of(call.call_id),
        "name": call.name,
        "input": {},
        "caller": {"type": "direct"},
    }


def _input_of(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object; arguments that are none, cut off for example, under `INVALID_JSON`."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"INVALID_JSON": arguments}


def _delta_head(index: int, kind: bytes, field: bytes) -> bytes:
    """Return the event of a block's new part up to the JSON of its text."""
    data = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":' % (index, kind, field)
    return b"event: content_block_delta\ndata: " + data


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))
