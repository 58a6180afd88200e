"""The form of an answer's text: the fields that ask for one, and the text of a grammar that enforces it, within limits.

A grammar is llguidance's: JSON with parts that name each other, so that one of tool calls can say `calls | @answer`
(`of_calls`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec
from llguidance import regex_to_lark

from moeserve.frontend import limits
from moeserve.frontend.dialects import decimals
from moeserve.frontend.dialects.internal import OutputFormat, StructuralTags, Tag
from moeserve.frontend.errors import ApiError, invalid, missing, too_long, too_many, unsupported
from moeserve.grammars.large_numbers import LargeNumberError, expression_of, part_of
from moeserve.grammars.schemas import subschemas
from moeserve.plan import SamplingParams

_LONGEST_REASON = 300
# Lower than every other logit: EOS is sampled where nothing else is allowed, and nowhere else.
_LAST_RESORT = -1e6

# With free white space a model could write it without end. This pattern allows any usual layout of JSON.
_JSON_OPTIONS = {"whitespace_pattern": r"[ ]|\r?\n[ \t]{0,64}", "lenient": False}
# The values of `format` that can be enforced; others demand nothing.
_ENFORCED_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# The schemas behind these keywords exclude objects, or hold in some cases only.
_CONDITIONS = frozenset({"not", "if", "then", "else", "contains", "dependentSchemas"})
# Keywords whose schemas together describe one object, and keywords whose schema, if alone, describes it completely.
_PARTS = frozenset({"allOf", "oneOf"})
_ELSEWHERE = frozenset({"anyOf", "$ref", "$dynamicRef"})
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"})
_OF_OBJECTS = _OPEN | {"properties", "required"}

_NO_IDS: Mapping[str, int] = MappingProxyType({})
# Levels of JSON in a schema: one schema in another takes up to two.
_MAX_LEVELS = 4 * limits.MAX_SCHEMA_DEPTH

# Texts, comments, patterns and named tokens of Lark. In texts and comments a slash begins no pattern.
_LARK_PARTS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?P<pattern>(?:\\.|[^/\\\n])+)/|<(?!\[)[^<>\s]+>')

# The name under which a grammar of calls refers to the form of an answer's text.
ANSWER = "answer"


class JsonSchemaFormat(msgspec.Struct):
    """`strict` changes nothing: the answer always matches the schema."""

    schema: Any = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TagStructure(msgspec.Struct):
    """A tag in the older form of `structural_tag`."""

    begin: str
    schema: Any = None
    end: str = ""


class TagContent(msgspec.Struct):
    type: str
    json_schema: Any = None


class TagOfFormat(msgspec.Struct):
    """A tag in the newer form of `structural_tag`."""

    begin: str
    content: TagContent
    end: str = ""


class TagsFormat(msgspec.Struct):
    """The newer form of `structural_tag`; only its type `triggered_tags` is read."""

    type: str
    triggers: list[str] = []
    tags: list[TagOfFormat] = []
    at_least_one: bool = False
    stop_after_first: bool = False


class ResponseFormat(msgspec.Struct):
    """`schema` is an extension of other servers for `json_object`. `structures` and `triggers`, or `format`, belong to
    `structural_tag`."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: Any = None
    structures: list[TagStructure] | None = None
    triggers: list[str] | None = None
    format: TagsFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class FormatFields(msgspec.Struct, kw_only=True):
    """Fields of chat and completions; null is the same as absent."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None


def refuse_formats(body: FormatFields) -> None:
    """Refuse these fields in a dialect that has a field of its own for the form. Raise ApiError."""
    for name in FormatFields.__struct_fields__:
        if getattr(body, name) is not None:
            raise unsupported(name)


def read_format(body: FormatFields) -> OutputFormat | None:
    """Return the asked form, or None for free text. Raise ApiError for two forms, and for one that is not known.

    The same form in several fields is one form.
    """
    asked = _asked(body)
    for other in asked[1:]:
        if (other.kind, other.value) != (asked[0].kind, asked[0].value):
            first, second = asked[0].where, other.where
            raise invalid(f"`{second}` and `{first}` ask for different forms of the answer: give one of them", second)
    return asked[0] if asked else None


def _asked(body: FormatFields) -> list[OutputFormat]:
    asked = []
    if body.response_format is not None:
        asked.append(_of_response_format(body.response_format))
    outputs = body.structured_outputs
    if outputs is not None:
        asked += [
            _json(outputs.json, "structured_outputs.json"),
            _text("regex", outputs.regex, "structured_outputs.regex"),
            _choice(outputs.choice, "structured_outputs.choice"),
            _text("grammar", outputs.grammar, "structured_outputs.grammar"),
            OutputFormat("json_object", None, "structured_outputs.json_object") if outputs.json_object else None,
        ]
    asked += [
        _json(body.guided_json, "guided_json"),
        _text("regex", body.guided_regex, "guided_regex"),
        _choice(body.guided_choice, "guided_choice"),
        _text("grammar", body.guided_grammar, "guided_grammar"),
        _json(body.json_schema, "json_schema"),
        _text("regex", body.regex, "regex"),
        _text("grammar", body.ebnf, "ebnf"),
    ]
    return [form for form in asked if form is not None]


def _of_response_format(wanted: ResponseFormat) -> OutputFormat | None:
    match wanted.type:
        case "text":
            return None
        case "json_object" if wanted.schema is None:
            return OutputFormat("json_object", None, "response_format")
        case "json_object":
            return _json(wanted.schema, "response_format.schema")
        case "json_schema":
            where = "response_format.json_schema.schema"
            schema = None if wanted.json_schema is None else wanted.json_schema.schema
            if schema is None:
                raise missing(where)
            return _json(schema, where)
        case "structural_tag":
            return OutputFormat("structural_tag", _tags(wanted), "response_format")
        case _:
            raise unsupported("response_format.type", wanted.type[:40])


def _tags(wanted: ResponseFormat) -> StructuralTags:
    """Return the tags of either form of `structural_tag`. Raise ApiError for one that cannot be enforced."""
    newer = wanted.format
    if newer is None:
        where = "response_format.structures"
        found = [(tag.begin, tag.schema, tag.end) for tag in wanted.structures or []]
        triggers, flags = wanted.triggers or [], (False, False)
    elif newer.type != "triggered_tags":
        raise unsupported("response_format.format.type", newer.type[:40])
    else:
        where = "response_format.format.tags"
        for tag in newer.tags:
            if tag.content.type != "json_schema":
                raise unsupported(f"{where}.content.type", tag.content.type[:40])
        found = [(tag.begin, tag.content.json_schema, tag.end) for tag in newer.tags]
        triggers, flags = newer.triggers, (newer.at_least_one, newer.stop_after_first)
    if not 0 < len(found) <= limits.MAX_FORMAT_CHOICES:
        raise invalid(f"`{where}` must hold 1 to {limits.MAX_FORMAT_CHOICES} tags", where)
    tags = []
    for place, (begin, schema, end) in enumerate(found):
        trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
        if trigger is None:
            raise invalid(f"`{where}[{place}].begin` begins with no trigger", f"{where}[{place}].begin")
        tags.append(Tag(trigger, begin, checked_size({} if schema is None else schema, where), end))
    return StructuralTags(tuple(tags), *flags)


def _json(schema: Any, where: str) -> OutputFormat | None:
    """Return the form of a JSON schema, also of one that came as text."""
    if isinstance(schema, str):
        try:
            schema = decimals.decode(schema, Any, where)
        except (msgspec.DecodeError, RecursionError):
            raise invalid(f"`{where}` is not valid JSON", where) from None
    return None if schema is None else OutputFormat("json_schema", checked_size(schema, where), where)


def checked_size(schema: Any, where: str) -> Any:
    """Return a schema. Raise ApiError for one that is too large, before anything else goes through it."""
    try:
        size = len(msgspec.json.encode(schema))
    except RecursionError:
        size = 0  # Too deep: the reader of the schema refuses it.
    if size > limits.MAX_GRAMMAR_BYTES:
        raise too_long(where, limits.MAX_GRAMMAR_BYTES, "bytes")
    return schema


def _text(kind: Any, text: str | None, where: str) -> OutputFormat | None:
    if text is None:
        return None
    if not text.strip():
        raise invalid(f"`{where}` must not be empty", where)
    return OutputFormat(kind, text, where)


def _choice(texts: list[str] | None, where: str) -> OutputFormat | None:
    if texts is not None and len(texts) > limits.MAX_FORMAT_CHOICES:
        raise invalid(f"`{where}` must hold 1 to {limits.MAX_FORMAT_CHOICES} texts", where)
    return None if texts is None else OutputFormat("choice", texts, where)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar of llguidance, Lark or JSON, before it was checked. where: the request field that it comes from.

    schema: the JSON schema that it is, to find the place of an error in it; None for another grammar. bnf: GBNF that is
    still to be turned into Lark, for the last part of the grammar.
    """

    grammar: str
    where: str
    schema: Any = None
    bnf: str | None = None

    def with_lark(self, lark: str) -> str:
        """Return the grammar with the Lark that `bnf` means."""
        parts = msgspec.json.decode(self.grammar)["grammars"]
        parts[-1]["lark_grammar"] = lark
        return _whole(parts)


