"""What an operator sees of the experts, and the commands about them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moeserve.frontend import limits
from moeserve.frontend.body import read_body
from moeserve.frontend.dialects import fields
from moeserve.frontend.errors import ApiError, unavailable
from moeserve.frontend.request_group import EngineGone
from moeserve.frontend.routes.service import json_response
from moeserve.frontend.services import Services


class TraceBody(msgspec.Struct, forbid_unknown_fields=True):
    """`max_tokens` and `token_ids` (keep which tokens they are) belong to `start`."""

    action: Literal["start", "stop"]
    max_tokens: int | None = None
    token_ids: bool = False


class ExpertRoutes:
    """Handlers over the shared services. Every one answers 404 for a model without experts."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def experts(self, _: Request) -> Response:
        """Load, balance and placement by layer and expert."""
        return json_response({"object": "experts", **await self._command("experts")})

    async def save_statistics(self, _: Request) -> Response:
        """Saves the statistics to the file of `--expert-statistics`."""
        return json_response({"status": "ok", **await self._command("save_expert_statistics")})

    async def trace(self, request: Request) -> Response:
        """Starts recording a trace, or ends it and answers with the file."""
        self._check_experts()
        data = await read_body(
            request.scope,
            request.receive,
            max_bytes=self._services.run.config.max_request_bytes,
            timeout_s=limits.RECEIVE_TIMEOUT_S,
        )
        body, _ = fields.decode_json(data, TraceBody)
        if body.max_tokens is not None and body.max_tokens < 1:
            raise ApiError(400, "`max_tokens` must be at least 1", param="max_tokens")
        if body.action == "start":
            arguments = {"max_tokens": body.max_tokens, "token_ids": body.token_ids}
            return json_response({"status": "recording", **await self._command("start_expert_trace", arguments)})
        result = await self._command("stop_expert_trace")
        content = await asyncio.to_thread(_take, Path(result["file"]))
        return Response(
            content,
            media_type="application/octet-stream",
            headers={"content-disposition": 'attachment; filename="trace.safetensors"'},
        )

    def _check_experts(self) -> None:
        self._services.check_serving()
        ready = self._services.engine.ready
        if ready is not None and not ready.num_experts:
            raise ApiError(404, "This model has no experts: its layers are dense", code="no_experts")

    async def _command(self, name: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        self._check_experts()
        try:
            result = await self._services.engine.control(name, arguments)
        except EngineGone as error:
            raise unavailable("The engine is not running", "engine_dead") from error
        if result.error is not None:
            raise ApiError(409, result.error[:500], type="conflict", code="not_possible_now")
        return result.result


def _take(path: Path) -> bytes:
    """The content of a file that is there to be handed over."""
    content = path.read_bytes()
    path.unlink()
    return content
