"""The routes around generation: what is served, whether it works, its numbers, and the operator's command."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moeserve.frontend.errors import ApiError, unavailable, unknown_model
from moeserve.frontend.metrics import CONTENT_TYPE
from moeserve.frontend.request_group import EngineGone
from moeserve.frontend.services import Services
from moeserve.version import VERSION

ENDPOINTS = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "GET /v1/models",
    "POST /tokenize",
    "POST /detokenize",
    "GET /health",
    "GET /ready",
    "GET /metrics",
    "GET /version",
    "POST /reset_prefix_cache",
    "GET /v1/experts",
    "POST /v1/experts/statistics",
    "POST /v1/experts/trace",
)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


class ServiceRoutes:
    """Handlers over the shared services."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def index(self, _: Request) -> Response:
        return json_response({"service": "moeserve", "version": VERSION, "endpoints": ENDPOINTS})

    async def health(self, _: Request) -> Response:
        """Alive: this process answers."""
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Ready: the model is loaded, the engine makes progress, and generations are taken."""
        reason = self._services.not_ready_reason()
        if reason is None:
            return json_response({"status": "ready"})
        return json_response({"status": "unavailable", "reason": reason}, 503, {"retry-after": "1"})

    async def version(self, _: Request) -> Response:
        return json_response({"version": VERSION})

    async def metrics(self, _: Request) -> Response:
        return Response(self._services.metrics.render(), headers={"content-type": CONTENT_TYPE.decode()})

    async def models(self, _: Request) -> Response:
        names = self._services.run.served_model_names
        return json_response({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._services.run.served_model_names:
            raise unknown_model(name)
        return json_response(self._model(name))

    async def reset_prefix_cache(self, _: Request) -> Response:
        """Drops every cached prefix that no request uses."""
        self._services.check_serving()
        try:
            result = await self._services.engine.control("reset_prefix_cache")
        except EngineGone as error:
            raise unavailable("The engine is not running", "engine_dead") from error
        if result.error is not None:
            raise ApiError(409, result.error[:500], type="server_error", code="reset_failed")
        return json_response({"status": "ok", **result.result})

    def _model(self, name: str) -> dict[str, Any]:
        ready = self._services.engine.ready
        return {
            "id": name,
            "object": "model",
            "created": self._services.created,
            "owned_by": "moeserve",
            "root": name,
            "parent": None,
            "max_model_len": None if ready is None else ready.max_model_len,
        }
