"""The key that the nodes of one service share: it encrypts what ranks on several nodes tell each other (ZeroMQ CURVE).

One key pair serves both ends: whoever has the file is let in, and nobody else. It does not cover tensors, which travel
through torch's own collectives.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.auth

from moeserve.config import ConfigError

_ZAP_DOMAIN = "moeserve"


@dataclass(frozen=True, slots=True)
class RankKeys:
    """A CURVE key pair, Z85 text of 40 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Lets only holders of this key connect to `socket`, which is not bound yet. Needs `Gatekeeper`."""
        socket.zap_domain = _ZAP_DOMAIN.encode()
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.curve_server = True

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Has `socket`, which is not connected yet, speak only to a holder of this key."""
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.curve_serverkey = self.public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key may enter: the interface of `zmq.auth`'s credentials provider."""
        return key == self.public


def create_keys(path: Path) -> None:
    """Writes a new key with mode 0600. Raises ConfigError if the file exists or cannot be written."""
    public, secret = zmq.curve_keypair()
    text = f'metadata\ncurve\n    public-key = "{public.decode()}"\n    secret-key = "{secret.decode()}"\n'
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} exists already and is left as it is.") from None
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror}.") from None
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)


def load_keys(path: Path) -> RankKeys:
    """The key that `create_keys` wrote. Raises ConfigError for a file that is none, or that everybody may read."""
    advice = "make one with 'moeserve curve-key FILE' and copy it to every node"
    try:
        mode = path.stat().st_mode
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError):
        raise ConfigError(f"--curve-key-file {path} cannot be read as a key: {advice}.") from None
    if mode & 0o007:
        raise ConfigError(f"--curve-key-file {path} is open to every user of this machine: chmod 600 it.")
    if secret is None or len(public) != 40 or len(secret) != 40:
        raise ConfigError(f"--curve-key-file {path} holds no key pair: {advice}.")
    return RankKeys(public, secret)


class Gatekeeper:
    """Answers ZeroMQ's question whether a client's key is the right one, for all servers of a context."""

    def __init__(self, context: zmq.Context[Any], keys: RankKeys) -> None:
        from zmq.auth.thread import ThreadAuthenticator

        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_ZAP_DOMAIN, keys)

    def close(self) -> None:
        self._authenticator.stop()
