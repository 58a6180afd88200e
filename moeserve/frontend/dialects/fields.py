"""The common part of the OpenAI dialects: strict JSON, sampling fields with bounds, refused fields, streamed events."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Generator, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.cache_options import read_cache_options
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
from moeserve.plan import SamplingParams, TokenLogprobs

EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh"})

_ABSENT = frozenset({b"null"})
_OFF = frozenset({b"null", b"false"})
_EMPTY = frozenset({b"null", b"[]", b"{}"})
_LEAST_LOGPROB = -9999.0
_LEVELS_IN_RESERVE = 700  # of the 1000 that Python has
WRITTEN_AT_ONCE = 256  # tokens with log probabilities

# The fields that may be long, in all dialects.
_PROMPTS = ("messages", "prompt", "input", "system", "instructions", "tokens")
_TOOLS = ("tools", "functions")
_CONVERSATIONS = ("messages", "input")
_NOTHING = msgspec.Raw(b"")

# Fields that would change the answer if they were supported, with the values that ask for nothing. A dialect that has
# the field reads it; all others refuse it.
UNSUPPORTED: dict[str, Collection[bytes]] = {
    "audio": _ABSENT,
    "best_of": {b"null", b"1"},
    "cache_hit_threshold": {b"null", b"0", b"0.0"},
    "chat_template": _ABSENT,
    "continue_final_message": _OFF,
    "documents": _EMPTY,
    "echo": _OFF,
    "function_call": {b"null", b'"none"'},
    "functions": _EMPTY,
    "guided_whitespace_pattern": _ABSENT,
    "kv_transfer_params": _ABSENT,
    "logits_processors": _EMPTY,
    "modalities": {b"null", b'["text"]'},
    "prompt_embeds": _ABSENT,
    "suffix": {b"null", b'""'},
    "tool_choice": {b"null", b'"none"'},
    "tools": _EMPTY,
    "return_token_ids": _OFF,
    "truncate_prompt_tokens": _ABSENT,
    "use_beam_search": _OFF,
    "web_search_options": _ABSENT,
}

# The names that clients know for a budget of thought, vLLM's and llama.cpp's.
BUDGETS = ("thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens")

# Fields of known clients that do not change the answer here; others are counted under one name.
HARMLESS = frozenset(
    {
        "client_metadata",
        "early_stopping",
        "guided_decoding_backend",
        "include",
        "length_penalty",
        "metadata",
        "prediction",
        "safety_identifier",
        "server_tools",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
        "verbosity",
        # Of a model that does not think.
        *BUDGETS,
        "thinking.budget_tokens",
    }
)


# A body with fewer commas has no list that `_check_counts` refuses.
_FEWEST_COUNTED = min(limits.MAX_MESSAGES, limits.MAX_CONTENT_PARTS, limits.MAX_CALLS)


class _Lists(msgspec.Struct):
    content: msgspec.Raw = _NOTHING
    tool_calls: msgspec.Raw = _NOTHING


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


_B = TypeVar("_B", bound=msgspec.Struct)


def decode_json(body: bytes, expected: type[_B]) -> tuple[_B, tuple[str, ...]]:
    """Return the typed body, and the names of its fields that `expected` lacks. Raises ApiError for a bad body."""
    if body.count(b",") > limits.MAX_BODY_COMMAS:
        raise invalid(f"The body has more than {limits.MAX_BODY_COMMAS} commas", code="too_many_values")
    try:
        body.decode("utf-8")
        _check_sizes(body, expected)
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        unknown = raw.keys() - set(expected.__struct_fields__)
        if len(unknown) > limits.MAX_UNKNOWN_FIELDS:
            raise invalid(f"The body has more than {limits.MAX_UNKNOWN_FIELDS} fields that do not exist")
        for name in sorted(unknown & UNSUPPORTED.keys()):
            if _compact(bytes(raw[name])) not in UNSUPPORTED[name]:
                raise unsupported(name)
        return msgspec.json.decode(body, type=expected), tuple(sorted(unknown - UNSUPPORTED.keys()))
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise invalid("The body is not valid JSON in UTF-8", code="invalid_json") from None
    except RecursionError:
        raise invalid("The body is nested too deeply", code="invalid_json") from None


def _check_sizes(body: bytes, expected: type[msgspec.Struct]) -> None:
    """Raise ApiError for a large body that is not a large prompt: small values in great number take long to read."""
    if len(body) <= limits.MAX_OPTION_BYTES:
        return
    known = msgspec.structs.asdict(msgspec.json.decode(body, type=_raw_fields(expected)))
    sizes = {name: len(memoryview(value)) for name, value in known.items()}
    for name in _TOOLS:
        if sizes.get(name, 0) > limits.MAX_TOOLS_BYTES:
            raise invalid(f"`{name}` has more than {limits.MAX_TOOLS_BYTES} bytes", name, "too_many_values")
    if body.count(b",") >= _FEWEST_COUNTED:
        for name in _CONVERSATIONS:
            _check_counts(name, known.get(name, _NOTHING))
    prompt = sum(sizes.pop(name, 0) for name in (*_PROMPTS, *_TOOLS))
    if len(body) - prompt > limits.MAX_OPTION_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        message = f"The body has more than {limits.MAX_OPTION_BYTES} bytes beside its prompt and tools"
        raise invalid(message, largest if sizes[largest] else None, "too_many_values")


def _check_counts(name: str, conversation: msgspec.Raw) -> None:
    """Raise ApiError for more messages, parts or calls than any dialect takes, before an object is made of each."""
    messages, num_calls = _entries(conversation), 0
    if len(messages) > limits.MAX_MESSAGES:
        raise invalid(f"`{name}` takes at most {limits.MAX_MESSAGES} entries", name, "too_many_values")
    for number, message in enumerate(messages):
        if not _begins(message, "{"):
            continue
        lists = msgspec.json.decode(message, type=_Lists)
        num_calls += len(_entries(lists.tool_calls))
        if num_calls > limits.MAX_CALLS:
            raise invalid(f"`{name}` take at most {limits.MAX_CALLS} calls", name, "too_many_values")
        if len(_entries(lists.content)) > limits.MAX_CONTENT_PARTS:
            where = f"{name}[{number}].content"
            raise invalid(f"`{where}` takes at most {limits.MAX_CONTENT_PARTS} parts", where, "too_many_values")


def _entries(value: msgspec.Raw) -> list[msgspec.Raw]:
    """Return the entries of a list as they are written; none of any other value."""
    return msgspec.json.decode(value, type=list[msgspec.Raw]) if _begins(value, "[") else []


def _begins(value: msgspec.Raw, bracket: str) -> bool:
    return memoryview(value)[:1].tobytes() == bracket.encode()


@cache
def _raw_fields(expected: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a type of the same fields that reads and requires none of them."""
    names = expected.__struct_encode_fields__
    return msgspec.defstruct(expected.__name__, [(name, msgspec.Raw, _NOTHING) for name in names])


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raise ApiError for more metadata than OpenAI's API takes."""
    metadata = metadata or {}
    if len(metadata) > limits.MAX_METADATA_ENTRIES:
        raise invalid(f"`metadata` takes at most {limits.MAX_METADATA_ENTRIES} entries", "metadata")
    longest_key, longest_value = limits.MAX_METADATA_KEY_CHARS, limits.MAX_METADATA_VALUE_CHARS
    if any(len(key) > longest_key or len(value) > longest_value for key, value in metadata.items()):
        raise invalid(
            f"keys of `metadata` take at most {longest_key} characters, values at most {longest_value}", "metadata"
        )


