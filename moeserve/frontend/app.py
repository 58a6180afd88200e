"""The Starlette application: routes, and the layers around them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from moeserve.config import ConfigError
from moeserve.frontend.cache_routes import CacheRoutes
from moeserve.frontend.dialects import messages_answer
from moeserve.frontend.generate import CHAT, COMPLETIONS, MESSAGES, TELLING_HEADERS, WARM, GenerateRoute
from moeserve.frontend.http import ApiError
from moeserve.frontend.keys import AuthGate, load_keys
from moeserve.frontend.live_routes import LiveRoutes
from moeserve.frontend.middleware import RequestBoundary
from moeserve.frontend.openapi import DescriptionRoutes
from moeserve.frontend.page_gate import PageGate
from moeserve.frontend.pages import FILES, Pages
from moeserve.frontend.peers import Peers
from moeserve.frontend.public_prefixes import load_public_prefixes, publish_prefixes
from moeserve.frontend.response_store import ResponseStore
from moeserve.frontend.responses import KeptResponseRoutes, ResponsesRoute
from moeserve.frontend.routes import ExpertRoutes, ServiceRoutes, TokenRoutes
from moeserve.frontend.services import Services

# By the path under which routes lie, where errors have another shape than OpenAI's.
ERROR_BODIES = {"/v1/messages": messages_answer.error_body}
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


def create_app(services: Services) -> Starlette:
    """Create the application. Its lifespan connects to the engine without waiting.

    Raises ConfigError for bad keys and origins.
    """
    config = services.run.config
    keys = load_keys(config.api_key, config.api_key_file)
    public = load_public_prefixes(config.public_prefixes)
    store = ResponseStore()
    peers = Peers(services.run, services.number, store)
    routes = _routes(services, store, peers)
    paths = frozenset(route.path for route in routes if isinstance(route, Route))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await services.start()
        await peers.start()
        # One of several frontends is enough: all share the engine, and one that ends is started again.
        is_publisher = bool(public) and services.number == 0
        publishing = asyncio.create_task(publish_prefixes(services, public)) if is_publisher else None
        try:
            yield
        finally:
            if publishing is not None:
                publishing.cancel()
                await asyncio.gather(publishing, return_exceptions=True)
            await peers.stop()
            await services.stop()

    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[
            *_cors(config.cors_allow_origin),
            Middleware(RequestBoundary, metrics=services.metrics, routes=paths, error_bodies=ERROR_BODIES),
            Middleware(
                PageGate,
                is_open=not keys,
                hosts=(config.host, *config.allowed_host),
                origins=config.cors_allow_origin,
            ),
            Middleware(AuthGate, keys=keys),
        ],
        exception_handlers={404: _no_route, 405: _no_method},
    )
    app.router.redirect_slashes = False
    return app


def _routes(services: Services, store: ResponseStore, peers: Peers) -> list[BaseRoute]:
    service, tokens, experts = ServiceRoutes(services), TokenRoutes(services), ExpertRoutes(services)
    kept, cache = KeptResponseRoutes(store, peers), CacheRoutes(services)
    live, description, pages = LiveRoutes(services), DescriptionRoutes(services), Pages()
    return [
        Route("/v1/chat/completions", GenerateRoute(services, CHAT), methods=["POST"]),
        Route("/v1/completions", GenerateRoute(services, COMPLETIONS), methods=["POST"]),
        Route("/v1/messages", GenerateRoute(services, MESSAGES), methods=["POST"]),
        Route("/v1/messages/count_tokens", tokens.count_message, methods=["POST"]),
        Route("/v1/responses", ResponsesRoute(services, store, peers), methods=["POST"]),
        Route("/v1/responses/resp_{name}", kept.one, methods=["GET", "DELETE"]),
        Route("/v1/responses/resp_{name}/input_items", kept.input_items, methods=["GET"]),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health", service.health),
        Route("/ready", service.ready),
        Route("/metrics", service.metrics),
        Route("/version", service.version),
        Route("/reset_prefix_cache", service.reset_prefix_cache, methods=["POST"]),
        Route("/v1/cache", cache.cache, methods=["GET", "DELETE"]),
        Route("/v1/cache/warm", GenerateRoute(services, WARM), methods=["POST"]),
        Route("/v1/cache/pin", cache.pin, methods=["POST"]),
        Route("/v1/cache/unpin", cache.unpin, methods=["POST"]),
        Route("/v1/experts", experts.experts),
        Route("/v1/experts/statistics", experts.save_statistics, methods=["POST"]),
        Route("/v1/experts/trace", experts.trace, methods=["POST"]),
        Route("/v1/stats", live.stats),
        Route("/v1/stats/stream", live.stream, methods=["GET"]),
        Route("/openapi.json", description.openapi),
        Route("/", pages.index(description.index)),
        *(Route(path, pages.file) for path in FILES),
    ]


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Return the layer that lets pages of these origins call the server; it answers a browser's preflight, too.

    Raises ConfigError for an origin that no browser sends.
    """
    for origin in origins:
        if origin != "*" and _ORIGIN.fullmatch(origin) is None:
            raise ConfigError(f"--cors-allow-origin takes `*` or SCHEME://HOST[:PORT], not {origin}")
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", *TELLING_HEADERS],
        )
    ]


async def _no_route(request: Request, _: Exception) -> Response:
    message = f"There is no {request.scope['path'][:200]} here; GET / lists what there is"
    raise ApiError(404, message, code="not_found")


async def _no_method(request: Request, error: Exception) -> Response:
    """Refuse a method that the route does not answer; HEAD, by which clients look whether it exists, is answered."""
    allowed = (getattr(error, "headers", None) or {}).get("Allow", "")
    if request.method == "HEAD":
        return Response(headers={"allow": allowed})
    message = f"{request.scope['path'][:200]} does not answer {request.method}, but {allowed}"
    raise ApiError(405, message, code="method_not_allowed", allow=allowed)