def constraint_of(form: OutputFormat, ids: Mapping[str, int] = _NO_IDS) -> Constraint:
    """Return the constraint of a form. ids: of the tokens that a grammar may name, by their text. Raise ApiError for a
    form that is too large or malformed."""
    where = form.where
    match form.kind:
        case "json_object":
            return of_schema({"type": "object"}, where)
        case "json_schema":
            return of_schema(form.value, where)
        case "regex":
            _check_size(form.value, where)
            return _of_lark(f"start: /{ascii_pattern(form.value)}/", where)
        case "choice":
            return _of_lark(_choices(form.value, where), where)
        case "grammar":
            _check_size(form.value, where)
            if "::=" in form.value:
                return Constraint(_whole([{"lark_grammar": ""}]), where, bnf=form.value)
            return _of_lark(_with_token_ids(ascii_classes(form.value), ids, where), where)
        case "structural_tag":
            return _of_lark(_tagged(form.value, where), where)


def ascii_classes(lark: str) -> str:
    """Return a grammar in Lark in whose patterns `\\d`, `\\w` and `\\s` mean ASCII, as in a schema's `pattern`."""

    def replaced(found: re.Match[str]) -> str:
        pattern = found["pattern"]
        return found[0] if pattern is None else f"/{ascii_pattern(pattern)}/"

    return _LARK_PARTS.sub(replaced, lark)


