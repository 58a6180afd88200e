"""The routes of Ollama's API that generate nothing: what is served, and what is in memory."""

from __future__ import annotations

import time
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from moeserve.frontend import limits
from moeserve.frontend.dialects import ollama
from moeserve.frontend.errors import ApiError, invalid
from moeserve.frontend.http import json_response, receive_body
from moeserve.frontend.parsers.shape import model_type_of
from moeserve.frontend.route import LINES
from moeserve.frontend.services import Services
from moeserve.wire import Rest

_FOR_EVER_S = 100 * 365 * 86_400  # as long as a model is in memory that nothing puts to sleep


class OllamaRoutes:
    """Version, lists and descriptions. Every served name is listed as a model of its own."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._names = services.run.served_model_names
        self._architecture = model_type_of(Path(services.run.model_dir)) or "unknown"

    async def version(self, _: Request) -> Response:
        return json_response({"version": ollama.VERSION})

    async def tags(self, _: Request) -> Response:
        about = self._about()
        return json_response({"models": [about.listed(name) for name in self._names]})

    async def ps(self, _: Request) -> Response:
        """List the model if it is in memory."""
        engine, sleep_after = self._services.engine, self._services.run.config.sleep_after
        if engine.ready is None or engine.rest is not Rest.AWAKE:
            return json_response({"models": []})
        expires = int(time.time() + (sleep_after or _FOR_EVER_S))
        about = self._about()
        return json_response({"models": [about.loaded(name, expires) for name in self._names]})

    async def show(self, request: Request) -> Response:
        _, name = await self._named(request)
        return json_response(self._about().shown(name))

    async def pull(self, request: Request) -> Response:
        """Answer that a served model is there, which is all that clients want to know. Raise ApiError for another."""
        try:
            await self._named(request)
        except ApiError as error:
            if error.code != "model_not_found":
                raise
            message = f"{error.message}. It pulls no others: start it with another, `moeserve serve MODEL`"
            raise invalid(message, "model", "model_not_found") from None
        return Response(b'{"status":"success"}\n', media_type=LINES)

    async def _named(self, request: Request) -> tuple[ollama.NameBody, str]:
        body = await receive_body(request.scope, request.receive, limits.INLINE_BODY_BYTES)
        return ollama.read_name(body, self._names)

    def _about(self) -> ollama.About:
        services = self._services
        run, ready, shape = services.run, services.engine.ready, services.shape
        path = run.config.model or ""
        level = ollama.level_of(path)
        has = (("tools", shape.calls != "none"), ("thinking", shape.reasoning != "none"))
        return ollama.About(
            architecture=self._architecture,
            created=services.created,
            digest=run.model_hash,
            num_bytes=0 if ready is None else ready.weights_bytes,
            context=None if ready is None else ready.max_model_len,
            is_gguf=bool(level) or path.endswith(".gguf"),
            level=level or ("" if ready is None else ready.dtype),
            capabilities=("completion", *(word for word, is_there in has if is_there)),
        )
