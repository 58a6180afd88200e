"""The Starlette application: routes, and the layers around them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.routing import Route as StarletteRoute

from moeserve.config import ConfigError
from moeserve.frontend.errors import ApiError
from moeserve.frontend.held import OpenRequests
from moeserve.frontend.jobs.batch_runner import Batches
from moeserve.frontend.jobs.idempotency import KeyedAnswers
from moeserve.frontend.jobs.jobs import Jobs
from moeserve.frontend.keys import AuthGate, load_keys, warn_of_readers
from moeserve.frontend.middleware import RequestBoundary
from moeserve.frontend.pages import PageGate
from moeserve.frontend.route import RouteTable
from moeserve.frontend.routes.cache import load_public_prefixes
from moeserve.frontend.routes.generate import TELLING_HEADERS
from moeserve.frontend.routes.table import ROUTES, Endpoints
from moeserve.frontend.services import Services
from moeserve.frontend.setting_files import PublicPrefixes, SettingFiles
from moeserve.frontend.store.file import Owner
from moeserve.frontend.store.store import Bounds, Store
from moeserve.frontend.usage import UsageBook

_DAY_S = 86_400.0
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")

_TEXT_ALONE = "This server generates text alone"
_ELSEWHERE = (
    (
        (
            "/v1/embeddings",
            "/embeddings",
            "/v1/rerank",
            "/rerank",
            "/v1/score",
            "/score",
            "/pooling",
            "/api/embed",
            "/api/embeddings",
        ),
        f"{_TEXT_ALONE}: for embeddings and ranking run a server for these models beside it, such as `llama-server "
        "--embeddings -m MODEL.gguf` or text-embeddings-inference, and give clients its address for them",
    ),
    (
        ("/v1/audio",),
        f"{_TEXT_ALONE}: for speech run a server for it beside this one, such as whisper.cpp's `whisper-server`, and "
        "give clients its address for it",
    ),
    (
        ("/v1/images", "/v1/videos"),
        f"{_TEXT_ALONE}: for images run a server for them beside this one, such as stable-diffusion.cpp's `sd-server`, "
        "and give clients its address for them",
    ),
    (
        ("/api/create", "/api/copy", "/api/push", "/api/delete", "/api/blobs"),
        "This server changes no models: it serves the one that it was started with, `moeserve serve MODEL`",
    ),
)


def create_app(services: Services, most_requests: int) -> Starlette:
    """Create the application. Its lifespan connects to the engine without waiting.

    most_requests: that are open at once. Raise ConfigError for bad keys and origins.
    """
    config = services.run.config
    keys = load_keys(config.api_key, config.api_key_file)
    warn_of_readers(config.api_key_file)
    public = load_public_prefixes(config.public_prefixes)
    bounds = Bounds(config.response_store_size, config.response_store_days * _DAY_S, keys.stored_share)
    store = Store(services.run.store_file, bounds)
    owner = Owner(services.run.store_file)
    book = UsageBook(keys, store, owner, services.metrics.rejections, services.drain_logs)
    jobs = Jobs(services, store, owner, book)
    answers = KeyedAnswers(store, owner, services.held)
    endpoints = Endpoints(services, store, jobs, answers, book, owner.name)
    batches = Batches(services, store, owner, book)
    table = RouteTable(ROUTES)
    files = SettingFiles(services, keys, book, PublicPrefixes(services, public))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with _running(services, store, owner, book, jobs, answers, batches):
            files.start()
            yield
            await files.stop()

    app = Starlette(
        routes=_starlette_routes(endpoints),
        lifespan=lifespan,
        middleware=[
            *_cors(config.cors_allow_origin),
            Middleware(RequestBoundary, metrics=services.metrics, routes=table, ledger=book),
            Middleware(
                PageGate,
                routes=table,
                is_open=not keys,
                hosts=(config.host, *config.allowed_host),
                origins=config.cors_allow_origin,
            ),
            Middleware(
                AuthGate,
                keys=keys,
                routes=table,
                places=OpenRequests(most_requests, keys.part, services.metrics.rejections),
                held=services.held,
            ),
        ],
        exception_handlers={404: _no_route(frozenset(route.path for route in ROUTES)), 405: _no_method},
    )
    app.router.redirect_slashes = False
    return app


@asynccontextmanager
async def _running(
    services: Services,
    store: Store,
    owner: Owner,
    book: UsageBook,
    jobs: Jobs,
    answers: KeyedAnswers,
    batches: Batches,
) -> AsyncIterator[None]:
    """Start everything behind the routes; stop it in the opposite order."""
    await store.start()
    await services.start()
    owner.hold()
    book.start()
    await jobs.start()
    batches.start()
    try:
        yield
    finally:
        await batches.stop()
        await jobs.stop()
        await answers.stop()
        await services.stop()
        await book.stop()
        await store.stop()
        owner.release()


def _starlette_routes(endpoints: Endpoints) -> list[BaseRoute]:
    """Return a route of Starlette's for each path, with all its methods."""
    methods: dict[str, list[str]] = {}
    for route in ROUTES:
        methods.setdefault(route.path, []).append(route.method)
    first = {route.path: route for route in reversed(ROUTES)}
    return [StarletteRoute(path, first[path].endpoint(endpoints), methods=found) for path, found in methods.items()]


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Return the layer that lets pages of these origins call the server; it answers a browser's preflight, too.

    Raise ConfigError for an origin that no browser sends.
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


def _no_route(paths: frozenset[str]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return the handler of requests to none of these paths."""

    async def refuse(request: Request, _: Exception) -> Response:
        raise ApiError(404, why_absent(request.scope["path"], paths), code="not_found")

    return refuse


async def _no_method(request: Request, error: Exception) -> Response:
    """Refuse a method that the route does not answer. HEAD is answered: clients ask by it whether a route exists."""
    allowed = (getattr(error, "headers", None) or {}).get("Allow", "")
    if request.method == "HEAD":
        return Response(headers={"allow": allowed})
    message = f"{request.scope['path'][:200]} does not answer {request.method}, but {allowed}"
    raise ApiError(405, message, code="method_not_allowed", allow=allowed)


def why_absent(path: str, known: frozenset[str]) -> str:
    """Return the sentence for a path that has no route. known: the paths that have one."""
    for prefixes, sentence in _ELSEWHERE:
        if any(path == prefix or path.startswith(prefix + "/") for prefix in prefixes):
            return sentence
    shown = path[:200]
    plain = re.sub("/{2,}", "/", path).rstrip("/")
    for meant in (plain, f"/v1{plain}", plain.removeprefix("/v1")):
        if meant != path and meant in known:
            return f"There is no {shown} here, but {meant}"
    return f"There is no {shown} here; GET /openapi.json lists what there is"
