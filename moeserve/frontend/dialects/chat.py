"""The dialect of `/v1/chat/completions`: reads its requests into internal ones, writes internal answers as its own.

Bodies of routes that generate no answer have the fields of a chat's prompt: prefixes for the prompt cache, texts and
tokens to convert. Warming is a generation of one token, with a formatter of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies, fields, internal
from moeserve.frontend.dialects.chat_calls import ChatCalls
from moeserve.frontend.dialects.chat_parts import (
    ChatMessage,
    check_choice,
    check_tools,
    make_tool,
    read_breakpoints,
    read_messages,
)
from moeserve.frontend.dialects.completions import SearchBody, read_beams, read_search_request
from moeserve.frontend.dialects.custom_tools import make_custom_tool
from moeserve.frontend.dialects.fields import read_cache_salt
from moeserve.frontend.dialects.internal import (
    CacheOptions,
    ChatPrompt,
    Delta,
    Formatter,
    GenerateRequest,
    ModelFacts,
    TokenText,
    Tool,
    ToolChoice,
    Usage,
    Writing,
)
from moeserve.frontend.errors import invalid, missing, too_long, too_many, unsupported
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import PromptProgress, SamplingParams

# The variables that only fields of their own, or no fields, set.
_RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)
_CHOICES = ("none", "auto", "required")


class FunctionBody(msgspec.Struct):
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomBody(msgspec.Struct):
    name: str | None = None
    description: str | None = None
    format: dict[str, Any] | None = None


class ToolBody(msgspec.Struct):
    type: str = "function"
    function: FunctionBody | None = None
    custom: CustomBody | None = None


class ChatBody(SearchBody, kw_only=True):
    messages: list[ChatMessage] | None = None
    max_completion_tokens: fields.Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionBody] | None = None
    function_call: str | dict[str, Any] | None = None


class _Repeated(msgspec.Struct):
    """custom: the names of custom tools."""

    is_legacy: bool = False
    custom: list[str] = []


def parse(body: bytes, model: ModelFacts) -> GenerateRequest:
    """Return the internal request. Raise ApiError with the status that the client gets."""
    chat, ignored = fields.read_body(body, ChatBody, model)
    return read_chat_request(chat, read_chat_prompt(chat), model, ignored=ignored)


def read_chat_request(chat: ChatBody, prompt: ChatPrompt, model: ModelFacts, **own: Any) -> GenerateRequest:
    """Return the request of a body. Raise ApiError. prompt: of the body. own: see `fields.read_request`."""
    logprobs = _logprobs(chat, model)
    if chat.echo and not prompt.continue_final:
        raise invalid("`echo` needs `continue_final_message`: it repeats the text that the answer continues", "echo")
    is_legacy = bool(chat.functions)
    beams = read_beams(chat, logprobs)
    if beams is None and chat.best_of not in (None, 1):
        raise unsupported("best_of")
    return read_search_request(
        chat,
        model,
        [prompt],
        chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens,
        fields.read_sampling(chat, model, logprobs),
        beams=beams,
        n=chat.n or 1,
        cache=read_cache(chat),
        thought=fields.read_thought(chat, chat.reasoning_effort),
        tools=prompt.tools,
        tool_choice=_tool_choice(chat, prompt.tools),
        parallel_tool_calls=chat.parallel_tool_calls is not False and not is_legacy,
        repeated=msgspec.json.encode(_Repeated(is_legacy, _custom_names(chat))),
        **own,
    )


def read_cache(chat: ChatBody) -> CacheOptions:
    """Return the settings for the prompt cache in a body and in the marks of its messages. Raise ApiError."""
    options = fields.read_cache(chat)
    breakpoints = read_breakpoints(chat.messages, chat.prompt_cache_options)
    return replace(options, breakpoints=breakpoints) if breakpoints else options


def read_chat_prompt(chat: ChatBody) -> ChatPrompt:
    """Return the messages, tools and template variables of a body. Raise ApiError."""
    messages = read_messages(chat.messages)
    continues = bool(chat.continue_final_message)
    if continues and chat.add_generation_prompt:
        raise invalid(
            "`continue_final_message` and `add_generation_prompt` cannot both be true", "continue_final_message"
        )
    if continues and messages[-1]["role"] != "assistant":
        raise invalid("`continue_final_message` needs an assistant's message at the end", "continue_final_message")
    variables, switches = _variables(chat)
    return ChatPrompt(
        messages=messages,
        add_generation_prompt=chat.add_generation_prompt is not False and not continues,
        variables=variables,
        tools=_tools(chat),
        continue_final=continues,
        switches=switches,
    )


def _tools(chat: ChatBody) -> tuple[Tool, ...]:
    """Return the functions of `tools`, or of `functions`, which is its older name."""
    if chat.functions and chat.tools:
        raise invalid("Give `tools` or `functions`, not both", "functions")
    made = [(_tool(tool, f"tools[{index}]"), f"tools[{index}]") for index, tool in enumerate(chat.tools or ())]
    for index, function in enumerate(chat.functions or ()):
        made.append((_function(function, f"functions[{index}]"), f"functions[{index}]"))
    return check_tools(made, "functions" if chat.functions else "tools")


def _tool(tool: ToolBody, where: str) -> Tool:
    if tool.type not in ("function", "custom"):
        raise unsupported(f"{where}.type", tool.type[:40])
    where = f"{where}.{tool.type}"
    if tool.type == "custom" and tool.custom is not None:
        body = tool.custom
        return make_custom_tool(body.name, body.description, body.format, where, limits.MAX_CHAT_TOOL_NAME_CHARS)
    if tool.type == "custom" or tool.function is None:
        raise missing(where)
    return _function(tool.function, where)


def _function(body: FunctionBody, where: str) -> Tool:
    longest = limits.MAX_CHAT_TOOL_NAME_CHARS
    return make_tool(body.name, body.description, body.parameters, body.strict, where, longest)


def _custom_names(chat: ChatBody) -> list[str]:
    return [str(tool.custom.name) for tool in chat.tools or () if tool.type == "custom" and tool.custom is not None]


def _tool_choice(chat: ChatBody, tools: tuple[Tool, ...]) -> ToolChoice:
    where, asked = ("function_call", chat.function_call) if chat.functions else ("tool_choice", chat.tool_choice)
    if not chat.functions and chat.function_call not in (None, "none", "auto"):
        raise invalid("`function_call` needs `functions`", "function_call")
    if asked is None:
        return ToolChoice()
    known = {tool.name for tool in tools}
    if isinstance(asked, str):
        if asked not in _CHOICES or (chat.functions and asked == "required"):
            raise invalid(f"`{where}` must be one of {', '.join(_CHOICES)}, or name a tool", where)
        mode: Any = asked
        return check_choice(ToolChoice(mode), known, where)
    if chat.functions:
        return check_choice(ToolChoice("required", (_name_in(asked, where),)), known, where)
    match asked.get("type"):
        case "function" | "custom":
            return check_choice(ToolChoice("required", (_named_tool(asked, where),)), known, where)
        case "allowed_tools":
            return check_choice(_allowed_tools(asked.get("allowed_tools"), where), known, where)
        case other:
            raise unsupported(f"{where}.type", str(other)[:40])


def _allowed_tools(allowed: Any, where: str) -> ToolChoice:
    where = f"{where}.allowed_tools"
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
        raise invalid(f"`{where}` must hold `mode` and `tools`", where)
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise invalid(f"`{where}.mode` must be auto or required", f"{where}.mode")
    names = [_named_tool(entry, f"{where}.tools[{index}]") for index, entry in enumerate(allowed["tools"])]
    return ToolChoice(mode, tuple(dict.fromkeys(names)))


def _named_tool(choice: Any, where: str) -> str:
    """Return the name in `{"type": "function", "function": {"name": ...}}`, or of a custom tool alike."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("function", "custom"):
        raise invalid(f"`{where}` must be a choice of type function or custom", where)
    return _name_in(choice.get(kind), f"{where}.{kind}")


