"""The dialect of `/v1/responses` and the bodies of `/v1/conversations`: reads requests into internal ones.

`responses_items` reads items and tools, `responses_answer` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies, fields
from moeserve.frontend.dialects.formats import checked_size, refuse_formats
from moeserve.frontend.dialects.internal import ChatPrompt, GenerateRequest, ModelFacts, OutputFormat
from moeserve.frontend.dialects.responses_items import (
    ClientName,
    Earlier,
    Item,
    ItemReader,
    Named,
    ToolSet,
    check_named_bytes,
    is_reference,
    read_tool_choice,
    read_tools,
)
from moeserve.frontend.errors import ApiError, invalid, missing, too_long, too_many, unsupported
from moeserve.plan import SamplingParams

_LOGPROBS = "message.output_text.logprobs"
_SEALED_REASONING = "reasoning.encrypted_content"
# Fields that would change the answer if they were supported, and the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "context_management": (None, []),
    "include_stop_str_in_output": (None, False),
    "max_tokens": (None,),
    "n": (None, 1),
    "prompt": (None,),
    "prompt_logprobs": (None, False),
    "skip_special_tokens": (None, True),
}


class TextOptions(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ConversationName(msgspec.Struct):
    id: str


class ResponsesBody(fields.SamplingBody, kw_only=True):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: fields.Tokens | None = None
    max_output_tokens: fields.Tokens | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    background: bool | None = None
    context_management: Any = None
    conversation: str | ConversationName | None = None
    include_stop_str_in_output: Any = None
    prompt: Any = None
    prompt_logprobs: Any = None
    skip_special_tokens: Any = None


@dataclass(frozen=True, slots=True)
class Turn:
    """The part of a request that its answer needs.

    repeated: the fields of the response object that are the request's. names: how the client knows the tools, by the
    model's names for them.
    """

    repeated: dict[str, Any]
    names: dict[str, ClientName]
    previous_id: str | None
    conversation_id: str | None
    store: bool
    seals_reasoning: bool


def previous_id_of(request: GenerateRequest) -> str | None:
    """Return the id of the response that a request of this dialect continues, if any."""
    return msgspec.json.decode(request.repeated, type=Turn).previous_id


class _Names(msgspec.Struct):
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    input: str | list[_ItemName] | None = None


class _ItemName(msgspec.Struct):
    type: str | None = None
    role: str | None = None
    id: str | None = None


def earlier_names(body: bytes) -> Named | None:
    """Return the ids of the earlier items that a request names; None for a body that names none or is no request."""
    try:
        named = msgspec.json.decode(body, type=_Names)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    items = named.input if isinstance(named.input, list) else []
    if len(items) > limits.MAX_MESSAGES:
        return None  # `parse` refuses it
    referred = [item.id for item in items if item.type in ("item_reference", None) and item.role is None and item.id]
    found = Named(named.previous_response_id, _conversation_id(named.conversation), list(dict.fromkeys(referred)))
    return None if found == Named(None, None, []) else found


def _conversation_id(named: str | ConversationName | None) -> str | None:
    return named.id if isinstance(named, ConversationName) else named


def parse(body: bytes, model: ModelFacts, earlier: Earlier) -> GenerateRequest:
    """Return the internal request; its `repeated` is a `Turn`. Raise ApiError with the status for the client."""
    asked, ignored = fields.read_body(body, ResponsesBody, model)
    for field, harmless in UNSUPPORTED.items():
        if getattr(asked, field) not in harmless:
            raise unsupported(field)
    refuse_formats(asked)
    _check_labels(asked)
    if asked.background and asked.store is False:
        raise invalid(
            "A response in the `background` is fetched from where it is kept: `store` must not be false", "store"
        )
    items, past = _own_items(asked.input), _past(asked, earlier)
    _check_count([*past, *items])
    check_named_bytes(sum(len(earlier.items.get(item["id"], b"")) for item in items if is_reference(item)))
    tools = read_tools(asked.tools, [*past, *items])
    sampling = fields.read_sampling(asked, model, _logprobs(asked, model))
    output_format, form = _read_format(asked.text)
    bodies.check_depth((items, asked.tools, form))
    verbosity = ("verbosity",) if asked.text is not None and asked.text.verbosity is not None else ()
    return fields.read_request(
        asked,
        model,
        [_prompt(asked, past, items, tools, earlier)],
        asked.max_output_tokens,
        sampling,
        background=False,
        detached=bool(asked.background),
        thought=fields.read_thought(asked, asked.reasoning.effort if asked.reasoning else None),
        tools=tuple(tools.tools),
        tool_choice=read_tool_choice(asked.tool_choice, tools),
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        output_format=output_format,
        ignored=(*ignored, *verbosity),
        dropped_tools=tuple(tools.dropped),
        repeated=msgspec.json.encode(_turn(asked, tools, _repeated(asked, tools, sampling, form))),
        own_items=b"[]" if asked.store is False else msgspec.json.encode(_resolved(items, earlier)),
    )


def _prompt(asked: ResponsesBody, past: list[Item], items: list[Item], tools: ToolSet, earlier: Earlier) -> ChatPrompt:
    effort = fields.read_effort("reasoning.effort", asked.reasoning.effort if asked.reasoning else None)
    return ChatPrompt(
        messages=_read_messages(asked, past, items, earlier),
        variables={} if effort is None else {fields.EFFORT: effort},
        tools=tuple(tools.tools),
        request_field="input",
        switches={} if effort is None else {"reasoning.effort": (fields.EFFORT,)},
    )


def _turn(asked: ResponsesBody, tools: ToolSet, repeated: dict[str, Any]) -> Turn:
    return Turn(
        repeated=repeated,
        names=tools.names,
        previous_id=asked.previous_response_id,
        conversation_id=_conversation_id(asked.conversation),
        store=asked.store is not False,
        seals_reasoning=_SEALED_REASONING in (asked.include or ()),
    )


def _check_labels(asked: ResponsesBody) -> None:
    """Check fields that the answer repeats and that do not change it otherwise."""
    for name in ("user", "safety_identifier", "service_tier"):
        if len(getattr(asked, name) or "") > limits.MAX_ECHOED_CHARS:
            raise too_long(name, limits.MAX_ECHOED_CHARS, "characters")
    bodies.check_metadata(asked.metadata)


def _logprobs(asked: ResponsesBody, model: ModelFacts) -> int | None:
    num_top = fields.read_logprobs("top_logprobs", asked.top_logprobs or 0, model)
    return num_top if num_top or _LOGPROBS in (asked.include or ()) else None


def _own_items(asked: str | list[dict[str, Any]] | None) -> list[Item]:
    if asked is None:
        raise missing("input")
    if isinstance(asked, str):
        return [{"type": "message", "role": "user", "content": asked}]
    _check_count(asked)
    return asked


def _read_messages(asked: ResponsesBody, past: list[Item], items: list[Item], earlier: Earlier) -> list[dict[str, Any]]:
    """Return the messages of the instructions, of the earlier conversation, and of this request's items."""
    reader = ItemReader(earlier.item)
    if asked.instructions:
        reader.say("system", asked.instructions)
    for item in past:
        reader.add(item, "previous_response_id" if asked.conversation is None else "conversation")
    for index, item in enumerate(items):
        reader.add(item, f"input[{index}]")
    if not reader.messages:
        raise invalid("`input` must hold at least one item", "input")
    return reader.messages


