"""The table of all routes, and what is told from it: `/openapi.json` and the JSON index at `/`.

A route is one line of `OPERATIONS`. The schemas of bodies are those of the structs that read them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moeserve.config import VERSION
from moeserve.frontend.cache_routes import PrefixBody, UnpinBody
from moeserve.frontend.dialects.chat import ChatBody
from moeserve.frontend.dialects.completions import CompletionBody
from moeserve.frontend.dialects.messages import MessagesBody
from moeserve.frontend.dialects.responses import ResponsesBody
from moeserve.frontend.keys import PUBLIC_PATHS, ROLE_OF_PATH, USER
from moeserve.frontend.routes import DetokenizeBody, TokenizeBody, TraceBody

JSON, TEXT, EVENTS, HTML, BYTES = (
    "application/json",
    "text/plain",
    "text/event-stream",
    "text/html",
    "application/octet-stream",
)


@dataclass(frozen=True, slots=True)
class Operation:
    """A route. required: fields of the body that may not be left out; media: in which forms it answers."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    required: tuple[str, ...] = ()
    media: tuple[str, ...] = (JSON,)


OPERATIONS = (
    Operation("POST", "/v1/chat/completions", "Answer a chat", ChatBody, ("model", "messages"), (JSON, EVENTS)),
    Operation("POST", "/v1/completions", "Continue a text", CompletionBody, ("model", "prompt"), (JSON, EVENTS)),
    Operation("POST", "/v1/responses", "Make a response", ResponsesBody, ("model", "input"), (JSON, EVENTS)),
    Operation("GET", "/v1/responses/resp_{name}", "Find a response that was kept"),
    Operation("DELETE", "/v1/responses/resp_{name}", "Drop a response"),
    Operation("GET", "/v1/responses/resp_{name}/input_items", "List the input of a response"),
    Operation(
        "POST", "/v1/messages", "Answer messages", MessagesBody, ("model", "messages", "max_tokens"), (JSON, EVENTS)
    ),
    Operation("POST", "/v1/messages/count_tokens", "Count the tokens", MessagesBody, ("model", "messages")),
    Operation("GET", "/v1/models", "List the models that are served"),
    Operation("GET", "/v1/models/{name}", "Describe a model"),
    Operation("POST", "/tokenize", "Turn a text or messages into tokens", TokenizeBody),
    Operation("POST", "/detokenize", "Turn tokens into text", DetokenizeBody, ("tokens",)),
    Operation("GET", "/health", "Tell whether the HTTP process lives"),
    Operation("GET", "/ready", "Tell whether requests are admitted"),
    Operation("GET", "/metrics", "Tell the metrics in Prometheus' form", media=(TEXT,)),
    Operation("GET", "/version", "Tell the version"),
    Operation("POST", "/reset_prefix_cache", "Forget all cached prefixes"),
    Operation("GET", "/v1/cache", "List one's cached prefixes"),
    Operation("DELETE", "/v1/cache", "Forget one's cached prefixes"),
    Operation("POST", "/v1/cache/warm", "Compute and cache a prompt", PrefixBody),
    Operation("POST", "/v1/cache/pin", "Keep a prefix until it is unpinned", PrefixBody),
    Operation("POST", "/v1/cache/unpin", "Let a pinned prefix go", UnpinBody),
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
    """`/openapi.json` and the index. The document is made on the first request."""

    async def openapi(self, _: Request) -> Response:
        return Response(self._document, media_type=JSON)

    async def index(self, _: Request) -> Response:
        endpoints = [f"{operation.method} {operation.path}" for operation in OPERATIONS if operation.path != "/"]
        content = {"service": "moeserve", "version": VERSION, "endpoints": endpoints}
        return Response(msgspec.json.encode(content), media_type=JSON)

    @cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(describe(OPERATIONS))


def describe(operations: tuple[Operation, ...]) -> dict[str, Any]:
    """Return an OpenAPI document."""
    bodies = [operation.body for operation in operations if operation.body is not None]
    references, schemas = msgspec.json.schema_components(bodies, ref_template=_REF)
    by_body = dict(zip(bodies, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        schema = None if operation.body is None else by_body[operation.body]
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schema)
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


def _operation(operation: Operation, schema: dict[str, Any] | None) -> dict[str, Any]:
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
    if schema is not None:
        whole = {"allOf": [schema, {"required": list(operation.required)}]} if operation.required else schema
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": whole}}}
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
