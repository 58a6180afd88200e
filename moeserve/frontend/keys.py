"""Keys, roles, and the gate in front of every route.

The gate decides by `scope["path"]` and denies by default: an unknown path needs a key like any other. Without keys the
server is open. A role opens the routes of another role only where `_GRANTS` says so.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from stat import S_IRGRP, S_IROTH
from typing import Any

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from moeserve.config import ConfigError
from moeserve.frontend.errors import ApiError, forbidden
from moeserve.frontend.held import HeldBytes, OpenRequests
from moeserve.frontend.route import Route, RouteTable

log = structlog.get_logger(__name__)

USER, METRICS, ADMIN = "user", "metrics", "admin"
ROLES = (USER, METRICS, ADMIN)
# What the shares of a key are parts of.
_BLOCKS = "KV blocks"
_SHARED = {
    "retention": _BLOCKS,
    "pinned": _BLOCKS,
    "cached": _BLOCKS,
    "running": "running places",
    "queue": "places",
    "stored": "bytes of the response store",
}
_RIGHT = re.compile(r"(.*\S)\s+(retention|pinned|weight|running|queue|cached|stored|priority)=(\S*)")
_LEAST_WEIGHT = 0.001
_ROUNDING = 1e-9  # of a sum of shares
_GRANTS = {USER: {USER}, METRICS: {METRICS}, ADMIN: {USER, METRICS, ADMIN}}


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights that the key file grants a key.

    `retention`: the share of the KV blocks that may be retained for it, `pinned`: the share that it may pin; None for
    the service's settings. `weight`: of the key among all that have requests. `running` and `queue`: the shares of the
    places for running and for all requests that it gets at most. `cached`: the share of the KV blocks beyond which its
    prefixes are evicted before all others. `stored`: its share of the response store; None for an equal part, weight
    for weight, of what named shares leave. `priority`: whether it may ask for an urgent one.
    """

    retention: float | None = None
    pinned: float | None = None
    weight: float = 1.0
    running: float = 1.0
    queue: float = 1.0
    cached: float = 1.0
    stored: float | None = None
    priority: bool = False


DEFAULT_RIGHTS = Rights()


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller: the SHA-256 digest of its key (empty without keys) and the roles that the key grants."""

    digest: bytes
    grants: frozenset[str]
    rights: Rights = DEFAULT_RIGHTS

    @property
    def is_admin(self) -> bool:
        """Return whether this is a key with the role `admin`. Without keys no caller is an admin, though all routes are
        open."""
        return bool(self.digest) and ADMIN in self.grants

    @property
    def may_hurry(self) -> bool:
        """Return whether the key may ask for more than its turn: an urgent priority, or a pace that slows others."""
        return self.rights.priority or ADMIN in self.grants


ANYONE = Identity(b"", frozenset(ROLES))


class AuthGate:
    """ASGI middleware. Puts the caller's `Identity` into `scope["state"]["identity"]`, and the count of the bytes that
    the request holds into `scope["state"]["hold"]`, or raises ApiError."""

    def __init__(self, app: ASGIApp, keys: KeyRing, routes: RouteTable, places: OpenRequests, held: HeldBytes) -> None:
        """places: for requests, but not those by which operators look at the server."""
        self._app = app
        self._keys = keys
        self._routes = routes
        self._places = places
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = self._routes.find(scope["path"])
        identity = self._identify(scope, route)
        place = nullcontext() if route is not None and route.is_watch else self._places.enter(identity.digest)
        with place, self._held.hold(identity.digest) as hold:
            scope.setdefault("state", {}).update(identity=identity, hold=hold)
            await self._app(scope, receive, send)

    def _identify(self, scope: Scope, route: Route[Any] | None) -> Identity:
        if not self._keys or (route is not None and route.role == "public"):
            return ANYONE
        key = sent_key(scope)
        identity = self._keys.find(key) if key else None
        if identity is None:
            raise ApiError(
                401,
                "A valid API key is required: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                type="authentication_error",
                code="invalid_api_key",
            )
        role = USER if route is None else route.role
        if role not in identity.grants:
            raise forbidden(
                f"This route needs a key with the role `{role}`: a line `{role}:KEY` in the file of `--api-key-file`"
            )
        return identity


def caller_of(scope: Scope) -> bytes:
    """Return the digest of the caller's key, which owns all that the caller keeps."""
    identity: Identity = scope["state"]["identity"]
    return identity.digest


