"""Descriptions of the routes: `/openapi.json` and the JSON index at `/`.

The schemas of bodies are made from the structs that read them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moeserve.config import VERSION
from moeserve.frontend.dialects.internal import ModelFacts
from moeserve.frontend.http import ApiError
from moeserve.frontend.route import JSON, Route
from moeserve.frontend.routes.body_schemas import body_schemas, narrowed
from moeserve.frontend.services import Services

_REF = "#/components/schemas/{name}"


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
    """Return an OpenAPI document. model: bounds what bodies may hold, once it is known."""
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
                "code": _NULLABLE_TEXT,
            },
        }
    },
}
