"""Who may call what: keys, roles, and the gate in front of every route.

The gate decides by `scope["path"]` and denies by default: an unknown path needs a key like any other. Without keys the
server is open. A role opens the routes of another role only where `_GRANTS` says so.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from moeserve.config import ConfigError
from moeserve.frontend.http import ApiError
from moeserve.frontend.pages import FILES

USER, METRICS, ADMIN = "user", "metrics", "admin"
ROLES = (USER, METRICS, ADMIN)
PUBLIC_PATHS = frozenset({"/", "/health", "/ready", "/openapi.json", *FILES})
ROLE_OF_PATH = {
    "/metrics": METRICS,
    "/v1/stats": METRICS,
    "/v1/stats/stream": METRICS,
    "/reset_prefix_cache": ADMIN,
    "/v1/experts": ADMIN,
    "/v1/experts/statistics": ADMIN,
    "/v1/experts/trace": ADMIN,
}
_GRANTS = {USER: {USER}, METRICS: {METRICS}, ADMIN: {USER, METRICS, ADMIN}}


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller: the SHA-256 digest of its key (empty without keys) and the roles that the key grants.

    `retention_share` of the KV blocks may be retained for the key, None for the service's setting.
    """

    digest: bytes
    grants: frozenset[str]
    retention_share: float | None = None


ANYONE = Identity(b"", frozenset(ROLES))


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
                "A valid API key is required: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
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
    """Return the key in `Authorization: Bearer` or `x-api-key`."""
    fallback = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return bytes(token.strip())
        elif name == b"x-api-key":
            fallback = bytes(value.strip())
    return fallback


class KeyRing:
    """The keys of a server, as digests."""

    def __init__(self, entries: Iterable[tuple[str, str]] = (), shares: Mapping[str, float] | None = None) -> None:
        """entries: (role, key). shares: `Identity.retention_share` by key."""
        own_shares = {hashlib.sha256(key.encode()).digest(): share for key, share in (shares or {}).items()}
        grants: dict[bytes, set[str]] = {}
        for role, key in entries:
            grants.setdefault(hashlib.sha256(key.encode()).digest(), set()).update(_GRANTS[role])
        self._identities = [
            Identity(digest, frozenset(allowed), own_shares.get(digest)) for digest, allowed in grants.items()
        ]

    def __bool__(self) -> bool:
        return bool(self._identities)

    def find(self, key: bytes) -> Identity | None:
        """Return the identity of a key, None for a wrong one. Takes the same time for every key."""
        digest = hashlib.sha256(key).digest()
        found = None
        for identity in self._identities:
            if hmac.compare_digest(identity.digest, digest):
                found = identity
        return found


def load_keys(api_keys: Iterable[str], api_key_file: str | None) -> KeyRing:
    """Return the keys of the settings; `api_keys` have the role `user`. Raises ConfigError."""
    entries = [(USER, key) for key in api_keys]
    shares: dict[str, float] = {}
    if api_key_file is not None:
        try:
            lines = Path(api_key_file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the key file {api_key_file}: {type(error).__name__}") from None
        stripped = (line.strip() for line in lines)
        file_entries = [_entry(line, shares) for line in stripped if line and not line.startswith("#")]
        if not file_entries:
            raise ConfigError(f"the key file {api_key_file} holds no key")
        entries += file_entries
    if any(not key for _, key in entries):
        raise ConfigError("an API key must not be empty")
    return KeyRing(entries, shares)


def _entry(line: str, shares: dict[str, float]) -> tuple[str, str]:
    """Return the role and the key of a line, and put the key's `retention=SHARE` behind it into `shares`."""
    rest, _, option = line.rpartition(" ")
    has_share = bool(rest) and option.startswith("retention=")
    line = rest.strip() if has_share else line
    role, colon, key = line.partition(":")
    entry = (role, key.strip()) if colon and role in ROLES else (USER, line)
    if has_share:
        try:
            share = float(option.removeprefix("retention="))
        except ValueError:
            share = math.nan
        if not 0 <= share <= 1:
            raise ConfigError("`retention=` in the key file takes a share of the KV blocks, 0 to 1")
        shares[entry[1]] = share
    return entry


def cache_namespace(secret: str, identity: Identity, cache_salt: str) -> str:
    """Return the namespace of the cached prefixes that a request may use: its own key's, narrowed by its salt.

    Its first part, before a `/`, is the key's account (`cache_account`). Without keys and salt all requests share one
    namespace, the empty one. The key's digest has a fixed length, so no two pairs of key and salt give one message.
    """
    account = cache_account(secret, identity)
    if not cache_salt:
        return account
    message = identity.digest.ljust(32, b"\0") + cache_salt.encode()
    return f"{account}/{_mac(secret, message)}"


def cache_account(secret: str, identity: Identity) -> str:
    """Return the account of a key: the owner of its namespaces and of what it retains. Empty without keys."""
    return _mac(secret, identity.digest) if identity.digest else ""


def _mac(secret: str, message: bytes) -> str:
    return hmac.new(bytes.fromhex(secret), message, hashlib.sha256).hexdigest()
