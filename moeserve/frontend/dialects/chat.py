"""The dialect of `/v1/chat/completions`: reads its requests into internal ones, writes internal answers as its own."""

from __future__ import annotations

from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects import fields
from moeserve.frontend.dialects.fields import EventWriter, finite
from moeserve.frontend.dialects.internal import (
    ChatPrompt,
    Delta,
    GenerateRequest,
    ModelFacts,
    TokenText,
    ToolCallPart,
    Usage,
)
from moeserve.frontend.http import KEEP_ALIVE, ApiError, invalid, unsupported
from moeserve.frontend.templates import ALLOWED_TEMPLATE_KWARGS
from moeserve.frontend.text import TextTokenizer

ROLES = frozenset({"system", "developer", "user", "assistant"})
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh"})
_NO_TOOLS = frozenset({b"", b"null", b"[]"})


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"")
    function_call: msgspec.Raw = msgspec.Raw(b"")


class ChatBody(fields.SamplingBody, kw_only=True):
    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


def parse(body: bytes, model: ModelFacts) -> GenerateRequest:
    """Return the internal request. Raises ApiError with the status that the client gets."""
    chat, ignored = fields.decode_json(body, ChatBody)
    name = fields.check_model(chat.model, model)
    logprobs = _logprobs(chat, model)
    stream, include_usage, continuous_usage = fields.read_stream_options(chat)
    limit_name = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    return GenerateRequest(
        model=name,
        prompts=[read_chat_prompt(chat)],
        sampling=fields.read_sampling(chat, model, logprobs),
        max_tokens=fields.read_count(limit_name, getattr(chat, limit_name)),
        seed=fields.read_seed(chat.seed),
        n=fields.read_n(chat),
        stop=fields.read_stop(chat.stop),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        priority=fields.read_priority(chat),
        cache_salt=fields.read_cache_salt(chat.cache_salt),
        cache=fields.read_cache(chat),
        ignored=ignored,
    )


def read_chat_prompt(chat: ChatBody) -> ChatPrompt:
    """Return the messages and template variables of a body. Raises ApiError."""
    if not chat.messages:
        raise invalid("`messages` must hold at least one message", "messages")
    if len(chat.messages) > limits.MAX_MESSAGES:
        raise invalid(f"`messages` takes at most {limits.MAX_MESSAGES} messages", "messages")
    return ChatPrompt(
        messages=[_message(message, f"messages[{index}]") for index, message in enumerate(chat.messages)],
        add_generation_prompt=chat.add_generation_prompt is not False,
        variables=_variables(chat),
    )


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role in ("tool", "function"):
        raise unsupported(f"{where}.role", message.role)
    if message.role not in ROLES:
        raise invalid(f"`{where}.role` must be one of {', '.join(sorted(ROLES))}", f"{where}.role")
    for name in ("tool_calls", "function_call"):
        if bytes(getattr(message, name)).strip() not in _NO_TOOLS:
            raise unsupported(f"{where}.{name}")
    if message.content is None and message.role != "assistant":
        raise invalid(f"`{where}.content` is required", f"{where}.content")
    plain = {"role": message.role, "content": _content_text(message.content, where)}
    return plain if message.name is None else {**plain, "name": message.name}


