"""Writes answers as `/v1/responses` has them: one response object, or the events of its items.

An answer is a list of items: reasoning, a message, calls. The formatter has one item open at a time, and an answer that
is sent whole goes the same way as a streamed one, so that both have the same items.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from moeserve.frontend.dialects.custom_tools import custom_input
from moeserve.frontend.dialects.internal import (
    WRITTEN_AT_ONCE,
    Delta,
    Formatter,
    GenerateRequest,
    TokenText,
    ToolCallPart,
    Usage,
    Writing,
    logprob_entry,
    progress_json,
)
from moeserve.frontend.dialects.responses import Turn
from moeserve.frontend.dialects.responses_items import ClientName, Item, item_id_of, seal_reasoning
from moeserve.frontend.errors import ApiError
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import PromptProgress

_LAST_NUMBER = 2**31 - 1
OUTPUT_FOLLOWS = b',"output":'  # stands behind a response's head without its last brace


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response and the items of its request, as JSON. head: the response without its output. previous_id,
    conversation_id: named by the request."""

    response_id: str
    head: bytes
    output: bytes
    input: bytes
    previous_id: str | None = None
    conversation_id: str | None = None

    @property
    def response(self) -> bytes:
        return self.head[:-1] + OUTPUT_FOLLOWS + self.output + b"}"


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a stream of unknown content: its number is above all others."""
    fields = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": _LAST_NUMBER}
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode({"type": "error", **fields})


class EventLog:
    """Numbers events and writes them."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({"type": kind, **fields, "sequence_number": self._next})
        self._next += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def take_back(self) -> None:
        """Reuse the number of the last event for the next one, which is written in its place."""
        self._next -= 1

    def delta(self, head: bytes, text: str, logprobs: list[msgspec.Raw] | None = None) -> bytes:
        """Return an event that carries a piece of text. head: from `delta_head`; logprobs: None leaves them out."""
        rest = b"" if logprobs is None else b',"logprobs":' + (msgspec.json.encode(logprobs) if logprobs else b"[]")
        number = self._next
        self._next += 1
        return b'%b"delta":%b%b,"sequence_number":%d}\n\n' % (head, msgspec.json.encode(text), rest, number)


def delta_head(kind: str, place: dict[str, Any]) -> bytes:
    """Return the bytes of a delta event up to its text, the same for all deltas of an item. place: its fields."""
    return b"event: %b\ndata: %b," % (kind.encode(), msgspec.json.encode({"type": kind, **place})[:-1])


class TextItem:
    """An item with one part that is text: a message or reasoning."""

    def __init__(self, log: EventLog, item: Item, output_index: int, *, seals: bool) -> None:
        """item: its `id` and `type`. seals: reasoning has `encrypted_content` too."""
        self.is_message = item["type"] == "message"
        self._log = log
        self._item = {**item, "role": "assistant"} if self.is_message else {**item, "summary": []}
        self._kind = "response.output_text" if self.is_message else "response.reasoning_text"
        self._output_index = output_index
        self._place = {"item_id": item["id"], "output_index": output_index, "content_index": 0}
        self._head = delta_head(f"{self._kind}.delta", self._place)
        self._seals = seals
        self._texts: list[str] = []
        self._logprobs: list[msgspec.Raw] = []

    def open(self) -> bytes:
        item = {**self._item, "status": "in_progress", "content": []}
        return self._log.event(
            "response.output_item.added", output_index=self._output_index, item=item
        ) + self._log.event("response.content_part.added", **self._place, part=self._part(""))

    def push(self, text: str, logprobs: list[msgspec.Raw]) -> bytes:
        self._texts.append(text)
        self._logprobs += logprobs
        return self._log.delta(self._head, text, logprobs if self.is_message else None)

    def close(self, status: str) -> bytes:
        item, text = self.object(status), "".join(self._texts)
        logprobs = {"logprobs": self._logprobs} if self.is_message else {}
        return (
            self._log.event(f"{self._kind}.done", **self._place, text=text, **logprobs)
            + self._log.event("response.content_part.done", **self._place, part=self._part(text))
            + self._log.event("response.output_item.done", output_index=self._output_index, item=item)
        )

    def object(self, status: str) -> Item:
        """Return the item as it stands."""
        text = "".join(self._texts)
        item = {**self._item, "status": status, "content": [self._part(text)]}
        return {**item, "encrypted_content": seal_reasoning(text)} if self._seals else item

    def _part(self, text: str) -> Item:
        if not self.is_message:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs if text else []}