def _check_count(items: list[Item]) -> None:
    if len(items) > limits.MAX_MESSAGES:
        raise too_many("input", limits.MAX_MESSAGES, "items")


def _past(asked: ResponsesBody, earlier: Earlier) -> list[Item]:
    """Return the items of the conversation that the request continues, if any."""
    previous_id, conversation_id = asked.previous_response_id, _conversation_id(asked.conversation)
    if previous_id is None and conversation_id is None:
        return []
    if previous_id is not None and conversation_id is not None:
        raise invalid("A request has either `previous_response_id` or `conversation`", "conversation")
    past = earlier.conversation()
    if past is not None:
        return past
    if conversation_id is not None:
        raise conversation_not_found(conversation_id, "conversation")
    assert previous_id is not None
    raise ApiError(
        404,
        f"There is no response {previous_id[:80]!r}: it was never stored, was deleted, or had to make room. "
        "Send the whole conversation in `input`.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def conversation_not_found(conversation_id: str, param: str = "conversation_id") -> ApiError:
    message = f"There is no conversation {conversation_id[:80]!r}: it was never made, was deleted, or had to make room"
    return ApiError(404, message, param=param, code="conversation_not_found")


def _resolved(items: list[Item], earlier: Earlier) -> list[Item]:
    """Return the items with each reference replaced by its item, so that a kept response is whole by itself."""
    return [(earlier.item(item["id"]) or item) if is_reference(item) else item for item in items]


def _read_format(text: TextOptions | None) -> tuple[OutputFormat | None, dict[str, Any]]:
    """Return the form of the answer's text, and the format as the response object repeats it."""
    form = text.format if text is not None else None
    match form:
        case None | {"type": "text"}:
            return None, {"type": "text"}
        case {"type": "json_object"}:
            return OutputFormat("json_object", None, "text.format"), {"type": "json_object"}
        case {"type": "json_schema", "schema": dict(schema)}:
            name, description, strict = form.get("name"), form.get("description"), form.get("strict")
            if not isinstance(name, str) or not name:
                raise missing("text.format.name")
            if not isinstance(description, str | None) or not isinstance(strict, bool | None):
                raise invalid(
                    "`text.format.description` must be a string and `text.format.strict` a boolean", "text.format"
                )
            repeated = {"type": "json_schema", "name": name, "description": description, "schema": schema}
            asked = OutputFormat("json_schema", checked_size(schema, "text.format.schema"), "text.format.schema")
            return asked, {**repeated, "strict": bool(strict)}
        case {"type": "json_schema"}:
            raise invalid("`text.format.schema` must be a JSON schema, an object", "text.format.schema")
        case _:
            raise invalid("`text.format.type` must be text, json_object or json_schema", "text.format.type")


def _repeated(asked: ResponsesBody, tools: ToolSet, sampling: SamplingParams, form: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the response object that repeat the request, with the values in force."""
    reasoning = asked.reasoning or ReasoningOptions()
    verbosity = asked.text.verbosity if asked.text is not None else None
    return {
        "instructions": asked.instructions,
        "previous_response_id": asked.previous_response_id,
        "conversation": None if asked.conversation is None else {"id": _conversation_id(asked.conversation)},
        "store": asked.store is not False,
        "background": bool(asked.background),
        "tools": tools.repeated,
        "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "max_tool_calls": asked.max_tool_calls,
        "max_output_tokens": asked.max_output_tokens,
        "text": {"format": form} if verbosity is None else {"format": form, "verbosity": verbosity},
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": asked.top_logprobs or 0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "truncation": "disabled",
        "metadata": asked.metadata or {},
        "user": asked.user,
        "safety_identifier": asked.safety_identifier,
        "prompt_cache_key": asked.prompt_cache_key,
        "service_tier": "default",
    }


class ConversationBody(msgspec.Struct):
    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class ItemsBody(msgspec.Struct):
    items: list[dict[str, Any]] | None = None


class MetadataBody(msgspec.Struct):
    metadata: dict[str, str] | None = None


class Checked(msgspec.Struct):
    """The items and the metadata of a body that was checked; metadata is JSON of an object."""

    items: list[Item]
    metadata: msgspec.Raw


def parse_conversation(body: bytes) -> Checked:
    """Return the content of a new conversation. Raise ApiError."""
    read, _ = bodies.decode_json(body or b"{}", ConversationBody)
    return _checked(read.items, read.metadata)


def parse_items(body: bytes) -> Checked:
    """Return the items to add. Raise ApiError."""
    read, _ = bodies.decode_json(body, ItemsBody)
    if not read.items:
        raise invalid("`items` must hold at least one item", "items")
    return _checked(read.items, None)


def parse_metadata(body: bytes) -> Checked:
    """Return the new metadata. Raise ApiError."""
    read, _ = bodies.decode_json(body, MetadataBody)
    if read.metadata is None:
        raise missing("metadata")
    return _checked(None, read.metadata)


def _checked(items: list[Item] | None, metadata: dict[str, str] | None) -> Checked:
    items = items or []
    bodies.check_metadata(metadata)
    if len(items) > limits.MAX_MESSAGES:
        raise too_many("items", limits.MAX_MESSAGES, "entries")
    bodies.check_depth(items)
    # Outputs may belong to calls in the conversation.
    calls = {item["call_id"] for item in items if isinstance(item.get("call_id"), str)}
    reader = ItemReader(lambda _: None, calls)
    for index, item in enumerate(items):
        if is_reference(item):
            raise invalid(f"`items[{index}]` must be an item, not a reference to one", f"items[{index}]")
        if not isinstance(item.get("id"), str | None):
            raise invalid(f"`items[{index}].id` must be a string", f"items[{index}].id")
        reader.add(item, f"items[{index}]")
    return Checked(items, msgspec.Raw(msgspec.json.encode(metadata or {})))
