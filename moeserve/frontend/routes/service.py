"""The routes beside generation: models, health, metrics, tokens, and an operator's commands."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moeserve.config import VERSION
from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies
from moeserve.frontend.dialects.bodies import bounded
from moeserve.frontend.http import ApiError, json_response, receive_body, unknown_model, until_disconnect
from moeserve.frontend.metrics import CONTENT_TYPE
from moeserve.frontend.metrics_vllm import VllmNames
from moeserve.frontend.prepare.messages import Body, Kind, expect
from moeserve.frontend.relay.request_group import EngineGone
from moeserve.frontend.services import Services, engine_unavailable
from moeserve.wire import Rest


class ServiceRoutes:
    """The service: models, health, metrics, version, and the prefix cache."""

    def __init__(self, services: Services) -> None:
        self._services = services
        has_names = services.run.config.metrics_compat == "vllm"
        self._names = VllmNames(services.run.served_model_names[0]) if has_names else None

    async def health(self, _: Request) -> Response:
        """Answer 200 while this process lives."""
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Answer 200 if generations are admitted: by an engine that makes progress, or by a sleep that they end."""
        reason = self._services.not_ready_reason()
        if reason is None:
            return json_response({"status": "ready" if self._services.engine.rest is Rest.AWAKE else "asleep"})
        return json_response({"status": "unavailable", "reason": reason}, 503, {"retry-after": "1"})

    async def version(self, _: Request) -> Response:
        return json_response({"version": VERSION})

    async def metrics(self, _: Request) -> Response:
        text = self._services.metrics.render(self._services.engine.ready, self._names)
        return Response(text, headers={"content-type": CONTENT_TYPE.decode()})

    async def models(self, _: Request) -> Response:
        names = self._services.run.served_model_names
        data = [self._model(name) for name in names]
        pages = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return json_response({"object": "list", "data": data, **pages})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._services.run.served_model_names:
            raise unknown_model(name)
        return json_response(self._model(name))

    async def reset_prefix_cache(self, _: Request) -> Response:
        """Drop every cached prefix that no request uses."""
        self._services.check_serving()
        try:
            result = await self._services.engine.control("drop_prefixes", {"namespace": None})
        except EngineGone as error:
            raise engine_unavailable(error) from error
        if result.error is not None:
            raise ApiError(409, result.error[:500], type="server_error", code="reset_failed")
        return json_response({"status": "ok", **result.result})

    def _model(self, name: str) -> dict[str, Any]:
        """Return a model as OpenAI's and Anthropic's clients know it, in one object."""
        ready = self._services.engine.ready
        max_model_len = None if ready is None else ready.max_model_len
        longest = None if ready is None else ready.longest_answer
        created = datetime.fromtimestamp(self._services.created, UTC)
        return {
            "id": name,
            "object": "model",
            "created": self._services.created,
            "owned_by": "moeserve",
            "root": name,
            "parent": None,
            "max_model_len": max_model_len,
            "type": "model",
            "display_name": name,
            "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "max_input_tokens": max_model_len,
            "max_tokens": max_model_len if longest is None else longest,
            "default_max_tokens": None if ready is None else ready.default_max_tokens,
            "arithmetic": None if ready is None else ready.arithmetic,
            "capabilities": None,
            "lifecycle": "active",
        }


class TokenRoutes:
    """`/tokenize`, `/detokenize` and `/v1/messages/count_tokens`: the same conversions that generations use."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def tokenize(self, request: Request) -> Response:
        """Tokenise `prompt` as `/v1/completions` does, or `messages` as `/v1/chat/completions` does."""
        return await self._converted(request, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        return await self._converted(request, "detokenize")

    async def count_message(self, request: Request) -> Response:
        """Count the prompt tokens that the request would have on `/v1/messages`."""
        return await self._converted(request, "count_message")

    async def _converted(self, request: Request, kind: Kind) -> Response:
        services = self._services
        services.check_serving()
        body = await receive_body(request.scope, request.receive, services.run.config.max_request_bytes)
        reply = await until_disconnect(request.receive, services.prepare(kind, body, request.scope))
        return Response(expect(reply, Body).content, media_type="application/json")


class TraceBody(msgspec.Struct, forbid_unknown_fields=True):
    """`max_tokens` and `token_ids` (keep which tokens they are) belong to `start`."""

    action: Literal["start", "stop"]
    max_tokens: int | None = None
    token_ids: bool = False


class ExpertRoutes:
    """The views of experts and the commands about them, for operators. Every route answers 404 without experts."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def experts(self, _: Request) -> Response:
        """Answer with load, balance and placement by layer and expert."""
        return json_response({"object": "experts", **await self._command("experts")})

    async def save_statistics(self, _: Request) -> Response:
        """Save the statistics to the file of `--expert-statistics`."""
        return json_response({"status": "ok", **await self._command("save_expert_statistics")})

    async def trace(self, request: Request) -> Response:
        """Start recording a trace, or end it and answer with the file."""
        self._check_experts()
        data = await receive_body(request.scope, request.receive, limits.INLINE_BODY_BYTES)
        body, _ = bodies.decode_json(data, TraceBody)
        if body.max_tokens is not None:
            bounded("max_tokens", body.max_tokens, 1, limits.MAX_TOKENS)
        if body.action == "start":
            arguments = {"max_tokens": body.max_tokens, "token_ids": body.token_ids}
            return json_response({"status": "recording", **await self._command("start_expert_trace", arguments)})
        result = await self._command("stop_expert_trace")
        content = await asyncio.to_thread(_read_and_remove, Path(result["file"]))
        return Response(
            content,
            media_type="application/octet-stream",
            headers={"content-disposition": 'attachment; filename="trace.safetensors"'},
        )

    def _check_experts(self) -> None:
        self._services.check_serving()
        ready = self._services.engine.ready
        if ready is not None and not ready.num_experts:
            raise ApiError(404, "This model has no experts that moeserve computes itself", code="no_experts")

    async def _command(self, name: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        self._check_experts()
        try:
            result = await self._services.engine.control(name, arguments)
        except EngineGone as error:
            raise engine_unavailable(error) from error
        if result.error is not None:
            raise ApiError(409, result.error[:500], type="conflict", code="not_possible_now")
        return result.result


def _read_and_remove(path: Path) -> bytes:
    content = path.read_bytes()
    path.unlink()
    return content
