"""From the asked form of an answer to the text of a grammar that enforces it, within limits.

A grammar is llguidance's: Lark, or JSON with several parts that name each other. `parts_of` gives such a part, so that
a grammar of tool calls can say `calls | @answer` (`of_calls`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from llguidance import LLMatcher

from moeserve.frontend import limits
from moeserve.frontend.dialects.internal import OutputFormat
from moeserve.frontend.http import invalid
from moeserve.plan import SamplingParams

# Lower than every other logit: EOS is sampled where nothing else is allowed, and nowhere else.
_LAST_RESORT = -1e6

# Free white space would let a model go on with it for ever. This allows any usual layout of JSON.
_JSON_OPTIONS = {"whitespace_pattern": r"[ ]|\r?\n[ \t]{0,64}", "lenient": False}
# Schemas do not use `format` as a demand unless both sides know it; these are the ones that can be enforced.
_ENFORCED_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_OF_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_OF_SOME = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_BY_NAME = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
# Values, and schemas that say what an object is not, or is in some cases.
_KEPT = frozenset({"enum", "const", "default", "examples", "not", "if", "then", "else", "contains", "dependentSchemas"})
_ALTERNATIVES = frozenset({"anyOf", "oneOf"})
_OPEN = _ALTERNATIVES | {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref"}

# The name under which a grammar of calls refers to the form of an answer's text.
ANSWER = "answer"

SchemaPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar of llguidance, Lark or JSON, before it was checked. where: the request field that it comes from.

    schema: the JSON schema that it is, to find the place of an error in it; None for another grammar. is_bnf: the text
    is GBNF, which is still to be turned into Lark.
    """

    grammar: str
    where: str
    schema: Any = None
    is_bnf: bool = False


def constraint_of(form: OutputFormat) -> Constraint:
    """Return the constraint of a form. Raises ApiError for one that is too large or malformed."""
    where = form.where
    match form.kind:
        case "json_object":
            return of_schema({"type": "object"}, where)
        case "json_schema":
            return of_schema(form.value, where)
        case "regex":
            _check_size(form.value, where)
            return Constraint(LLMatcher.grammar_from_regex(form.value), where)
        case "choice":
            return _of_lark(_choices(form.value, where), where)
        case "grammar":
            _check_size(form.value, where)
            return Constraint(form.value, where, is_bnf=True) if "::=" in form.value else _of_lark(form.value, where)


def of_calls(lark: str, form: OutputFormat | None) -> Constraint:
    """Return the constraint of a grammar of tool calls, in which `@answer` is a text of a form. Raises ApiError."""
    parts: list[dict[str, Any]] = [{"lark_grammar": lark}]
    if form is not None:
        parts.append({"name": ANSWER, **parts_of(form)})
    if len(lark) > limits.MAX_CALLS_GRAMMAR_CHARS:
        raise invalid(
            f"The schemas of `tools` make a grammar of over {limits.MAX_CALLS_GRAMMAR_CHARS} characters", "tools"
        )
    return Constraint(json.dumps({"grammars": parts}, ensure_ascii=False), "tools")


def of_schema(schema: Any, where: str) -> Constraint:
    """Return the constraint of a JSON schema. Raises ApiError for one that is too large or too deep."""
    prepared = prepare_schema(schema, where)
    return Constraint(json.dumps({"grammars": [{"json_schema": prepared}]}, ensure_ascii=False), where, prepared)


def prepare_schema(schema: Any, where: str) -> Any:
    """Return a JSON schema as grammars take it, with options for its layout and without annotations that llguidance
    refuses. Raises ApiError for one that is too large or too deep."""
    if not isinstance(schema, dict | bool):
        raise invalid(f"`{where}` must be a JSON schema: an object", where)
    try:
        _check_size(json.dumps(schema, ensure_ascii=False), where)
    except RecursionError:
        raise _too_deep(where) from None
    prepared = closed(enforceable(schema, where))
    return prepared | {"x-guidance": _JSON_OPTIONS} if isinstance(prepared, dict) else prepared


def parts_of(form: OutputFormat) -> dict[str, Any]:
    """Return the form as a part of a larger grammar, for `{"grammars": [..., {"name": NAME, **parts}]}`.

    Raises ApiError as `constraint_of` does, and for GBNF.
    """
    constraint = constraint_of(form)
    if constraint.is_bnf:
        raise invalid(f"`{form.where}` has to be a Lark grammar where the answer may also call tools", form.where)
    (part,) = msgspec.json.decode(constraint.grammar)["grammars"]
    return {name: part[name] for name in ("json_schema", "lark_grammar") if part.get(name) is not None}