def check_depth(value: Any) -> None:
    """Raise ApiError for a value that is nested so deeply that later readers of it might run out of stack.

    A template or an answer goes down into the value again, from a deeper stack and with more frames for each level.
    """
    for _ in range(_LEVELS_IN_RESERVE):
        value = [value]
    try:
        msgspec.json.encode(value)
    except RecursionError:
        raise invalid("The body is nested too deeply", code="invalid_json") from None


def _compact(raw: bytes) -> bytes:
    """Return JSON without insignificant spaces; long values unchanged, since no value that asks for nothing is long."""
    try:
        return msgspec.json.encode(msgspec.json.decode(raw)) if len(raw) <= 64 else raw
    except msgspec.DecodeError:
        return raw


def _wrong_type(message: str) -> ApiError:
    path = re.search(r" - at `\$\.?(.*?)`$", message)
    reason = message[: path.start()] if path else message
    param = (path[1] if path else None) or None
    name = f"Invalid value for `{param}`: " if param else "Invalid body: "
    return invalid(name + reason[:1].lower() + reason[1:], param)


def bounded(name: str, value: Any, low: float, high: float, *, above: bool = False) -> Any:
    """Return `value` if it is finite and in [low, high] (in (low, high] with `above`). Raises ApiError."""
    if not math.isfinite(value) or value < low or value > high or (above and value == low):
        interval = f"{'above' if above else 'at least'} {_plain(low)} and at most {_plain(high)}"
        raise invalid(f"`{name}` must be {interval}", name)
    return value


def _plain(bound: float) -> str:
    """Return all digits of a whole number, else the shortest form."""
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


def check_model(name: str | None, model: ModelFacts) -> str:
    """Return the model's name for the answer. Raises ApiError: 400 without a name, 404 for another model."""
    if not name:
        raise invalid("`model` is required", "model")
    if name not in model.names:
        raise unknown_model(name)
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
    """Return what `kv_transfer_params` asks for (see `read_params`). Raises ApiError.

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