class CallItem:
    """A call of a tool. The input of a custom tool is complete only with its arguments, so it comes in one piece."""

    def __init__(self, log: EventLog, part: ToolCallPart, client: ClientName, item_id: str, output_index: int) -> None:
        """part: the first of the call."""
        self.place = part.place
        self._log = log
        self._custom = client.custom
        self._field = "input" if client.custom else "arguments"
        self._kind = "response.custom_tool_call_input" if client.custom else "response.function_call_arguments"
        self._item: Item = {
            "id": item_id,
            "type": "custom_tool_call" if client.custom else "function_call",
            "call_id": part.call_id,
            "name": client.name,
        }
        if client.namespace is not None:
            self._item["namespace"] = client.namespace
        self._output_index = output_index
        self._place = {"item_id": item_id, "output_index": output_index}
        self._head = delta_head(f"{self._kind}.delta", self._place)
        self._pieces: list[str] = []

    def open(self) -> bytes:
        item = {**self._item, self._field: "", "status": "in_progress"}
        return self._log.event("response.output_item.added", output_index=self._output_index, item=item)

    def push(self, arguments: str) -> bytes:
        self._pieces.append(arguments)
        return self._log.delta(self._head, arguments) if arguments and not self._custom else b""

    def close(self, status: str) -> bytes:
        item = self.object(status)
        text: str = item[self._field]
        return (
            (self._log.delta(self._head, text) if self._custom else b"")
            + self._log.event(f"{self._kind}.done", **self._place, **self._named(), **{self._field: text})
            + self._log.event("response.output_item.done", output_index=self._output_index, item=item)
        )

    def object(self, status: str) -> Item:
        text = "".join(self._pieces)
        return {**self._item, self._field: custom_input(text) if self._custom else text, "status": status}

    def _named(self) -> dict[str, str]:
        return {} if self._custom else {"name": self._item["name"]}