def _name_in(function: Any, where: str) -> str:
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise missing(f"{where}.name")
    return name


def _variables(chat: ChatBody) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Return the variables for the template, switches, numbers and texts under any name that is not taken, and the
    fields that set them (`ChatPrompt.switches`)."""
    asked = chat.chat_template_kwargs or {}
    if len(asked) > limits.MAX_TEMPLATE_VARIABLES:
        most = limits.MAX_TEMPLATE_VARIABLES
        raise too_many("chat_template_kwargs", most, "entries")
    variables: dict[str, Any] = {}
    switches: dict[str, tuple[str, ...]] = {}
    for name, value in asked.items():
        param = f"chat_template_kwargs.{name[:60]}"
        if name in _RESERVED_VARIABLES or not name.isidentifier():
            raise unsupported(param)
        if not isinstance(value, bool | int | float | str | None):
            raise invalid(f"`{param}` must be a boolean, a number or a string", param)
        if isinstance(value, str) and len(value) > limits.MAX_TEMPLATE_VARIABLE_CHARS:
            raise too_long(param, limits.MAX_TEMPLATE_VARIABLE_CHARS, "characters")
        if value is not None:
            variables[name] = value
            switches[param] = (name,)
    if (effort := fields.read_effort("reasoning_effort", chat.reasoning_effort)) is not None:
        # Templates of models that can answer without reasoning know one of these two switches.
        wanted = {fields.EFFORT: effort} | ({"enable_thinking": False, "thinking": False} if effort == "none" else {})
        variables = {**wanted, **variables}
        switches["reasoning_effort"] = tuple(wanted)
    return variables, switches


def _logprobs(chat: ChatBody, model: ModelFacts) -> int | None:
    if chat.top_logprobs and not chat.logprobs:
        raise invalid("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    if not chat.logprobs:
        return None
    return fields.read_logprobs("top_logprobs", chat.top_logprobs or 0, model)


def _message_of(choice: Delta, calls: ChatCalls) -> dict[str, Any]:
    """Return a whole answer's message. Its content is null where there are calls and no text."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.text if choice.text or not choice.calls else None,
        "refusal": None,
        "annotations": [],
    }
    if choice.reasoning:
        message |= {"reasoning": choice.reasoning, "reasoning_content": choice.reasoning}
    return message | calls.whole(choice.calls)


