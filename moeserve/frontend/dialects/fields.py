"""The fields that dialects share: sampling, beam search and prompt cache in requests, events and counts in answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.bodies import BUDGETS, bounded
from moeserve.frontend.dialects.formats import FormatFields
from moeserve.frontend.dialects.internal import (
    CacheOptions,
    GenerateRequest,
    ModelFacts,
    ThoughtOptions,
    TokenText,
    Usage,
)
from moeserve.frontend.http import DONE, ApiError, invalid, unknown_model, unsupported
from moeserve.frontend.text import TextTokenizer
from moeserve.kv_transfer import KvTicket, read_params
from moeserve.plan import BeamParams, SamplingParams, TokenLogprobs

MAX_KEY_CHARS = 1024
MAX_SECONDS = 86_400
# OpenAI keeps a prompt for minutes after its last use where the client asks for no more.
_IN_MEMORY_SECONDS = 600
_OPTIONS_SECONDS = 1800
RETENTION_SECONDS = {"in_memory": _IN_MEMORY_SECONDS, "in-memory": _IN_MEMORY_SECONDS, "24h": 86_400}
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

EFFORT = "reasoning_effort"  # the variable of chat templates
EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh"})

_LEAST_LOGPROB = -9999.0
WRITTEN_AT_ONCE = 256  # tokens with log probabilities


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
# Fields that ask for nothing without a search.
_OF_SEARCHES = ("length_penalty", "early_stopping")


class CacheBreakpoint(msgspec.Struct):
    """The mark `prompt_cache_breakpoint` of a content part: the prompt up to there will come again."""

    mode: Literal["explicit"]
    ttl: str | int | None = None


def read_cache_options(
    key: str | None, retention: str | None, options: dict[str, Any] | None, report: bool | None
) -> CacheOptions:
    """Return the wishes in `prompt_cache_key`, `prompt_cache_retention`, `prompt_cache_options` and `cache_report`.

    Each of the first three retains the whole prompt; the longest time counts. Raises ApiError.
    """
    if key is None and retention is None and options is None:
        return _ONLY_REPORT if report else _NO_WISHES
    seconds = []
    if key is not None:
        if len(key) > MAX_KEY_CHARS:
            raise invalid(f"`prompt_cache_key` must have at most {MAX_KEY_CHARS} characters", "prompt_cache_key")
        seconds.append(_IN_MEMORY_SECONDS)
    if retention is not None:
        if retention not in RETENTION_SECONDS:
            raise invalid("`prompt_cache_retention` must be in_memory or 24h", "prompt_cache_retention")
        seconds.append(RETENTION_SECONDS[retention])
    implicit = True
    if options is not None:
        implicit, longer = _read_options(options)
        seconds.append(longer)
    return CacheOptions(seconds=max(seconds) if implicit else None, report=bool(report), key=key)


def read_breakpoint(mark: CacheBreakpoint, options: dict[str, Any] | None, where: str) -> int:
    """Return the seconds of a mark; `prompt_cache_options` has their default. `where` is the path of the mark."""
    if mark.ttl is not None:
        return _read_ttl(mark.ttl, f"{where}.ttl")
    return _read_options(options or {})[1]


def _read_options(options: dict[str, Any]) -> tuple[bool, int]:
    """Return whether the whole prompt is to be retained, and for how long."""
    for name, value in options.items():
        if name not in ("mode", "ttl") and value is not None:
            raise unsupported(f"prompt_cache_options.{name[:60]}")
    mode = options.get("mode") or "implicit"
    if mode not in ("implicit", "explicit"):
        raise invalid("`prompt_cache_options.mode` must be implicit or explicit", "prompt_cache_options.mode")
    ttl = options.get("ttl")
    return mode == "implicit", _OPTIONS_SECONDS if ttl is None else _read_ttl(ttl, "prompt_cache_options.ttl")


def _read_ttl(ttl: Any, where: str) -> int:
    """Return the seconds of `90`, `90s`, `30m`, `1h` or `1d`."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})([smhd]?)", str(ttl)) if isinstance(ttl, str | int) else None
    seconds = 0 if found is None else int(found[1]) * _UNIT_SECONDS[found[2] or "s"]
    if not 0 < seconds <= MAX_SECONDS:
        raise invalid(f"`{where}` must be a time such as 300s, 30m or 24h, at most 24h", where)
    return seconds


