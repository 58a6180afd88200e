"""A route is described once: application, gate, descriptions and documents follow its record."""

import re
from pathlib import Path

import pytest
from starlette.routing import Route as StarletteRoute

from moeserve.frontend.app import create_app
from moeserve.frontend.errors import openai_error_body
from moeserve.frontend.route import Route, RouteTable
from moeserve.frontend.routes.openapi import describe
from moeserve.frontend.routes.table import ROUTES
from moeserve.frontend.services import Services
from tests.support.frontend import run_context
from tests.support.sources import ROOT

SHOWN = [route for route in ROUTES if not route.is_file]


def test_a_route_without_a_role_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="role"):
        Route(method="GET", path="/x", summary="x", endpoint=lambda made: made)  # type: ignore[call-arg]


def test_the_application_has_the_routes_of_the_table(tmp_path: Path) -> None:
    app = create_app(Services.load(run_context(tmp_path)), 1024)
    found = set()
    for route in app.routes:
        assert isinstance(route, StarletteRoute)
        found |= {(method, route.path) for method in route.methods or () if method != "HEAD"}
    assert found == {(route.method, route.path) for route in ROUTES}
    assert len(found) == len(ROUTES)


def test_all_methods_of_a_path_have_one_role_and_one_endpoint() -> None:
    for route in ROUTES:
        others = [other for other in ROUTES if other.path == route.path]
        assert {other.role for other in others} == {route.role}, route.path
        assert len({other.error_body for other in others}) == 1, route.path


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_the_table_finds_the_route_of_every_path(route: Route) -> None:
    table = RouteTable(ROUTES)
    path = re.sub(r"{\w+(:path)?}", "a1", route.path)
    found = table.find(path)
    assert found is not None
    assert found.path == route.path
    assert table.error_body(path) is route.error_body


def test_errors_of_unknown_paths_have_the_shape_of_the_routes_above_and_beside() -> None:
    table = RouteTable(ROUTES)
    assert table.error_body("/v1/messages/batches/x") is table.error_body("/v1/messages") is not openai_error_body
    assert table.error_body("/v1/messages2") is table.error_body("/nowhere") is openai_error_body
    assert table.error_body("/api/embed") is table.error_body("/api/chat") is not openai_error_body
    assert table.find("/nowhere") is table.find("/v1/models2") is None


def test_the_document_describes_every_route_once() -> None:
    document = describe(SHOWN)
    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert told == {(route.method, route.template) for route in SHOWN}
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


def test_the_routes_are_told_in_the_documents() -> None:
    rows = [f"| `{route.method} {route.template}` | {route.role} | {route.summary} |" for route in SHOWN]
    told = (ROOT / "docs" / "routes.md").read_text().splitlines()
    assert [line for line in told if line.startswith("| `")] == rows


def test_the_document_refers_to_nothing_it_lacks() -> None:
    document = describe(SHOWN)
    for reference in re.findall(r"'\$ref': '#/([^']+)'", str(document)):
        found = document
        for part in reference.split("/"):
            found = found[part]
        assert found, reference


def test_required_fields_are_fields_of_the_body() -> None:
    for route in SHOWN:
        known = () if route.body is None else route.body.__struct_encode_fields__
        assert set(route.required) <= set(known), route.path
