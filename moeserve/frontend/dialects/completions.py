"""The dialect of `/v1/completions`: reads its requests into internal ones, writes internal answers as its own."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies, fields
from moeserve.frontend.dialects.chat_parts import Prediction, read_prediction
from moeserve.frontend.dialects.fields import EventWriter, SearchBody, finite, read_beams, without_search
from moeserve.frontend.dialects.formats import read_format
from moeserve.frontend.dialects.internal import (
    ChatPrompt,
    Delta,
    GenerateRequest,
    ModelFacts,
    TokenText,
    Usage,
    Writing,
)
from moeserve.frontend.http import KEEP_ALIVE, ApiError, invalid
from moeserve.frontend.text import TextTokenizer

DEFAULT_MAX_TOKENS = 16


class CompletionBody(SearchBody, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    cache_hit_threshold: float | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prediction: Prediction | None = None


class _Repeated(msgspec.Struct):
    logprobs: int | None = None


def parse(body: bytes, model: ModelFacts) -> GenerateRequest:
    """Return the internal request. Raises ApiError with the status that the client gets."""
    completion, ignored = bodies.decode_json(body, CompletionBody)
    name = fields.check_model(completion.model, model)
    echo = bool(completion.echo)
    asked = completion.logprobs
    logprobs = None if asked is None else fields.read_logprobs("logprobs", asked, model)
    stream, include_usage, continuous_usage = fields.read_stream_options(completion)
    prompt_logprobs = fields.read_prompt_logprobs(completion, model)
    # Without output tokens an answer is about its prompt alone.
    least = 0 if echo or prompt_logprobs is not None else 1
    max_tokens = fields.read_count("max_tokens", completion.max_tokens, least)
    beams = read_beams(completion, logprobs)
    if beams is not None and echo and logprobs is not None:
        raise invalid("`echo` with `logprobs` cannot be used together with `use_beam_search`", "echo")
    n, best = _read_best(completion) if beams is None else (beams.num_answers, None)
    prompts = read_prompts(completion.prompt, model.vocab_size)
    is_single, params = n * len(prompts) == 1 and beams is None, completion.kv_transfer_params
    offers_kv, ticket = fields.read_transfer(params, model, is_single=is_single, stream=stream)
    return GenerateRequest(
        model=name,
        prompts=prompts,
        sampling=fields.read_sampling(completion, model, 0 if best and logprobs is None else logprobs, echo),
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        seed=fields.read_seed(completion.seed),
        n=n,
        stop=fields.read_stop(completion.stop),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        echo=echo,
        priority=fields.read_priority(completion),
        background=bool(completion.background),
        cache_salt=fields.read_cache_salt(completion.cache_salt),
        offers_kv=offers_kv,
        ticket=ticket,
        cache_hit_threshold=fields.read_hit_threshold(completion.cache_hit_threshold),
        cache=fields.read_cache(completion),
        thought=fields.read_thought(completion),
        prediction=read_prediction(completion.prediction),
        best=best,
        beams=beams,
        include_stop=bool(completion.include_stop_str_in_output),
        skip_special_tokens=completion.skip_special_tokens is not False,
        prompt_logprobs=prompt_logprobs,
        truncate=fields.read_truncation(completion, completion.max_tokens, model),
        output_format=read_format(completion),
        ignored=(*ignored, *without_search(completion)),
        repeated=msgspec.json.encode(_Repeated(logprobs)),
    )


def _read_best(completion: CompletionBody) -> tuple[int, int | None]:
    """Return how many samples to draw, and how many of them to give, None for all. Raises ApiError."""
    n, best_of = fields.read_n(completion), completion.best_of
    if best_of is None or best_of == n:
        return n, None
    if best_of < n or best_of > limits.MAX_N:
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


class CompletionFormatter:
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
        self._events = EventWriter(self._head, request)
        self._tokenizer = tokenizer
        self._num_top = msgspec.json.decode(request.repeated, type=_Repeated).logprobs
        self._wants_prompt = request.prompt_logprobs is not None

    def start(self, index: int, usage: Usage) -> bytes:
        return b""

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        text = b'"text":' + msgspec.json.encode(delta.text)
        logprobs = msgspec.json.encode(self._logprobs(delta.tokens)) if delta.tokens else b"null"
        return self._events.choice(delta.index, text, logprobs, delta.finish_reason, usage)

    def end(self, usage: Usage) -> bytes:
        return self._events.end(usage)

    def error(self, error: ApiError) -> bytes:
        return error.event()

    def ping(self) -> bytes:
        return KEEP_ALIVE

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
                written[-1]["prompt_logprobs"] = yield from fields.prompt_logprobs(choice.prompt, self._tokenizer)
        return msgspec.json.encode(
            {**self._head, "choices": written, "usage": fields.openai_usage(usage), **usage.handed_over}
        )

    def _written(self, tokens: list[TokenText]) -> Generator[None, None, dict[str, msgspec.Raw]]:
        lists = {}
        for name, entry in self._entries.items():
            lists[name] = yield from fields.written(tokens, entry)
        return lists

    def _logprobs(self, tokens: list[TokenText]) -> dict[str, Any]:
        return {name: [entry(token) for token in tokens] for name, entry in self._entries.items()}

    @property
    def _entries(self) -> dict[str, Callable[[TokenText], Any]]:
        """Four parallel lists; the first token of an echoed prompt has null for its probability."""
        return {
            "tokens": lambda token: self._text(token.token_id),
            "token_logprobs": lambda token: None if token.logprobs is None else finite(token.logprobs.logprob),
            "top_logprobs": self._top,
            "text_offset": lambda token: token.offset,
        }

    def _top(self, token: TokenText) -> dict[str, float] | None:
        """Return the likeliest texts, best first, and the sampled one even if it is not among them."""
        if token.logprobs is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in (*token.logprobs.top, (token.token_id, token.logprobs.logprob)):
            top.setdefault(self._text(token_id), finite(logprob))
        return top

    def _text(self, token_id: int) -> str:
        """Return a token's text; bytes that are no UTF-8 are spelled out, which keeps keys apart."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