_NO_WISHES, _ONLY_REPORT = CacheOptions(), CacheOptions(report=True)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(FormatFields, kw_only=True):
    """The fields of both dialects; null is the same as absent."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    background: bool | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    cache_report: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | bool | None = None
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None
    reasoning_budget_tokens: int | None = None
    thinking_budget_tokens: int | None = None


def check_model(name: str | None, model: ModelFacts) -> str:
    """Return the model's name for the answer. Raises ApiError: 400 without a name, 404 for another model."""
    if not name:
        raise invalid("`model` is required", "model")
    if name not in model.names:
        raise unknown_model(name, model.names)
    return name


def read_sampling(body: SamplingBody, model: ModelFacts, logprobs: int | None, echo: bool = False) -> SamplingParams:
    """Return the sampling parameters, by default the checkpoint's. `max_tokens` and `seed` are not filled in."""
    defaults = model.default_sampling

    def pick(name: str, neutral: float) -> Any:
        value = getattr(body, name)
        return defaults.get(name, neutral) if value is None else value

    top_k = int(pick("top_k", 0))
    bounded("top_k", top_k, -1, limits.MAX_TOKENS)
    return SamplingParams(
        max_tokens=0,
        temperature=bounded("temperature", pick("temperature", 1.0), 0, limits.MAX_TEMPERATURE),
        top_k=0 if top_k == -1 or top_k >= model.vocab_size else top_k,
        top_p=bounded("top_p", pick("top_p", 1.0), 0, 1, above=True),
        min_p=bounded("min_p", pick("min_p", 0.0), 0, 1),
        presence_penalty=_penalty("presence_penalty", body.presence_penalty),
        frequency_penalty=_penalty("frequency_penalty", body.frequency_penalty),
        repetition_penalty=bounded(
            "repetition_penalty", pick("repetition_penalty", 1.0), 0, limits.MAX_REPETITION_PENALTY, above=True
        ),
        logit_bias=_logit_bias(body.logit_bias, model.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=_most(logprobs if echo else None, read_prompt_logprobs(body, model)),
        min_tokens=bounded("min_tokens", body.min_tokens or 0, 0, limits.MAX_TOKENS),
        stop_token_ids=_stop_token_ids(body, model),
    )


def _most(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def read_count(name: str, value: int | None, least: int = 1) -> int | None:
    """Return a number of tokens, at least `least`, or None."""
    return None if value is None else int(bounded(name, value, least, limits.MAX_TOKENS))


def read_truncation(body: SamplingBody, max_tokens: int | None, model: ModelFacts) -> int | None:
    """Return how many tokens at the end of a prompt are kept, None for all. Raises ApiError.

    -1 asks for as many as fit beside the output, as vLLM has it.
    """
    name, kept = "truncate_prompt_tokens", body.truncate_prompt_tokens
    if kept == 0:
        raise invalid(f"`{name}` must be -1 or at least 1", name)
    if kept is None or bounded(name, kept, -1, limits.MAX_TOKENS) > 0:
        return kept
    output = max_tokens if max_tokens and max_tokens < model.max_model_len else 1
    return model.max_model_len - output


def read_prompt_logprobs(body: SamplingBody, model: ModelFacts) -> int | None:
    """Return how many alternatives to each prompt token are asked for, or None. Raises ApiError."""
    asked = body.prompt_logprobs
    if asked is None or asked is False:
        return None
    if asked is True:
        raise invalid("`prompt_logprobs` must be a number of alternatives", "prompt_logprobs")
    if body.stream:
        raise invalid("`prompt_logprobs` cannot be streamed", "prompt_logprobs")
    return read_logprobs("prompt_logprobs", asked, model)


def read_seed(seed: int | None) -> int | None:
    return None if seed is None else int(bounded("seed", seed, limits.MIN_SEED, limits.MAX_SEED))


def read_logprobs(name: str, value: int, model: ModelFacts) -> int:
    return int(bounded(name, value, 0, model.max_logprobs))


def read_priority(body: SamplingBody) -> int:
    return int(bounded("priority", body.priority or 0, -limits.MAX_PRIORITY, limits.MAX_PRIORITY))


def read_n(body: SamplingBody) -> int:
    return int(bounded("n", 1 if body.n is None else body.n, 1, limits.MAX_N))


def read_stop(stop: str | list[str] | None, name: str = "stop") -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > limits.MAX_STOP_STRINGS:
        raise invalid(f"`{name}` takes at most {limits.MAX_STOP_STRINGS} strings", name)
    if any(not text or len(text) > limits.MAX_STOP_CHARS for text in stops):
        raise invalid(f"strings in `{name}` must have 1 to {limits.MAX_STOP_CHARS} characters", name)
    return stops


def read_cache_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not salt or len(salt) > limits.MAX_CACHE_SALT_CHARS:
        raise invalid(f"`cache_salt` must have 1 to {limits.MAX_CACHE_SALT_CHARS} characters", "cache_salt")
    return salt


def read_hit_threshold(threshold: float | None) -> float:
    """Return the share of the prompt that must be cached for the request to be computed. Raises ApiError."""
    return float(bounded("cache_hit_threshold", threshold or 0.0, 0, 1))


def read_transfer(
    params: dict[str, Any] | None, model: ModelFacts, *, is_single: bool, stream: bool
) -> tuple[bool, KvTicket | None]:
    """Return the wishes in `kv_transfer_params` (see `read_params`). Raises ApiError.

    is_single: the request has one prompt and one choice.
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
        raise invalid("`do_remote_decode` takes one prompt and one choice, and is not streamed", name)
    return offers, ticket


def read_effort(name: str, effort: str | None) -> str | None:
    """Return how much the model is asked to reason, None if that is left to the template."""
    if effort is not None and effort not in EFFORTS:
        raise invalid(f"`{name}` must be one of {', '.join(sorted(EFFORTS))}", name)
    return effort


def read_thought(body: SamplingBody, effort: str | None = None, **own: int | None) -> ThoughtOptions:
    """Return the settings of a body for thoughts; the smallest of several budgets counts. Raises ApiError.

    own: budgets in fields of the dialect's own, checked already, by their paths.
    """
    given = {name: getattr(body, name) for name in BUDGETS}
    asked = {
        name: int(bounded(name, value, -1, limits.MAX_TOKENS)) for name, value in given.items() if value is not None
    }
    asked |= {name: value for name, value in own.items() if value is not None}
    if not asked:
        return ThoughtOptions(effort=effort)
    return ThoughtOptions(min((budget for budget in asked.values() if budget >= 0), default=-1), effort, tuple(asked))


def read_cache(body: SamplingBody) -> CacheOptions:
    """Return the settings of a body for the prompt cache. Raises ApiError."""
    return read_cache_options(
        body.prompt_cache_key, body.prompt_cache_retention, body.prompt_cache_options, body.cache_report
    )


def read_stream_options(body: SamplingBody) -> tuple[bool, bool, bool]:
    """Return (stream, include_usage, continuous_usage)."""
    stream = bool(body.stream)
    options = body.stream_options
    if options is None:
        return stream, False, False
    if not stream:
        raise invalid("`stream_options` is only allowed together with `stream`", "stream_options")
    return stream, bool(options.include_usage), bool(options.continuous_usage_stats)


def check_token_ids(name: str, token_ids: list[int], vocab_size: int) -> list[int]:
    """Return `token_ids` if all of them are in the vocabulary. Raises ApiError."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise invalid(f"`{name}` holds a token id outside the vocabulary of {vocab_size} tokens", name)
    return token_ids


def _penalty(name: str, value: float | None) -> float:
    return float(bounded(name, value or 0.0, -limits.MAX_PENALTY, limits.MAX_PENALTY))


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    if len(bias) > limits.MAX_LOGIT_BIAS:
        raise invalid(f"`logit_bias` takes at most {limits.MAX_LOGIT_BIAS} entries", "logit_bias")
    if any(re.fullmatch(r"[0-9]{1,10}", key) is None for key in bias):
        raise invalid("keys of `logit_bias` must be token ids", "logit_bias")
    check_token_ids("logit_bias", [int(key) for key in bias], vocab_size)
    limit = limits.MAX_LOGIT_BIAS_VALUE
    return {int(key): float(bounded("logit_bias", value, -limit, limit)) for key, value in bias.items()}


def _stop_token_ids(body: SamplingBody, model: ModelFacts) -> tuple[int, ...]:
    asked = body.stop_token_ids or []
    if len(asked) > limits.MAX_STOP_TOKEN_IDS:
        raise invalid(f"`stop_token_ids` takes at most {limits.MAX_STOP_TOKEN_IDS} ids", "stop_token_ids")
    check_token_ids("stop_token_ids", asked, model.vocab_size)
    natural = () if body.ignore_eos else model.eos_token_ids
    return tuple(dict.fromkeys((*natural, *asked)))


class EventWriter:
    """Writes server-sent events with one object each, as chat and completions have them.

    The common fields of an answer are encoded once. Usage is in the last event or in every event if the client asked
    for that.
    """

    def __init__(self, head: dict[str, Any], request: GenerateRequest) -> None:
        """head: the fields before the choices."""
        self._head = b"data: " + msgspec.json.encode(head)[:-1]
        self._include_usage, self._continuous_usage = request.include_usage, request.continuous_usage
        self._tail = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"

    def choice(
        self,
        index: int,
        content: bytes,
        logprobs: bytes = b"null",
        finish: str | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """Return the event of one choice. content: JSON of one or more fields, `"name":value`; logprobs: JSON."""
        return b'%b,"choices":[{"index":%d,%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._head,
            index,
            content,
            logprobs,
            b"null" if finish is None else b'"' + finish.encode() + b'"',
            _usage_tail(usage) if usage is not None and self._continuous_usage else self._tail,
        )

    def end(self, usage: Usage) -> bytes:
        """Return the last events."""
        return (self._head + b',"choices":[]' + _usage_tail(usage) if self._include_usage else b"") + DONE


def openai_usage(usage: Usage) -> dict[str, Any]:
    """Return the `usage` object of chat and of completions."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": min(usage.accepted_prediction_tokens, usage.completion_tokens),
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
        **usage.extensions,
    }


def written(tokens: Sequence[TokenText], entry: Callable[[TokenText], Any]) -> Generator[None, None, msgspec.Raw]:
    """Return the JSON of a list with an entry for each token. Yields between parts of it."""
    parts = []
    for start in range(0, len(tokens), WRITTEN_AT_ONCE):
        if start:
            yield
        part = [entry(token) for token in tokens[start : start + WRITTEN_AT_ONCE]]
        parts.append(msgspec.json.encode(part)[1:-1])
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def logprob_entry(token: TokenText, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return a token with its log probability and the likeliest tokens, as chat and Responses have it."""

    def alternative(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}

    logprobs = token.logprobs
    entry = alternative(token.token_id, logprobs.logprob if logprobs else 0.0)
    return {**entry, "top_logprobs": [alternative(*found) for found in (logprobs.top if logprobs else ())]}


def prompt_logprobs(tokens: Sequence[TokenText], tokenizer: TextTokenizer) -> Generator[None, None, msgspec.Raw]:
    """Return the log probabilities of a prompt: for each token null, or an object of alternatives by token id."""
    return written(tokens, lambda token: None if token.logprobs is None else _by_id(token, token.logprobs, tokenizer))


def _by_id(token: TokenText, logprobs: TokenLogprobs, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return the likeliest tokens with their ranks, and the prompt's own one first; its rank is null below them."""
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(logprobs.top, start=1)}
    found = {token.token_id: logprobs.logprob} | dict(logprobs.top)
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
        }
        for token_id, logprob in found.items()
    }