def _new_parts(delta: Delta, calls: ChatCalls) -> dict[str, Any]:
    """Return the `delta` of an event."""
    parts: dict[str, Any] = {}
    if delta.reasoning:
        parts |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
    if delta.text or (delta.tokens and not delta.reasoning and not delta.calls):
        parts["content"] = delta.text
    return parts | calls.parts(delta)


def _finish(delta: Delta, calls: ChatCalls) -> str | None:
    return "function_call" if calls.is_legacy and delta.finish_reason == "tool_calls" else delta.finish_reason


class ChatFormatter(Formatter):
    """Writes answers in this dialect."""

    def __init__(
        self, answer_id: str, created: int, request: GenerateRequest, tokenizer: TextTokenizer, fingerprint: str
    ) -> None:
        self._head = {"id": answer_id, "object": "chat.completion", "created": created, "model": request.model}
        self._fingerprint = fingerprint
        self._tokenizer = tokenizer
        self._wants_logprobs = request.sampling.logprobs is not None
        self._wants_prompt = request.prompt_logprobs is not None
        self._has_ids = request.returns_token_ids
        repeated = msgspec.json.decode(request.repeated, type=_Repeated)
        self._calls = ChatCalls(is_legacy=repeated.is_legacy, custom=frozenset(repeated.custom))
        chunk = {**self._head, "object": "chat.completion.chunk", "system_fingerprint": fingerprint}
        self._events = internal.EventWriter(chunk, request)
        self._has_begun = False

    def start(self, index: int, usage: Usage) -> bytes:
        before = usage if self._has_begun else internal.Usage(usage.prompt_tokens, cached_tokens=usage.cached_tokens)
        self._has_begun = True
        return self._events.choice(index, b'"delta":{"role":"assistant","content":""}', usage=before)

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        content = b'"delta":' + msgspec.json.encode(_new_parts(delta, self._calls))
        logprobs = msgspec.json.encode(self._logprobs(delta.tokens)) if delta.tokens else b"null"
        beside = b""
        if self._has_ids:
            content += b',"token_ids":' + msgspec.json.encode(delta.token_ids)
            if delta.prompt_token_ids is not None:
                beside = b',"prompt_token_ids":' + msgspec.json.encode(delta.prompt_token_ids)
        return self._events.choice(delta.index, content, logprobs, _finish(delta, self._calls), usage, beside)

    def progress(self, index: int, progress: PromptProgress) -> bytes:
        return self._events.progress(index, b'"delta":{}', progress)

    def end(self, usage: Usage) -> bytes:
        return self._events.end(usage)

    def complete(self, choices: list[Delta], usage: Usage) -> Writing:
        extra: dict[str, Any] = {"prompt_token_ids": choices[0].prompt_token_ids} if self._has_ids else {}
        if self._wants_prompt:
            extra["prompt_logprobs"] = yield from internal.prompt_logprobs(choices[0].prompt, self._tokenizer)
        logprobs: list[dict[str, Any] | None] = []
        for choice in choices:
            if self._wants_logprobs:
                content = yield from internal.written(choice.tokens, self._token)
                logprobs.append({"content": content, "refusal": None})
            else:
                logprobs.append(None)
        return msgspec.json.encode(
            {
                **self._head,
                "choices": [
                    {
                        "index": choice.index,
                        "message": _message_of(choice, self._calls),
                        "logprobs": found,
                        "finish_reason": _finish(choice, self._calls),
                        **({"token_ids": choice.token_ids} if self._has_ids else {}),
                    }
                    for choice, found in zip(choices, logprobs, strict=True)
                ],
                "usage": internal.openai_usage(usage),
                "system_fingerprint": self._fingerprint,
                **usage.handed_over,
                **extra,
            }
        )

    def _logprobs(self, tokens: list[TokenText]) -> dict[str, Any]:
        return {"content": [self._token(token) for token in tokens], "refusal": None}

    def _token(self, token: TokenText) -> dict[str, Any]:
        return internal.logprob_entry(token, self._tokenizer)