def sent_key(scope: Scope) -> bytes | None:
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

    def __init__(self, entries: Iterable[tuple[str, str]] = (), rights: Mapping[str, Rights] | None = None) -> None:
        """entries: (role, key). rights: by key, where they are not the usual ones."""
        own_rights = {hashlib.sha256(key.encode()).digest(): own for key, own in (rights or {}).items()}
        grants: dict[bytes, set[str]] = {}
        for role, key in entries:
            grants.setdefault(hashlib.sha256(key.encode()).digest(), set()).update(_GRANTS[role])
        self._identities = [
            Identity(digest, frozenset(allowed), own_rights.get(digest, DEFAULT_RIGHTS))
            for digest, allowed in grants.items()
        ]
        self._holders = {identity.digest: identity for identity in self._identities}
        self._weights = sum(identity.rights.weight for identity in self._identities)
        self._stored = _stored_shares([identity for identity in self._identities if USER in identity.grants])

    def __bool__(self) -> bool:
        return bool(self._identities)

    def holder(self, digest: bytes) -> Identity | None:
        """Return the holder of the key with this digest, None if the key is not valid any more. Without keys anyone
        holds it."""
        if not self:
            return ANYONE if not digest else None
        return self._holders.get(digest)

    def stored_share(self, digest: bytes) -> float:
        """Return the share of the response store of the key with this digest: 1 without keys, 0 for a key that is not
        valid any more."""
        return self._stored.get(digest, 0.0) if self else 1.0

    def part(self, digest: bytes) -> float:
        """Return the part, by weight, of the key with this digest: 1 without keys, 0 for what is no key's."""
        if not self:
            return 1.0
        holder = self.holder(digest)
        return 0.0 if holder is None else holder.rights.weight / self._weights

    def find(self, key: bytes) -> Identity | None:
        """Return the identity of a key, None for a wrong one. Takes the same time for every key."""
        digest = hashlib.sha256(key).digest()
        found = None
        for identity in self._identities:
            if hmac.compare_digest(identity.digest, digest):
                found = identity
        return found


def _stored_shares(identities: Iterable[Identity]) -> dict[bytes, float]:
    """Return the share of the response store of each key, by its digest; together at most 1."""
    shares = {one.digest: one.rights.stored for one in identities if one.rights.stored is not None}
    left = max(0.0, 1.0 - sum(shares.values()))
    weights = {one.digest: one.rights.weight for one in identities if one.rights.stored is None}
    return shares | {digest: left * weight / sum(weights.values()) for digest, weight in weights.items()}


def warn_of_readers(api_key_file: str | None) -> None:
    """Log a warning for a key file that other users of the machine can read."""
    if api_key_file is not None and Path(api_key_file).stat().st_mode & (S_IRGRP | S_IROTH):
        log.warning("key_file_is_readable_by_others", file=api_key_file)


def load_keys(api_keys: Iterable[str], api_key_file: str | None) -> KeyRing:
    """Return the keys of the settings; `api_keys` have the role `user`. Raise ConfigError."""
    entries = [(USER, key) for key in api_keys]
    rights: dict[str, Rights] = {}
    if api_key_file is not None:
        try:
            lines = Path(api_key_file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the key file {api_key_file}: {type(error).__name__}") from None
        stripped = (line.strip() for line in lines)
        file_entries = [_entry(line, rights) for line in stripped if line and not line.startswith("#")]
        if not file_entries:
            raise ConfigError(f"the key file {api_key_file} holds no key")
        entries += file_entries
    if sum(own.stored or 0.0 for own in rights.values()) > 1 + _ROUNDING:
        raise ConfigError("the shares `stored=` in the key file add up to more than 1")
    if any(not key for _, key in entries):
        raise ConfigError("an API key must not be empty")
    return KeyRing(entries, rights)


def _entry(line: str, rights: dict[str, Rights]) -> tuple[str, str]:
    """Return the role and the key of a line, and put the rights behind the key, like `weight=2`, into `rights`."""
    granted: dict[str, Any] = {}
    while match := _RIGHT.fullmatch(line):
        line, name, value = match[1].strip(), match[2], match[3]
        granted[name] = _right(name, value)
    role, colon, key = line.partition(":")
    entry = (role, key.strip()) if colon and role in ROLES else (USER, line)
    if granted:
        rights[entry[1]] = Rights(**granted)
    return entry


def _right(name: str, value: str) -> float | bool:
    """Return the value of a right. Raise ConfigError."""
    if name == "priority":
        if value not in ("yes", "no"):
            raise ConfigError("`priority=` in the key file is yes or no")
        return value == "yes"
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if name == "weight":
        if not _LEAST_WEIGHT <= number <= 1 / _LEAST_WEIGHT:
            raise ConfigError(f"`weight=` in the key file takes a number, {_LEAST_WEIGHT:g} to {1 / _LEAST_WEIGHT:g}")
    elif not 0 <= number <= 1:
        raise ConfigError(f"`{name}=` in the key file takes a share of the {_SHARED[name]}, 0 to 1")
    return number


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
    """Return the account of a key: the owner of its namespaces and of its retained prefixes. Empty without keys."""
    return _mac(secret, identity.digest) if identity.digest else ""


def _mac(secret: str, message: bytes) -> str:
    return hmac.new(bytes.fromhex(secret), message, hashlib.sha256).hexdigest()
