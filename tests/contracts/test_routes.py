"""Every route of the application is told in `/openapi.json`, and nothing that is not there."""

import re
from pathlib import Path

import pytest
from starlette.routing import Route

from moeserve.frontend.app import create_app
from moeserve.frontend.openapi import OPERATIONS, describe
from moeserve.frontend.pages import FILES
from moeserve.frontend.services import Services
from tests.support.frontend import run_context

ASSETS = {path for path in FILES if path.startswith("/pages/")}


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    app = create_app(Services.load(run_context(tmp_path_factory.mktemp("run"))))
    assert all(isinstance(route, Route) for route in app.routes)
    found = set()
    for route in app.routes:
        assert isinstance(route, Route)
        path = re.sub(r":\w+}", "}", route.path)
        found |= {(method, path) for method in route.methods or () if method != "HEAD" and path not in ASSETS}
    return found


def test_the_table_of_operations_is_the_applications_routes(routes: set[tuple[str, str]]) -> None:
    told = [(operation.method, operation.path) for operation in OPERATIONS]
    assert len(told) == len(set(told))
    assert set(told) == routes


def test_the_document_describes_every_operation_once() -> None:
    document = describe(OPERATIONS)
    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert told == {(operation.method, operation.path) for operation in OPERATIONS}
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


def test_the_document_refers_to_nothing_it_lacks() -> None:
    document = describe(OPERATIONS)
    for reference in re.findall(r"'\$ref': '#/([^']+)'", str(document)):
        found = document
        for part in reference.split("/"):
            found = found[part]
        assert found, reference


def test_required_fields_are_fields_of_the_body(tmp_path: Path) -> None:
    for operation in OPERATIONS:
        known = () if operation.body is None else operation.body.__struct_encode_fields__
        assert set(operation.required) <= set(known), operation.path
