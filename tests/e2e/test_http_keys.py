"""Keys over real HTTP: who gets in where, and whose cache a request sees."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.routing import Route

from moeserve.frontend.app import create_app
from moeserve.frontend.routes.table import ROUTES
from moeserve.frontend.services import Services
from moeserve.wire import Generate
from tests.support.frontend import Frontend, frontend, run_context

BODY = {"model": "tiny", "prompt": "hi"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    folder = tmp_path_factory.mktemp("frontend")
    (folder / "keys").write_text("admin:root\nmetrics:prom\nuser:bob\n")
    with frontend(folder, api_key=("alice",), api_key_file=str(folder / "keys")) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


ROLES = {route.path: route.role for route in ROUTES}


def routes(folder: Path) -> list[tuple[str, str]]:
    """(method, path) of every route of the application."""
    app = create_app(Services.load(run_context(folder)), 1024)
    found = [(method, route.path) for route in app.routes if isinstance(route, Route) for method in route.methods or ()]
    assert len(found) >= len(app.routes) >= 12
    return found


def test_every_route_but_health_needs_a_key(server: Frontend, tmp_path: Path) -> None:
    for method, path in routes(tmp_path):
        status = server.http.request(method, path).status_code
        wrong = server.http.request(method, path, headers=bearer("wrong")).status_code
        if ROLES[path] == "public":
            assert (status, wrong) == (200, 200), path
        else:
            assert (status, wrong) == (401, 401), path


def test_users_get_in_everywhere_but_where_a_role_is_asked_for(server: Frontend, tmp_path: Path) -> None:
    for method, path in routes(tmp_path):
        status = server.http.request(method, path, headers=bearer("alice")).status_code
        assert (status == 403) == (ROLES[path] in ("metrics", "admin")), path


def test_a_user_of_ollamas_api_puts_nobody_elses_service_to_sleep(server: Frontend) -> None:
    answer = server.http.post("/api/chat", json={"model": "tiny", "keep_alive": 0}, headers=bearer("alice"))
    assert (answer.status_code, answer.json()["done_reason"]) == (200, "unload")
    assert server.http.get("/ready").json() == {"status": "ready"}


def test_each_role_reaches_its_routes_and_admin_all(server: Frontend) -> None:
    get, post = server.http.get, server.http.post
    assert get("/metrics", headers=bearer("prom")).status_code == 200
    assert get("/v1/models", headers=bearer("prom")).status_code == 403
    assert post("/reset_prefix_cache", headers=bearer("prom")).status_code == 403
    assert post("/reset_prefix_cache", headers=bearer("root")).status_code == 200
    assert get("/metrics", headers=bearer("root")).status_code == 200
    assert post("/v1/completions", json=BODY, headers=bearer("root")).status_code == 200


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("/v1/models", "x/health?"),
        ("//health", "x"),
        ("/v1/../health", "x"),
        ("/health/../v1/models", "x"),
        ("/%68ealth/..", "x"),
        ("/health%2f", "x"),
    ],
)
def test_forged_paths_and_hosts_open_nothing(server: Frontend, path: str, host: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        assert connection.recv(12) == b"HTTP/1.1 401"


def test_a_refusal_has_openais_shape_and_the_scheme(server: Frontend) -> None:
    response = server.http.get("/v1/models", headers={"authorization": b"Bearer \xfc\xff"})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_keys_and_salts_do_not_share_cached_prefixes(server: Frontend) -> None:
    server.engine.received.clear()
    for key, salt in (("alice", None), ("alice", None), ("bob", None), ("alice", "s"), ("bob", "s")):
        body = BODY if salt is None else {**BODY, "cache_salt": salt}
        assert server.http.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
    names = [generate.namespace for generate in server.engine.of(Generate)]
    assert names[0] == names[1] != ""
    assert len(set(names)) == 4
    assert not any(word in name for name in names for word in ("alice", "bob"))


def test_keys_are_not_logged(server: Frontend) -> None:
    server.http.get("/v1/models", headers=bearer("alice"))
    log = server.log_path.read_text()
    # Paths may hold such names, too.
    log = log.replace(str(server.log_path.parent), "")
    assert "alice" not in log
    assert "root" not in log


def test_a_bad_key_file_is_one_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="ended"),
        frontend(tmp_path, api_key_file=str(tmp_path / "missing")),
    ):
        pytest.fail("it must not start")
    assert (tmp_path / "frontend.log").read_text().count("\n") == 1
