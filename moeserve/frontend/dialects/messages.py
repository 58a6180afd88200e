"""The dialect of `/v1/messages` and `/v1/messages/count_tokens`: reads requests into internal ones.

Its answers are messages of content blocks, with named events and errors of another shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from moeserve.frontend import limits
from moeserve.frontend.dialects import fields
from moeserve.frontend.dialects.bodies import bounded
from moeserve.frontend.dialects.chat_parts import call_in_history, check_choice, check_tools, make_tool, placeholder
from moeserve.frontend.dialects.fields import read_cache
from moeserve.frontend.dialects.formats import checked_size, refuse_formats
from moeserve.frontend.dialects.internal import (
    CacheOptions,
    ChatPrompt,
    Delta,
    Formatter,
    GenerateRequest,
    ModelFacts,
    OutputFormat,
    ThoughtOptions,
    Tool,
    ToolCallPart,
    ToolChoice,
    Usage,
    Writing,
    progress_json,
)
from moeserve.frontend.errors import ApiError, invalid, missing, too_many, unsupported
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import PromptProgress

BILLING_HEADER = "x-anthropic-billing-header:"
MAX_TEMPERATURE = 1.0
ROLES = ("user", "assistant", "system")
# Fields of other dialects, or of this one, that ask for something not served; fields of this one may be empty lists.
REFUSED = ("n", "stop", "stream_options", "logit_bias", "prompt_logprobs")
REFUSED_UNLESS_EMPTY = ("container", "mcp_servers")
REGIONS = (None, "global", "not_available")


class CacheControl(msgspec.Struct):
    """The mark after a part of the prompt that the client will send again."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        return 3600.0 if self.ttl == "1h" else 300.0


class Block(msgspec.Struct):
    """A content block of any type; `type` says which of the other fields it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    tool_name: str | None = None
    cache_control: CacheControl | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Block]


class ToolBody(msgspec.Struct):
    """A tool of the client's; with another `type` than `custom` one whose schema, or execution, is the vendor's."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoiceBody(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class Format(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class Metadata(msgspec.Struct):
    user_id: str | None = None


class ContextEdit(msgspec.Struct):
    type: str
    keep: Any = None


class ContextManagement(msgspec.Struct):
    edits: list[ContextEdit] | None = None


class MessagesBody(fields.SamplingBody, kw_only=True):
    """The request. Sampling fields that Anthropic's API lacks, such as `seed` and `min_p`, are taken as elsewhere."""

    messages: list[Message] | None = None
    system: str | list[Block] | None = None
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    stop_sequences: list[str] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    cache_control: CacheControl | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard", "fast"] | None = None
    inference_geo: str | None = None
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None


def parse(body: bytes, model: ModelFacts) -> GenerateRequest:
    """Return the internal request. Raise ApiError with the status that the client gets."""
    asked, ignored = fields.read_body(body, MessagesBody, model)
    if asked.max_tokens is None:
        raise missing("max_tokens")
    prompt, breakpoints, dropped = _read_prompt(asked)
    if prompt.messages[-1]["role"] == "assistant":
        raise invalid("The last of `messages` must not be the assistant's: prefill is not supported", "messages")
    return fields.read_request(
        asked,
        model,
        [prompt],
        asked.max_tokens,
        fields.read_sampling(asked, model, None),
        stop=fields.read_stop(asked.stop_sequences, "stop_sequences"),
        cache=_cache(asked, breakpoints),
        thought=_thought(asked),
        tools=prompt.tools,
        tool_choice=_tool_choice(asked, prompt.tools),
        parallel_tool_calls=not (asked.tool_choice and asked.tool_choice.disable_parallel_tool_use),
        output_format=_output_format(asked),
        ignored=ignored,
        dropped_tools=dropped,
        repeated=msgspec.json.encode(Repeated(_shows_thinking(asked))),
    )


def parse_count(body: bytes, model: ModelFacts) -> ChatPrompt:
    """Return the prompt of a request to count its tokens: the very one that `parse` gives. Raise ApiError."""
    asked, _ = fields.read_body(body, MessagesBody, model)
    if asked.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens")
    return _read_prompt(asked)[0]


# (number of the prompt's leading messages, seconds), see `CacheOptions`.
Breakpoints = list[tuple[int, float]]


