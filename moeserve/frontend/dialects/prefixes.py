"""The bodies of routes that generate no answer: prefixes for the prompt cache, texts and tokens to convert.

They have the fields of a chat's prompt. Warming is a generation of one token, with a formatter of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies, fields
from moeserve.frontend.dialects.chat import ChatBody, read_cache, read_chat_prompt
from moeserve.frontend.dialects.fields import read_cache_salt
from moeserve.frontend.dialects.internal import (
    ChatPrompt,
    Delta,
    Formatter,
    GenerateRequest,
    ModelFacts,
    Usage,
    Writing,
)
from moeserve.frontend.errors import invalid, unsupported
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import SamplingParams

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


class UnpinBody(PrefixBody, kw_only=True):
    """id: of the listing, in place of a prefix."""

    id: str | None = None


def check_prefix(body: PrefixBody, others: Collection[str]) -> None:
    """Raise ApiError unless the body has one prefix, and beside it asks for nothing but in the fields `others`."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Give either `prompt` or `messages`", "prompt")
    prefix_fields = MESSAGE_FIELDS if body.prompt is None else {"prompt"}
    for name in body.__struct_fields__:
        if name not in prefix_fields and name not in others and _asks(name, getattr(body, name)):
            raise invalid(f"`{name}` has no effect on a prefix here: leave it out", name)


def _asks(name: str, value: Any) -> bool:
    """Return whether a field asks for something. Bodies made for a chat may state defaults."""
    if name in ("function_call", "tool_choice"):
        return value not in (None, "auto", "none")
    return not (value is None or value is False or value in ([], {}) or (name == "n" and value == 1))


def read_prefix(body: PrefixBody, model: ModelFacts) -> ChatPrompt | str | list[int]:
    """Return the prefix of a checked body; messages without the head of an answer, unless the client asks for it."""
    if body.model is not None:
        fields.check_model(body.model, model)
    if body.prompt is None:
        return replace(read_chat_prompt(body), add_generation_prompt=body.add_generation_prompt is True)
    if not body.prompt:
        raise invalid("`prompt` must not be empty", "prompt")
    return (
        body.prompt if isinstance(body.prompt, str) else fields.check_token_ids("prompt", body.prompt, model.vocab_size)
    )


def parse_warm(body: bytes, model: ModelFacts) -> GenerateRequest:
    """Return a request that computes a prefix and samples one token, which nobody sees. Raises ApiError."""
    prefix, ignored = bodies.decode_json(body, PrefixBody)
    check_prefix(prefix, WARM_FIELDS)
    return GenerateRequest(
        model=prefix.model or model.names[0],
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
    """Return a body with a `prompt` of bounded length, or the conversation of one with `messages`. Raises ApiError."""
    body, _ = bodies.decode_json(data, TokenizeBody)
    if body.model is not None:
        fields.check_model(body.model, model)
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
    """Return the token ids of a body, all of them in the vocabulary. Raises ApiError."""
    body, _ = bodies.decode_json(data, DetokenizeBody)
    if body.model is not None:
        fields.check_model(body.model, model)
    num_tokens = len(body.tokens)
    if num_tokens > limits.MAX_CONVERTED_TOKENS:
        raise invalid(f"`tokens` has {num_tokens} entries; at most {limits.MAX_CONVERTED_TOKENS}", "tokens")
    return fields.check_token_ids("tokens", body.tokens, model.vocab_size)
