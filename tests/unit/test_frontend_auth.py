"""Keys, roles, and the cache namespaces that follow from them."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from moeserve.config import ConfigError
from moeserve.frontend.errors import ApiError
from moeserve.frontend.held import HeldBytes, OpenRequests
from moeserve.frontend.key_file import read_line
from moeserve.frontend.keys import ANYONE, AuthGate, Identity, KeyRing, cache_namespace, load_keys, warn_of_readers
from moeserve.frontend.route import RouteTable
from moeserve.frontend.routes.table import ROUTES
from tests.support.refusals import refused

KEYS = KeyRing(map(read_line, ["user:u", "metrics:m", "admin:a", "user:both", "metrics:both"]))
SECRET = "5e" * 32


def enter(path: str, *headers: tuple[bytes, bytes], keys: KeyRing = KEYS) -> Identity:
    """What the gate makes of a request."""
    scope: dict[str, Any] = {"type": "http", "path": path, "headers": list(headers)}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """The gate let it through."""

    gate = AuthGate(app, keys, RouteTable(ROUTES), OpenRequests(9, keys.part, Counter()), HeldBytes())
    asyncio.run(gate(scope, None, None))  # type: ignore[arg-type]
    identity: Identity = scope["state"]["identity"]
    return identity


def status_of(path: str, key: bytes | None = None, keys: KeyRing = KEYS) -> int:
    headers = [] if key is None else [(b"authorization", b"Bearer " + key)]
    try:
        enter(path, *headers, keys=keys)
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/"])
def test_health_needs_no_key(path: str) -> None:
    assert status_of(path) == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/tokenize",
        "/nowhere",
        "/health/",
        "//health",
        "/v1/../health",
        "/HEALTH",
        "/ready/x",
        "",
        "/docs",
    ],
)
def test_every_other_path_needs_a_key_whether_it_exists_or_not(path: str) -> None:
    assert status_of(path) == 401
    assert status_of(path, b"u") == 200


@pytest.mark.parametrize("key", [b"", b"x", b"U", b"u ", b"\xfc\xff", b"u" * 100_000])
def test_wrong_keys_are_refused_and_non_ascii_ones_too(key: bytes) -> None:
    assert status_of("/v1/models", key) == (200 if key.strip() == b"u" else 401)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/models", {b"u", b"a", b"both"}),
        ("/metrics", {b"m", b"a", b"both"}),
        ("/reset_prefix_cache", {b"a"}),
    ],
)
def test_roles_open_their_routes(path: str, allowed: set[bytes]) -> None:
    for key in (b"u", b"m", b"a", b"both"):
        assert status_of(path, key) == (200 if key in allowed else 403)


def test_a_refusal_tells_how_to_get_in() -> None:
    with refused("insufficient_role", None, "--api-key-file"):
        enter("/reset_prefix_cache", (b"authorization", b"Bearer u"))


@pytest.mark.parametrize(
    "header",
    [(b"authorization", b"bearer u"), (b"authorization", b"Bearer   u"), (b"x-api-key", b"u")],
)
def test_a_key_comes_in_either_header(header: tuple[bytes, bytes]) -> None:
    assert enter("/v1/models", header).grants == {"user"}


def test_a_server_without_keys_is_open() -> None:
    assert enter("/reset_prefix_cache", keys=KeyRing()) == ANYONE


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o640, True), (0o600, False)])
def test_a_key_file_that_others_can_read_is_warned_about(tmp_path: Path, mode: int, warned: bool) -> None:
    path = tmp_path / "keys"
    path.write_text("user:u\n")
    path.chmod(mode)
    with capture_logs() as logs:
        warn_of_readers(str(path))
    assert [entry["event"] for entry in logs] == ["key_file_is_readable_by_others"] * warned


def test_keys_come_from_settings_and_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# people\nadmin:root\n\n  metrics: prom \nplain\nodd:colon\nuser:u2\n")
    keys = load_keys(("first",), str(path))
    grants = {
        key: identity.grants
        for key in ("first", "root", "prom", "plain", "odd:colon", "u2")
        if (identity := keys.find(key.encode()))
    }
    assert grants == {
        "first": {"user"},
        "root": {"user", "metrics", "admin"},
        "prom": {"metrics"},
        "plain": {"user"},
        "odd:colon": {"user"},
        "u2": {"user"},
    }


@pytest.mark.parametrize("text", ["", "# nothing\n", "admin:\n"])
def test_a_file_without_keys_is_an_error_and_not_an_open_server(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_keys((), str(path))


def test_a_missing_file_and_an_empty_key_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_keys((), str(tmp_path / "missing"))
    with pytest.raises(ConfigError):
        load_keys(("",), None)


def test_each_key_and_salt_has_its_own_namespace_and_all_are_one_without_keys() -> None:
    one, two = Identity(b"1" * 32, frozenset()), Identity(b"2" * 32, frozenset())
    names = {cache_namespace(SECRET, who, salt) for who in (one, two, ANYONE) for salt in ("x", "y")}
    names |= {cache_namespace(SECRET, who, "") for who in (one, two, ANYONE)}
    assert len(names) == 9
    assert cache_namespace(SECRET, ANYONE, "") == ""
    assert cache_namespace("00" * 32, one, "") != cache_namespace(SECRET, one, "")
