"""CURVE keys: with one file of them, processes on several machines talk over ZeroMQ only to each other, encrypted."""

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
class CurveKeys:
    """A CURVE key pair, Z85 text of 40 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Let only holders of this key connect to `socket`, which is not bound yet. Needs a running `Gatekeeper`."""
        socket.zap_domain = _ZAP_DOMAIN.encode()
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.curve_server = True

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Let `socket`, which is not connected yet, talk only to a holder of this key."""
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.curve_serverkey = self.public

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client with this public key may connect; `zmq.auth` calls this on a credentials provider."""
        return key == self.public


def create_keys(path: Path) -> None:
    """Write a new key pair with mode 0600. Raise ConfigError if the file exists or cannot be written."""
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


def load_keys(path: Path, setting: str = "--curve-key-file") -> CurveKeys:
    """Read the file of `create_keys` that `setting` names.

    Raise ConfigError if it holds no key pair or every user may read it.
    """
    advice = "make one with 'moeserve curve-key FILE' and copy it to every node"
    try:
        mode = path.stat().st_mode
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError):
        raise ConfigError(f"{setting} {path} cannot be read as a key: {advice}.") from None
    if mode & 0o007:
        raise ConfigError(f"{setting} {path} is open to every user of this machine: chmod 600 it.")
    if secret is None or len(public) != 40 or len(secret) != 40:
        raise ConfigError(f"{setting} {path} holds no key pair: {advice}.")
    return CurveKeys(public, secret)


class Gatekeeper:
    """Authenticates clients by their key for all CURVE servers of a ZeroMQ context, in a thread of its own."""

    def __init__(self, context: zmq.Context[Any], keys: CurveKeys) -> None:
        from zmq.auth.thread import ThreadAuthenticator

        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_ZAP_DOMAIN, keys)

    def close(self) -> None:
        self._authenticator.stop()
