"""The table of all routes, and what is told from it: `/openapi.json` and the JSON index at `/`.

A route is one line of `OPERATIONS`. The schemas of bodies are those of the structs that read them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moeserve.config import VERSION
from moeserve.frontend.body_schemas import body_schemas, narrowed
from moeserve.frontend.dialects.chat import ChatBody
from moeserve.frontend.dialects.completions import CompletionBody
from moeserve.frontend.dialects.internal import ModelFacts
from moeserve.frontend.dialects.messages import MessagesBody
from moeserve.frontend.dialects.prefixes import MESSAGE_FIELDS, PIN_FIELDS, WARM_FIELDS, PrefixBody, UnpinBody
from moeserve.frontend.dialects.responses import ResponsesBody
from moeserve.frontend.dialects.tokens import DetokenizeBody, TokenizeBody
from moeserve.frontend.http import ApiError
from moeserve.frontend.keys import PUBLIC_PATHS, ROLE_OF_PATH, USER
from moeserve.frontend.routes import TraceBody
from moeserve.frontend.services import Services

JSON, TEXT, EVENTS, HTML, BYTES = (
    "application/json",
    "text/plain",
    "text/event-stream",
    "text/html",
    "application/octet-stream",
)


@dataclass(frozen=True, slots=True)
class Operation:
    """A route.

    required: fields of the body that may not be left out. fields: those with an effect, all where it is empty. example:
    of the body, without the model's name. media: in which forms it answers.
    """

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    required: tuple[str, ...] = ()
    media: tuple[str, ...] = (JSON,)
    fields: frozenset[str] = frozenset()
    example: dict[str, Any] | None = None


_HELLO = [{"role": "user", "content": "Hello"}]
_PREFIX = MESSAGE_FIELDS | {"prompt"}
OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answer a chat",
        ChatBody,
        ("model", "messages"),
        (JSON, EVENTS),
        example={"messages": _HELLO, "max_completion_tokens": 16},
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Continue a text",
        CompletionBody,
        ("model", "prompt"),
        (JSON, EVENTS),
        example={"prompt": "Once upon a time", "max_tokens": 16},
    ),
    Operation(
        "POST",
        "/v1/responses",
        "Make a response",
        ResponsesBody,
        ("model", "input"),
        (JSON, EVENTS),
        example={"input": "Hello", "max_output_tokens": 16},
    ),
    Operation("GET", "/v1/responses/resp_{name}", "Find a response that was kept"),
    Operation("DELETE", "/v1/responses/resp_{name}", "Drop a response"),
    Operation("GET", "/v1/responses/resp_{name}/input_items", "List the input of a response"),
    Operation(
        "POST",
        "/v1/messages",
        "Answer messages",
        MessagesBody,
        ("model", "messages", "max_tokens"),
        (JSON, EVENTS),
        example={"messages": _HELLO, "max_tokens": 16},
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "Count the tokens",
        MessagesBody,
        ("model", "messages"),
        example={"messages": _HELLO},
    ),
    Operation("GET", "/v1/models", "List the models that are served"),
    Operation("GET", "/v1/models/{name}", "Describe a model"),
    Operation(
        "POST",
        "/tokenize",
        "Turn a text or messages into tokens",
        TokenizeBody,
        fields=_PREFIX | {"model", "add_special_tokens"},
        example={"prompt": "Hello"},
    ),
    Operation("POST", "/detokenize", "Turn tokens into text", DetokenizeBody, ("tokens",), example={"tokens": [1, 2]}),
    Operation("GET", "/health", "Tell whether the HTTP process lives"),
    Operation("GET", "/ready", "Tell whether requests are admitted"),
    Operation("GET", "/metrics", "Tell the metrics in Prometheus' form", media=(TEXT,)),
    Operation("GET", "/version", "Tell the version"),
    Operation("POST", "/reset_prefix_cache", "Forget all cached prefixes"),
    Operation("GET", "/v1/cache", "List one's cached prefixes"),
    Operation("DELETE", "/v1/cache", "Forget one's cached prefixes"),
    Operation(
        "POST",
        "/v1/cache/warm",
        "Compute and cache a prompt",
        PrefixBody,
        fields=_PREFIX | WARM_FIELDS,
        example={"prompt": "Hello"},
    ),
    Operation(
        "POST",
        "/v1/cache/pin",
        "Keep a prefix until it is unpinned",
        PrefixBody,
        fields=_PREFIX | PIN_FIELDS,
        example={"prompt": "Hello"},
    ),
    Operation(
        "POST",
        "/v1/cache/unpin",
        "Let a pinned prefix go",
        UnpinBody,
        fields=_PREFIX | PIN_FIELDS | {"id"},
        example={"prompt": "Hello"},
    ),
    Operation("GET", "/v1/stats", "Tell the figures of the latest minutes"),
    Operation("GET", "/v1/stats/stream", "Tell the figures every second", media=(EVENTS,)),
    Operation("GET", "/v1/experts", "Describe load, balance and placement of the experts"),
    Operation("POST", "/v1/experts/statistics", "Save the statistics of the experts"),
    Operation("POST", "/v1/experts/trace", "Record a routing trace", TraceBody, ("action",), (JSON, BYTES)),
    Operation("GET", "/dashboard", "Show the figures as a page", media=(HTML,)),
    Operation("GET", "/openapi.json", "Describe these routes"),
    Operation("GET", "/", "List the routes; show the chat page to browsers", media=(JSON, HTML)),
)
_REF = "#/components/schemas/{name}"


class DescriptionRoutes:
    """`/openapi.json` and the index."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._documents: dict[bool, bytes] = {}  # by whether the model is known

    async def openapi(self, _: Request) -> Response:
        try:
            model = self._services.check_serving()
        except ApiError:
            model = None
        known = model is not None
        if known not in self._documents:
            self._documents[known] = msgspec.json.encode(describe(OPERATIONS, model))
        return Response(self._documents[known], media_type=JSON)

    async def index(self, _: Request) -> Response:
        endpoints = [f"{operation.method} {operation.path}" for operation in OPERATIONS if operation.path != "/"]
        content = {"service": "moeserve", "version": VERSION, "endpoints": endpoints}
        return Response(msgspec.json.encode(content), media_type=JSON)