def _content_text(content: str | list[ContentPart] | None, where: str) -> str:
    """Return the text of a message's content. Parts are joined by a newline, so that no two words merge."""
    if content is None or isinstance(content, str):
        return content or ""
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise invalid(f"`{where}.content` takes at most {limits.MAX_CONTENT_PARTS} parts", f"{where}.content")
    texts = []
    for index, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text"):
            raise unsupported(f"{where}.content[{index}].type", part.type[:40])
        if part.text is None:
            raise invalid(f"`{where}.content[{index}].text` is required", f"{where}.content[{index}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _variables(chat: ChatBody) -> dict[str, Any]:
    variables = dict(chat.chat_template_kwargs or {})
    for name, value in variables.items():
        param = f"chat_template_kwargs.{name[:60]}"
        if name not in ALLOWED_TEMPLATE_KWARGS:
            raise unsupported(param)
        if not isinstance(value, bool | int | str):
            raise invalid(f"`{param}` must be a boolean, a whole number or a string", param)
    if chat.reasoning_effort is not None:
        if chat.reasoning_effort not in _EFFORTS:
            raise invalid(f"`reasoning_effort` must be one of {', '.join(sorted(_EFFORTS))}", "reasoning_effort")
        variables.setdefault("reasoning_effort", chat.reasoning_effort)
    return variables


def _logprobs(chat: ChatBody, model: ModelFacts) -> int | None:
    if chat.top_logprobs and not chat.logprobs:
        raise invalid("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    if not chat.logprobs:
        return None
    return fields.read_logprobs("top_logprobs", chat.top_logprobs or 0, model)


def _message_of(choice: Delta) -> dict[str, Any]:
    """Return a whole answer's message. Its content is null where there are calls and no text."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.text if choice.text or not choice.calls else None,
        "refusal": None,
        "annotations": [],
    }
    if choice.reasoning:
        message |= {"reasoning": choice.reasoning, "reasoning_content": choice.reasoning}
    if choice.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return message


def _new_parts(delta: Delta) -> dict[str, Any]:
    """Return the `delta` of an event. A call's id, type and name come once."""
    parts: dict[str, Any] = {}
    if delta.reasoning:
        parts |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
    if delta.text or (delta.tokens and not delta.reasoning and not delta.calls):
        parts["content"] = delta.text
    if delta.calls:
        parts["tool_calls"] = [_call_part(part) for part in delta.calls]
    return parts


def _call_part(part: ToolCallPart) -> dict[str, Any]:
    if part.name:
        function = {"name": part.name, "arguments": part.arguments}
        return {"index": part.place, "id": part.call_id, "type": "function", "function": function}
    return {"index": part.place, "function": {"arguments": part.arguments}}


class ChatFormatter:
    """Writes answers in this dialect."""

    def __init__(
        self, answer_id: str, created: int, request: GenerateRequest, tokenizer: TextTokenizer, fingerprint: str
    ) -> None:
        self._head = {"id": answer_id, "object": "chat.completion", "created": created, "model": request.model}
        self._fingerprint = fingerprint
        self._tokenizer = tokenizer
        self._wants_logprobs = request.sampling.logprobs is not None
        chunk = {**self._head, "object": "chat.completion.chunk", "system_fingerprint": fingerprint}
        self._events = EventWriter(chunk, request)

    def start(self, index: int, usage: Usage) -> bytes:
        return self._events.choice(index, b'"delta":{"role":"assistant","content":""}')

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        content = b'"delta":' + msgspec.json.encode(_new_parts(delta))
        logprobs = msgspec.json.encode(self._logprobs(delta.tokens)) if delta.tokens else b"null"
        return self._events.choice(delta.index, content, logprobs, delta.finish_reason, usage)

    def end(self, usage: Usage) -> bytes:
        return self._events.end(usage)

    def error(self, error: ApiError) -> bytes:
        return error.event()

    def ping(self) -> bytes:
        return KEEP_ALIVE

    def complete(self, choices: list[Delta], usage: Usage) -> bytes:
        return msgspec.json.encode(
            {
                **self._head,
                "choices": [
                    {
                        "index": choice.index,
                        "message": _message_of(choice),
                        "logprobs": self._logprobs(choice.tokens) if self._wants_logprobs else None,
                        "finish_reason": choice.finish_reason,
                    }
                    for choice in choices
                ],
                "usage": fields.openai_usage(usage),
                "system_fingerprint": self._fingerprint,
            }
        )

    def _logprobs(self, tokens: list[TokenText]) -> dict[str, Any]:
        return {"content": [self._token(token) for token in tokens], "refusal": None}

    def _token(self, token: TokenText) -> dict[str, Any]:
        logprobs = token.logprobs
        entry = self._alternative(token.token_id, logprobs.logprob if logprobs else 0.0)
        top = [self._alternative(token_id, logprob) for token_id, logprob in (logprobs.top if logprobs else ())]
        return {**entry, "top_logprobs": top}

    def _alternative(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}