def _with_token_ids(lark: str, ids: Mapping[str, int], where: str) -> str:
    """Return a grammar in Lark that names tokens by id (`grammars.tokens` hides their texts). Raise ApiError."""

    def replaced(found: re.Match[str]) -> str:
        if not found[0].startswith("<"):
            return found[0]
        if found[0] not in ids:
            raise invalid(f"`{where}` names the token {found[0][:60]}, which this model lacks", where)
        return f"<[{ids[found[0]]}]>"

    return _LARK_PARTS.sub(replaced, lark)


def of_calls(lark: str, form: OutputFormat | None, ids: Mapping[str, int] = _NO_IDS) -> Constraint:
    """Return the constraint of a grammar of tool calls, in which `@answer` is a text of a form. Raise ApiError."""
    if len(lark) > limits.MAX_CALLS_GRAMMAR_CHARS:
        raise invalid(
            f"The schemas of `tools` make a grammar of over {limits.MAX_CALLS_GRAMMAR_CHARS} characters", "tools"
        )
    calls = {"lark_grammar": lark}
    if form is None:
        return Constraint(_whole([calls]), "tools")
    answer = constraint_of(form, ids)
    (part,) = msgspec.json.decode(answer.grammar)["grammars"]
    where = "tools" if answer.bnf is None else answer.where
    return Constraint(_whole([calls, {"name": ANSWER, **part}]), where, bnf=answer.bnf)