def _usage_tail(usage: Usage) -> bytes:
    return b',"usage":' + msgspec.json.encode(openai_usage(usage)) + b"}\n\n"


def finite(logprob: float) -> float:
    """Return a number that JSON can hold: a masked token has -inf, for which clients get -9999."""
    return max(logprob, _LEAST_LOGPROB)


class SearchBody(SamplingBody, kw_only=True):
    """The fields of the dialects that search."""

    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None


def read_beams(body: SearchBody, logprobs: int | None) -> BeamParams | None:
    """Return the search that a body asks for, None for none. Raises ApiError.

    logprobs: alternatives to each token of the answer, None for none.
    """
    penalty, most = 1.0 if body.length_penalty is None else body.length_penalty, limits.MAX_LENGTH_PENALTY
    bounded("length_penalty", penalty, -most, most)
    early = body.early_stopping or False
    if isinstance(early, str) and early != "never":
        raise invalid('`early_stopping` must be true, false or "never"', "early_stopping")
    if not body.use_beam_search:
        return None
    n = read_n(body)
    width = n if body.best_of is None else body.best_of
    if not max(2, n) <= width <= limits.MAX_N:
        field = "n" if body.best_of is None else "best_of"
        raise invalid(f"`{field}` is the number of beams: at least 2, at least `n`, at most {limits.MAX_N}", field)
    for name, values in _REFUSED.items():
        if getattr(body, name) not in values:
            raise _apart(name)
    if getattr(body, "cache_hit_threshold", None):
        raise _apart("cache_hit_threshold")
    if body.prompt_logprobs is not None and body.prompt_logprobs is not False:
        raise _apart("prompt_logprobs")
    if body.max_tokens == 0:
        raise _apart("max_tokens")
    return BeamParams(width, n, float(penalty), "never" if early == "never" else bool(early), logprobs)


def without_search(body: SearchBody) -> tuple[str, ...]:
    """Return the fields of searches in a body that asks for none."""
    return () if body.use_beam_search else tuple(name for name in _OF_SEARCHES if getattr(body, name) is not None)


def _apart(name: str) -> ApiError:
    return invalid(f"`{name}` cannot be used together with `{_SWITCH}`", name)
