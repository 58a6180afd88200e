"""The dialect of `/v1/completions`: reads its requests into internal ones, writes internal answers as its own."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies, fields, writing
from moeserve.frontend.dialects.internal import (
    ChatPrompt,
    Delta,
    Formatter,
    GenerateRequest,
    ModelFacts,
    TokenText,
    Usage,
    Writing,
)
from moeserve.frontend.dialects.search import SearchBody, read_beams, read_search_request
from moeserve.frontend.errors import ApiError, invalid
from moeserve.frontend.text import TextTokenizer

DEFAULT_MAX_TOKENS = 16


class CompletionBody(SearchBody, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: fields.TokensOrNone | None = None
    logprobs: int | None = None


class _Repeated(msgspec.Struct):
    logprobs: int | None = None


def parse(body: bytes, model: ModelFacts) -> GenerateRequest:
    """Return the internal request. Raises ApiError with the status that the client gets."""
    completion, ignored = fields.read_body(body, CompletionBody, model)
    asked, echo = completion.logprobs, bool(completion.echo)
    logprobs = None if asked is None else fields.read_logprobs("logprobs", asked, model)
    # Without output tokens an answer is about its prompt alone.
    shows_prompt = echo or fields.read_prompt_logprobs(completion, model) is not None
    if completion.max_tokens == 0 and not shows_prompt:
        bodies.bounded("max_tokens", 0, 1, limits.MAX_TOKENS)
    beams = read_beams(completion, logprobs)
    if beams is not None and echo and logprobs is not None:
        raise invalid("`echo` with `logprobs` cannot be used together with `use_beam_search`", "echo")
    n, best = _read_best(completion) if beams is None else (beams.num_answers, None)
    request = read_search_request(
        completion,
        model,
        read_prompts(completion.prompt, model.vocab_size),
        completion.max_tokens,
        fields.read_sampling(completion, model, 0 if best and logprobs is None else logprobs, echo),
        ignored=ignored,
        beams=beams,
        n=n,
        thought=fields.read_thought(completion),
        best=best,
        repeated=msgspec.json.encode(_Repeated(logprobs)),
    )
    return request if request.max_tokens is not None else replace(request, max_tokens=DEFAULT_MAX_TOKENS)


def _read_best(completion: CompletionBody) -> tuple[int, int | None]:
    """Return how many samples to draw, and how many of them to give, None for all. Raises ApiError."""
    n, best_of = completion.n or 1, completion.best_of
    if best_of is None or best_of == n:
        return n, None
    if best_of < n:
        raise invalid(f"`best_of` must be at least `n` and at most {limits.MAX_N}", "best_of")
    if completion.stream:
        raise invalid("`best_of` cannot be streamed: the best are known at the end", "best_of")
    return best_of, n


def read_prompts(
    prompt: str | list[str | int | list[int]] | None, vocab_size: int
) -> list[ChatPrompt | str | list[int]]:
    """Return the prompts of a body: one text, several, one list of ids, or several. Raises ApiError."""
    if prompt is None:
        raise invalid("`prompt` is required", "prompt")
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise _empty()
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise invalid("`prompt` must hold either texts, or token ids, or lists of token ids", "prompt")
    if kinds == {int}:
        prompt = [[item for item in prompt if isinstance(item, int)]]
    if len(prompt) > limits.MAX_PROMPTS:
        raise invalid(f"`prompt` takes at most {limits.MAX_PROMPTS} prompts", "prompt")
    prompts: list[ChatPrompt | str | list[int]] = []
    for item in prompt:
        if not item:
            raise _empty()
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list):
            prompts.append(fields.check_token_ids("prompt", item, vocab_size))
    return prompts


def _empty() -> ApiError:
    return invalid("`prompt` must not be empty", "prompt")


class CompletionFormatter(Formatter):
    """Writes answers in this dialect."""

    def __init__(
        self, answer_id: str, created: int, request: GenerateRequest, tokenizer: TextTokenizer, fingerprint: str
    ) -> None:
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": created,
            "model": request.model,
            "system_fingerprint": fingerprint,
        }
        self._events = writing.EventWriter(self._head, request)
        self._tokenizer = tokenizer
        self._num_top = msgspec.json.decode(request.repeated, type=_Repeated).logprobs
        self._wants_prompt = request.prompt_logprobs is not None

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        text = b'"text":' + msgspec.json.encode(delta.text)
        logprobs = msgspec.json.encode(self._logprobs(delta.tokens)) if delta.tokens else b"null"
        return self._events.choice(delta.index, text, logprobs, delta.finish_reason, usage)

    def end(self, usage: Usage) -> bytes:
        return self._events.end(usage)

    def complete(self, choices: list[Delta], usage: Usage) -> Writing:
        written = []
        for choice in choices:
            logprobs = None if self._num_top is None else (yield from self._written(choice.tokens))
            written.append(
                {
                    "index": choice.index,
                    "text": choice.text,
                    "logprobs": logprobs,
                    "finish_reason": choice.finish_reason,
                }
            )
            if self._wants_prompt:
                written[-1]["prompt_logprobs"] = yield from writing.prompt_logprobs(choice.prompt, self._tokenizer)
        return msgspec.json.encode(
            {**self._head, "choices": written, "usage": writing.openai_usage(usage), **usage.handed_over}
        )

    def _written(self, tokens: list[TokenText]) -> Generator[None, None, dict[str, msgspec.Raw]]:
        lists = {}
        for name, entry in self._entries.items():
            lists[name] = yield from writing.written(tokens, entry)
        return lists

    def _logprobs(self, tokens: list[TokenText]) -> dict[str, Any]:
        return {name: [entry(token) for token in tokens] for name, entry in self._entries.items()}

    @property
    def _entries(self) -> dict[str, Callable[[TokenText], Any]]:
        """Four parallel lists; the first token of an echoed prompt has null for its probability."""
        return {
            "tokens": lambda token: self._text(token.token_id),
            "token_logprobs": lambda token: None if token.logprobs is None else writing.finite(token.logprobs.logprob),
            "top_logprobs": self._top,
            "text_offset": lambda token: token.offset,
        }

    def _top(self, token: TokenText) -> dict[str, float] | None:
        """Return the likeliest texts, best first, and the sampled one even if it is not among them."""
        if token.logprobs is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in (*token.logprobs.top, (token.token_id, token.logprobs.logprob)):
            top.setdefault(self._text(token_id), writing.finite(logprob))
        return top

    def _text(self, token_id: int) -> str:
        """Return a token's text; bytes that are no UTF-8 are spelled out, which keeps keys apart."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