def _read_prompt(asked: MessagesBody) -> tuple[ChatPrompt, Breakpoints, tuple[str, ...]]:
    """Return the prompt, the ends of its marked parts, and the types of the tools that were dropped. Raise ApiError.

    A mark inside a turn counts at the turn's end.
    """
    _refuse_what_is_not_served(asked)
    if not asked.messages:
        raise invalid("`messages` must hold at least one message", "messages")
    if len(asked.messages) > limits.MAX_MESSAGES:
        raise too_many("messages", limits.MAX_MESSAGES, "messages")
    system = _system_text(asked.system)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    breakpoints = _marks(0, [tool.cache_control for tool in asked.tools or []])
    breakpoints += _marks(len(messages), _controls(asked.system or ""))
    for role, numbered_turn in groupby(enumerate(asked.messages), lambda numbered: numbered[1].role):
        turn = list(numbered_turn)
        blocks = [found for index, message in turn for found in _blocks(message.content, f"messages[{index}]")]
        if role == "assistant":
            messages.append(_assistant_message(blocks))
        elif role == "user":
            calls = messages[-1].get("tool_calls", []) if messages else []
            messages += _user_messages(blocks, [call["id"] for call in calls])
        elif role == "system":
            messages.append({"role": "system", "content": _joined(blocks)})
        else:
            names = ", ".join(ROLES)
            index = next(index for index, message in enumerate(asked.messages) if message.role == role)
            raise invalid(f"`messages[{index}].role` must be one of {names}", f"messages[{index}].role")
        breakpoints += _marks(len(messages), [mark for _, message in turn for mark in _controls(message.content)])
    tools, dropped = _tools(asked.tools or [])
    variables = _variables(asked)
    switches: dict[str, tuple[str, ...]] = {}
    if fields.EFFORT in variables:
        switches["output_config.effort"] = (fields.EFFORT,)
    return ChatPrompt(messages=messages, variables=variables, tools=tools, switches=switches), breakpoints, dropped


def _refuse_what_is_not_served(asked: MessagesBody) -> None:
    """Raise ApiError for fields that ask for something that this server, or this API, does not have."""
    refuse_formats(asked)
    for name in REFUSED:
        if getattr(asked, name) is not None:
            raise unsupported(name)
    for name in REFUSED_UNLESS_EMPTY:
        if getattr(asked, name) not in (None, []):
            raise unsupported(name)
    if asked.inference_geo not in REGIONS:
        raise unsupported("inference_geo", str(asked.inference_geo)[:40])
    edits = asked.context_management.edits if asked.context_management else None
    for index, edit in enumerate(edits or []):
        # An edit that keeps all thinking changes nothing.
        if not (edit.type.startswith("clear_thinking_") and edit.keep == "all"):
            raise unsupported(f"context_management.edits[{index}].type", edit.type[:40])


def _controls(content: str | list[Block]) -> list[CacheControl | None]:
    return [] if isinstance(content, str) else [block.cache_control for block in content]


def _marks(num_messages: int, controls: Sequence[CacheControl | None]) -> Breakpoints:
    """Return the breakpoint of a part of the prompt, none if nothing in it is marked; the longest time counts."""
    seconds = [control.seconds for control in controls if control is not None]
    return [(num_messages, max(seconds))] if seconds else []


def _cache(asked: MessagesBody, breakpoints: Breakpoints) -> CacheOptions:
    """Return the wishes for the prompt cache; a mark on the request itself is for the whole prompt."""
    options = read_cache(asked)
    whole = [options.seconds, asked.cache_control.seconds if asked.cache_control else None]
    seconds = max((value for value in whole if value is not None), default=None)
    return CacheOptions(seconds, tuple(breakpoints), options.report)


def _system_text(system: str | list[Block] | None) -> str:
    """Return the system prompt without the clients' billing header, a nonce per request at the head of every prefix."""
    if system is None:
        return ""
    if isinstance(system, str):
        return system.partition("\n")[2] if system.startswith(BILLING_HEADER) else system
    blocks = [found for found in _blocks(system, "system", "") if not (found[1].text or "").startswith(BILLING_HEADER)]
    return _joined(blocks)


def _blocks(content: str | list[Block], where: str, field: str = ".content") -> list[tuple[str, Block]]:
    """Return the blocks of a content, each with its path; a text is one block."""
    if isinstance(content, str):
        return [(where + field, Block("text", text=content))]
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise too_many(where + field, limits.MAX_CONTENT_PARTS, "blocks")
    return [(f"{where}{field}[{index}]", block) for index, block in enumerate(content)]


def _joined(blocks: Sequence[tuple[str, Block]]) -> str:
    """Return the text of text blocks, joined by a newline, so that no two words merge."""
    texts = []
    for path, block in blocks:
        if block.type != "text":
            raise unsupported(f"{path}.type", block.type[:40])
        texts.append(_required(block.text, f"{path}.text"))
    return "\n".join(texts)


def _required(value: str | None, path: str) -> str:
    if value is None:
        raise missing(path)
    return value


def _user_messages(blocks: list[tuple[str, Block]], call_ids: list[str]) -> list[dict[str, Any]]:
    """Return the messages of a user's turn: one for each tool's result, then one with the user's text.

    Results come in the order of `call_ids`, the calls before this turn: many templates show no ids, and agents send
    the result first that was ready first.
    """
    results = [_tool_message(path, block) for path, block in blocks if block.type == "tool_result"]
    places = {call_id: place for place, call_id in enumerate(call_ids)}
    results.sort(key=lambda result: places.get(result["tool_call_id"], len(places)))
    said = [found for found in blocks if found[1].type != "tool_result"]
    return results if results and not said else [*results, {"role": "user", "content": _joined(said)}]


