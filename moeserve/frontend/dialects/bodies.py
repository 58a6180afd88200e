"""Strict JSON: bodies and values within bounds, and the fields that every dialect refuses or ignores."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection
from functools import cache
from typing import Any, TypeVar

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects import decimals
from moeserve.frontend.errors import ApiError, invalid, too_many, unsupported

_ABSENT = frozenset({b"null"})
_OFF = frozenset({b"null", b"false"})
_EMPTY = frozenset({b"null", b"[]", b"{}"})
_ZERO = frozenset({b"null", b"0", b"0.0"})
_ONE = frozenset({b"null", b"1", b"1.0"})
_LEVELS_IN_RESERVE = 700  # of the 1000 levels of Python's stack, left to later readers

# The fields that may be long, in all dialects.
_PROMPTS = ("messages", "prompt", "input", "inputs", "text_input", "system", "instructions", "tokens")
_TOOLS = ("tools", "functions")
_CONVERSATIONS = ("messages", "input")
_NOTHING = msgspec.Raw(b"")

# Fields that would change the answer if they were supported, with the values that ask for nothing. A dialect that has
# such a field reads it; the others refuse other values. Some fields are extensions of vLLM, SGLang or llama.cpp.
UNSUPPORTED: dict[str, Collection[bytes]] = {
    "allowed_token_ids": _EMPTY,
    "audio": _ABSENT,
    "bad_words": _EMPTY,
    "best_of": _ONE,
    "cache_hit_threshold": _ZERO,
    "chat_template": _ABSENT,
    "continue_final_message": _OFF,
    "custom_logit_processor": _ABSENT,
    "documents": _EMPTY,
    "dry_multiplier": _ZERO,
    "echo": _OFF,
    "function_call": {b"null", b'"none"'},
    "functions": _EMPTY,
    "grammar": {b"null", b'""'},
    "guided_whitespace_pattern": _ABSENT,
    "include_reasoning": {b"null", b"true"},
    "kv_transfer_params": _ABSENT,
    "logits_processors": _EMPTY,
    "lora_path": _ABSENT,
    "mirostat": _ZERO,
    "modalities": {b"null", b'["text"]'},
    "no_repeat_ngram_size": _ZERO,
    "prompt_embeds": _ABSENT,
    "return_hidden_states": _OFF,
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "stop_regex": {b"null", b'""', b"[]"},
    "suffix": {b"null", b'""'},
    "tool_choice": {b"null", b'"none"'},
    "tools": _EMPTY,
    "truncate_prompt_tokens": _ABSENT,
    "typical_p": _ONE,
    "use_beam_search": _OFF,
    "web_search_options": _ABSENT,
    "xtc_probability": _ZERO,
}

# The fields of vLLM and llama.cpp for a budget of thought.
BUDGETS = ("thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens")

# Fields of known clients that do not change the answer here. Unknown fields are counted under one name.
HARMLESS = frozenset(
    {
        "client_metadata",
        "early_stopping",
        "guided_decoding_backend",
        "include",
        "length_penalty",
        "metadata",
        "prediction",
        "return_progress",
        "safety_identifier",
        "server_tools",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
        "verbosity",
        # These have no effect on a model that does not think, or whose template does not ask for them.
        *BUDGETS,
        "thinking.budget_tokens",
        "output_config.effort",
        "reasoning.effort",
        "reasoning_effort",
    }
)

# A body with fewer commas has no list that `_check_counts` refuses.
# One of two `\\u` escapes that only together are a character: text cut inside an emoji, for example.
_HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]")
_FEWEST_COUNTED = min(limits.MAX_MESSAGES, limits.MAX_CONTENT_PARTS, limits.MAX_CALLS)


class _Lists(msgspec.Struct):
    content: msgspec.Raw = _NOTHING
    tool_calls: msgspec.Raw = _NOTHING


_B = TypeVar("_B", bound=msgspec.Struct)


def decode_json(body: bytes, expected: type[_B]) -> tuple[_B, tuple[str, ...]]:
    """Return the typed body, and the names of its fields that `expected` lacks. Raise ApiError for a bad body."""
    if body.count(b",") > limits.MAX_BODY_COMMAS:
        raise invalid(f"The body has more than {limits.MAX_BODY_COMMAS} commas", code="too_many_values")
    try:
        body = body.removeprefix(codecs.BOM_UTF8)
        body.decode("utf-8")
        _check_sizes(body, expected)
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        unknown = raw.keys() - set(expected.__struct_fields__)
        if len(unknown) > limits.MAX_UNKNOWN_FIELDS:
            raise invalid(f"The body has more than {limits.MAX_UNKNOWN_FIELDS} fields that do not exist")
        for name in sorted(unknown & UNSUPPORTED.keys()):
            if _compact(bytes(raw[name])) not in UNSUPPORTED[name]:
                raise unsupported(name)
        return decimals.decode(body, expected), tuple(sorted(unknown - UNSUPPORTED.keys()))
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error), expected) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON in UTF-8: {_fault(body, error)}", code="invalid_json") from None
    except RecursionError:
        raise invalid("The body is nested too deeply", code="invalid_json") from None


def _fault(body: bytes, error: Exception) -> str:
    """Return the error of a body that is not JSON."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is no UTF-8"
    if not body.strip():
        return "it is empty"
    if _HALF_OF_A_PAIR.search(body):
        return "a \\u escape is half of a surrogate pair"
    reason = str(error).removeprefix("JSON is malformed: ")
    return reason[:1].lower() + reason[1:]


