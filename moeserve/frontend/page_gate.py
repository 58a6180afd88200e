"""Keeps other people's web pages away from a server without keys.

A browser lets any page send requests to this machine. A page sees no answer of another origin, but a `POST` acts all
the same; and a page whose own name is resolved to this machine later (DNS rebinding) sees answers as well. Such a
request has a foreign `Origin` or `Host`, or a body that is not declared as JSON: for JSON a browser asks first. A
server with keys needs none of this: a page does not know them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from ipaddress import ip_address
from socket import gethostname
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from moeserve.frontend.http import ApiError
from moeserve.frontend.routes.table import ROUTES

# It takes forms, which foreign pages can send without a preflight: browsers name their origin then.
_FORM_PATH = "/v1/files"
# Load balancers look at these under any name, and a page learns nothing from them.
_OPEN_PATHS = frozenset(route.path for route in ROUTES if route.is_watch and route.role == "public")
# No page's name ends so: names of this machine, of a local network, of a cluster.
_LOCAL_ENDS = (".localhost", ".local", ".internal")
_MAX_SHOWN_CHARS = 100


class PageGate:
    """ASGI middleware. Raises ApiError: 403 for a foreign page, 415 for a body that is not JSON, 405 for a preflight.

    is_open: whether the server has no keys, without which only preflights are refused. hosts: names by which clients
    may call it; `*` for any. origins: whose pages may, `*` for any; preflights of these are answered before.
    """

    def __init__(self, app: ASGIApp, *, is_open: bool, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._is_open = is_open
        self._any_host = "*" in hosts
        self._hosts = {gethostname().lower(), *(host.lower() for host in hosts)}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = scope["headers"]
            if scope["method"] == "OPTIONS" and not self._origins:
                raise _no_preflight(_value(headers, b"origin"))
            if self._is_open and scope["path"] not in _OPEN_PATHS:
                self._check_host(headers)
                self._check_origin(headers)
                if scope["method"] == "POST" and scope["path"] != _FORM_PATH:
                    check_media_type(headers)
        await self._app(scope, receive, send)

    def _check_host(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        for name, value in headers:
            if name == b"host" and not self._is_own(_hostname(f"//{_text(value)}")):
                shown = _text(value)
                raise _foreign(
                    f"`Host: {shown}` is no known name of this server, which has no API keys: "
                    "allow it with --allowed-host, or set --api-key",
                    "foreign_host",
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
        raise _foreign(
            f"Pages of {origin} may not call this server, which has no API keys: "
            "allow them with --cors-allow-origin, or set --api-key",
            "foreign_origin",
        )

    def _is_own(self, host: str) -> bool:
        """Return whether no foreign page can have come by this name: what public DNS resolves has a dot."""
        return self._any_host or host in self._hosts or "." not in host or host.endswith(_LOCAL_ENDS) or _is_ip(host)


def check_media_type(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise ApiError (415) for a body that is declared as anything but JSON."""
    media = _value(headers, b"content-type")
    kind = (media or "").partition(";")[0].strip().lower()
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


def _foreign(message: str, code: str) -> ApiError:
    return ApiError(403, message, type="permission_error", code=code)


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
    """Return whether a host is an address. A page that came by one is its own server's: DNS has no part in it."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.endswith(".localhost") or (_is_ip(host) and ip_address(host).is_loopback)
