"""The dialect of `/v1/completions`: reads its requests into internal ones, writes internal answers as its own.

Chat shares the fields of `SearchBody`, which other dialects lack: beam search, transfer of KV, a prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from moeserve.frontend import limits
from moeserve.frontend.beam_search import BeamParams
from moeserve.frontend.dialects import bodies, fields, internal
from moeserve.frontend.dialects.chat_parts import Prediction, read_prediction
from moeserve.frontend.dialects.fields import Choices, SamplingBody, Share, read_request
from moeserve.frontend.dialects.formats import read_format
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
from moeserve.frontend.errors import ApiError, invalid, missing, too_many
from moeserve.frontend.text import TextTokenizer
from moeserve.kv_transfer import KvTicket, read_params
from moeserve.plan import PromptProgress, SamplingParams

_SWITCH = "use_beam_search"
# Fields that would have to change the search, with the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 0),
    "top_p": (None, 1),
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "stop": (None, []),
}
# Fields that have no effect without a search.
_OF_SEARCHES = ("length_penalty", "early_stopping")


class SearchBody(SamplingBody, kw_only=True):
    best_of: Choices | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-limits.MAX_LENGTH_PENALTY, le=limits.MAX_LENGTH_PENALTY)] | None = None
    early_stopping: bool | str | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    cache_hit_threshold: Share | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prediction: Prediction | None = None


def read_search_request(
    body: SearchBody,
    model: ModelFacts,
    prompts: list[ChatPrompt | str | list[int]],
    max_tokens: int | None,
    sampling: SamplingParams,
    *,
    ignored: tuple[str, ...],
    beams: BeamParams | None,
    n: int,
    **own: Any,
) -> GenerateRequest:
    """Return the request of a body; see `read_request`. Raise ApiError.

    ignored: fields that no dialect reads. beams: of `read_beams`. n: samples of each prompt.
    """
    is_single = len(prompts) == 1 and beams is None
    offers_kv, ticket = _transfer(body.kv_transfer_params, model, is_single=is_single, stream=bool(body.stream))
    shared = {
        "n": n,
        "beams": beams,
        "echo": bool(body.echo),
        "returns_token_ids": bool(body.return_token_ids),
        "offers_kv": offers_kv,
        "ticket": ticket,
        "cache_hit_threshold": body.cache_hit_threshold or 0.0,
        "prediction": read_prediction(body.prediction),
        "output_format": read_format(body),
        "ignored": (*ignored, *_without_search(body)),
    }
    return read_request(body, model, prompts, max_tokens, sampling, **(shared | own))


def _transfer(
    params: dict[str, Any] | None, model: ModelFacts, *, is_single: bool, stream: bool
) -> tuple[bool, KvTicket | None]:
    """Return the wishes in `kv_transfer_params` (see `read_params`). Raise ApiError.

    is_single: the request has one prompt, without a beam search.
    """
    name = "kv_transfer_params"
    if params is None:
        return False, None
    try:
        offers, ticket = read_params(params)
    except ValueError as error:
        raise invalid(str(error), name) from None
    if (offers or ticket is not None) and not model.moves_kv:
        raise invalid(f"`{name}` needs a server that was started with --kv-transfer-config", name)
    if offers and (stream or not is_single):
        raise invalid("`do_remote_decode` takes one prompt, without a beam search, and is not streamed", name)
    return offers, ticket


def read_beams(body: SearchBody, logprobs: int | None) -> BeamParams | None:
    """Return the search that a body asks for, None for none. Raise ApiError.

    logprobs: alternatives to each token of the answer, None for none.
    """
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    early = body.early_stopping or False
    if isinstance(early, str) and early != "never":
        raise invalid('`early_stopping` must be true, false or "never"', "early_stopping")
    if not body.use_beam_search:
        return None
    n = body.n or 1
    width = n if body.best_of is None else body.best_of
    if not max(2, n) <= width <= limits.MAX_N:
        field = "n" if body.best_of is None else "best_of"
        raise invalid(f"`{field}` is the number of beams: at least 2, at least `n`, at most {limits.MAX_N}", field)
    for name, values in _REFUSED.items():
        if getattr(body, name) not in values:
            raise _apart(name)
    if body.cache_hit_threshold:
        raise _apart("cache_hit_threshold")
    if body.prompt_logprobs is not None and body.prompt_logprobs is not False:
        raise _apart("prompt_logprobs")
    if body.max_tokens == 0:
        raise _apart("max_tokens")
    return BeamParams(width, n, float(penalty), "never" if early == "never" else bool(early), logprobs)


def _without_search(body: SearchBody) -> tuple[str, ...]:
    """Return the fields of searches in a body that asks for none."""
    return () if body.use_beam_search else tuple(name for name in _OF_SEARCHES if getattr(body, name) is not None)


def _apart(name: str) -> ApiError:
    return invalid(f"`{name}` cannot be used together with `{_SWITCH}`", name)


DEFAULT_MAX_TOKENS = 16


class CompletionBody(SearchBody, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: fields.TokensOrNone | None = None
    logprobs: int | None = None


class _Repeated(msgspec.Struct):
    logprobs: int | None = None


def parse(body: bytes, model: ModelFacts) -> GenerateRequest:
    """Return the internal request. Raise ApiError with the status that the client gets."""
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
    """Return how many samples to draw and how many of them to return (None for all). Raise ApiError."""
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
    """Return the prompts of a body: one text, several, one list of ids, or several. Raise ApiError."""
    if prompt is None:
        raise missing("prompt")
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
        raise too_many("prompt", limits.MAX_PROMPTS, "prompts")
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


def _ids_of(delta: Delta) -> dict[str, Any]:
    return {"token_ids": delta.token_ids, "prompt_token_ids": delta.prompt_token_ids}


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
        self._events = internal.EventWriter(self._head, request)
        self._tokenizer = tokenizer
        self._num_top = msgspec.json.decode(request.repeated, type=_Repeated).logprobs
        self._wants_prompt = request.prompt_logprobs is not None
        self._has_ids = request.returns_token_ids

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        text = b'"text":' + msgspec.json.encode(delta.text)
        if self._has_ids:
            text += b"," + msgspec.json.encode(_ids_of(delta))[1:-1]
        logprobs = msgspec.json.encode(self._logprobs(delta.tokens)) if delta.tokens else b"null"
        return self._events.choice(delta.index, text, logprobs, delta.finish_reason, usage)

    def progress(self, index: int, progress: PromptProgress) -> bytes:
        return self._events.progress(index, b'"text":""', progress)

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
            if self._has_ids:
                written[-1] |= _ids_of(choice)
            if self._wants_prompt:
                written[-1]["prompt_logprobs"] = yield from internal.prompt_logprobs(choice.prompt, self._tokenizer)
        return msgspec.json.encode(
            {**self._head, "choices": written, "usage": internal.openai_usage(usage), **usage.handed_over}
        )

    def _written(self, tokens: list[TokenText]) -> Generator[None, None, dict[str, msgspec.Raw]]:
        lists = {}
        for name, entry in self._entries.items():
            lists[name] = yield from internal.written(tokens, entry)
        return lists

    def _logprobs(self, tokens: list[TokenText]) -> dict[str, Any]:
        return {name: [entry(token) for token in tokens] for name, entry in self._entries.items()}

    @property
    def _entries(self) -> dict[str, Callable[[TokenText], Any]]:
        """Four parallel lists; the first token of an echoed prompt has null for its probability."""
        return {
            "tokens": lambda token: self._text(token.token_id),
            "token_logprobs": lambda token: None if token.logprobs is None else internal.finite(token.logprobs.logprob),
            "top_logprobs": self._top,
            "text_offset": lambda token: token.offset,
        }

    def _top(self, token: TokenText) -> dict[str, float] | None:
        """Return the likeliest texts, best first, and the sampled one even if it is not among them."""
        if token.logprobs is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in (*token.logprobs.top, (token.token_id, token.logprobs.logprob)):
            top.setdefault(self._text(token_id), internal.finite(logprob))
        return top

    def _text(self, token_id: int) -> str:
        """Return a token's text; bytes that are no UTF-8 are spelled out, which keeps keys apart."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