class ResponsesFormatter(Formatter):
    """Writes answers in this dialect. `kept` is the complete response that is to be stored; None before, and where none
    is."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        request: GenerateRequest,
        tokenizer: TextTokenizer,
        fingerprint: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """clock: gives the UNIX time at which the response is complete."""
        self._clock = clock
        self.kept: KeptResponse | None = None
        self._turn = msgspec.json.decode(request.repeated, type=Turn)
        self._own_items = request.own_items
        self._id = answer_id
        self._head = {"id": answer_id, "object": "response", "created_at": created, "model": request.model}
        self._tokenizer = tokenizer
        self._log = EventLog()
        self._started = self._is_queued = False
        self._done: list[Item] = []
        self._open: TextItem | CallItem | None = None
        self._logprobs: list[msgspec.Raw] = []  # of tokens whose text has not come yet
        self._status = "completed"
        # Agents take `response.incomplete` for a broken stream and ask again, but only clients that set a bound expect
        # it: without one a cut answer ends the stream like a complete one. Its status says that it is cut.
        self._ends_complete = request.max_tokens is None
        self._has_answer = False  # a message or a call
        self._final: dict[str, Any] = {}

    def queued(self) -> bytes:
        """Return the events with which the stream of a response in the background begins, before `start`."""
        self._is_queued = True
        response = self._response("queued")
        return self._log.event("response.created", response=response) + self._log.event(
            "response.queued", response=response
        )

    def start(self, index: int, usage: Usage) -> bytes:
        if self._started:
            return b""
        self._started = True
        response = self._response("in_progress")
        created = b"" if self._is_queued else self._log.event("response.created", response=response)
        return created + self._log.event("response.in_progress", response=response)

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        events = self._say("reasoning", delta.reasoning, []) if delta.reasoning else b""
        self._logprobs += map(self._logprob, delta.tokens)
        if delta.text:
            events += self._say_text(delta.text)
        for part in delta.calls:
            events += self._call(part)
        return events if delta.finish_reason is None else events + self._finish(delta.finish_reason)

    def progress(self, index: int, progress: PromptProgress) -> bytes:
        fields = {"response_id": self._id, "prompt_progress": msgspec.Raw(progress_json(progress))}
        return self.start(index, Usage()) + self._log.event("response.prompt_progress", **fields)

    def end(self, usage: Usage) -> bytes:
        return self._last_event(self._finished(usage))

    def error(self, error: ApiError) -> bytes:
        begin = self.start(0, Usage())
        failure = {"code": "server_error", "message": error.message}
        return begin + self._log.event("response.failed", response=self._response("failed", error=failure))

    def cancelled(self) -> bytes:
        """Return the events that end the stream of a response that was cancelled."""
        return self._close("incomplete") + self._log.event("response.incomplete", response=self._response("cancelled"))

    def snapshot(self, status: str, error: ApiError | None = None) -> KeptResponse:
        """Return the response as it stands, in a state that `complete` does not give."""
        if status == "cancelled":
            self._close("incomplete")
        failure = None if error is None else {"code": "server_error", "message": error.message}
        return self._to_keep(self._response(status, error=failure))

    def complete(self, choices: list[Delta], usage: Usage) -> Writing:
        (choice,) = choices
        for start in range(0, len(choice.tokens), WRITTEN_AT_ONCE):
            if start:
                yield
            self._logprobs += map(self._logprob, choice.tokens[start : start + WRITTEN_AT_ONCE])
        self.delta(replace(choice, tokens=[]), usage)
        return self._finished(usage)

    def unkept_response(self) -> KeptResponse:
        """Return a response that has ended, and was to be kept and is not."""
        return self._to_keep({**self._final, "store": False})

    def unkept(self) -> bytes:
        """Return the result of `end` or `complete` once more, for a response that is not kept after all."""
        data = msgspec.json.encode({**self._final, "store": False})
        if not self._started:
            return data
        self._log.take_back()
        return self._last_event(data)

    def _last_event(self, response: bytes) -> bytes:
        kind = "completed" if self._ends_complete else self._status
        return self._log.event(f"response.{kind}", response=msgspec.Raw(response))

    def _say_text(self, text: str) -> bytes:
        """Return the events of text, with the log probabilities that have come up to it."""
        logprobs, self._logprobs = self._logprobs, []
        return self._say("message", text, logprobs)

    def _say(self, kind: str, text: str, logprobs: list[msgspec.Raw]) -> bytes:
        item, begin = self._open, b""
        if not isinstance(item, TextItem) or item.is_message != (kind == "message"):
            prefix = "msg" if kind == "message" else "rs"
            begin = self._close("completed")
            place = len(self._done)
            self._has_answer = self._has_answer or kind == "message"
            identity = {"id": self._item_id(prefix), "type": kind}
            item = TextItem(self._log, identity, place, seals=kind == "reasoning" and self._turn.seals_reasoning)
            begin += item.open()
            self._open = item
        return begin + item.push(text, logprobs)

    def _call(self, part: ToolCallPart) -> bytes:
        item, begin = self._open, b""
        if not isinstance(item, CallItem) or item.place != part.place:
            client = self._turn.names.get(part.name, ClientName(part.name))
            begin = self._close("completed")
            item_id = self._item_id("ctc" if client.custom else "fc")
            self._has_answer = True
            item = CallItem(self._log, part, client, item_id, len(self._done))
            begin += item.open()
            self._open = item
        return begin + item.push(part.arguments)

    def _finish(self, reason: str) -> bytes:
        """Return the events that end the last item. An answer of nothing but reasoning gets an empty message."""
        self._status = "incomplete" if reason == "length" else "completed"
        is_message = isinstance(self._open, TextItem) and self._open.is_message
        answered = self._has_answer or (self._open is not None and self._status == "incomplete")
        events = b"" if answered and not (is_message and self._logprobs) else self._say_text("")
        return events + self._close(self._status)

    def _close(self, status: str) -> bytes:
        """End the open item, if there is one; return its last events."""
        item, self._open = self._open, None
        if item is None:
            return b""
        self._done.append(item.object(status))
        return item.close(status)

    def _item_id(self, prefix: str) -> str:
        return item_id_of(prefix, self._id, len(self._done))

    def _finished(self, usage: Usage) -> bytes:
        """Return the complete response, which is to be kept if the request says so."""
        self._final = self._response(self._status, usage)
        if not self._turn.store:
            return msgspec.json.encode(self._final)
        self.kept = self._to_keep(self._final)
        return self.kept.response

    def _to_keep(self, response: dict[str, Any]) -> KeptResponse:
        turn = self._turn
        head = msgspec.json.encode({name: value for name, value in response.items() if name != "output"})
        output = msgspec.json.encode(response["output"])
        return KeptResponse(self._id, head, output, self._own_items, turn.previous_id, turn.conversation_id)

    def _response(self, status: str, usage: Usage | None = None, error: dict[str, str] | None = None) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "completed_at": int(self._clock()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._done,
            "usage": None if usage is None else _usage(usage),
            **self._turn.repeated,
        }

    def _logprob(self, token: TokenText) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(logprob_entry(token, self._tokenizer)))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **usage.extensions,
    }