def _check_sizes(body: bytes, expected: type[msgspec.Struct]) -> None:
    """Raise ApiError for a body that is large beside its prompt: very many small values take long to read."""
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
        raise too_many(name, limits.MAX_MESSAGES, "entries")
    for number, message in enumerate(messages):
        if not _begins(message, "{"):
            continue
        lists = msgspec.json.decode(message, type=_Lists)
        num_calls += len(_entries(lists.tool_calls))
        if num_calls > limits.MAX_CALLS:
            raise invalid(f"`{name}` take at most {limits.MAX_CALLS} calls", name, "too_many_values")
        if len(_entries(lists.content)) > limits.MAX_CONTENT_PARTS:
            where = f"{name}[{number}].content"
            raise too_many(where, limits.MAX_CONTENT_PARTS, "parts")


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
        raise too_many("metadata", limits.MAX_METADATA_ENTRIES, "entries")
    longest_key, longest_value = limits.MAX_METADATA_KEY_CHARS, limits.MAX_METADATA_VALUE_CHARS
    if any(len(key) > longest_key or len(value) > longest_value for key, value in metadata.items()):
        raise invalid(
            f"keys of `metadata` take at most {longest_key} characters, values at most {longest_value}", "metadata"
        )


def check_depth(value: Any) -> None:
    """Raise ApiError for a value that is nested so deeply that its later readers might run out of stack.

    Templates and answers read the value again, from a deeper stack and with more frames for each level.
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


def _wrong_type(message: str, expected: type[msgspec.Struct]) -> ApiError:
    path = re.search(r" - at `\$\.?(.*?)`$", message)
    reason = message[: path.start()] if path else message
    param = (path[1] if path else None) or None
    if param in (spans := _spans(expected)) and re.match(r"Expected `\w+` [<>]", reason):
        return _beyond(str(param), *spans[str(param)])
    name = f"Invalid value for `{param}`: " if param else "Invalid body: "
    return invalid(name + reason[:1].lower() + reason[1:], param, "invalid_type")


@cache
def _spans(expected: type[msgspec.Struct]) -> dict[str, tuple[float, float, bool]]:
    """Return the bounds (low, high, above) of a struct's fields, as `_beyond` takes them."""
    found = {}
    described = msgspec.inspect.type_info(expected)
    assert isinstance(described, msgspec.inspect.StructType)
    for field in described.fields:
        kinds = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        for kind in kinds:
            if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType) and kind.le is not None:
                low = kind.ge if kind.gt is None else kind.gt
                found[field.encode_name] = (low or 0, kind.le, kind.gt is not None)
    return found


def bounded(name: str, value: Any, low: float, high: float) -> Any:
    """Return `value` if it is finite and in [low, high]. Raise ApiError."""
    # A comparison with NaN fails as well; JSON's integers may be too large for a float.
    if not low <= value <= high:
        raise _beyond(name, low, high)
    return value


def _beyond(name: str, low: float, high: float, above: bool = False) -> ApiError:
    """Return the error of a value beyond [low, high], or beyond (low, high] with `above`."""
    interval = f"{'above' if above else 'at least'} {_plain(low)} and at most {_plain(high)}"
    return invalid(f"`{name}` must be {interval}", name)


def _plain(bound: float) -> str:
    """Return all digits of a whole number, else the shortest form."""
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"