def constrain(sampling: SamplingParams, grammar: str, eos_token_ids: Sequence[int]) -> SamplingParams:
    """Return the sampling parameters with a grammar that was checked.

    The grammar wins over `ignore_eos`, which otherwise leaves EOS ids out of the stop tokens: EOS ends the answer where
    the grammar can only end, and is not sampled where the grammar could go on.
    """
    ignored = [token for token in eos_token_ids if token not in sampling.stop_token_ids]
    if not ignored:
        return replace(sampling, grammar=grammar)
    return replace(
        sampling,
        grammar=grammar,
        stop_token_ids=(*ignored, *sampling.stop_token_ids),
        logit_bias={**(sampling.logit_bias or {}), **dict.fromkeys(ignored, _LAST_RESORT)},
    )


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[SchemaPath, Any]]:
    """Yield the path and value of each schema right inside a schema, definitions first. Examples and constants are
    none."""
    for keyword in _BY_NAME:
        if isinstance(schema.get(keyword), dict):
            yield from (((keyword, name), inner) for name, inner in schema[keyword].items())
    for keyword in _OF_SOME:
        if isinstance(schema.get(keyword), list):
            yield from (((keyword, place), inner) for place, inner in enumerate(schema[keyword]))
    for keyword in _OF_ONE:
        if isinstance(schema.get(keyword), dict | bool):
            yield (keyword,), schema[keyword]


def enforceable(schema: Any, where: str, depth: int = 0) -> Any:
    """Return a JSON schema without the words that forbid nothing but that llguidance refuses.

    depth: of this schema in a larger one. Raises ApiError for one that is too deep.
    """
    if not isinstance(schema, dict):
        return schema
    if depth > limits.MAX_SCHEMA_DEPTH:
        raise _too_deep(where)
    prepared = {keyword: value for keyword, value in schema.items() if not _says_nothing(keyword, value)}
    for path, inner in subschemas(prepared):
        if isinstance(inner, dict):
            keyword = path[0]
            if len(path) == 1:
                prepared[keyword] = enforceable(inner, where, depth + 1)
            else:
                if prepared[keyword] is schema[keyword]:
                    prepared[keyword] = schema[keyword].copy()
                prepared[keyword][path[1]] = enforceable(inner, where, depth + 1)
    return prepared


def closed(schema: Any) -> Any:
    """Return a JSON schema whose objects, at any depth, have the properties that they list and no others.

    A weak model invents properties without end where it may. Objects that say what else they may have keep it, and so
    does a schema with `allOf`, whose parts list the properties together.
    """
    return schema if "allOf" in json.dumps(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    lists = isinstance(schema.get("properties"), dict)
    copy: dict[str, Any] = {}
    for word, value in schema.items():
        if word in _KEPT or (lists and word in _ALTERNATIVES):
            copy[word] = value
        elif word in _BY_NAME and isinstance(value, dict):
            copy[word] = {name: _closed(part) for name, part in value.items()}
        else:
            copy[word] = _closed(value)
    if lists and not _OPEN & schema.keys():
        copy["additionalProperties"] = False
    return copy


def _says_nothing(keyword: str, value: Any) -> bool:
    """Return whether a keyword forbids nothing, although llguidance refuses it."""
    match keyword:
        case "format":
            return isinstance(value, str) and value not in _ENFORCED_FORMATS
        case "propertyNames":
            return value in (True, {}, {"type": "string"})
        case "uniqueItems":
            return value is False
        case "unevaluatedProperties" | "unevaluatedItems":
            return value in (True, {})
        case "x-guidance":
            return True
    return False


def _of_lark(lark: str, where: str) -> Constraint:
    return Constraint(json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False), where)


def _choices(texts: Sequence[str], where: str) -> str:
    if not texts or len(texts) > limits.MAX_FORMAT_CHOICES:
        raise invalid(f"`{where}` must hold 1 to {limits.MAX_FORMAT_CHOICES} texts", where)
    lark = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    _check_size(lark, where)
    return lark


def _check_size(text: str, where: str) -> None:
    if len(text.encode("utf-8", "surrogatepass")) > limits.MAX_GRAMMAR_BYTES:
        raise invalid(f"`{where}` takes at most {limits.MAX_GRAMMAR_BYTES} bytes", where)


def _too_deep(where: str) -> Exception:
    return invalid(f"`{where}` takes at most {limits.MAX_SCHEMA_DEPTH} levels of schemas", where)
