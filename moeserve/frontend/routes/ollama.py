"""The routes of Ollama's API: the served model, the models in memory, and answers."""

from __future__ import annotations

import time
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from moeserve.frontend import limits
from moeserve.frontend.dialects import ollama, ollama_models
from moeserve.frontend.errors import ApiError, invalid
from moeserve.frontend.held import hold_of
from moeserve.frontend.http import content_coding, json_response, receive_body, until_disconnect
from moeserve.frontend.jobs.idempotency import KeyedAnswers
from moeserve.frontend.jobs.jobs import Jobs
from moeserve.frontend.keys import Identity
from moeserve.frontend.parsers.shape import model_type_of
from moeserve.frontend.relay.request_group import EngineGone
from moeserve.frontend.route import LINES
from moeserve.frontend.routes.generate import OLLAMA_CHAT, OLLAMA_GENERATE, GenerateRoute
from moeserve.frontend.services import Services, engine_unavailable
from moeserve.frontend.usage import UsageBook
from moeserve.wire import Rest

_FOR_EVER_S = 100 * 365 * 86_400  # as long as a model is in memory that nothing puts to sleep


class OllamaRoutes:
    """Version, lists and descriptions. Every served name is listed as a model of its own."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._names = services.run.served_model_names
        self._architecture = model_type_of(Path(services.run.model_dir)) or "unknown"

    async def version(self, _: Request) -> Response:
        return json_response({"version": ollama_models.VERSION})

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

    async def _named(self, request: Request) -> tuple[ollama_models.NameBody, str]:
        body = await receive_body(request.scope, request.receive, limits.INLINE_BODY_BYTES)
        return ollama_models.read_name(body, self._names, takes_any=self._services.run.takes_any_name)

    def _about(self) -> ollama_models.About:
        services = self._services
        run, ready, shape = services.run, services.engine.ready, services.shape
        path = run.config.model or ""
        level = ollama_models.level_of(path)
        has = (("tools", shape.calls != "none"), ("thinking", shape.reasoning != "none"))
        return ollama_models.About(
            architecture=self._architecture,
            created=services.created,
            digest=run.model_hash,
            num_bytes=0 if ready is None else ready.weights_bytes,
            context=None if ready is None else ready.max_model_len,
            is_gguf=bool(level) or path.endswith(".gguf"),
            level=level or ("" if ready is None else ready.dtype),
            capabilities=("completion", *(word for word, is_there in has if is_there)),
        )


class OllamaGenerateRoute:
    """The ASGI endpoint of `/api/chat` or `/api/generate`. A body without messages, or a prompt, wishes that the model
    is loaded or is not."""

    def __init__(
        self,
        services: Services,
        jobs: Jobs,
        answers: KeyedAnswers,
        book: UsageBook,
        body: type[ollama.OllamaBody],
    ) -> None:
        self._services = services
        self._body = body
        dialect = OLLAMA_CHAT if body is ollama.OllamaChatBody else OLLAMA_GENERATE
        self._generate = GenerateRoute(services, dialect, jobs, answers, book)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        services.check_serving()
        data = await receive_body(scope, receive, services.run.config.max_request_bytes)
        # A wish is short; longer bodies are read in text processes alone.
        is_short = len(data) <= limits.INLINE_BODY_BYTES and content_coding(scope["headers"]) is None
        names, takes_any = services.run.served_model_names, services.run.takes_any_name
        wish = ollama.read_load(data, self._body, names, takes_any=takes_any) if is_short else None
        if wish is None:
            hold_of(scope).set(0)  # it is received again
            await self._generate(scope, _again(data, receive), send)
            return
        if not wish.unloads:
            await self._reach(receive, Rest.AWAKE)
        elif _may_unload(scope["state"]["identity"]) and not services.run.meets_in_store:
            await self._reach(receive, Rest.ASLEEP)
        await json_response(wish.answer(self._body, int(time.time())))(scope, receive, send)

    async def _reach(self, receive: Receive, rest: Rest) -> None:
        try:
            await until_disconnect(receive, self._services.reach(rest))
        except EngineGone as error:
            raise engine_unavailable(error) from error


def _may_unload(identity: Identity) -> bool:
    """Return whether a caller may put the service to sleep: an admin, or anyone where there are no keys."""
    return identity.is_admin or not identity.digest


def _again(data: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read, then the messages behind it."""
    bodies: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def next_message() -> Message:
        return bodies.pop() if bodies else await receive()

    return next_message
