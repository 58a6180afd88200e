"""The outermost layer: request ids, errors as responses, one log line and one count per request."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeserve.config import ConfigError
from moeserve.frontend.http import ApiError, ClientDisconnected, SlowReader, internal_error, send_error
from moeserve.frontend.metrics import Metrics

log = structlog.get_logger(__name__)

_SAFE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_CLIENT_CLOSED = 499


class RequestBoundary:
    """ASGI middleware. `scope["state"]["request_id"]` is the client's `x-request-id` where it is safe to repeat.

    What handlers put into `scope["state"]["log"]` is part of the log line: counts and times, never text.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id, "log": {}, "arrival": started}
        response = _Response(send, request_id)
        try:
            await self._app(scope, receive, response)
        except ClientDisconnected:
            response.status = _CLIENT_CLOSED
            self._metrics.count_disconnect()
        except SlowReader:
            response.status = _CLIENT_CLOSED
            self._metrics.count_disconnect()
            state["log"]["slow_reader"] = True
            if abort := scope.get("extensions", {}).get("moeserve.abort"):
                abort()
        except Exception as error:
            await self._fail(error, response, request_id)
        finally:
            route = scope["path"] if scope["path"] in self._routes else "other"
            self._metrics.count_response(route, response.status)
            fields = {**state["log"], "ms": round(1000 * (time.monotonic() - started), 1)}
            emit = log.debug if route in ("/health", "/ready", "/metrics") else log.info
            emit("request", request_id=request_id, route=route, status=response.status, **fields)

    async def _fail(self, error: Exception, response: _Response, request_id: str) -> None:
        if not isinstance(error, ApiError | HTTPException):
            log.error("request_failed", request_id=request_id, exc_info=error)
        if response.started:
            raise error
        await send_error(response, as_api_error(error))


def as_api_error(error: Exception) -> ApiError:
    """The error that the client gets for an exception of a handler."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    return internal_error()


class _Response:
    """A `send` that adds the request id and knows the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._header = (b"x-request-id", request_id.encode())
        self.started = False
        self.status = 500

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), self._header]}
        await self._send(message)


def _request_id(scope: Scope) -> str:
    sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return sent.decode() if _SAFE_ID.fullmatch(sent) else secrets.token_hex(12)


# Who may call what: keys, roles, and the gate in front of every route. The gate decides by `scope["path"]` and
# denies by default: a path it does not know needs a key like any other. Without keys the server is open. A role
# opens the routes of the lesser ones only where `_GRANTS` says so.


USER, METRICS, ADMIN = "user", "metrics", "admin"
ROLES = (USER, METRICS, ADMIN)
PUBLIC_PATHS = frozenset({"/", "/health", "/ready"})
ROLE_OF_PATH = {
    "/metrics": METRICS,
    "/reset_prefix_cache": ADMIN,
    "/v1/experts": ADMIN,
    "/v1/experts/statistics": ADMIN,
    "/v1/experts/trace": ADMIN,
}
_GRANTS = {USER: {USER}, METRICS: {METRICS}, ADMIN: {USER, METRICS, ADMIN}}


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller: the SHA-256 digest of its key (empty without keys) and what the key may do."""

    digest: bytes
    grants: frozenset[str]


ANYONE = Identity(b"", frozenset(ROLES))


class KeyRing:
    """The keys of a server, as digests."""

    def __init__(self, entries: Iterable[tuple[str, str]] = ()) -> None:
        grants: dict[bytes, set[str]] = {}
        for role, key in entries:
            grants.setdefault(hashlib.sha256(key.encode()).digest(), set()).update(_GRANTS[role])
        self._identities = [Identity(digest, frozenset(allowed)) for digest, allowed in grants.items()]

    def __bool__(self) -> bool:
        return bool(self._identities)

    def find(self, key: bytes) -> Identity | None:
        """The identity of a key. Takes the same time whichever key it is, or none."""
        digest = hashlib.sha256(key).digest()
        found = None
        for identity in self._identities:
            if hmac.compare_digest(identity.digest, digest):
                found = identity
        return found


def load_keys(api_keys: Iterable[str], api_key_file: str | None) -> KeyRing:
    """Keys of the settings. Those given as settings have the role `user`. Raises ConfigError."""
    entries = [(USER, key) for key in api_keys]
    if api_key_file is not None:
        try:
            lines = Path(api_key_file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the key file {api_key_file}: {type(error).__name__}") from None
        stripped = (line.strip() for line in lines)
        file_entries = [_entry(line) for line in stripped if line and not line.startswith("#")]
        if not file_entries:
            raise ConfigError(f"the key file {api_key_file} holds no key")
        entries += file_entries
    if any(not key for _, key in entries):
        raise ConfigError("an API key must not be empty")
    return KeyRing(entries)


def _entry(line: str) -> tuple[str, str]:
    role, colon, key = line.partition(":")
    return (role, key.strip()) if colon and role in ROLES else (USER, line)


def cache_namespace(secret: str, identity: Identity, cache_salt: str) -> str:
    """Which cached prefixes a request may see: those of its own key, narrowed by the client's salt.

    Without keys and salt everybody shares one namespace, the empty one. The key's digest has a fixed length, so no two
    pairs of key and salt give the same message.
    """
    if not identity.digest and not cache_salt:
        return ""
    message = identity.digest.ljust(32, b"\0") + cache_salt.encode()
    return hmac.new(bytes.fromhex(secret), message, hashlib.sha256).hexdigest()


class AuthGate:
    """ASGI middleware. Puts the caller's `Identity` into `scope["state"]["identity"]` or raises ApiError."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["identity"] = self._identify(scope)
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope) -> Identity:
        if not self._keys or scope["path"] in PUBLIC_PATHS:
            return ANYONE
        key = _sent_key(scope)
        identity = self._keys.find(key) if key else None
        if identity is None:
            raise ApiError(
                401,
                "A valid API key is required: send it as `Authorization: Bearer KEY`",
                type="authentication_error",
                code="invalid_api_key",
            )
        role = ROLE_OF_PATH.get(scope["path"], USER)
        if role not in identity.grants:
            raise ApiError(
                403,
                f"This route needs a key with the role `{role}`: a line `{role}:KEY` in the file of `--api-key-file`",
                type="permission_error",
                code="insufficient_role",
            )
        return identity


def _sent_key(scope: Scope) -> bytes | None:
    """The key of `Authorization: Bearer` or `x-api-key`."""
    fallback = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return bytes(token.strip())
        elif name == b"x-api-key":
            fallback = bytes(value.strip())
    return fallback
