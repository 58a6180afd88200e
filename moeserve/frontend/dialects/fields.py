"""The fields that all dialects share, and the request that they make."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies
from moeserve.frontend.dialects.bodies import BUDGETS, bounded
from moeserve.frontend.dialects.formats import FormatFields
from moeserve.frontend.dialects.internal import CacheOptions, ChatPrompt, GenerateRequest, ModelFacts, ThoughtOptions
from moeserve.frontend.errors import invalid, too_many, unknown_model, unsupported
from moeserve.plan import SamplingParams

MAX_KEY_CHARS = 1024
MAX_SECONDS = 86_400
# OpenAI keeps a prompt for minutes after its last use unless the client asks for longer.
_IN_MEMORY_SECONDS = 600
_OPTIONS_SECONDS = 1800
RETENTION_SECONDS = {"in_memory": _IN_MEMORY_SECONDS, "in-memory": _IN_MEMORY_SECONDS, "24h": 86_400}
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

EFFORT = "reasoning_effort"  # the variable of chat templates
EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh"})

# Numbers with the bounds that requests have; `bodies.decode_json` refuses others, and `/openapi.json` shows the bounds.
Choices = Annotated[int, Meta(ge=1, le=limits.MAX_N)]
Share = Annotated[float, Meta(ge=0, le=1)]
ShareAboveZero = Annotated[float, Meta(gt=0, le=1)]
Tokens = Annotated[int, Meta(ge=1, le=limits.MAX_TOKENS)]
TokensOrNone = Annotated[int, Meta(ge=0, le=limits.MAX_TOKENS)]
TokensOrAll = Annotated[int, Meta(ge=-1, le=limits.MAX_TOKENS)]
_Penalty = Annotated[float, Meta(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)]

_B = TypeVar("_B", bound="SamplingBody")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(FormatFields, kw_only=True):
    """The fields of all dialects; null is the same as absent."""

    model: str | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=limits.MAX_TEMPERATURE)] | None = None
    top_p: ShareAboveZero | None = None
    top_k: TokensOrAll | None = None
    min_p: Share | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=limits.MAX_REPETITION_PENALTY)] | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Meta(ge=limits.MIN_SEED, le=limits.MAX_SEED)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: Tokens | None = None
    min_tokens: TokensOrNone | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] | None = None
    background: bool | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    cache_report: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | bool | None = None
    truncate_prompt_tokens: TokensOrAll | None = None
    thinking_token_budget: TokensOrAll | None = None
    reasoning_budget_tokens: TokensOrAll | None = None
    thinking_budget_tokens: TokensOrAll | None = None


def read_body(data: bytes, expected: type[_B], model: ModelFacts) -> tuple[_B, tuple[str, ...]]:
    """Return a body for this model, and the names of its fields that `expected` lacks. Raise ApiError."""
    body, ignored = bodies.decode_json(data, expected)
    body.model = served_model(body.model, model)
    return body, ignored


def served_model(name: str | None, model: ModelFacts) -> str:
    """Return the name of the model that a request asks for, the first one served where it names none.

    Raise ApiError (404) for another model.
    """
    if not name:
        return model.names[0]
    if name not in model.names and not model.takes_any_name:
        raise unknown_model(name, model.names)
    return name


def read_request(
    body: SamplingBody,
    model: ModelFacts,
    prompts: list[ChatPrompt | str | list[int]],
    max_tokens: int | None,
    sampling: SamplingParams,
    **own: Any,
) -> GenerateRequest:
    """Return the request of a body. Raise ApiError.

    max_tokens: as the dialect names it. sampling: of `read_sampling`. own: fields of `GenerateRequest` that the dialect
    reads itself.
    """
    options = body.stream_options or StreamOptions()
    if body.stream_options is not None and not body.stream:
        raise invalid("`stream_options` is only allowed together with `stream`", "stream_options")
    shared = {
        "seed": body.seed,
        "stop": read_stop(body.stop),
        "stream": bool(body.stream),
        "include_usage": bool(options.include_usage),
        "continuous_usage": bool(options.continuous_usage_stats),
        "reports_progress": bool(body.return_progress),
        "priority": body.priority or 0,
        "background": bool(body.background),
        "cache_salt": read_cache_salt(body.cache_salt),
        "cache": read_cache(body),
        "include_stop": bool(body.include_stop_str_in_output),
        "skip_special_tokens": body.skip_special_tokens is not False,
        "prompt_logprobs": read_prompt_logprobs(body, model),
        "truncate": _truncation(body, max_tokens, model),
    }
    required = {"model": body.model, "prompts": prompts, "sampling": sampling, "max_tokens": max_tokens}
    return GenerateRequest(**(required | shared | own))


def read_sampling(body: SamplingBody, model: ModelFacts, logprobs: int | None, echo: bool = False) -> SamplingParams:
    """Return the sampling parameters, by default the checkpoint's. `max_tokens` and `seed` are not filled in."""
    defaults = model.default_sampling

    def pick(name: str, neutral: float) -> Any:
        value = getattr(body, name)
        return defaults.get(name, neutral) if value is None else value

    top_k = int(pick("top_k", 0))
    return SamplingParams(
        max_tokens=0,
        temperature=pick("temperature", 1.0),
        top_k=0 if top_k == -1 or top_k >= model.vocab_size else top_k,
        top_p=pick("top_p", 1.0),
        min_p=pick("min_p", 0.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=pick("repetition_penalty", 1.0),
        logit_bias=_logit_bias(body.logit_bias, model.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=_most(logprobs if echo else None, read_prompt_logprobs(body, model)),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=_stop_token_ids(body, model),
    )


def _most(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _truncation(body: SamplingBody, max_tokens: int | None, model: ModelFacts) -> int | None:
    """Return how many tokens at the end of a prompt are kept, None for all. Raise ApiError.

    -1 asks for as many as fit beside the output, as vLLM has it.
    """
    name, kept = "truncate_prompt_tokens", body.truncate_prompt_tokens
    if kept == 0:
        raise invalid(f"`{name}` must be -1 or at least 1", name)
    if kept != -1:
        return kept
    output = max_tokens if max_tokens and max_tokens < model.max_model_len else 1
    return model.max_model_len - output


def read_prompt_logprobs(body: SamplingBody, model: ModelFacts) -> int | None:
    """Return how many alternatives to each prompt token are asked for, or None. Raise ApiError."""
    asked = body.prompt_logprobs
    if asked is None or asked is False:
        return None
    if asked is True:
        raise invalid("`prompt_logprobs` must be a number of alternatives", "prompt_logprobs")
    if body.stream:
        raise invalid("`prompt_logprobs` cannot be streamed", "prompt_logprobs")
    return read_logprobs("prompt_logprobs", asked, model)


def read_logprobs(name: str, value: int, model: ModelFacts) -> int:
    return int(bounded(name, value, 0, model.max_logprobs))


def read_stop(stop: str | list[str] | None, name: str = "stop") -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > limits.MAX_STOP_STRINGS:
        raise too_many(name, limits.MAX_STOP_STRINGS, "strings")
    if any(not text or len(text) > limits.MAX_STOP_CHARS for text in stops):
        raise invalid(f"strings in `{name}` must have 1 to {limits.MAX_STOP_CHARS} characters", name)
    return stops


def read_effort(name: str, effort: str | None) -> str | None:
    """Return how much the model is asked to reason, None if that is left to the template."""
    if effort is not None and effort not in EFFORTS:
        raise invalid(f"`{name}` must be one of {', '.join(sorted(EFFORTS))}", name)
    return effort


def read_thought(body: SamplingBody, effort: str | None = None, **own: int | None) -> ThoughtOptions:
    """Return the settings of a body for thoughts; the smallest of several budgets counts.

    own: budgets in fields of the dialect's own, by their paths.
    """
    given = {name: getattr(body, name) for name in BUDGETS} | own
    asked = {name: budget for name, budget in given.items() if budget is not None}
    if not asked:
        return ThoughtOptions(effort=effort)
    return ThoughtOptions(min((budget for budget in asked.values() if budget >= 0), default=-1), effort, tuple(asked))


def check_token_ids(name: str, token_ids: list[int], vocab_size: int) -> list[int]:
    """Return `token_ids` if all of them are in the vocabulary. Raise ApiError."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise invalid(f"`{name}` holds a token id outside the vocabulary of {vocab_size} tokens", name)
    return token_ids


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    if len(bias) > limits.MAX_LOGIT_BIAS:
        raise too_many("logit_bias", limits.MAX_LOGIT_BIAS, "entries")
    if any(re.fullmatch(r"[0-9]{1,10}", key) is None for key in bias):
        raise invalid("keys of `logit_bias` must be token ids", "logit_bias")
    check_token_ids("logit_bias", [int(key) for key in bias], vocab_size)
    limit = limits.MAX_LOGIT_BIAS_VALUE
    return {int(key): float(bounded("logit_bias", value, -limit, limit)) for key, value in bias.items()}


def _stop_token_ids(body: SamplingBody, model: ModelFacts) -> tuple[int, ...]:
    asked = body.stop_token_ids or []
    if len(asked) > limits.MAX_STOP_TOKEN_IDS:
        raise too_many("stop_token_ids", limits.MAX_STOP_TOKEN_IDS, "ids")
    check_token_ids("stop_token_ids", asked, model.vocab_size)
    natural = () if body.ignore_eos else model.eos_token_ids
    return tuple(dict.fromkeys((*natural, *asked)))


class CacheBreakpoint(msgspec.Struct):
    """The mark `prompt_cache_breakpoint` of a content part: the prompt up to there will come again."""

    mode: Literal["explicit"]
    ttl: str | int | None = None


def read_cache(body: SamplingBody) -> CacheOptions:
    """Return the settings of a body for the prompt cache. Raise ApiError.

    Its key, its retention and its options each retain the whole prompt; the longest time counts.
    """
    key, retention, options = body.prompt_cache_key, body.prompt_cache_retention, body.prompt_cache_options
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
    return CacheOptions(max(seconds, default=None) if implicit else None, report=bool(body.cache_report))


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


def read_cache_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not salt or len(salt) > limits.MAX_CACHE_SALT_CHARS:
        raise invalid(f"`cache_salt` must have 1 to {limits.MAX_CACHE_SALT_CHARS} characters", "cache_salt")
    return salt
