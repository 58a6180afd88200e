"""The fields by which OpenAI's dialects and their extensions ask for a form of the answer's text."""

from __future__ import annotations

from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.internal import OutputFormat, StructuralTags, Tag
from moeserve.frontend.http import invalid, unsupported


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
    """Refuse these fields in a dialect that has a field of its own for the form. Raises ApiError."""
    for name in FormatFields.__struct_fields__:
        if getattr(body, name) is not None:
            raise unsupported(name)


def read_format(body: FormatFields) -> OutputFormat | None:
    """Return the asked form, or None for free text. Raises ApiError for two forms, and for one that is not known.

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
                raise invalid(f"`{where}` is required", where)
            return _json(schema, where)
        case "structural_tag":
            return OutputFormat("structural_tag", _tags(wanted), "response_format")
        case _:
            raise unsupported("response_format.type", wanted.type[:40])


def _tags(wanted: ResponseFormat) -> StructuralTags:
    """Return the tags of either form of `structural_tag`. Raises ApiError for one that cannot be enforced."""
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
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError):
            raise invalid(f"`{where}` is not valid JSON", where) from None
    return None if schema is None else OutputFormat("json_schema", checked_size(schema, where), where)


def checked_size(schema: Any, where: str) -> Any:
    """Return a schema. Raises ApiError for one that is too large, before anything else goes through it."""
    try:
        size = len(msgspec.json.encode(schema))
    except RecursionError:
        size = 0  # Too deep, which is said by who reads it.
    if size > limits.MAX_GRAMMAR_BYTES:
        raise invalid(f"`{where}` takes at most {limits.MAX_GRAMMAR_BYTES} bytes", where)
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