# The fields of a body that have an effect: fields that render messages, and by route the fields beside the prefix.
MESSAGE_FIELDS = frozenset(
    {
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "functions",
        "messages",
        "reasoning_effort",
        "tools",
    }
)
PUBLIC_FIELDS = frozenset({"model"})
PIN_FIELDS = PUBLIC_FIELDS | {"cache_salt"}
WARM_FIELDS = PIN_FIELDS | {
    "cache_report",
    "priority",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
}


class PrefixBody(ChatBody, kw_only=True):
    """A prefix: the messages of a chat (with the fields that change how they are rendered), a text, or token ids.

    The other fields of a chat may ask for nothing (`check_prefix`).
    """

    prompt: str | list[int] | None = None


class PinBody(PrefixBody, kw_only=True):
    """id: of the listing, in place of a prefix."""

    id: str | None = None


def check_prefix(body: PrefixBody, others: Collection[str]) -> None:
    """Raise ApiError unless the body has one prefix, and beside it asks for nothing but in the fields `others`."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Give either `prompt` or `messages`", "prompt")
    prefix_fields = MESSAGE_FIELDS if body.prompt is None else {"prompt"}
    for name in body.__struct_fields__:
        if name not in prefix_fields and name not in others and _asks(name, getattr(body, name)):
            raise invalid(f"`{name}` has no effect on a prefix here: leave it out", name, "unsupported_parameter")


def _asks(name: str, value: Any) -> bool:
    """Return whether a field asks for something other than its default, which bodies made for a chat may state."""
    if name in ("function_call", "tool_choice"):
        return value not in (None, "auto", "none")
    return not (value is None or value is False or value in ([], {}) or (name == "n" and value == 1))


def read_prefix(body: PrefixBody, model: ModelFacts) -> ChatPrompt | str | list[int]:
    """Return the prefix of a checked body; messages without the head of an answer, unless the client asks for it."""
    fields.served_model(body.model, model)
    if body.prompt is None:
        return replace(read_chat_prompt(body), add_generation_prompt=body.add_generation_prompt is True)
    if not body.prompt:
        raise invalid("`prompt` must not be empty", "prompt")
    return (
        body.prompt if isinstance(body.prompt, str) else fields.check_token_ids("prompt", body.prompt, model.vocab_size)
    )


def parse_warm(body: bytes, model: ModelFacts) -> GenerateRequest:
    """Return a request that computes a prefix and samples one token, which nobody sees. Raise ApiError."""
    prefix, ignored = bodies.decode_json(body, PrefixBody)
    check_prefix(prefix, WARM_FIELDS)
    return GenerateRequest(
        model=fields.served_model(prefix.model, model),
        prompts=[read_prefix(prefix, model)],
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        max_tokens=1,
        seed=0,
        priority=prefix.priority or 0,
        cache_salt=read_cache_salt(prefix.cache_salt),
        cache=read_cache(prefix),
        ignored=ignored,
    )


class WarmFormatter(Formatter):
    """Writes how much of the prefix was cached before. Its answers are never streamed."""

    def __init__(
        self, answer_id: str, created: int, request: GenerateRequest, tokenizer: TextTokenizer, fingerprint: str
    ) -> None:
        self._head = {"id": answer_id, "object": "cache.warm", "created": created, "model": request.model}

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        return b""

    def end(self, usage: Usage) -> bytes:
        return b""

    def complete(self, choices: list[Delta], usage: Usage) -> Writing:
        yield from ()
        counts: dict[str, Any] = {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
        return msgspec.json.encode({**self._head, **counts, **usage.extensions})


class TokenizeBody(ChatBody, kw_only=True):
    prompt: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


def parse_tokenize(data: bytes, model: ModelFacts) -> TokenizeBody | ChatPrompt:
    """Return a body with a `prompt` of bounded length, or the conversation of one with `messages`. Raise ApiError."""
    body, _ = bodies.decode_json(data, TokenizeBody)
    fields.served_model(body.model, model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Give either `prompt` or `messages`", "prompt")
    if body.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens")
    if body.messages is not None:
        return read_chat_prompt(body)
    num_chars = len(body.prompt or "")
    if num_chars > limits.MAX_TOKENIZE_CHARS:
        raise invalid(f"`prompt` has {num_chars} characters; at most {limits.MAX_TOKENIZE_CHARS}", "prompt")
    return body


def parse_detokenize(data: bytes, model: ModelFacts) -> list[int]:
    """Return the token ids of a body, all of them in the vocabulary. Raise ApiError."""
    body, _ = bodies.decode_json(data, DetokenizeBody)
    fields.served_model(body.model, model)
    num_tokens = len(body.tokens)
    if num_tokens > limits.MAX_CONVERTED_TOKENS:
        raise invalid(f"`tokens` has {num_tokens} entries; at most {limits.MAX_CONVERTED_TOKENS}", "tokens")
    return fields.check_token_ids("tokens", body.tokens, model.vocab_size)
