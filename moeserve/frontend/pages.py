"""The pages for people: static files of this package, and the choice between page and index at `/`.

Pages are public and the same for everyone; they ask for their figures with the key that the browser keeps. The
policy lets them run their own scripts alone, and turns no text into HTML.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

# By path: the file in the folder `pages`. Every path is named here, so that nothing else is public.
FILES = {
    "/dashboard": "dashboard.html",
    "/pages/api.js": "api.js",
    "/pages/chat.css": "chat.css",
    "/pages/chat.html": "chat.html",
    "/pages/chat.js": "chat.js",
    "/pages/charts.js": "charts.js",
    "/pages/conversations.js": "conversations.js",
    "/pages/dashboard.css": "dashboard.css",
    "/pages/dashboard.js": "dashboard.js",
    "/pages/dom.js": "dom.js",
    "/pages/experts.js": "experts.js",
    "/pages/icon.svg": "icon.svg",
    "/pages/markdown.js": "markdown.js",
    "/pages/messages.js": "messages.js",
    "/pages/prefixes.js": "prefixes.js",
    "/pages/settings.js": "settings.js",
    "/pages/style.css": "style.css",
    "/pages/theme.js": "theme.js",
}
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


class Pages:
    """Answers with the files, read once, by the path of the request."""

    def __init__(self) -> None:
        self._files = {path: _StaticFile(_FOLDER / name) for path, name in FILES.items()}

    async def file(self, request: Request) -> Response:
        return self._files[request.scope["path"]].answer(request)

    def index(self, index: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of `/`: the chat page for browsers, `index` for clients that do not accept HTML."""

        async def answer(request: Request) -> Response:
            wants_page = "text/html" in request.headers.get("accept", "")
            response = self._files[CHAT].answer(request) if wants_page else await index(request)
            response.headers["vary"] = "accept"
            return response

        return answer


class _StaticFile:
    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._headers = {**_HEADERS, "etag": f'"{hashlib.sha256(self._content).hexdigest()[:24]}"'}
        self._type = _TYPES[path.suffix]

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 to a browser that has it."""
        if self._headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(None, 304, self._headers)
        return Response(self._content, 200, self._headers, media_type=self._type)
