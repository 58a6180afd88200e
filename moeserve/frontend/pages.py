"""The pages for people, and the gate that keeps other people's web pages away from a server without keys.

Our pages are static files of this package, public and the same for everyone; they ask for their figures with the key
that the browser keeps. The policy lets them run their own scripts alone, and turns no text into HTML.

A browser lets any page send requests to this machine. A page sees no answer of another origin, but a `POST` acts all
the same; and a page whose own name is resolved to this machine later (DNS rebinding) sees answers as well. Such a
request has a foreign `Origin` or `Host`, or a body that is not declared as JSON: for JSON a browser asks first. A
server with keys needs none of this: a page does not know them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection, Iterable
from ipaddress import ip_address
from pathlib import Path
from socket import gethostname
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from moeserve.frontend.dialects.ollama_models import RUNNING
from moeserve.frontend.errors import ApiError, forbidden
from moeserve.frontend.route import JSON, TEXT, RouteTable

# The files of the folder `pages` that `/pages` serves. Each is named here, so that no other file is public.
_NAMES = (
    "answers.js api.js attachments.js chat.css chat.html chat.js charts.js conversations.js dashboard.css dashboard.js "
    "dom.js experts.js highlight.js icon.svg keys.js markdown.js math.js messages.js prefixes.js settings.js "
    "snippets.js style.css theme.js versions.js"
)
# By path: the name of a file.
FILES = {"/dashboard": "dashboard.html", **{f"/pages/{name}": name for name in _NAMES.split()}}
CHAT = "/pages/chat.html"
_FOLDER = Path(__file__).parent / "pages"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

# This path takes forms, which foreign pages can send without a preflight: browsers name their origin then.
_CURLS = "application/x-www-form-urlencoded"
_FORM_PATH = "/v1/files"
# Names of this machine, of a local network and of a cluster end like this, names of pages on the web never.
_LOCAL_ENDS = (".localhost", ".local", ".internal")
_MAX_SHOWN_CHARS = 100


class Pages:
    """Answers with the files, read once, by the path of the request."""

    def __init__(self) -> None:
        self._files = {path: _StaticFile(_FOLDER / name) for path, name in FILES.items()}

    async def file(self, request: Request) -> Response:
        return self._files[request.scope["path"]].answer(request)

    def index(self, index: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of `/`: the chat page for browsers, `index` for clients that name JSON, for others the
        words by which Ollama's clients know that a server is there."""

        async def answer(request: Request) -> Response:
            accept = request.headers.get("accept", "")
            if "text/html" in accept:
                response = self._files[CHAT].answer(request)
            else:
                response = await index(request) if JSON in accept else Response(RUNNING, media_type=TEXT)
            response.headers["vary"] = "accept"
            return response

        return answer


class _StaticFile:
    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._headers = {**_HEADERS, "etag": f'"{hashlib.sha256(self._content).hexdigest()[:24]}"'}
        self._type = _TYPES[path.suffix]

    def answer(self, request: Request) -> Response:
        if self._headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(None, 304, self._headers)
        return Response(self._content, 200, self._headers, media_type=self._type)


class PageGate:
    """ASGI middleware. Raises ApiError: 403 for a foreign page, 415 for a body that is not JSON, 405 for a preflight.

    is_open: whether the server has no keys; on one with keys only preflights are refused. hosts: names by which clients
    may call it; `*` for any. origins: whose pages may, `*` for any; preflights of these are answered before.
    """

    def __init__(
        self, app: ASGIApp, routes: RouteTable, *, is_open: bool, hosts: Collection[str], origins: Collection[str]
    ) -> None:
        self._app = app
        self._routes = routes
        self._is_open = is_open
        self._any_host = "*" in hosts
        self._hosts = {gethostname().lower(), *(host.lower() for host in hosts)}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = scope["headers"]
            if scope["method"] == "OPTIONS" and not self._origins:
                raise _no_preflight(_value(headers, b"origin"))
            if self._is_open and not self._is_watched(scope["path"]):
                self._check_host(headers)
                self._check_origin(headers)
                if scope["method"] == "POST" and scope["path"] != _FORM_PATH:
                    check_media_type(headers)
        await self._app(scope, receive, send)

    def _is_watched(self, path: str) -> bool:
        """Return whether load balancers poll a path, under any host name; a page learns nothing from it."""
        route = self._routes.find(path)
        return route is not None and route.is_watch and route.role == "public"

    def _check_host(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        for name, value in headers:
            if name == b"host" and not self._is_own(_hostname(f"//{_text(value)}")):
                shown = _text(value)
                raise forbidden(
                    f"`Host: {shown}` is no known name of this server, which has no API keys: "
                    "allow it with --allowed-host, or set --api-key",
                    code="foreign_host",
                )

    def _check_origin(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        origin = _value(headers, b"origin")
        if origin is None or "*" in self._origins or origin in self._origins:
            return
        scheme, _, address = origin.partition("://")
        # Pages of the web cannot have another scheme: extensions and desktop applications do.
        if scheme not in ("http", "https", "null"):
            return
        host = _hostname(origin)
        if address == _value(headers, b"host") or _is_loopback(host) or host in self._hosts:
            return
        raise forbidden(
            f"Pages of {origin} may not call this server, which has no API keys: "
            "allow them with --cors-allow-origin, or set --api-key",
            code="foreign_origin",
        )

    def _is_own(self, host: str) -> bool:
        """Return whether no foreign page can have this host name: names in public DNS have a dot."""
        return self._any_host or host in self._hosts or "." not in host or host.endswith(_LOCAL_ENDS) or _is_ip(host)


def check_media_type(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise ApiError (415) if a body is declared as anything but JSON.

    `curl -d` says that it sends a form. A browser that sends one names the page that it comes from.
    """
    media = _value(headers, b"content-type")
    kind = (media or "").partition(";")[0].strip().lower()
    if kind == _CURLS and _value(headers, b"origin") is None and _value(headers, b"sec-fetch-site") is None:
        return
    length = _value(headers, b"content-length")
    has_body = _value(headers, b"transfer-encoding") is not None or length not in (None, "0")
    if not has_body or kind in ("", "application/json", "text/json"):
        return
    if not (kind.startswith("application/") and kind.endswith("+json")):
        message = f"A body of `content-type: {media}` is not read here: send JSON with `content-type: application/json`"
        raise ApiError(415, message, code="unsupported_media_type")


def _no_preflight(origin: str | None) -> ApiError:
    pages = "pages" if origin is None else f"pages of {origin}"
    message = f"Browsers may not call this server from {pages}: start it with --cors-allow-origin {origin or 'ORIGIN'}"
    return ApiError(405, message, code="cors_not_enabled", allow="GET, POST, DELETE")


def _value(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> str | None:
    return next((_text(value) for name, value in headers if name == wanted), None)


def _text(value: bytes) -> str:
    return value.decode("ascii", "replace").strip()[:_MAX_SHOWN_CHARS]


def _hostname(address: str) -> str:
    """Return the name in `SCHEME://HOST:PORT`, "." for none that can be read."""
    try:
        return (urlsplit(address).hostname or ".").removesuffix(".") or "."
    except ValueError:
        return "."


def _is_ip(host: str) -> bool:
    """Return whether a host is an address. A page that was loaded from an address comes from that server: no DNS is
    involved."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.endswith(".localhost") or (_is_ip(host) and ip_address(host).is_loopback)