def _tool_message(path: str, block: Block) -> dict[str, Any]:
    call_id = _required(block.tool_use_id, f"{path}.tool_use_id")
    text = _joined([(where, _readable(part, where)) for where, part in _blocks(block.content or "", path)])
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"  # templates have no other place for it
    return {"role": "tool", "tool_call_id": call_id_of(call_id), "content": text}


def _readable(block: Block, path: str) -> Block:
    """Return a block of a tool's result as text: images and files are left out, a tool that was found is named."""
    if block.type == "tool_reference":
        return Block("text", text=f"[tool {_required(block.tool_name, f'{path}.tool_name')}]")
    instead = placeholder(block.type)
    return block if instead is None else Block("text", text=instead)


def _assistant_message(blocks: list[tuple[str, Block]]) -> dict[str, Any]:
    """Return the one message of an assistant's turn."""
    said, thoughts, calls = [], [], []
    for path, block in blocks:
        if block.type == "thinking":
            thoughts.append(_required(block.thinking, f"{path}.thinking"))
        elif block.type == "tool_use":
            calls.append(_call(path, block))
        elif block.type != "redacted_thinking":  # which only its vendor can read
            said.append((path, block))
    message: dict[str, Any] = {"role": "assistant", "content": _joined(said)}
    if thoughts := [thought for thought in thoughts if thought]:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(path: str, block: Block) -> dict[str, Any]:
    if block.input is None:
        raise invalid(f"`{path}.input` must be an object", f"{path}.input")
    call_id = call_id_of(_required(block.id, f"{path}.id"))
    return call_in_history(call_id, _required(block.name, f"{path}.name"), block.input)


def _tools(bodies: list[ToolBody]) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """Return the client's own tools, and the types of the other ones: tools that the vendor defines or runs."""
    made, dropped = [], []
    for index, body in enumerate(bodies):
        path = f"tools[{index}]"
        if body.type not in (None, "custom"):
            dropped.append(body.type)
            continue
        if body.input_schema is None:
            raise missing(f"{path}.input_schema")
        longest = limits.MAX_TOOL_NAME_CHARS
        tool = make_tool(body.name, body.description, body.input_schema, body.strict, path, longest, "input_schema")
        made.append((tool, f"{path}.name"))
    return check_tools(made), tuple(dropped)


def _tool_choice(asked: MessagesBody, tools: tuple[Tool, ...]) -> ToolChoice:
    choice = asked.tool_choice
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "none":
        return ToolChoice("none")
    known = {tool.name for tool in tools}
    if choice.type == "any":
        return check_choice(ToolChoice("required"), known)
    name = _required(choice.name, "tool_choice.name")
    vendors = next((body.type for body in asked.tools or [] if body.name == name), None)
    if name not in known and vendors is not None:
        raise unsupported("tool_choice.name", f"{name[:128]} (a tool of type {vendors[:40]})")
    return check_choice(ToolChoice("required", (name,)), known, "tool_choice.name")


def _variables(asked: MessagesBody) -> dict[str, Any]:
    """Return the template's variables. Without `thinking` in the request the template decides."""
    variables: dict[str, Any] = {}
    if thinking := asked.thinking:
        if thinking.type not in ("enabled", "adaptive", "disabled"):
            raise unsupported("thinking.type", thinking.type[:40])
        thinks = thinking.type != "disabled"
        variables |= {"enable_thinking": thinks, "thinking": thinks}
        if thinking.budget_tokens is not None:
            budget = bounded("thinking.budget_tokens", thinking.budget_tokens, 1, limits.MAX_TOKENS)
            variables["thinking_budget"] = int(budget)
    if asked.output_config and asked.output_config.effort:
        variables[fields.EFFORT] = asked.output_config.effort
    return variables


def _thought(asked: MessagesBody) -> ThoughtOptions:
    thinking, config = asked.thinking, asked.output_config
    budget = thinking.budget_tokens if thinking is not None and thinking.type != "disabled" else None
    return fields.read_thought(asked, config.effort if config else None, **{"thinking.budget_tokens": budget})


def _shows_thinking(asked: MessagesBody) -> bool:
    return asked.thinking is None or asked.thinking.display != "omitted"


def _output_format(asked: MessagesBody) -> OutputFormat | None:
    in_config = asked.output_config.format if asked.output_config else None
    path, wanted = ("output_config.format", in_config) if in_config else ("output_format", asked.output_format)
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        raise unsupported(f"{path}.type", wanted.type[:40])
    if wanted.schema is None:
        raise missing(f"{path}.schema")
    return OutputFormat("json_schema", checked_size(wanted.schema, f"{path}.schema"), f"{path}.schema")


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
        message = f"prompt is too long: {message}"  # these words make agents compact the conversation
    inner = {"type": _ERROR_TYPES.get(error.status, "invalid_request_error"), "message": message}
    return msgspec.json.encode({"type": "error", "error": inner, "request_id": request_id})


def error_event(error: ApiError) -> bytes:
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
        self._blank = ""  # white space without text behind it so far
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

    def progress(self, index: int, progress: PromptProgress) -> bytes:
        return _event("ping", prompt_progress=msgspec.Raw(progress_json(progress)))

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
