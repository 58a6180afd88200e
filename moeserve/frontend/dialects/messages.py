"""The dialect of `/v1/messages` and `/v1/messages/count_tokens`: reads requests into internal ones.

`messages_answer` writes.
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
from moeserve.frontend.dialects.chat_parts import call_in_history, check_choice, check_tools, make_tool
from moeserve.frontend.dialects.fields import read_cache
from moeserve.frontend.dialects.formats import checked_size, refuse_formats
from moeserve.frontend.dialects.internal import (
    CacheOptions,
    ChatPrompt,
    GenerateRequest,
    ModelFacts,
    OutputFormat,
    ThoughtOptions,
    Tool,
    ToolChoice,
)
from moeserve.frontend.dialects.messages_answer import Repeated, call_id_of
from moeserve.frontend.errors import invalid, unsupported

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
    """Return the internal request. Raises ApiError with the status that the client gets."""
    asked, ignored = fields.read_body(body, MessagesBody, model)
    if asked.max_tokens is None:
        raise invalid("`max_tokens` is required", "max_tokens")
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
    """Return the prompt of a request to count its tokens: the very one that `parse` gives. Raises ApiError."""
    asked, _ = fields.read_body(body, MessagesBody, model)
    if asked.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens")
    return _read_prompt(asked)[0]


# (number of the prompt's leading messages, seconds), see `CacheOptions`.
Breakpoints = list[tuple[int, float]]


def _read_prompt(asked: MessagesBody) -> tuple[ChatPrompt, Breakpoints, tuple[str, ...]]:
    """Return the prompt, the ends of its marked parts, and the types of the tools that were dropped. Raises ApiError.

    A mark inside a turn counts at the turn's end.
    """
    _refuse_what_is_not_served(asked)
    if not asked.messages:
        raise invalid("`messages` must hold at least one message", "messages")
    if len(asked.messages) > limits.MAX_MESSAGES:
        raise invalid(f"`messages` takes at most {limits.MAX_MESSAGES} messages", "messages")
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
        # Keeping all of the thinking is no edit at all.
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
    return CacheOptions(seconds, tuple(breakpoints), options.report, options.key)


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
        raise invalid(f"`{where}{field}` takes at most {limits.MAX_CONTENT_PARTS} blocks", where + field)
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
        raise invalid(f"`{path}` is required", path)
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
    text = _joined(_blocks(block.content or "", path))
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"  # templates have no other place to say so
    return {"role": "tool", "tool_call_id": call_id_of(call_id), "content": text}


def _assistant_message(blocks: list[tuple[str, Block]]) -> dict[str, Any]:
    """Return the one message of an assistant's turn."""
    said, thoughts, calls = [], [], []
    for path, block in blocks:
        if block.type == "thinking":
            thoughts.append(_required(block.thinking, f"{path}.thinking"))
        elif block.type == "tool_use":
            calls.append(_call(path, block))
        elif block.type != "redacted_thinking":  # which nobody but its vendor can read
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
            raise invalid(f"`{path}.input_schema` is required", f"{path}.input_schema")
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
        raise invalid(f"`{path}.schema` is required", f"{path}.schema")
    return OutputFormat("json_schema", checked_size(wanted.schema, f"{path}.schema"), f"{path}.schema")