def of_schema(schema: Any, where: str) -> Constraint:
    """Return the constraint of a JSON schema. Raise ApiError for one that is too large or too deep."""
    try:
        return of_prepared(prepare_schema(schema, where), where)
    except LargeNumberError as error:
        raise unenforceable(where, error.path, str(error)) from None


def of_prepared(schema: Any, where: str) -> Constraint:
    """Return the constraint of a schema that has its spacing in `x-guidance`. Raise LargeNumberError."""
    return Constraint(_whole([part_of(schema)]), where, schema)


def json_expression(prepared: Any, where: str) -> str:
    """Return the expression in Lark for JSON of a schema, which has its spacing in `x-guidance`. Raise ApiError."""
    try:
        return expression_of(prepared)
    except LargeNumberError as error:
        raise unenforceable(where, error.path, str(error)) from None


def unenforceable(where: str, path: Sequence[str | int], reason: str) -> ApiError:
    """Return the error of a schema. path: of its part at fault."""
    param = where + "".join(f"[{step}]" if isinstance(step, int) else f".{step[:60]}" for step in path)
    return invalid(f"Invalid value for `{param}`: {' '.join(reason.split())[:_LONGEST_REASON]}", param)


def prepare_schema(schema: Any, where: str) -> Any:
    """Return a JSON schema as grammars take it, with options for its layout and without annotations that llguidance
    refuses. Raise ApiError for one that is too large or too deep."""
    if not isinstance(schema, dict | bool):
        raise invalid(f"`{where}` must be a JSON schema: an object", where)
    if _levels(schema) > _MAX_LEVELS:
        raise _too_deep(where)
    _check_size(json.dumps(schema, ensure_ascii=False), where)
    prepared = closed(enforceable(schema, where))
    return prepared | {"x-guidance": _JSON_OPTIONS} if isinstance(prepared, dict) else prepared


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


def _levels(value: Any) -> int:
    """Count the levels of objects and arrays of a JSON value, without a stack that it could run out of."""
    num_levels, level = 0, [value]
    while level:
        num_levels += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return num_levels


