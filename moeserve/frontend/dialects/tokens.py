"""The bodies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects import fields
from moeserve.frontend.dialects.chat import ChatBody, read_chat_prompt
from moeserve.frontend.dialects.internal import ChatPrompt, ModelFacts
from moeserve.frontend.http import invalid, unsupported


class TokenizeBody(ChatBody, kw_only=True):
    prompt: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


def parse_tokenize(data: bytes, model: ModelFacts) -> TokenizeBody | ChatPrompt:
    """Return a body with a `prompt` of bounded length, or the conversation of one with `messages`. Raises ApiError."""
    body, _ = fields.decode_json(data, TokenizeBody)
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
    body, _ = fields.decode_json(data, DetokenizeBody)
    if body.model is not None:
        fields.check_model(body.model, model)
    num_tokens = len(body.tokens)
    if num_tokens > limits.MAX_CONVERTED_TOKENS:
        raise invalid(f"`tokens` has {num_tokens} entries; at most {limits.MAX_CONVERTED_TOKENS}", "tokens")
    return fields.check_token_ids("tokens", body.tokens, model.vocab_size)
