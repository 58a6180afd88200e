"""The listening HTTP socket, bound before anything slow begins, so that a taken port is known at once."""

from __future__ import annotations

import errno
import socket

from launcher.preflight import LaunchError

_BACKLOG = 2048  # connections that the system queues until an HTTP process accepts them


def open_listener(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket. Clients that connect early wait in its backlog until the frontend accepts.

    Raises LaunchError when the address is not usable.
    """
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LaunchError(f"The host name {host!r} cannot be resolved: {reason}.") from None
    family, kind, protocol, _, address = candidates[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two sockets may share an address while neither listens: only listening makes it ours.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise LaunchError(_bind_failure(host, port, error)) from None
    return listener


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def reachable_address(listener: socket.socket) -> tuple[str, int]:
    """Return host and port under which this machine itself reaches the socket."""
    host, port = listener.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port


def url(address: tuple[str, int]) -> str:
    """Return `http://host:port`."""
    host, port = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind_failure(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is taken by another process: stop that one or choose another with --port."
    if error.errno == errno.EACCES:
        return f"Port {port} needs more rights than this user has: choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"This machine has no address {host}: choose one of its own with --host."
    return f"Cannot listen on {host} port {port}: {error.strerror}."