def _with_inner(schema: dict[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a copy in which each schema right inside is replaced by `change` of its keyword and itself."""
    copy = schema.copy()
    for path, inner in subschemas(schema):
        keyword = str(path[0])
        if len(path) == 1:
            copy[keyword] = change(keyword, inner)
        else:
            if copy[keyword] is schema[keyword]:
                copy[keyword] = schema[keyword].copy()
            copy[keyword][path[1]] = change(keyword, inner)
    return copy


def enforceable(schema: Any, where: str, depth: int = 0) -> Any:
    """Return a JSON schema without the words that forbid nothing but that llguidance refuses.

    depth: of this schema in a larger one. Raise ApiError for one that is too deep.
    """
    if not isinstance(schema, dict):
        return schema
    if depth > limits.MAX_SCHEMA_DEPTH:
        raise _too_deep(where)
    said = {keyword: value for keyword, value in schema.items() if not _says_nothing(keyword, value)}
    return _with_inner(said, lambda _, inner: enforceable(inner, where, depth + 1))


def closed(schema: Any) -> Any:
    """Return a JSON schema, no deeper than `enforceable` lets pass, whose objects have only properties that they list.

    A weak model invents properties without end where it may. A value that obeys the result obeys the schema. Objects
    that allow further properties explicitly keep them. A schema that describes an object in several places stays as it
    is: each place would forbid the properties of the others, or branches that overlap would look as if they did not.
    """
    return schema if _describes_in_parts(schema) else _closed(schema)


def _describes_in_parts(schema: Any) -> bool:
    """Return whether an object is described by a schema and by further ones that are part of it, at any depth."""
    if not isinstance(schema, dict):
        return False
    words = schema.keys()
    num_parts = len(words & _ELSEWHERE) + bool(words & _OF_OBJECTS)
    return num_parts > 1 or bool(words & _PARTS) or any(_describes_in_parts(inner) for _, inner in subschemas(schema))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    copy = _with_inner(schema, lambda keyword, inner: inner if keyword in _CONDITIONS else _closed(inner))
    listed, required = schema.get("properties"), schema.get("required", [])
    if isinstance(listed, dict) and isinstance(required, list) and not _OPEN & schema.keys():
        names = list(listed)
        return copy if any(name not in names for name in required) else copy | {"additionalProperties": False}
    return copy


def _says_nothing(keyword: str, value: Any) -> bool:
    """Return whether a keyword forbids nothing, although llguidance may refuse it."""
    match keyword:
        case "format":
            return isinstance(value, str) and value not in _ENFORCED_FORMATS
        case "propertyNames":
            return value in (True, {}, {"type": "string"})
        case "uniqueItems":
            return value is False
        case "unevaluatedProperties" | "unevaluatedItems":
            return value in (True, {})
        case "x-guidance" | "default" | "examples":
            return True
    return False


def _of_lark(lark: str, where: str) -> Constraint:
    return Constraint(_whole([{"lark_grammar": lark}]), where)


def _whole(parts: list[dict[str, Any]]) -> str:
    """Return the grammar of parts, which name each other."""
    return json.dumps({"grammars": parts}, ensure_ascii=False)


def _choices(texts: Sequence[str], where: str) -> str:
    if not texts or len(texts) > limits.MAX_FORMAT_CHOICES:
        raise invalid(f"`{where}` must hold 1 to {limits.MAX_FORMAT_CHOICES} texts", where)
    lark = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    _check_size(lark, where)
    return lark


def ascii_pattern(pattern: str) -> str:
    """Return a pattern as it stands between slashes in Lark, with its classes of characters in ASCII."""
    converted: str = regex_to_lark(pattern, "dws")
    return converted


def _tagged(form: StructuralTags, where: str) -> str:
    """Return the grammar of a text that may hold tags, in Lark. Raise ApiError for schemas that are too large.

    A trigger ends the free text at once, as the text before it is matched lazily.
    """
    rules, names = [], []
    for number, tag in enumerate(form.tags):
        schema = json_expression(prepare_schema(tag.schema, where), where)
        trigger, rest, end = (_quoted(text) for text in (tag.trigger, tag.begin[len(tag.trigger) :], tag.end))
        names.append(f"tag_{number}")
        rules.append(f"begin_{number}[lazy]: TEXT {trigger}")
        rules.append(f"tag_{number}: begin_{number} {rest} {schema} {end}")
    tags = f"({' | '.join(names)})"
    if form.stop_after_first:
        body = tags if form.at_least_one else f"{tags} | text"
    else:
        body = f"{tags}{'+' if form.at_least_one else '*'} text"
    lark = "\n".join([f"start: {body}", "text: TEXT", "TEXT: /(.|\\n)*/", *rules])
    _check_size(lark, where)
    return lark


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _check_size(text: str, where: str) -> None:
    if len(text.encode("utf-8", "surrogatepass")) > limits.MAX_GRAMMAR_BYTES:
        raise too_long(where, limits.MAX_GRAMMAR_BYTES, "bytes")


def _too_deep(where: str) -> ApiError:
    return too_many(where, limits.MAX_SCHEMA_DEPTH, "levels of schemas")