def describe(operations: tuple[Operation, ...], model: ModelFacts | None = None) -> dict[str, Any]:
    """Return an OpenAPI document. model: bounds what bodies may hold, once it is known."""
    bodies = list(dict.fromkeys(operation.body for operation in operations if operation.body is not None))
    by_body, schemas = body_schemas(bodies, _REF, model)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        described = _operation(operation)
        if operation.body is not None:
            schema = narrowed(by_body[operation.body], operation.required, operation.fields)
            content: dict[str, Any] = {"schema": schema}
            if operation.example is not None:
                names = {"model": model.names[0]} if model is not None and "model" in schema["properties"] else {}
                content["example"] = names | operation.example
            described["requestBody"] = {"required": True, "content": {JSON: content}}
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
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


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": _identifier(operation),
        "security": _security(operation.path),
        "responses": {
            "200": {"description": "Done", "content": {media: {} for media in operation.media}},
            "default": {"$ref": "#/components/responses/Error"},
        },
    }
    role = ROLE_OF_PATH.get(operation.path, USER)
    if role != USER:
        described["description"] = f"Where keys are set, this needs one with the role `{role}`."
    if names := re.findall(r"{(\w+)}", operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return described


def _identifier(operation: Operation) -> str:
    words = re.findall(r"\w+", operation.path)
    return "_".join([operation.method.lower(), *words])


def _security(path: str) -> list[dict[str, list[str]]]:
    return [{}] if path in PUBLIC_PATHS else [{"bearer": []}, {"apiKey": []}, {}]


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
                "code": _NULLABLE_TEXT,
            },
        }
    },
}
