"""Descriptions of the routes: `/openapi.json`, with the schemas of request bodies, and the JSON index at `/`.

A body's schema is made from the struct that reads it, with the bounds that its reader checks. A body that a schema
refuses is a 400. One that it allows may be a 400 too, since schemas cannot say all that readers refuse: tools that are
chosen and not there, two formats at once, a grammar that is invalid.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moeserve.config import VERSION
from moeserve.frontend import limits
from moeserve.frontend.dialects import chat_parts, fields, messages, ollama, responses, responses_items
from moeserve.frontend.dialects.formats import FormatFields
from moeserve.frontend.dialects.internal import ModelFacts
from moeserve.frontend.errors import ApiError
from moeserve.frontend.route import JSON, Route
from moeserve.frontend.services import Services

_REF = "#/components/schemas/{name}"

Schema = dict[str, Any]


class DescriptionRoutes:
    """`/openapi.json` and the index."""

    def __init__(self, services: Services, routes: Sequence[Route[Any]]) -> None:
        self._services = services
        self._routes = [route for route in routes if not route.is_file]
        self._documents: dict[bool, bytes] = {}  # by whether the model is known

    async def openapi(self, _: Request) -> Response:
        try:
            model = self._services.check_serving()
        except ApiError:
            model = None
        known = model is not None
        if known not in self._documents:
            self._documents[known] = msgspec.json.encode(describe(self._routes, model))
        return Response(self._documents[known], media_type=JSON)

    async def index(self, _: Request) -> Response:
        endpoints = [f"{route.method} {route.template}" for route in self._routes if route.path != "/"]
        content = {"service": "moeserve", "version": VERSION, "endpoints": endpoints}
        return Response(msgspec.json.encode(content), media_type=JSON)


def describe(routes: Sequence[Route[Any]], model: ModelFacts | None = None) -> dict[str, Any]:
    """Return an OpenAPI document. model: bounds the fields of bodies, once it is known."""
    bodies = list(dict.fromkeys(operation.body for operation in routes if operation.body is not None))
    by_body, schemas = body_schemas(bodies, _REF, model)
    paths: dict[str, dict[str, Any]] = {}
    for operation in routes:
        described = _operation(operation)
        if operation.body is not None:
            schema = narrowed(by_body[operation.body], operation.required, operation.fields)
            content: dict[str, Any] = {"schema": schema}
            if operation.example is not None:
                names = {"model": model.names[0]} if model is not None and "model" in schema["properties"] else {}
                content["example"] = names | operation.example
            described["requestBody"] = {"required": True, "content": {JSON: content}}
        paths.setdefault(operation.template, {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "moeserve", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR},
            "responses": {"Error": {"description": "Refused or failed", "content": _content("Error")}},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Route[Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": _identifier(operation),
        "security": _security(operation),
        "responses": {
            "200": {"description": "Done", "content": {media: {} for media in operation.media}},
            "default": {"$ref": "#/components/responses/Error"},
        },
    }
    if operation.role not in ("public", "user"):
        described["description"] = f"Where keys are set, this needs one with the role `{operation.role}`."
    if names := re.findall(r"{(\w+)}", operation.template):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return described


def _identifier(operation: Route[Any]) -> str:
    words = re.findall(r"\w+", operation.template)
    return "_".join([operation.method.lower(), *words])


def _security(operation: Route[Any]) -> list[dict[str, list[str]]]:
    return [{}] if operation.role == "public" else [{"bearer": []}, {"apiKey": []}, {}]


def _content(name: str) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": _REF.format(name=name)}}}


_NULLABLE_TEXT = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE_TEXT,
                "code": {"type": "string"},
            },
        }
    },
}


def body_schemas(
    bodies: Sequence[type[msgspec.Struct]], reference: str, model: ModelFacts | None
) -> tuple[dict[type[msgspec.Struct], Schema], dict[str, Schema]]:
    """Return the schema of each body, and by name the schemas that these refer to.

    reference: how to refer to a schema, with `{name}` in it. model: has bounds of its own, once it is known.
    """
    references, named = msgspec.json.schema_components(bodies, ref_template=reference)
    for name, schema in list(named.items()):
        struct = name.removeprefix("moeserve.frontend.dialects.")
        general = {**_OF_FIELDS, **({} if model is None else _of_model(model))} if _is_body(schema) else {}
        own = _OF_STRUCTS.get(struct, {})
        for field, described in schema["properties"].items():
            bound = own.get(field, {})
            says_all = "enum" in bound or bound in (_NULL, _STRING)
            schema["properties"][field] = bound if says_all else described | general.get(field, {}) | bound
        named[name] = narrowed(schema, _REQUIRED.get(struct, ())) | _VARIANTS.get(struct, {})
    found = [named.pop(str(schema["$ref"]).rpartition("/")[2]) for schema in references]
    return dict(zip(bodies, found, strict=True)), named


def _is_body(schema: Schema) -> bool:
    return "model" in schema["properties"]


def narrowed(schema: Schema, required: Collection[str], kept: Collection[str] = ()) -> Schema:
    """Return the schema of a body whose `required` fields are there and not null; of the others `kept`, or all."""
    properties = {name: value for name, value in schema["properties"].items() if not kept or name in kept}
    for name in required:
        value = {word: said for word, said in schema["properties"][name].items() if word != "default"}
        if "anyOf" in value:
            value["anyOf"] = [kind for kind in value["anyOf"] if kind != _NULL]
        if "enum" in value:
            value["enum"] = [choice for choice in value["enum"] if choice is not None]
        properties[name] = value
    return {**schema, "properties": properties, "required": sorted({*schema.get("required", ()), *required})}


def _span(low: float, high: float = limits.MAX_TOKENS) -> Schema:
    return {"minimum": low, "maximum": high}


def _one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def _text(shortest: int = 0, longest: int | None = None) -> Schema:
    return {"type": "string", "minLength": shortest} | ({} if longest is None else {"maxLength": longest})


def _list(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _object(required: Sequence[str] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _typed(field: str, kinds: Mapping[Any, Mapping[str, Schema]]) -> Schema:
    """Return the schema of an object that has to have other fields for each value of `field`."""
    return {"anyOf": [_object([field, *needs], **{field: _one_of(kind)}, **needs) for kind, needs in kinds.items()]}


def _one_field(*names: str) -> Schema:
    """Return the schema of an object that has exactly one of some fields."""
    return {
        "anyOf": [
            {"required": [name], "properties": {other: {"not": _NULL} if other == name else _NULL for other in names}}
            for name in names
        ]
    }


def _of_model(model: ModelFacts) -> dict[str, Schema]:
    token = {"type": "integer", **_span(0, model.vocab_size - 1)}
    count = _span(0, model.max_logprobs)
    return {
        "model": {"type": ["string", "null"]} if model.takes_any_name else _one_of(*model.names, None),
        "stop_token_ids": _OF_FIELDS["stop_token_ids"] | {"items": token},
        "tokens": {"items": token},
        "prompt": _prompt(token),
        "logprobs": count,
        "top_logprobs": count,
        "prompt_logprobs": count | {"not": {"const": True}},
    }


def _prompt(token: Schema) -> Schema:
    text, tokens = _text(1), {"type": "array", "items": token, "minItems": 1}
    many = [_list(one, limits.MAX_PROMPTS, 1) for one in (text, tokens)]
    return {"anyOf": [text, tokens, *many, _NULL]}


_NULL: Schema = {"type": "null"}
_STRING: Schema = {"type": "string"}
_ANY_OBJECT: Schema = {"type": "object"}
_CHAT_NAME: Schema = {"pattern": f"^[a-zA-Z0-9_.-]{{1,{limits.MAX_CHAT_TOOL_NAME_CHARS}}}$"}
_NAME: Schema = {"type": "string", "pattern": f"^[a-zA-Z0-9_.-]{{1,{limits.MAX_TOOL_NAME_CHARS}}}$"}
_CALLED: Schema = _text(1, limits.MAX_CALLED_NAME_CHARS)
_ECHOED: Schema = {"maxLength": limits.MAX_ECHOED_CHARS}
_EFFORT = _one_of(None, *sorted(fields.EFFORTS))
_TTL: Schema = {
    "anyOf": [
        {"type": "integer", **_span(1, fields.MAX_SECONDS)},
        {"type": "string", "pattern": "^([1-9][0-9]{0,4}s?|[1-9][0-9]{0,3}m|[1-9][0-9]?h|1d)$"},
        _NULL,
    ]
}
_STOP = _text(1, limits.MAX_STOP_CHARS)
_STOPS: Schema = {"anyOf": [_STOP, _list(_STOP, limits.MAX_STOP_STRINGS), _NULL]}

# Bounds by field, in every body that names a model.
_OF_FIELDS: dict[str, Schema] = {
    "messages": {"minItems": 1, "maxItems": limits.MAX_MESSAGES},
    "early_stopping": _one_of(True, False, "never", None),
    "logit_bias": {
        "maxProperties": limits.MAX_LOGIT_BIAS,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", **_span(-limits.MAX_LOGIT_BIAS_VALUE, limits.MAX_LOGIT_BIAS_VALUE)},
    },
    "stop": _STOPS,
    "stop_token_ids": {"maxItems": limits.MAX_STOP_TOKEN_IDS},
    "truncate_prompt_tokens": {"not": {"const": 0}},
    "cache_salt": {"minLength": 1, "maxLength": limits.MAX_CACHE_SALT_CHARS},
    "prompt_cache_key": {"maxLength": fields.MAX_KEY_CHARS},
    "prompt_cache_retention": _one_of(None, *fields.RETENTION_SECONDS),
    "prompt_cache_options": {
        "properties": {"mode": _one_of(None, "implicit", "explicit"), "ttl": _TTL},
        "additionalProperties": _NULL,
    },
    "reasoning_effort": _EFFORT,
    "chat_template_kwargs": {
        "maxProperties": limits.MAX_TEMPLATE_VARIABLES,
        "propertyNames": {"pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"},
        "additionalProperties": {"type": ["boolean", "number", "string", "null"]},
    },
    "prompt": _prompt({"type": "integer", "minimum": 0}),
}

_RESPONSES_PART = _typed("type", {kind: {field: _STRING} for kind, field in responses_items.TEXTS.items()})
_RESPONSES_TEXT: Schema = {"anyOf": [_STRING, _list(_RESPONSES_PART, limits.MAX_CONTENT_PARTS)]}
_CALL: dict[str, Schema] = {"call_id": _STRING, "name": _STRING}
_OUTPUT: dict[str, Schema] = {"call_id": _STRING, "output": _RESPONSES_TEXT}
_RESPONSES_ITEM: Schema = {
    "anyOf": [
        _object(
            ("role", "content"),
            type=_one_of("message", None),
            role=_one_of(*responses_items.ROLES),
            content=_RESPONSES_TEXT,
        ),
        *_typed(
            "type",
            {
                "reasoning": {},
                "function_call": {**_CALL, "arguments": _STRING},
                "custom_tool_call": {**_CALL, "input": _STRING},
                "function_call_output": _OUTPUT,
                "custom_tool_call_output": _OUTPUT,
            },
        )["anyOf"],
        _object(("id",), type=_one_of("item_reference", None), id=_STRING),
    ]
}
_RESPONSES_TOOL: Schema = {
    "anyOf": [
        _object(
            ("type", "name"),
            type=_one_of("function"),
            name=_NAME,
            description={"type": ["string", "null"], "maxLength": limits.MAX_TOOL_DESCRIPTION_CHARS},
            parameters={"type": ["object", "null"]},
            strict={"type": ["boolean", "null"]},
        ),
        _object(("type", "name"), type=_one_of("custom", "namespace"), name=_NAME),
        _object(("type",), type=_STRING | {"not": _one_of("function", "custom", "namespace")}),
    ]
}
_RESPONSES_FORMAT: Schema = {
    "anyOf": [
        _object(("type",), type=_one_of("text", "json_object")),
        _object(("type", "name", "schema"), type=_one_of("json_schema"), name=_text(1), schema=_ANY_OBJECT),
        _NULL,
    ]
}
_EMPTY = _one_of(None, "", [])
_OF_OLLAMA: dict[str, Schema] = {
    "format": {"anyOf": [_one_of("", "json", None), _ANY_OBJECT]},
    "options": {"type": ["object", "null"]},
}
_LONG: Schema = {"type": "string", "minLength": 1}
_NO_FORMATS = dict.fromkeys(FormatFields.__struct_fields__, _NULL)
# Bounds by the struct that reads a body, and by field.
_OF_STRUCTS: dict[str, dict[str, Schema]] = {
    "ChatBody": {"logprobs": _one_of(None, False, True)},
    "TokenizeBody": {"prompt": {"type": ["string", "null"]}},
    "PrefixBody": {"prompt": {"items": {"type": "integer"}}},
    "PinBody": {"prompt": {"items": {"type": "integer"}}},
    "CacheBreakpoint": {"ttl": _TTL},
    "ChatMessage": {"role": _one_of(*sorted(chat_parts.ROLES))},
    "MessageCall": {"type": _one_of("function")},
    "CalledFunction": {"name": _CALLED},
    "FunctionBody": {"name": _CHAT_NAME},
    "CustomBody": {"name": _CHAT_NAME},
    "chat.ToolBody": {"type": _one_of("function", "custom")},
    "ResponsesBody": {
        **_NO_FORMATS,
        **{name: _one_of(*harmless) for name, harmless in responses.UNSUPPORTED.items()},
        "input": {"anyOf": [_STRING, _list(_RESPONSES_ITEM, limits.MAX_MESSAGES, 1), _NULL]},
        "tools": {"items": _RESPONSES_TOOL, "maxItems": limits.MAX_TOOLS},
        "metadata": {
            "maxProperties": limits.MAX_METADATA_ENTRIES,
            "propertyNames": {"maxLength": limits.MAX_METADATA_KEY_CHARS},
            "additionalProperties": _text(0, limits.MAX_METADATA_VALUE_CHARS),
        },
        **dict.fromkeys(("user", "safety_identifier", "service_tier"), _ECHOED),
    },
    "TextOptions": {"format": _RESPONSES_FORMAT},
    "ReasoningOptions": {"effort": _EFFORT},
    "MessagesBody": {
        **_NO_FORMATS,
        **dict.fromkeys(messages.REFUSED, _NULL),
        **dict.fromkeys(messages.REFUSED_UNLESS_EMPTY, _one_of(None, [])),
        "stop_sequences": {"items": _STOP, "maxItems": limits.MAX_STOP_STRINGS},
        "inference_geo": _one_of(*messages.REGIONS),
    },
    "Message": {"role": _one_of(*messages.ROLES)},
    "Thinking": {"type": _one_of("enabled", "adaptive", "disabled"), "budget_tokens": _span(1)},
    "Format": {"type": _one_of("json_schema"), "schema": _ANY_OBJECT},
    "NameBody": {"model": _STRING},
    "OllamaChatBody": {"model": _STRING, "messages": {"minItems": 0}, **_OF_OLLAMA},
    "OllamaGenerateBody": {
        "model": _STRING,
        "prompt": {"anyOf": [_STRING, _NULL]},
        **dict.fromkeys(ollama.REFUSED, _EMPTY),
        **_OF_OLLAMA,
    },
    "TgiBody": {"inputs": _LONG, "parameters": {"type": ["object", "null"]}},
    "TritonBody": {"text_input": _LONG, "parameters": {"type": ["object", "null"]}},
    "ContextEdit": {"type": {"pattern": "^clear_thinking_"}, "keep": _one_of("all")},
}
# Fields that are neither left out nor null, by struct.
_REQUIRED: dict[str, tuple[str, ...]] = {
    "MessageCall": ("function",),
    "CalledFunction": ("name",),
    "FunctionBody": ("name",),
    "CustomBody": ("name",),
    "Format": ("schema",),
    "ContextEdit": ("keep",),
}
_SAID = {"text": {"text": _STRING}}
_BLOCKS: dict[str, dict[str, dict[str, Schema]]] = {
    "user": {**_SAID, "tool_result": {"tool_use_id": _STRING}},
    "assistant": {
        **_SAID,
        "thinking": {"thinking": _STRING},
        "redacted_thinking": {},
        "tool_use": {"id": _STRING, "name": _STRING, "input": _ANY_OBJECT},
    },
    "system": _SAID,
}
# Fields that depend on the value of another field, or on its lack, by struct.
_VARIANTS: dict[str, Schema] = {
    "chat.ToolBody": {
        "anyOf": [
            _object(("function",), type=_one_of("function"), function=_ANY_OBJECT),
            _object(("type", "custom"), type=_one_of("custom"), custom=_ANY_OBJECT),
        ]
    },
    "messages.ToolBody": {
        "anyOf": [
            _object(("name", "input_schema"), type=_one_of(None, "custom"), name=_NAME, input_schema=_ANY_OBJECT),
            _object(("type",), type=_STRING | {"not": _one_of("custom")}),
        ]
    },
    "TokenizeBody": _one_field("prompt", "messages"),
    "PrefixBody": _one_field("prompt", "messages"),
    "PinBody": _one_field("prompt", "messages", "id"),
    "ContentPart": _typed(
        "type", {kind: {"text": _STRING} for kind in sorted(chat_parts.TEXT_PARTS)} | {"refusal": {"refusal": _STRING}}
    ),
    "ChatMessage": _typed(
        "role",
        {
            role: {"content": {"type": ["string", "array"]}} if role in ("user", "system", "developer") else {}
            for role in sorted(chat_parts.ROLES)
        },
    ),
    "Message": _typed(
        "role",
        {
            role: {"content": {"anyOf": [_STRING, _list(_typed("type", kinds), limits.MAX_CONTENT_PARTS)]}}
            for role, kinds in _BLOCKS.items()
        },
    ),
}
