"""Keys, roles, and the gate in front of every route.

The gate decides by `scope["path"]` and denies by default: an unknown path needs a key like any other. Without keys the
server is open. A role opens the routes of another role only where `_GRANTS` says so.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator
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
from moeserve.frontend.key_file import (
    ADMIN,
    DEFAULT_RIGHTS,
    METRICS,
    ROLES,
    USER,
    KeyLine,
    Rights,
    digest_of,
    read_lines,
    usual_name,
)
from moeserve.frontend.route import Route, RouteTable

log = structlog.get_logger(__name__)

_ROUNDING = 1e-9  # of a sum of shares
_GRANTS = {USER: {USER}, METRICS: {METRICS}, ADMIN: {USER, METRICS, ADMIN}}


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller: the SHA-256 digest of its key (empty without keys), the roles that the key grants, and its name, which
    several keys may share (empty without keys)."""

    digest: bytes
    grants: frozenset[str]
    rights: Rights = DEFAULT_RIGHTS
    name: str = ""

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
        """places: for requests, except the ones by which operators look at the server."""
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
            wrong = "The API key that was sent is none of this server's: ask who runs it for one"
            missing = "An API key is required: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise ApiError(
                401,
                wrong if key else missing,
                type="authentication_error",
                code="invalid_api_key",
            )
        scope.setdefault("state", {}).setdefault("log", {})["key"] = identity.name
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
    """The keys of a server, as digests. Those that are valid change when the key file does."""

    def __init__(self, lines: Iterable[KeyLine] = ()) -> None:
        """Raise ConfigError for lines that contradict each other."""
        self._now = _Keys(lines)

    def __bool__(self) -> bool:
        return bool(self._now.by_digest)

    def __iter__(self) -> Iterator[Identity]:
        return iter(self._now.by_digest.values())

    def adopt(self, other: KeyRing) -> list[Identity]:
        """Have the keys of another ring from now on; return the keys that are not valid any more."""
        gone = [one for digest, one in self._now.by_digest.items() if digest not in other._now.by_digest]
        self._now = other._now
        return gone

    def holder(self, digest: bytes) -> Identity | None:
        """Return the holder of the key with this digest, None if the key is not valid any more. Without keys anyone
        holds it."""
        if not self:
            return ANYONE if not digest else None
        return self._now.by_digest.get(digest)

    def stored_share(self, digest: bytes) -> float:
        """Return the share of the response store of the key with this digest: 1 without keys, 0 for a key that is not
        valid any more."""
        return self._now.stored.get(digest, 0.0) if self else 1.0

    def part(self, digest: bytes) -> float:
        """Return the part, by weight, of the key with this digest: 1 without keys, 0 for any other digest."""
        if not self:
            return 1.0
        holder = self.holder(digest)
        return 0.0 if holder is None else holder.rights.weight / self._now.weights

    def find(self, key: bytes) -> Identity | None:
        """Return the identity of a key, None for a wrong one. Takes the same time for every key."""
        digest = hashlib.sha256(key).digest()
        found = None
        for identity in self:
            if hmac.compare_digest(identity.digest, digest):
                found = identity
        return found


class _Keys:
    """The keys of one reading of the key file."""

    def __init__(self, lines: Iterable[KeyLine]) -> None:
        """A key with several lines has the roles of all, and name and rights of the last that says any."""
        grants: dict[bytes, set[str]] = {}
        rights: dict[bytes, Rights] = {}
        names: dict[bytes, str] = {}
        for line in lines:
            digest = digest_of(line.key)
            grants.setdefault(digest, set()).update(_GRANTS[line.role])
            if line.rights != DEFAULT_RIGHTS:
                rights[digest] = line.rights
            if line.name is not None:
                names[digest] = line.name
        self.by_digest = {
            digest: Identity(
                digest, frozenset(allowed), rights.get(digest, DEFAULT_RIGHTS), names.get(digest, usual_name(digest))
            )
            for digest, allowed in grants.items()
        }
        identities = self.by_digest.values()
        _check_names(identities)
        if sum(own.stored or 0.0 for own in rights.values()) > 1 + _ROUNDING:
            raise ConfigError("the shares `stored=` in the key file add up to more than 1")
        self.weights = sum(identity.rights.weight for identity in identities)
        self.stored = _stored_shares([identity for identity in identities if USER in identity.grants])


def _check_names(identities: Iterable[Identity]) -> None:
    """Raise ConfigError for keys that share a name and state different limits."""
    limits: dict[str, tuple[int | None, int | None]] = {}
    for one in identities:
        own = (one.rights.tokens, one.rights.requests)
        if limits.setdefault(one.name, own) != own:
            raise ConfigError(
                f"the keys with the name {one.name} in the key file share their limits: give each of them the same "
                "`tokens=` and `requests=`"
            )


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
    found = [KeyLine(USER, key) for key in api_keys]
    if api_key_file is not None:
        try:
            lines = Path(api_key_file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the key file {api_key_file}: {type(error).__name__}") from None
        of_file = read_lines(lines)
        if not of_file:
            raise ConfigError(f"the key file {api_key_file} holds no key")
        found += of_file
    if any(not line.key for line in found):
        raise ConfigError("an API key must not be empty")
    return KeyRing(found)


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
