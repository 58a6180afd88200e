"""The Starlette application: routes, and the layers around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from moeserve.frontend.cache_routes import WARM, CacheRoutes
from moeserve.frontend.generate import CHAT, COMPLETIONS, GenerateRoute
from moeserve.frontend.http import ApiError
from moeserve.frontend.keys import AuthGate, load_keys
from moeserve.frontend.middleware import RequestBoundary
from moeserve.frontend.public_prefixes import load_public_prefixes, publish_prefixes
from moeserve.frontend.routes import ExpertRoutes, ServiceRoutes, TokenRoutes
from moeserve.frontend.services import Services


def create_app(services: Services) -> Starlette:
    """Create the application. Its lifespan connects to the engine without waiting. Raises ConfigError for bad keys."""
    config = services.run.config
    keys = load_keys(config.api_key, config.api_key_file)
    public = load_public_prefixes(config.public_prefixes)
    routes = _routes(services)
    paths = frozenset(route.path for route in routes if isinstance(route, Route))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await services.engine.start()
        publishing = asyncio.create_task(publish_prefixes(services, public)) if public else None
        try:
            yield
        finally:
            if publishing is not None:
                publishing.cancel()
                await asyncio.gather(publishing, return_exceptions=True)
            await services.engine.stop()

    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[
            Middleware(RequestBoundary, metrics=services.metrics, routes=paths),
            Middleware(AuthGate, keys=keys),
        ],
        exception_handlers={404: _no_route, 405: _no_method},
    )
    app.router.redirect_slashes = False
    return app


def _routes(services: Services) -> list[BaseRoute]:
    service, tokens, experts = ServiceRoutes(services), TokenRoutes(services), ExpertRoutes(services)
    cache = CacheRoutes(services)
    return [
        Route("/v1/chat/completions", GenerateRoute(services, CHAT), methods=["POST"]),
        Route("/v1/completions", GenerateRoute(services, COMPLETIONS), methods=["POST"]),
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
        Route("/", service.index),
    ]


async def _no_route(request: Request, _: Exception) -> Response:
    message = f"There is no {request.scope['path'][:200]} here; GET / lists what there is"
    return Response(ApiError(404, message, code="not_found").body(), 404, media_type="application/json")


async def _no_method(request: Request, error: Exception) -> Response:
    headers = getattr(error, "headers", None) or {}
    message = f"{request.scope['path'][:200]} does not answer {request.method}, but {headers.get('Allow')}"
    body = ApiError(405, message, code="method_not_allowed").body()
    return Response(body, 405, headers, media_type="application/json")
