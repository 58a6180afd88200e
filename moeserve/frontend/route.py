"""The facts about a path, stated once: `Route`. Application, gate, log, errors and descriptions follow from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec

from moeserve.frontend.errors import ErrorBody, openai_error_body

JSON, TEXT, EVENTS, LINES, HTML, BYTES = (
    "application/json",
    "text/plain",
    "text/event-stream",
    "application/x-ndjson",
    "text/html",
    "application/octet-stream",
)
_PARAMETER = re.compile(r"{(\w+)(:path)?}")

# The callers: anyone, or the holders of a key with this role.
Role = Literal["public", "user", "metrics", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
_E = TypeVar("_E")


@dataclass(frozen=True, slots=True)
class Route(Generic[_E]):
    """A method of a path. It has no role by default.

    path: as Starlette reads it. endpoint: chosen from the objects of the application. error_body: the shape of errors,
    here and for unknown paths below and beside it. body: the struct that reads the body. required: its fields that may
    not be left out. fields: its fields with an effect; empty for all. example: a body without the model's name. media:
    in which forms it answers. is_watch: operators look at it all the time; it is answered also where there are too many
    connections, and logged at level debug. is_file: it is a file of a page, which nothing describes.
    """

    method: str
    path: str
    role: Role
    summary: str
    endpoint: Callable[[_E], Any]
    _: KW_ONLY
    error_body: ErrorBody = openai_error_body
    body: type[msgspec.Struct] | None = None
    required: tuple[str, ...] = ()
    fields: frozenset[str] = frozenset()
    example: dict[str, Any] | None = None
    media: tuple[str, ...] = (JSON,)
    is_watch: bool = False
    is_file: bool = False

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it."""
        return _PARAMETER.sub(r"{\1}", self.path)


class RouteTable:
    """Finds the route of a request's path."""

    def __init__(self, routes: Sequence[Route[Any]]) -> None:
        self._exact = {route.path: route for route in routes if "{" not in route.path}
        self._patterns = [
            (re.compile(_PARAMETER.sub(lambda found: ".*" if found[2] else "[^/]+", route.path)), route)
            for route in routes
            if "{" in route.path
        ]
        self._shapes: dict[str, set[ErrorBody]] = {}  # of the routes in a folder of paths
        for path, route in self._exact.items():
            self._shapes.setdefault(_folder(path), set()).add(route.error_body)
        # The longest path first.
        self._parents = sorted(self._exact.values(), key=lambda route: -len(route.path))

    def find(self, path: str) -> Route[Any] | None:
        """Return a route of this path, None for an unknown one. All methods of a path have one role."""
        found = self._exact.get(path)
        if found is not None:
            return found
        return next((route for pattern, route in self._patterns if pattern.fullmatch(path)), None)

    def error_body(self, path: str) -> ErrorBody:
        """Return the shape of the errors of a path: its route's, that of the route above it, or the one that all routes
        beside it have."""
        route = self.find(path) or next((one for one in self._parents if path.startswith(one.path + "/")), None)
        if route is not None:
            return route.error_body
        shapes = self._shapes.get(_folder(path), set())
        return next(iter(shapes)) if len(shapes) == 1 else openai_error_body


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
