"""A server without keys and other people's web pages: by whose name and from which pages it may be called."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moeserve.frontend.errors import ApiError
from moeserve.frontend.pages import PageGate
from moeserve.frontend.route import RouteTable
from moeserve.frontend.routes.table import ROUTES

JSON = "application/json"


def refusal(
    *,
    method: str = "POST",
    path: str = "/v1/completions",
    is_open: bool = True,
    hosts: tuple[str, ...] = ("127.0.0.1",),
    origins: tuple[str, ...] = (),
    **headers: str,
) -> ApiError | None:
    """Return the error that a request gets, None if it reaches the application."""
    reached = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)

    gate = PageGate(app, RouteTable(ROUTES), is_open=is_open, hosts=hosts, origins=origins)
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": named}
    try:
        asyncio.run(gate(scope, None, None))  # type: ignore[arg-type]
    except ApiError as error:
        assert not reached
        return error
    assert reached
    return None


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LOCALHOST.", "app.localhost:1", "127.0.0.1:8000", "[::1]:8000", "[fe80::1]"),
        *("192.168.1.7:8000", "8.8.8.8", "moeserve:8000", "box.local", "host.docker.internal:8000"),
        *("m.default.svc.cluster.local", "bound.example:80", "BOUND.example", "allowed.example"),
    ],
)
def test_a_server_answers_to_addresses_local_names_and_its_own(host: str) -> None:
    assert refusal(hosts=("bound.example", "allowed.example"), host=host) is None


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "[", "", "a b.c"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_foreign_name_is_refused(host: str, method: str) -> None:
    error = refusal(method=method, host=host)
    assert error is not None
    assert (error.status, error.code) == (403, "foreign_host")
    assert "--allowed-host" in error.message


def test_names_do_not_count_with_keys_for_looks_at_health_and_where_any_is_allowed() -> None:
    assert refusal(host="evil.example", is_open=False) is None
    assert refusal(host="evil.example", hosts=("*",)) is None
    assert refusal(host="evil.example", path="/health", method="GET") is None
    assert refusal() is None


@pytest.mark.parametrize(
    "origin",
    [
        *(
            "http://localhost:8000",
            "http://localhost:3000",
            "http://127.0.0.1:9",
            "https://[::1]:1",
            "http://a.localhost",
        ),
        *(
            "http://box:8000",
            "vscode-webview://abc",
            "app://obsidian.md",
            "https://chat.example",
            "http://named.example",
        ),
    ],
)
def test_pages_of_this_server_of_this_machine_and_allowed_ones_may_call(origin: str) -> None:
    allowed = {"origins": ("https://chat.example",), "hosts": ("named.example",)}
    assert refusal(host="box:8000", origin=origin, **allowed) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "https://8.8.8.8", "null", "http://box:8001", "http://", "http://[", "https://a:x"],
)
def test_other_pages_are_refused(origin: str) -> None:
    error = refusal(host="box:8000", origin=origin, origins=("https://chat.example",))
    assert error is not None
    assert (error.status, error.code) == (403, "foreign_origin")
    assert "--cors-allow-origin" in error.message


def test_pages_do_not_count_with_keys_or_where_any_may_call() -> None:
    assert refusal(origin="http://evil.example", is_open=False) is None
    assert refusal(origin="http://evil.example", origins=("*",)) is None


@pytest.mark.parametrize(
    "media", [JSON, "application/json; charset=utf-8", "Application/JSON", "text/json", "application/ld+json", ""]
)
def test_json_under_any_of_its_names_is_read(media: str) -> None:
    assert refusal(content_type=media, content_length="2") is None


@pytest.mark.parametrize("media", ["text/plain", "text/plain;application/json", "multipart/form-data"])
def test_another_body_is_refused_in_words_that_name_the_header(media: str) -> None:
    for length in ({"content_length": "2"}, {"transfer_encoding": "chunked"}):
        error = refusal(content_type=media, **length)  # type: ignore[arg-type]
        assert error is not None
        assert (error.status, error.code) == (415, "unsupported_media_type")
        assert "content-type: application/json" in error.message
    assert refusal(content_type=media, content_length="0") is None
    assert refusal(content_type=media, content_length="2", is_open=False) is None
    assert refusal(content_length="2") is None


def test_what_curl_calls_a_form_is_read_and_the_form_of_a_page_is_not() -> None:
    form = {"content_type": "application/x-www-form-urlencoded", "content_length": "2"}
    assert refusal(**form) is None  # type: ignore[arg-type]
    for page in ({"origin": "http://localhost"}, {"sec_fetch_site": "same-origin"}):
        error = refusal(**form, **page)  # type: ignore[arg-type]
        assert error is not None
        assert error.status == 415


@pytest.mark.parametrize("is_open", [True, False])
def test_a_preflight_is_refused_in_words_that_name_the_setting(is_open: bool) -> None:
    error = refusal(method="OPTIONS", origin="https://chat.example", is_open=is_open)
    assert error is not None
    assert (error.status, error.code) == (405, "cors_not_enabled")
    assert "--cors-allow-origin https://chat.example" in error.message
    assert refusal(method="OPTIONS", origins=("https://chat.example",)) is None


def test_forms_are_for_files_and_no_foreign_page_sends_one() -> None:
    form = {"host": "localhost", "content_type": "multipart/form-data; boundary=b", "content_length": "9"}
    assert refusal(method="POST", path="/v1/files", **form) is None
    refused = refusal(method="POST", path="/v1/batches", **form)
    assert refused is not None
    assert refused.status == 415
    foreign = refusal(method="POST", path="/v1/files", origin="https://evil.example", **form)
    assert foreign is not None
    assert foreign.status == 403
